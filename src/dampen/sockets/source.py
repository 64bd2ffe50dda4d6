"""What the code of a class says, without running it: whether its forward, or what that calls, names these functions."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_SOCKETS = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}


def calls_socket(cls: type) -> bool:
    """Whether the code of `cls.forward`, or of a method or function that it calls, mentions the socket."""
    forward = inspect.getattr_static(cls, "forward", None)
    return isinstance(forward, FunctionType) and _mentions(inspect.unwrap(forward), cls, depth=3)


def computes_attention(cls: type) -> bool:
    """Whether the code of `cls.forward`, or of what it calls, has a softmax and a product of two tensors."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False
    code = inspect.unwrap(forward)
    return _mentions(code, cls, 2, _SOFTMAX) and (_mentions(code, cls, 2, _PRODUCTS) or _multiplies(code, cls, 2))


def adds(cls: type) -> bool:
    """Whether the code of `cls.forward` itself has an addition, as a residual block has."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False
    codes = _codes(inspect.unwrap(forward).__code__)
    return any(i.opname == "BINARY_OP" and i.argrepr in ("+", "+=") for c in codes for i in dis.get_instructions(c))


def _mentions(function: FunctionType, cls: type, depth: int, wanted: set[str] = _SOCKETS) -> bool:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if names & wanted:
        return True
    return depth > 0 and any(_mentions(inner, cls, depth - 1, wanted) for inner in _called(function, cls, names))


def _multiplies(function: FunctionType, cls: type, depth: int) -> bool:
    """Whether the code has an `@`."""
    codes = list(_codes(function.__code__))
    if any(i.opname == "BINARY_OP" and i.argrepr == "@" for code in codes for i in dis.get_instructions(code)):
        return True
    names = {name for code in codes for name in code.co_names}
    return depth > 0 and any(_multiplies(inner, cls, depth - 1) for inner in _called(function, cls, names))


def _called(function: FunctionType, cls: type, names: set[str]) -> Iterator[FunctionType]:
    """The functions and methods that a function names, torch's own left out."""
    for name in names:
        inner: Any = inspect.getattr_static(cls, name, None)
        if not isinstance(inner, FunctionType) or inner.__module__.startswith("torch."):
            inner = function.__globals__.get(name)
        if isinstance(inner, FunctionType) and not inner.__module__.startswith("torch."):
            unwrapped = inspect.unwrap(inner)
            if unwrapped is not function:
                yield unwrapped


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
