"""What people type, and recipes, nearly right: one input in ten is drawn near the grammar by the tests' own strategies,
the others are crossed from two that were drawn, with characters or values changed (which costs a tenth of drawing)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import Tally, patience
from dampen.studies.errors import LabError

DRAWN, CROSSED = 200, 9
"""Inputs that are drawn at a time, and how many are crossed for each of them."""
SIGNS = "()[]{},+=.:'\"*#\\\0\n -019eExX_jé\u2212\U0001f600"


def attack(count: int, where: Path, rng: random.Random) -> Tally:
    """`count` inputs for each of --methods, --model, --set and recipes: read, or refused in words."""
    from dampen.studies.comparison import make_comparison
    from dampen.studies.request import comparison
    from tests.studies import strategies, test_parsers

    usual = comparison("digits", None, "drop_key", 1)
    cases: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "--methods": (strategies.METHOD_TEXT, test_parsers.parsed),
        "--model": (
            strategies.MODEL_TEXT,
            lambda text: make_comparison(comparison("digits", text, "drop_key", 1)),
        ),
        "--set": (
            strategies.SETTING,
            lambda text: make_comparison(usual, settings=[text, "train.epochs=1"]),
        ),
        "recipes": (strategies.mutated(test_parsers.GOOD), test_parsers.planned),
    }
    tally = Tally()
    for _ in patience.turns(count):  # by turns: whoever ends this early has as many for each
        for name, (strategy, read) in cases.items():
            drawn = _drawn(strategy, rng.randrange(10**9))
            crossed = (_crossed(*rng.choices(drawn, k=2), rng) for _ in range(CROSSED * len(drawn)))
            for value in [*drawn, *crossed][: count - tally[f"inputs to {name}"]]:
                _feed(name, read, value, tally)
        if all(tally[f"inputs to {name}"] >= count for name in cases):
            break
    tally["repetitions"] = sum(tally[f"inputs to {name}"] for name in cases)
    return tally


def _drawn(strategy: Any, number: int) -> list[Any]:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    values: list[Any] = []
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    settled = settings(max_examples=DRAWN, phases=[Phase.generate], **options)  # type: ignore[arg-type]
    settled(seed(number)(given(strategy)(lambda value: values.append(value))))()
    return values


def _crossed(one: Any, other: Any, rng: random.Random) -> Any:
    """The beginning of one text and the end of another; one table with a value from another."""
    if isinstance(one, dict):
        out = copy.deepcopy(one)
        for _ in range(rng.randint(1, 3)):
            _put(out, copy.deepcopy(_value(other, rng)), rng)
        return out
    text = (
        one[: rng.randint(0, len(one))] + other[rng.randint(0, len(other)) :]
        if rng.random() < 0.7
        else one
    )
    for _ in range(rng.choice((0, 1, 1, 3))):
        place = rng.randint(0, len(text))
        text = text[:place] + rng.choice(SIGNS) + text[place + rng.choice((0, 1)) :]
    return text


def _value(table: Any, rng: random.Random) -> Any:
    """A value at some depth of a table."""
    while isinstance(table, dict | list) and table and rng.random() < 0.8:
        table = table[rng.choice(list(table) if isinstance(table, dict) else range(len(table)))]
    return table


def _put(table: Any, value: Any, rng: random.Random) -> None:
    """Let a place at some depth of a table hold the value."""
    while True:
        key = rng.choice(list(table) if isinstance(table, dict) else range(len(table)))
        inside = table[key]
        if not isinstance(inside, dict | list) or not inside or rng.random() < 0.3:
            table[key] = value
            return
        table = inside


def _feed(name: str, read: Callable[[Any], Any], value: Any, tally: Tally) -> None:
    tally[f"inputs to {name}"] += 1
    try:
        read(value)
    except LabError:
        tally["refused in words"] += 1
    except Exception as error:
        tally["tracebacks"] += 1
        print(name, repr(value)[:300], repr(error)[:300], flush=True)
