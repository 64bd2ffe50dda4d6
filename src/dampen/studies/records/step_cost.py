"""What a training step costs against the reference's, seed by seed, of runs that may be compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dampen.studies.records.logged_run import LoggedRun
from dampen.studies.records.pairing import on_one_path
from dampen.studies.records.result import Result


@dataclass(frozen=True)
class Cost:
    """Time of a training step; `ratio` is the median over shared seeds against the reference on the same machine.

    On a CPU it is processor time, so that other programs do not count.
    """

    step_seconds: float | None
    train_seconds: float | None
    ratio: float | None = None
    low: float | None = None  # the smallest and the largest ratio
    high: float | None = None
    ratios: tuple[float, ...] = ()  # seed by seed
    n: int = 0

    def as_reference(self) -> Cost:
        """The cost of what the others are compared with."""
        return replace(self, ratio=1.0 if self.step_seconds else None)


def cost_of(finals: Sequence[Result]) -> Cost:
    """Medians of a row's own runs."""
    steps = [t for f in finals if (t := f.step_time)]
    seconds = [f.seconds["train"] for f in finals if "train" in f.seconds]
    return Cost(statistics.median(steps) if steps else None, statistics.median(seconds) if seconds else None)


def cost_against(cost: Cost, ours: Mapping[str, LoggedRun], theirs: Mapping[str, LoggedRun]) -> Cost:
    """The ratios of step times of shared seeds, of runs on the same machine and path of kernels, with as many threads
    and the same malloc."""
    ratios = []
    for seed, run in ours.items():
        other = theirs.get(seed)
        if other and run.final and other.final and run.place == other.place and on_one_path(run, other):
            own, plain = run.final.step_time, other.final.step_time
            if own and plain:
                ratios.append(own / plain)
    if not ratios:
        return cost
    return replace(
        cost,
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        ratios=tuple(ratios),
        n=len(ratios),
    )
