"""The time of a bench: which rows are built in it, and how much of it is left.

The clock starts before anything is imported or built. A row costs its set-up, a first call and at
least five rounds, so a row is built only if all of that still fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dampen.studies.bench.rows import PRESETS, Variant, find_variants

SHORT = 30.0
"""Seconds. Less time than this is for the methods themselves: one row each, nothing beside them."""
SHORT_BATCH = 8
"""Examples per step in a short time, if no batch is given."""
LEAST = 5
"""Rounds at least: with fewer there is no 95 % interval."""


def is_short(seconds: float) -> bool:
    """Whether the time is enough for one row per method only.

    Args:
        seconds: for the whole bench.
    """
    return seconds < SHORT


def short_rows(variants: Sequence[Variant]) -> list[Variant]:
    """The first row of each method and what is written out, the usual methods first.

    >>> [v.name for v in short_rows(find_variants("r_drop, anchor_kl, drop_key"))]
    ['drop_key', 'r_drop', 'anchor_kl']
    """
    first = [v for v in variants if v.name in (v.method, v.text)]
    usual = [v.method for v in find_variants(PRESETS["mid"].methods)]
    return sorted(first, key=lambda v: usual.index(v.method) if v.method in usual else len(usual))


@dataclass
class Budget:
    """How long a bench may take, and what the rows built so far need of it.

    Args:
        seconds: for everything.
        shared: how often a round times the references, for every so many rows.
        extra: calls of each step after the rounds, as those that count memory.
        clock: the time in seconds.
        started: when the bench began, by the clock; now if omitted.
    """

    seconds: float
    shared: int
    extra: int = 0
    clock: Callable[[], float] = time.perf_counter
    started: float | None = None
    references: float = 0.0  # seconds of one call of all references
    steps: list[float] = field(default_factory=list)  # of one call of each row built
    builds: float = 0.0  # seconds that all set-ups of rows took

    def __post_init__(self) -> None:
        if self.started is None:
            self.started = self.clock()

    def left(self) -> float:
        """Seconds until the time is over, set-up included."""
        return self.seconds - (self.clock() - (self.started or 0.0))

    def reference(self, step: Callable[[], object]) -> None:
        """Call a reference for the first time and note how long it takes.

        Args:
            step: one training step of the baseline.
        """
        begin = self.clock()
        step()
        self.references += self.clock() - begin

    def row(self, build: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Build a row, call it once and note how long both take.

        Args:
            build: makes the step.
        """
        begin = self.clock()
        step = build()
        built = self.clock()
        step()
        self.builds += built - begin
        self.steps.append(self.clock() - built)
        return step

    def has_room(self) -> bool:
        """Whether another row of the usual length fits, with the rounds of all that is built. The
        first always does: a table without a row says nothing."""
        if not self.steps:
            return True
        rows = len(self.steps)
        next_step = sum(self.steps) / rows
        groups = -(-(rows + 1) // self.shared)
        a_round = groups * self.references + sum(self.steps) + next_step
        memory = self.extra * (self.references + sum(self.steps) + next_step)
        return self.builds / rows + next_step + LEAST * a_round + memory <= self.left()
