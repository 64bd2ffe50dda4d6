"""Statistics over seeds: summaries, paired comparison, correction for many comparisons, power.

Runs of two methods with the same seed share their initial weights, their split and their order of batches, so that
differences are taken seed by seed; a difference has far less spread than either method alone. `verdict.py` makes words
of these numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.05
POWER = 0.8
FEWEST = 3
"""With fewer shared seeds no test is made."""
MOST_SEEDS = 10_000
"""A plan that needs more is called hopeless rather than counted."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (of a sample) and number of runs."""

    mean: float
    sd: float
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean and sample standard deviation.

    >>> summarize([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    """
    if not values:
        return Summary(math.nan, math.nan, 0)
    return Summary(statistics.fmean(values), deviation(values) if len(values) > 1 else math.nan, len(values))


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation, as `statistics.stdev` has it, without its exact fractions (30 times the time).

    >>> deviation([1.0, 2.0, 4.0]) == statistics.stdev([1.0, 2.0, 4.0])
    True
    """
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def paired_differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[float]:
    """Ours minus theirs over the seeds that both have, in the order of the seeds' numbers (looks come in that order).

    >>> paired_differences({"10": 3.0, "2": 1.0, "7": 9.0}, {"2": 0.5, "10": 1.0})
    [0.5, 2.0]
    """
    shared = sorted((s for s in ours if s in theirs), key=lambda s: (not s.lstrip("-").isdigit(), _number(s), s))
    # What is left between 0.4 - 0.3 and 0.3 - 0.2 in floating point is rounding, not spread.
    return [round(ours[s] - theirs[s], 12) for s in shared]


def _number(seed: str) -> int:
    return int(seed) if seed.lstrip("-").isdigit() else 0


def has_spread(differences: Sequence[float]) -> bool:
    """Whether the differences differ; small test sets make metrics coarse, so that they may not."""
    if len(differences) < 2:
        return False
    largest = max(1.0, *(abs(d) for d in differences))
    return deviation(differences) > 1e-12 * largest


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p value of 'the mean difference is zero' (t-test).

    Where all differences are equal the t-test has no spread to go by; then the exact sign-flip test speaks, whose p is
    at least 2 / 2^n.
    """
    from scipy.special import stdtr

    n, mean = len(differences), statistics.fmean(differences)
    if not has_spread(differences):
        return 1.0 if abs(mean) <= 1e-12 else 2.0 / 2**n
    return float(2 * stdtr(n - 1, -abs(mean) / (deviation(differences) / math.sqrt(n))))


def paired_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The mean differences that the test of `paired_p` does not reject at this level; NaN where it rejects none.

    >>> [round(v, 3) for v in paired_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    >>> paired_interval([1.0] * 3), paired_interval([1.0] * 8)  # equal differences: 2 / 2^n against the level
    ((nan, nan), (1.0, 1.0))
    """
    if len(differences) < 2:
        return math.nan, math.nan
    if has_spread(differences):
        return t_interval(differences, level)
    mean = statistics.fmean(differences)
    return (mean, mean) if 2.0 / 2 ** len(differences) <= level else (math.nan, math.nan)


def wilcoxon_p(differences: Sequence[float]) -> float | None:
    """Two-sided p of Wilcoxon's signed-rank test; None below six nonzero differences, where it cannot reach 0.05."""
    nonzero = [d for d in differences if d != 0]
    if len(nonzero) < 6:
        return None
    from scipy.stats import wilcoxon

    return float(wilcoxon(nonzero).pvalue)


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The interval of the mean by Student's t; NaN for a single value.

    >>> [round(v, 3) for v in t_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    """
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    mean, half = statistics.fmean(values), t_quantile(n - 1, level) * deviation(values) / math.sqrt(n)
    return mean - half, mean + half


@lru_cache(maxsize=100_000)
def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors bound a mean with confidence 1 - level."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def hedges_g(differences: Sequence[float]) -> float:
    """The mean difference in units of the differences' standard deviation, corrected for small n; NaN without spread.

    `g = mean / sd * (1 - 3 / (4 (n - 1) - 1))` (Hedges 1981).
    """
    if not has_spread(differences) or len(differences) < FEWEST:
        return math.nan
    return statistics.fmean(differences) / deviation(differences) * _small_sample(len(differences))


def effect_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The exact interval of the standardized effect, on the scale of `hedges_g`; NaN where there is no spread.

    `t = sqrt(n) mean / sd` has a noncentral t distribution with noncentrality `sqrt(n) delta`: the ends are the deltas
    at which the observed t is the upper and the lower `level / 2` quantile. (A bootstrap of three differences claims
    95 % and covers 62 %.)
    """
    if not has_spread(differences) or len(differences) < FEWEST:
        return math.nan, math.nan
    n = len(differences)
    t = math.sqrt(n) * statistics.fmean(differences) / deviation(differences)
    ends = (_noncentrality(t, n - 1, 1 - level / 2), _noncentrality(t, n - 1, level / 2))
    low, high = (_small_sample(n) * end / math.sqrt(n) for end in ends)
    return low, high


def _noncentrality(t: float, freedom: int, share: float) -> float:
    """The noncentrality at which `share` of the distribution lies below t; it falls as the noncentrality grows."""
    from scipy.optimize import brentq
    from scipy.special import nctdtr

    def excess(noncentrality: float) -> float:
        below = float(nctdtr(freedom, noncentrality, t))
        # scipy has no number for some points far in the tails, where the share is 0 or 1.
        return (float(noncentrality < t) if math.isnan(below) else below) - share

    reach = 10.0 + 4 * abs(t)
    return float(brentq(excess, -reach, reach, xtol=1e-9))


def _small_sample(n: int) -> float:
    return 1 - 3 / (4 * (n - 1) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's step-down method.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def holm_levels(p_values: Sequence[float], level: float = LEVEL) -> tuple[list[float], list[bool]]:
    """The level of each row's own interval, and whether the row is decided.

    With p sorted and k* the first rank (from 0) with `p > level / (m - k)`, a row before k* gets `level / (m - k)`, k*
    and all after it `level / (m - k*)`: an interval at that level leaves 0 out exactly where the row is decided. The
    intervals are each row's own; they are not simultaneous.

    >>> holm_levels([0.001, 0.5, 0.02])
    ([0.016666666666666666, 0.05, 0.025], [True, False, True])
    """
    m = len(p_values)
    order = sorted(range(m), key=lambda i: p_values[i])
    levels, decided = [level] * m, [False] * m
    going, at = True, level
    for rank, i in enumerate(order):
        if going:
            at = level / (m - rank)
            going = p_values[i] <= at
        levels[i], decided[i] = at, going
    return levels, decided


def detectable(sd: float, n: int, level: float, power: float = POWER) -> float:
    """The smallest true difference that n pairs with this spread show with the given power.

    >>> round(detectable(0.7, 10, 0.05), 2)
    0.7
    """
    if n < 2 or not sd >= 0:
        return math.nan
    return (t_quantile(n - 1, level) + t_quantile(n - 1, 2 * (1 - power))) * sd / math.sqrt(n)


def seeds_needed(difference: float, sd: float, level: float, power: float = POWER) -> int | None:
    """How many pairs decide this difference with this spread: `n = (t_{level/2} + t_{1-power})^2 (sd / difference)^2`.

    None where more than `MOST_SEEDS` are needed.

    >>> seeds_needed(1.0, 0.7, 0.05), seeds_needed(0.0, 1.0, 0.05)
    (6, None)
    """
    if not abs(difference) > 0:
        return None
    low, high = 2, MOST_SEEDS
    if not detectable(sd, high, level, power) <= abs(difference):
        return None
    while low < high:  # what n pairs can show falls with n
        middle = (low + high) // 2
        low, high = (low, middle) if detectable(sd, middle, level, power) <= abs(difference) else (middle + 1, high)
    return low
