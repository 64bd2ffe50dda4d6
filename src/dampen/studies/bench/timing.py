"""Compare costs on a noisy machine: one process, interleaved rounds, medians of paired ratios with
an interval."""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch

from dampen.native.library import cpu_name


@dataclass(frozen=True)
class Ratio:
    """How much a variant costs, as a multiple of the reference: median of paired ratios
    with a 95 % interval."""

    median: float
    low: float
    high: float
    rounds: int
    seconds: float  # of one call, the least seen

    @property
    def width(self) -> float:
        """The interval's width as a fraction of the median: above 0.03 the machine is too noisy for
        small costs."""
        return (self.high - self.low) / self.median

    def __str__(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}], n={self.rounds}"


Pair = tuple[float, dict[str, float]]
"""One timing, and what each reference took beside it."""


@dataclass(frozen=True)
class Timings:
    """Everything that was timed: per variant one pair for each round it took part in."""

    pairs: dict[str, list[Pair]]
    references: tuple[str, ...]

    def ratios(self) -> dict[str, Ratio]:
        """Every variant against the best reference."""
        return summarize(self.pairs, self.references)

    def between(self, ours: str, theirs: str) -> Ratio:
        """One variant against another, round by round, each first against the reference beside it.

        >>> timings = Timings({"plain": [(1.0, {"plain": 1.0})] * 5, "a": [(3.0, {"plain": 1.0})] * 5,
        ...                    "b": [(4.0, {"plain": 2.0})] * 5}, ("plain",))
        >>> timings.between("a", "b").median
        1.5
        """
        best = best_of(self.pairs, self.references)
        found = [[t / beside[best] for t, beside in self.pairs[name]] for name in (ours, theirs)]
        return _ratio(list(zip(*found, strict=False)))


def compare(
    variants: Mapping[str, Callable[[], Any]], reference: str | tuple[str, ...], **options: Any
) -> dict[str, Ratio]:
    """Time every variant against the reference; the options are those of `time_rounds`.

    >>> results = compare({"a": lambda: sum(range(2000)), "b": lambda: sum(range(8000))}, "a", rounds=9)
    >>> results["a"].median, results["b"].median > 1.5
    (1.0, True)
    """
    return time_rounds(variants, reference, **options).ratios()


def time_rounds(
    variants: Mapping[str, Callable[[], Any]],
    reference: str | tuple[str, ...],
    *,
    rounds: int = 15,
    seconds: float = math.inf,
    least: int = 5,
    every: int | None = None,
    enough: float | None = None,
    sure: int = 20,
    warm: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] | None = None,
) -> Timings:
    """Time every variant once per round, in an order drawn anew each round, against the reference
    of the same round.

    Args:
        variants: name -> something to call.
        reference: the variant that counts as 1, or several, of which the best in the median counts.
        rounds: how many rounds at most.
        seconds: stop before a round with which this time would be over.
        least: how many rounds at least, whatever the time.
        every: with many variants a round takes long, and the machine changes meanwhile; the
            reference is then timed again among every so many variants, which
            are paired with that one.
        enough: a variant whose interval is no wider than this, as a fraction of its median, is
            timed no more: the rounds that are left go to those of which less is known. Not before
            `sure` rounds: a few values lie close together by chance.
        sure: see `enough`.
        warm: call each once before; False where that was done.
        clock: `time.process_time` where neighbors disturb the wall clock, with a single thread.
        progress: called with the number of rounds done.
    """
    references = (reference,) if isinstance(reference, str) else reference
    for run in variants.values() if warm else ():
        run()
    pairs: dict[str, list[Pair]] = {name: [] for name in variants}
    start, shuffle = time.perf_counter(), random.Random(0)
    waiting = [name for name in variants if name not in references]
    for done in range(1, rounds + 1):
        for group in _groups(waiting, every, shuffle):
            order = [*references, *group]
            shuffle.shuffle(order)
            times = {}
            for name in order:
                begin = clock()
                variants[name]()
                times[name] = clock() - begin
            for name in order:
                pairs[name].append((times[name], {r: times[r] for r in references}))
        results = summarize(pairs, references)
        if progress is not None:
            progress(done)
        if done < least:
            continue
        beaten = [
            r for r in references if results[r].low > 1
        ]  # surely not the best: from now on a variant like others
        references, waiting = tuple(r for r in references if r not in beaten), [*waiting, *beaten]
        if enough is not None and done >= sure:
            waiting = [name for name in waiting if results[name].width > enough]
        spent = time.perf_counter() - start
        if spent + spent / done > seconds or (enough is not None and not waiting):
            break
    return Timings(pairs, references)


def summarize(pairs: Mapping[str, list[Pair]], references: Sequence[str]) -> dict[str, Ratio]:
    """Median and interval of time / reference for each variant, the reference being the one that is
    best in the median.

    >>> pairs = {"plain": [(2.0, {"plain": 2.0})] * 5, "twice": [(4.0, {"plain": 2.0})] * 5}
    >>> print(summarize(pairs, ["plain"])["twice"])
    2.000x [2.000, 2.000], n=5
    """
    best = best_of(pairs, references)
    return {
        name: _ratio([(t, beside[best]) for t, beside in found]) for name, found in pairs.items()
    }


def best_of(pairs: Mapping[str, list[Pair]], references: Sequence[str]) -> str:
    """The reference that is best in the median."""
    return min(references, key=lambda name: statistics.median(t for t, _ in pairs[name]))


def _groups(names: list[str], size: int | None, shuffle: random.Random) -> list[list[str]]:
    """The variants of a round in a new order, in groups of nearly equal size; one empty group if
    there are none."""
    names = names.copy()
    shuffle.shuffle(names)
    count = max(1, math.ceil(len(names) / size)) if size else 1
    return [names[i::count] for i in range(count)]


def _ratio(pairs: list[tuple[float, float]]) -> Ratio:
    ratios = sorted(a / b for a, b in pairs)
    low, high = _interval(len(ratios))
    return Ratio(
        statistics.median(ratios), ratios[low], ratios[high], len(ratios), min(a for a, _ in pairs)
    )


def _interval(n: int) -> tuple[int, int]:
    """The order statistics that enclose the median with 95 % confidence (binomial,
    distribution-free)."""
    below, total = 0, 0.0
    while below < n // 2:
        total += math.comb(n, below) / 2**n
        if total > 0.025:
            break
        below += 1
    low = max(0, below - 1)
    return low, n - 1 - low


def machine() -> dict[str, Any]:
    """What a record says about where it was measured. No host names."""
    return {
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
