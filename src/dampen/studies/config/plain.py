"""Plain data, as JSON has it: what a trial, a recipe and the values on a command line are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEEPEST = 16
"""Tables in tables beyond this are no setting of anybody's; every walk through plain data may then recurse."""
LARGEST = 2**63
"""Whole numbers beyond this fit into no tensor."""


def check_plain(value: Any, path: str, depth: int = 0) -> list[str]:
    """Every place that is not plain data: dates, infinite numbers, huge ones, what is nested too deeply.

    >>> check_plain({"lr": 0.1, "betas": [0.9, float("inf")]}, "train")
    ['train.betas[1]: expected a finite number, got inf']
    """
    if depth > DEEPEST:
        return [f"{path}: nested more than {DEEPEST} deep"]
    if isinstance(value, Mapping):
        named = [f"{path}: expected names as keys, got {key!r}" for key in value if not isinstance(key, str)]
        inner = [p for k, v in value.items() for p in check_plain(v, f"{path}.{k}" if path else str(k), depth + 1)]
        return named + inner
    if isinstance(value, list | tuple):
        return [p for i, v in enumerate(value) for p in check_plain(v, f"{path}[{i}]", depth + 1)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{path}: expected a finite number, got {value}"]
    if isinstance(value, int) and abs(value) >= LARGEST:
        return [f"{path}: expected a number below 2**63, got one of {len(f'{abs(value):x}') * 4} bits"]
    if value is None or isinstance(value, str | int | float):
        return []
    return [f"{path}: expected a number, a string, a list or a table, got a {type(value).__name__}: {value}"]
