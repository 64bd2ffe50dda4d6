"""What the code of a class says, without running it: whether its forward, or what that calls, names
these functions."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_SOCKETS = {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "ALL_ATTENTION_FUNCTIONS",
}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
_PLAIN = (
    Tensor,
    torch,
    F,
    nn.Module,
    str,
    list,
    dict,
    tuple,
    int,
    float,
)  # whose attributes hide no attention
_LIBRARIES = ("torch", "math", "numpy", "einops", "functools", "operator")


def calls_socket(module: nn.Module) -> bool:
    """Whether the code of a module's forward, or of a method or function that it calls, calls an
    attention function of torch: by its name, by another name, or as something kept on
    the module or its class."""
    cls = type(module)
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType):
        return False
    code = inspect.unwrap(forward)
    if _mentions(code, cls, 3, _SOCKETS) or any(map(_is_socket, vars(module).values())):
        return True
    return _mentions(code, cls, 3, _aliases(cls, code))


def _is_socket(value: Any) -> bool:
    """Whether a value is an attention function of torch, also in a `functools.partial` or a
    staticmethod."""
    while isinstance(value, partial | staticmethod):
        value = value.func if isinstance(value, partial) else value.__func__
    return value is F.scaled_dot_product_attention or value is F.multi_head_attention_forward


def _aliases(cls: type, forward: FunctionType) -> set[str]:
    """The names under which the file of a class, or the class itself, keeps an
    attention function of torch."""
    kept = {name: value for c in reversed(cls.__mro__) for name, value in vars(c).items()}
    return {name for name, value in {**forward.__globals__, **kept}.items() if _is_socket(value)}


def names_any(cls: type, wanted: set[str]) -> bool:
    """Whether the code of `cls.forward`, or of a method or function that it
    calls, names one of these."""
    forward = inspect.getattr_static(cls, "forward", None)
    return isinstance(forward, FunctionType) and _mentions(inspect.unwrap(forward), cls, 3, wanted)


def computes_attention(module: nn.Module) -> bool:
    """Whether the code of a module's forward, or of what it calls, has a softmax and a product of
    two tensors."""
    return all(shows_parts(module))


def shows_parts(module: nn.Module) -> tuple[bool, bool]:
    """Whether the code of a module's forward, or of what it calls, has a softmax, which may be a
    module of its own (`self.attend = nn.Softmax(dim=-1)`), and whether it has a
    product of two tensors."""
    cls = type(module)
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False, False
    code = inspect.unwrap(forward)
    softmax = _keeps_softmax(module) or _mentions(code, cls, 2, _SOFTMAX)
    return softmax, _mentions(code, cls, 2, _PRODUCTS) or _multiplies(code, cls, 2)


def _keeps_softmax(module: nn.Module) -> bool:
    """Whether a module has an `nn.Softmax` as a child, by itself or in a Sequential
    (with a dropout after it)."""
    children = [
        inner for m in module.children() for inner in (m if isinstance(m, nn.Sequential) else [m])
    ]
    return any(isinstance(m, nn.Softmax) for m in children)


def adds(cls: type) -> bool:
    """Whether the code of `cls.forward` itself has an addition, as a residual block has."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False
    codes = _codes(inspect.unwrap(forward).__code__)
    return any(
        i.opname == "BINARY_OP" and i.argrepr in ("+", "+=")
        for c in codes
        for i in dis.get_instructions(c)
    )


def scripted_function(module: nn.Module) -> str:
    """The name of a function compiled by torch.jit.script that the code of a module or of one below
    it calls, or ""."""
    for inner in module.modules():
        forward = inspect.getattr_static(type(inner), "forward", None)
        if not isinstance(forward, FunctionType):
            continue
        forward = inspect.unwrap(forward)
        names = (name for code in _codes(forward.__code__) for name in code.co_names)
        found = next(
            (n for n in names if isinstance(forward.__globals__.get(n), torch.jit.ScriptFunction)),
            "",
        )
        if found:
            return found
    return ""


def _mentions(function: FunctionType, cls: type, depth: int, wanted: set[str]) -> bool:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if names & wanted:
        return True
    return depth > 0 and any(
        _mentions(inner, cls, depth - 1, wanted) for inner in _called(function, cls, names)
    )


def _multiplies(function: FunctionType, cls: type, depth: int) -> bool:
    """Whether the code has an `@`."""
    codes = list(_codes(function.__code__))
    if any(
        i.opname == "BINARY_OP" and i.argrepr == "@"
        for code in codes
        for i in dis.get_instructions(code)
    ):
        return True
    names = {name for code in codes for name in code.co_names}
    return depth > 0 and any(
        _multiplies(inner, cls, depth - 1) for inner in _called(function, cls, names)
    )


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


def shows_no_softmax(module: nn.Module) -> bool:
    """Whether the code of a module and of all below it can be read in full and has no softmax, nor
    any attention of torch. Whatever cannot be followed (a function of another package, a callable
    kept on the module) might have one."""
    return all(_reads_plain(inner) for inner in module.modules())


def _reads_plain(module: nn.Module) -> bool:
    cls = type(module)
    if cls.__module__.startswith("torch."):
        return not (_attends(cls.__name__) or "Transformer" in cls.__name__)
    forward = inspect.getattr_static(cls, "forward", None)
    return (
        isinstance(forward, FunctionType)
        and "forward" not in vars(module)
        and _plain(forward, module, set())
    )


def _plain(function: FunctionType, module: nn.Module, seen: set[FunctionType]) -> bool:
    """Whether everything that a function names is known, and none of it attends."""
    if function in seen or function.__module__.startswith("torch."):
        return True
    seen.add(function)
    if function.__closure__ or hasattr(function, "__wrapped__"):
        return False  # what a closure holds or a decorator does is not in this code
    for instruction in (
        i for code in _codes(function.__code__) for i in dis.get_instructions(code)
    ):
        name = str(instruction.argval)
        if instruction.opname.startswith("IMPORT"):
            return False
        named = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")
        if not named:
            continue
        of_global = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        found = _global(function, name) if of_global else _attribute(module, name)
        if (
            _attends(name)
            or found is _UNKNOWN
            or (isinstance(found, FunctionType) and not _plain(found, module, seen))
        ):
            return False
    return True


_UNKNOWN = object()


def _attends(name: str) -> bool:
    return "softmax" in name.lower() or name in _SOCKETS or "attention" in name.lower()


def _global(function: FunctionType, name: str) -> Any:
    """The object behind a global name, where that is a function to be read; None
    where it hides nothing."""
    value = function.__globals__.get(name, getattr(builtins, name, _UNKNOWN))
    if isinstance(value, FunctionType) or value is _UNKNOWN:
        return value
    home = (
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
    )
    known = home.split(".")[0] in (*_LIBRARIES, "builtins", "typing")
    return (
        None
        if known or isinstance(value, BuiltinFunctionType) or not (callable(value) or home)
        else _UNKNOWN
    )


def _attribute(module: nn.Module, name: str) -> Any:
    """What an attribute of this name may stand for: one of the module, or of
    tensors and plain data."""
    own = inspect.getattr_static(type(module), name, None)
    own = (
        own.fget
        if isinstance(own, property)
        else own.__func__
        if isinstance(own, staticmethod | classmethod)
        else own
    )
    if isinstance(own, FunctionType):
        return own
    if name in vars(module):
        return _UNKNOWN if callable(vars(module)[name]) else None
    kept = {
        **dict(module.named_children()),
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    return (
        None
        if name in kept or own is not None or any(hasattr(x, name) for x in _PLAIN)
        else _UNKNOWN
    )
