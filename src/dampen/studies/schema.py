"""Plain data, as JSON has it: what a trial, a recipe and the values on a command line are made of."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, Union

from dampen.names import nearest
from dampen.texts import check_plain as check_plain

# --------------------
# Checking plain data against dataclasses: every problem is collected, each with the nearest known
# key.


def unknown_keys(mapping: Mapping[str, Any], known: Iterable[str], path: str) -> list[str]:
    """One problem for each key that is not known."""
    known = list(known)
    return [f"{path}{key}: unknown key{nearest(key, known)}" for key in mapping if key not in known]


def check_fields(
    cls: Any, mapping: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str]]:
    """The values for the dataclass `cls`, with numbers in the declared type, and all that is wrong with them.

    Args:
        cls: a dataclass.
        mapping: values by field.
        path: prefix of each problem.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     lr: float = 0.1
    ...     epochs: int = 1
    >>> check_fields(Options, {"lr": 1, "epoch": 3, "epochs": "x"}, "train.")
    ({'lr': 1.0}, ["train.epoch: unknown key; did you mean 'epochs'?", "train.epochs: expected int, got 'x'"])
    """
    hints = _hints(cls)
    known = [f.name for f in fields(cls)]
    problems = unknown_keys(mapping, known, path)
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in mapping:
            try:
                values[f.name] = coerce(mapping[f.name], hints[f.name])
            except TypeError as error:
                problems.append(f"{path}{f.name}: {error}")
        elif f.default is MISSING and f.default_factory is MISSING:
            problems.append(f"{path}{f.name}: missing")
    return values, problems


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; reading thousands of trials asks for them again and again."""
    return typing.get_type_hints(cls)


def coerce(value: Any, hint: Any) -> Any:
    """`value` in the type `hint`, or TypeError in words. Only an int given for a float is converted.

    Args:
        value: what was given.
        hint: the declared type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return coerce(value, option)
            except TypeError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
        raise TypeError(f"got {value!r}{nearest(value, map(str, arguments))}")
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            return origin(coerce(v, arguments[0]) for v in value)
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is Any:
        return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) < 2**1023:  # NaN and infinity too
                raise TypeError(f"expected a finite number, got {str(value)[:40]}")
            return float(value)
    elif (
        isinstance(hint, type)
        and isinstance(value, hint)
        and (hint is bool or not isinstance(value, bool))
    ):
        return value
    name = hint.__name__ if isinstance(hint, type) and origin is None else str(hint)
    raise TypeError(f"expected {name}, got {value!r}")
