"""What modules take and return, whatever holds it: tuples, named ones too, dicts, dataclasses,
outputs of libraries.

A container comes back as what it was: the same class, the same other fields. Only what changed is
another tensor; where nothing changed it is the same object."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that a value holds, in order, however deep."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, part in _parts(value):
            yield from tensors_in(part)


def first_of(value: Any) -> Tensor | None:
    """The first floating tensor that a value holds: of a block's output, the stream."""
    return next((t for t in tensors_in(value) if t.is_floating_point()), None)


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with `change` applied to each tensor in it.

    >>> import torch
    >>> with_tensors({"x": torch.ones(1), "n": 3}, lambda t: t + 1)
    {'x': tensor([2.]), 'n': 3}
    """
    if isinstance(value, Tensor):
        return change(value)
    new = {}
    for key, part in _parts(value):
        changed = with_tensors(part, change)
        if changed is not part:
            new[key] = changed
    if new:
        return _with_parts(value, new)
    return value


def with_first(value: Any, new: Tensor) -> Any:
    """The value with another tensor in the place of its first one."""
    first = first_of(value)
    return with_tensors(value, lambda t: new if t is first else t)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What a container holds, each with its place; nothing for anything else."""
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):  # transformers' outputs too
        return list(value.items())
    if isinstance(value, type):
        return []
    if dataclasses.is_dataclass(value):
        return [
            (f.name, getattr(value, f.name))
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        ]
    if isinstance(value, SimpleNamespace) or hasattr(type(value), "__attrs_attrs__"):
        return list(vars(value).items())
    return []


def _with_parts(value: Any, new: dict[Any, Any]) -> Any:
    if isinstance(value, list | tuple):
        parts = [new.get(i, part) for i, part in enumerate(value)]
        if type(value) in (list, tuple):
            return type(value)(parts)
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if type(value) is dict:
        return {**value, **new}
    if torch.compiler.is_compiling() and dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **new)  # type: ignore[type-var]  # a graph cannot copy
    out = copy.copy(value)
    for key, part in new.items():
        if isinstance(value, Mapping):
            out[key] = part
        else:
            object.__setattr__(out, key, part)  # of frozen ones too
    return out
