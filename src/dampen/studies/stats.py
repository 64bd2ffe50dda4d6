"""Statistics over seeds: summaries, paired comparison, correction for many comparisons, power.

Runs of two methods with the same seed share their initial weights, their split and their order of
batches, so that differences are taken seed by seed; a difference has far less spread than either
method alone. `verdict.py` makes words of these numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEVEL = 0.05
POWER = 0.8
FEWEST = 3
"""With fewer shared seeds no test is made."""
MOST_SEEDS = 10_000
"""A plan that needs more gets no number."""


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation (of a sample) and number of runs."""

    mean: float
    sd: float
    n: int


def summarize(values: Sequence[float]) -> Summary:
    """Mean and sample standard deviation.

    Args:
        values: one per seed.

    >>> summarize([1.0, 2.0, 3.0])
    Summary(mean=2.0, sd=1.0, n=3)
    """
    if not values:
        return Summary(math.nan, math.nan, 0)
    return Summary(
        statistics.fmean(values), deviation(values) if len(values) > 1 else math.nan, len(values)
    )


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation, as `statistics.stdev` has it, without its exact fractions (30
    times the time).

    >>> deviation([1.0, 2.0, 4.0]) == statistics.stdev([1.0, 2.0, 4.0])
    True
    """
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def paired_differences(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[float]:
    """Ours minus theirs over the seeds that both have, in the order of the seeds' numbers (looks
    come in that order).

    Args:
        ours: values by seed.
        theirs: values of the reference by seed.

    >>> paired_differences({"10": 3.0, "2": 1.0, "7": 9.0}, {"2": 0.5, "10": 1.0})
    [0.5, 2.0]
    """
    shared = sorted(
        (s for s in ours if s in theirs), key=lambda s: (not s.lstrip("-").isdigit(), _number(s), s)
    )
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

    Where all differences are equal the t-test has no spread to go by; then the exact sign-flip test
    speaks, whose p is at least 2 / 2^n.

    Args:
        differences: paired, one per shared seed.
    """
    from scipy.special import stdtr

    n, mean = len(differences), statistics.fmean(differences)
    if not has_spread(differences):
        return 1.0 if abs(mean) <= 1e-12 else 2.0 / 2**n
    return float(2 * stdtr(n - 1, -abs(mean) / (deviation(differences) / math.sqrt(n))))


def paired_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The mean differences that the test of `paired_p` does not reject at this level;
    NaN where it rejects none.

    Args:
        differences: paired, one per shared seed.
        level: the chance that such an interval misses the true difference.

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
    """Two-sided p of Wilcoxon's signed-rank test; None below six nonzero differences, where it
    cannot reach 0.05.

    Args:
        differences: paired, one per shared seed.
    """
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
    mean, half = (
        statistics.fmean(values),
        t_quantile(n - 1, level) * deviation(values) / math.sqrt(n),
    )
    return mean - half, mean + half


@lru_cache(maxsize=100_000)
def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors bound a mean with confidence 1 - level."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def hedges_g(differences: Sequence[float]) -> float:
    """The mean difference in units of the differences' standard deviation, corrected for small n;
    NaN without spread.

    `g = mean / sd * (1 - 3 / (4 (n - 1) - 1))` (Hedges 1981).

    Args:
        differences: paired, one per shared seed.
    """
    if not has_spread(differences) or len(differences) < FEWEST:
        return math.nan
    return statistics.fmean(differences) / deviation(differences) * _small_sample(len(differences))


def effect_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The exact interval of the standardized effect, on the scale of `hedges_g`; NaN
    where there is no spread.

    `t = sqrt(n) mean / sd` has a noncentral t distribution with noncentrality `sqrt(n) delta`: the
    ends are the deltas at which the observed t is the upper and the lower `level / 2` quantile. (A
    bootstrap of three differences claims 95 % and covers 62 %.)

    Args:
        differences: paired, one per shared seed.
        level: the chance that such an interval misses the true effect.
    """
    if not has_spread(differences) or len(differences) < FEWEST:
        return math.nan, math.nan
    n = len(differences)
    t = math.sqrt(n) * statistics.fmean(differences) / deviation(differences)
    ends = (_noncentrality(t, n - 1, 1 - level / 2), _noncentrality(t, n - 1, level / 2))
    low, high = (_small_sample(n) * end / math.sqrt(n) for end in ends)
    return low, high


def _noncentrality(t: float, freedom: int, share: float) -> float:
    """The noncentrality at which `share` of the distribution lies below t; it falls as the
    noncentrality grows."""
    from scipy.optimize import brentq

    reach = 10.0 + 4 * abs(t)
    return float(brentq(lambda x: share_below(t, freedom, x) - share, -reach, reach, xtol=1e-9))


def share_below(t: float, freedom: int, noncentrality: float) -> float:
    """The share of a noncentral t distribution that lies below t.

    Args:
        t: the point.
        freedom: degrees of freedom.
        noncentrality: of the distribution.
    """
    from scipy.special import nctdtr

    below = float(nctdtr(freedom, noncentrality, t))
    # scipy has no number for some points far in the tails, where the share is 0 or 1.
    return float(noncentrality < t) if math.isnan(below) else below


def _small_sample(n: int) -> float:
    return 1 - 3 / (4 * (n - 1) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's step-down method.

    Args:
        p_values: of all tests of the family, in any order.

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

    With p sorted and k* the first rank (from 0) with `p > level / (m - k)`, a row before k* gets
    `level / (m - k)`, k* and all after it `level / (m - k*)`: an interval at that level leaves 0
    out exactly where the row is decided. The intervals are each row's own;
    they are not simultaneous.

    Args:
        p_values: of all tests of the family, in any order.
        level: of the family.

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
    """How many pairs decide this difference with this spread:
    `n = (t_{level/2} + t_{1-power})^2 (sd / difference)^2`.

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
        low, high = (
            (low, middle)
            if detectable(sd, middle, level, power) <= abs(difference)
            else (middle + 1, high)
        )
    return low


# --------------------
# A test that may be looked at after every seed: an e-process for 'no difference', its p value and
# its interval.
# With differences d_1..d_n of a row, t their t statistic and nu = n - 1,
#     E_n = (1 + n g)^(-1/2) [(1 + t^2 / nu) / (1 + t^2 / (nu (1 + n g)))]^((nu + 1) / 2),   g = 1
# is the likelihood of a normal mixture over the standardized effect against 'no difference', with
# the right-invariant prior on the spread: whatever the spread is, E_n exceeds 1 / level at any
# look with probability at most `level` where there is no difference. So `1 / max E` is a p value
# at every stopping time, and Holm's correction holds over rows.


G = 1.0
"""The variance of the mixture over standardized effects."""


def log_e(t_squared: float, n: int) -> float:
    """log E_n from the square of the t statistic of n differences."""
    nu, spread = n - 1, 1 + n * G
    ratio = math.log1p(t_squared / nu) - math.log1p(t_squared / (nu * spread))
    return -0.5 * math.log(spread) + 0.5 * (nu + 1) * ratio


def sequential_p(differences: Sequence[float]) -> float:
    """1 / max E over all looks so far, at most 1.

    Looks at which all differences are equal say nothing: coarse metrics make such, and the formula
    would take them for certainty.

    Args:
        differences: paired, in the order in which the seeds were run.

    >>> round(sequential_p([1.0, 1.2, 0.9, 1.1, 1.3]), 4)
    0.0338
    >>> sequential_p([1.0, 1.0, 1.0])
    1.0
    """
    return math.exp(-strongest_look(differences)[0])


def strongest_look(differences: Sequence[float]) -> tuple[float, float]:
    """The largest log E of any look, at least 0, and the mean difference at that look: which way
    its evidence points.

    Args:
        differences: paired, in the order in which the seeds were run.
    """
    largest, pointing = 0.0, 0.0
    for n in range(2, len(differences) + 1):
        seen = differences[:n]
        if has_spread(seen):
            mean = statistics.fmean(seen)
            t = math.sqrt(n) * mean / deviation(seen)
            found = log_e(t * t, n)
            if found > largest:
                largest, pointing = found, mean
    return largest, pointing


def sequential_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The mean differences that no look so far rejects at this level; NaN while none is rejected.

    At look n these are `mean +- t_n sd / sqrt(n)` with `t_n^2 = nu (r - 1) / (1 - r / (1 + n g))`
    and `r = (sqrt(1 + n g) / level)^(2 / (nu + 1))`; where r reaches 1 + n g
    nothing can be rejected yet.

    Args:
        differences: paired, in the order in which the seeds were run.
        level: the chance that the interval ever misses the true difference.
    """
    low, high = -math.inf, math.inf
    for n in range(2, len(differences) + 1):
        seen = differences[:n]
        half = _half_width(n, level) * deviation(seen) / math.sqrt(n)
        if has_spread(seen) and math.isfinite(half):
            mean = statistics.fmean(seen)
            low, high = max(low, mean - half), min(high, mean + half)
    if math.isinf(low):
        return math.nan, math.nan
    if low > high:  # looks that contradict each other: the interval spans what they say
        low, high = high, low
    # Intersected over looks, the interval may leave out the present mean; an
    # estimate lies in its interval.
    mean = statistics.fmean(differences)
    return min(low, mean), max(high, mean)


def _half_width(n: int, level: float) -> float:
    nu, spread = n - 1, 1 + n * G
    r = (math.sqrt(spread) / level) ** (2 / (nu + 1))
    return math.sqrt(nu * (r - 1) / (1 - r / spread)) if r < spread else math.inf


def first_round(rows: int, level: float = LEVEL) -> int:
    """The fewest seeds that can decide anything: `E_n <= (1 + n)^((n - 1) / 2)` must reach
    `rows / level`.

    >>> first_round(1), first_round(11)
    (5, 7)
    """
    n = 2
    while (n - 1) / 2 * math.log1p(n * G) < math.log(max(1, rows) / level):
        n += 1
    return n


def log_e_matrix(differences: np.ndarray) -> np.ndarray:
    """log E_n of every prefix with n = 2, 3, ...: (draws, looks) to (draws, looks - 1)."""
    import numpy as np

    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(axis=1) / n
    square = (differences**2).cumsum(axis=1)
    n, mean, square = n[1:], mean[:, 1:], square[:, 1:]
    variance = np.maximum(square - n * mean**2, 1e-300) / (n - 1)
    t_squared = n * mean**2 / variance
    spread = 1 + n * G
    out: np.ndarray = -0.5 * np.log(spread) + n / 2 * (
        np.log1p(t_squared / (n - 1)) - np.log1p(t_squared / ((n - 1) * spread))
    )
    return out
