"""Which runs are pairs: the same seed on one path of kernels; the folds of a
round are averaged first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dampen.studies.result import Result
from dampen.studies.stats import FEWEST, LEVEL, Summary, holm, t_interval, t_quantile
from dampen.studies.store import LoggedRun


def on_one_path(ours: LoggedRun, theirs: LoggedRun) -> bool:
    """Whether two runs may be paired: both on torch's kernels, or both on the native ones.

    A trial without methods uses none of these kernels, and an old record does not say which it
    used: both pair as they always did.
    """
    paths = {run.final.kernels for run in (ours, theirs) if run.final and run.final.kernels}
    return len(paths) < 2 or not ours.config.get("methods") or not theirs.config.get("methods")


def unpaired(
    ours: Mapping[str, LoggedRun], theirs: Mapping[str, LoggedRun], folds: int = 1
) -> list[str]:
    """Seeds (or rounds of folds) of which a run and the reference's were on different kernels."""
    other = [int(s) // folds for s in ours if s in theirs and not on_one_path(ours[s], theirs[s])]
    return [str(n) for n in dict.fromkeys(other)]


def averaged_folds(values: Mapping[str, float], folds: int) -> dict[str, float]:
    """The mean of each whole round of cross-validation; seed = round x folds + fold. Folds alone
    are no repetitions.

    >>> averaged_folds({"0": 1.0, "1": 3.0, "2": 5.0}, 2)
    {'0': 2.0}
    """
    rounds: dict[int, list[float]] = {}
    for seed, value in values.items():
        rounds.setdefault(int(seed) // folds, []).append(value)
    return {
        str(n): statistics.fmean(found)
        for n, found in sorted(rounds.items())
        if len(found) == folds
    }


# --------------------
# What a training step costs against the reference's, seed by seed, of runs that may be compared.


@dataclass(frozen=True)
class Cost:
    """Time of a training step; `ratio` is the median over shared seeds against the
    reference on the same machine.

    On a CPU it is processor time, so that other programs do not count.
    """

    step_seconds: float | None
    train_seconds: float | None
    ratio: float | None = None
    low: float | None = None  # the smallest and the largest ratio
    high: float | None = None
    ratios: tuple[float, ...] = ()  # seed by seed
    n: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean ratio, from the logarithms of the ratios; NaN with fewer
        than 3 seeds."""
        if len(self.ratios) < FEWEST:
            return math.nan, math.nan
        low, high = t_interval([math.log(ratio) for ratio in self.ratios])
        return math.exp(low), math.exp(high)

    @property
    def differs(self) -> bool:
        """Whether a step takes another time than the baseline's: the interval leaves out 1."""
        low, high = self.interval
        return low > 1 or high < 1

    def as_reference(self) -> Cost:
        """The cost of what the others are compared with."""
        return replace(self, ratio=1.0 if self.step_seconds else None)


def cost_of(finals: Sequence[Result]) -> Cost:
    """Medians of a row's own runs."""
    steps = [t for f in finals if (t := f.step_time)]
    seconds = [f.seconds["train"] for f in finals if "train" in f.seconds]
    return Cost(
        statistics.median(steps) if steps else None, statistics.median(seconds) if seconds else None
    )


def cost_against(
    cost: Cost, ours: Mapping[str, LoggedRun], theirs: Mapping[str, LoggedRun]
) -> Cost:
    """The ratios of step times of shared seeds, of runs on the same machine and path of kernels,
    with as many threads and the same malloc."""
    ratios = []
    for seed, run in ours.items():
        other = theirs.get(seed)
        if (
            other
            and run.final
            and other.final
            and run.place == other.place
            and on_one_path(run, other)
        ):
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


# --------------------
# The variance of the gradient over training, as tables show it.


def in_training(final: Result) -> dict[str, float | None]:
    """The variance over training, where it was measured: itself, and by the
    gradient's squared norm."""
    found = final.variance or {}
    names = {"training_variance": "trace", "training_variance_normalized": "normalized"}
    return {name: found[kind] for name, kind in names.items() if kind in found}


def variance_ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """One row's variance against another's, by seed.

    >>> variance_ratios({"0": 3.0, "1": 1.0}, {"0": 2.0})
    {'0': 1.5}
    """
    shared = sorted(ours.keys() & theirs.keys())
    return {seed: ours[seed] / theirs[seed] for seed in shared if theirs[seed]}


# --------------------
# Our figure next to the published one: reproduced, not reproduced, or not comparable, and why.


PAPER_SEEDS = 5
"""Runs behind a published standard deviation where a recipe does not say: the
papers report five seeds."""
PaperWord = Literal["reproduced", "not reproduced", "not comparable"]


@dataclass(frozen=True)
class Published:
    """A figure as published: mean, and standard deviation over n runs where
    the paper gives them."""

    mean: float
    sd: float | None = None
    n: int | None = None

    def text(self) -> str:
        """As tables print it.

        >>> Published(86.38, 0.44, 5).text()
        '86.38 ± 0.44'
        """
        return f"{self.mean:.2f}" + (f" ± {self.sd:.2f}" if self.sd is not None else "")


def published_figures(figures: Mapping[str, Any]) -> dict[str, Published]:
    """What a recipe says was published: a mean, or [mean, sd], by metric."""
    found = {}
    for metric, value in figures.items():
        mean, sd = value if isinstance(value, list) and len(value) == 2 else (value, None)
        mean = mean[0] if isinstance(mean, list) else mean
        found[metric] = Published(
            float(mean), None if sd is None else float(sd), None if sd is None else PAPER_SEEDS
        )
    return found


def effect_agreement(low: float, high: float, published: float) -> str:
    """How an interval that excludes 0 agrees with a published difference: in direction, and within
    a factor of two.

    >>> effect_agreement(-0.7, -0.45, -15.87), effect_agreement(-1.0, -0.59, -0.57), effect_agreement(-1.1, -0.6, 0.15)
    ('same direction, much smaller', 'same direction and size', 'opposite direction')
    """
    near, far = sorted((abs(low), abs(high)))
    if (low + high) * published <= 0:
        return "opposite direction"
    if far < abs(published) / 2:
        return "same direction, much smaller"
    return "same direction, much larger" if near > 2 * abs(published) else "same direction and size"


@dataclass(frozen=True)
class AgainstPaper:
    """The word, the reason in words, and the difference ours - paper with its 95 %
    interval where it exists."""

    word: PaperWord
    reason: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None


def against_paper(
    ours: Summary | None, paper: Published, departures: Sequence[str] = ()
) -> AgainstPaper:
    """Judge our runs against the published figure, both in the same unit.

    Reproduced: the 95 % interval of the difference (Welch, from means, deviations and counts)
    contains 0 and is narrow enough to mean something, at most three published standard deviations
    to each side (2 % of the figure where none is published). Departures from the paper's protocol,
    and too few runs, make the two not comparable.

    >>> ours = Summary(mean=86.2, sd=0.5, n=5)
    >>> against_paper(ours, Published(86.38, 0.44, 5)).word
    'reproduced'
    >>> against_paper(ours, Published(86.38, 0.44, 5), ["2,100 training images instead of 35,000"]).word
    'not comparable'
    """
    if ours is None or not ours.n:
        return AgainstPaper("not comparable", "not measured here")
    difference = ours.mean - paper.mean
    if departures:
        return AgainstPaper("not comparable", "; ".join(departures), difference)
    if ours.n < FEWEST:
        return AgainstPaper(
            "not comparable",
            f"too few runs here: {ours.n}, at least {FEWEST} are needed",
            difference,
        )
    half = _welch_half_width(ours, paper)
    low, high = difference - half, difference + half
    interval = f"difference {difference:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"
    if not low <= 0 <= high:
        return AgainstPaper("not reproduced", interval, difference, low, high)
    widest = 3 * paper.sd if paper.sd else 0.02 * abs(paper.mean)
    if half > widest:
        reason = f"{interval}: inconclusive, our standard deviation is too large; add seeds"
        return AgainstPaper("not comparable", reason, difference, low, high)
    return AgainstPaper("reproduced", interval, difference, low, high)


def _welch_half_width(ours: Summary, paper: Published) -> float:
    """Half the 95 % interval of the difference of two means with unequal variances (Welch 1947)."""
    a = ours.sd**2 / ours.n
    b = paper.sd**2 / paper.n if paper.sd is not None and paper.n and paper.n > 1 else 0.0
    if a + b == 0:
        return 0.0
    freedom = (a + b) ** 2 / (
        a**2 / (ours.n - 1) + (b**2 / (paper.n - 1) if b and paper.n else 0.0)
    )
    return t_quantile(freedom) * math.sqrt(a + b)


# --- runs that fail
#
# How often a configuration's runs fail, against the baseline's: what a test of means cannot
# see.


@dataclass(frozen=True)
class FailureRate:
    """Runs that diverged, raised or returned no number, among those that
    ended, beside the baseline's.

    `low` to `high` is the exact 95 % interval of the rate (Clopper and Pearson), `p` Fisher's exact
    test against the baseline, `corrected` the same after Holm's correction over the configurations.
    """

    failed: int
    runs: int
    reference_failed: int = 0
    reference_runs: int = 0
    low: float = 0.0
    high: float = 1.0
    p: float | None = None
    corrected: float | None = None

    @property
    def in_excess(self) -> bool:
        """Whether runs failed here more often than the baseline's."""
        return self.failed * max(1, self.reference_runs) > self.reference_failed * self.runs

    @property
    def significant(self) -> bool:
        """Whether the rate differs from the baseline's."""
        return self.corrected is not None and self.corrected <= LEVEL

    def in_words(self) -> str:
        """Such as '3 of 8 runs failed'; empty where none did.

        >>> failure_rate(3, 8, 0, 8).in_words(), failure_rate(0, 8, 0, 8).in_words()
        ('3 of 8 runs failed', '')
        """
        if not self.failed:
            return ""
        told = f"{self.failed} of {self.runs} runs failed"
        if not self.significant:
            return told
        word = "more" if self.in_excess else "fewer"
        return f"{told}, significantly {word} than the baseline's {self.reference_failed} of {self.reference_runs}"


def failure_rate(
    failed: int, runs: int, reference_failed: int = 0, reference_runs: int = 0
) -> FailureRate:
    """A failure rate with its interval and its test.

    Args:
        failed: runs of the configuration without a result.
        runs: that ended, with a result or without.
        reference_failed: of the baseline.
        reference_runs: of the baseline.
    """
    if not runs:
        return FailureRate(failed, runs, reference_failed, reference_runs)
    from scipy.special import betaincinv
    from scipy.stats import fisher_exact

    low = betaincinv(failed, runs - failed + 1, LEVEL / 2) if failed else 0.0
    high = betaincinv(failed + 1, runs - failed, 1 - LEVEL / 2) if failed < runs else 1.0
    p = None
    if reference_runs:
        table = [[failed, runs - failed], [reference_failed, reference_runs - reference_failed]]
        p = float(fisher_exact(table).pvalue) if failed or reference_failed else 1.0
    return FailureRate(failed, runs, reference_failed, reference_runs, float(low), float(high), p)


def corrected_rates(rates: Mapping[str, FailureRate]) -> dict[str, FailureRate]:
    """The failure rates of a table's configurations, their p values corrected by Holm's method.

    Args:
        rates: by configuration.
    """
    corrected = holm([1.0 if r.p is None else r.p for r in rates.values()])
    return {
        name: replace(rate, corrected=None if rate.p is None else own)
        for (name, rate), own in zip(rates.items(), corrected, strict=True)
    }
