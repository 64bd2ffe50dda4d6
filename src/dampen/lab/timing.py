"""Compare costs on a noisy machine: one process, interleaved rounds, medians of paired ratios with an interval."""

from __future__ import annotations

import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch


@dataclass(frozen=True)
class Ratio:
    """How much a variant costs, as a multiple of the reference: median of paired ratios with a 95 % interval."""

    median: float
    low: float
    high: float
    rounds: int
    seconds: float  # of one call, the least seen

    @property
    def width(self) -> float:
        """The interval's width as a fraction of the median: above 0.03 the machine is too noisy to tell small costs."""
        return (self.high - self.low) / self.median

    def __str__(self) -> str:
        return f"{self.median:.3f}x [{self.low:.3f}, {self.high:.3f}], n={self.rounds}"


def compare(
    variants: Mapping[str, Callable[[], Any]],
    reference: str | tuple[str, ...],
    *,
    rounds: int = 15,
    seconds: float = math.inf,
    progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Ratio]:
    """Time every variant once per round, in an order drawn anew each round, against the reference of the same round.

    Args:
        variants: name -> something to call; each is warmed up once.
        reference: the variant that counts as 1, or several, of which the best in the median counts.
        rounds: how many rounds at most.
        seconds: stop after the round in which this time is over (at least five rounds are run).
        clock: `time.process_time` on one thread does not see what other programs take away.

    >>> results = compare({"a": lambda: sum(range(2000)), "b": lambda: sum(range(8000))}, "a", rounds=9)
    >>> results["a"].median, results["b"].median > 1.5
    (1.0, True)
    """
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    order, start = list(variants), time.perf_counter()
    shuffle = random.Random(0)
    for done in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            begin = clock()
            variants[name]()
            times[name].append(clock() - begin)
        if progress is not None:
            progress(done + 1)
        if done >= 4 and time.perf_counter() - start > seconds:
            break
    names = (reference,) if isinstance(reference, str) else reference
    best = min(names, key=lambda name: statistics.median(times[name]))
    return {name: _ratio(times[name], times[best]) for name in variants}


def _ratio(times: list[float], reference: list[float]) -> Ratio:
    ratios = sorted(a / b for a, b in zip(times, reference, strict=True))
    low, high = _interval(len(ratios))
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], len(ratios), min(times))


def _interval(n: int) -> tuple[int, int]:
    """The order statistics that enclose the median with 95 % confidence (binomial, distribution-free)."""
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
        "cpu": _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
