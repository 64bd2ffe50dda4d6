"""What the differences seen so far predict: how many seeds decide, what a selected effect is worth,
what to distrust.

`benchmarks/verdict_limits.py` simulates each of these; the committed record is
`benchmarks/records/verdict_limits.json`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from dampen.studies.stats import (
    FEWEST,
    LEVEL,
    deviation,
    has_spread,
    log_e_matrix,
    share_below,
    t_quantile,
)

LIKELY = (0.5, 0.8)
"""The range of seeds: at its lower end so many of such studies are conclusive, at
its upper end so many."""
MOST_PROMISED = 100
"""A range that ends above this number of seeds, or four times those there are, is not promised: the
effect may as well be 0."""
NODES, DRAWS = 64, 400
"""Quantiles that the variance is averaged over, and simulated continuations
of a sequential study."""


def seeds_to_conclusion(
    differences: Sequence[float],
    level: float,
    equal_level: float,
    margin: float | None,
    sequential: bool = False,
) -> tuple[int, int] | None:
    """The numbers of seeds at which 50 % and 80 % of the studies that began like
    this one are conclusive.

    The true mean and standard deviation are not known: both are averaged over what the differences
    leave possible (the flat prior, under which the mean has Student's t distribution). None where
    80 % is out of reach of `most_promised`.

    Args:
        differences: paired, one per shared seed.
        level: at which a difference is significant.
        equal_level: of the interval that must lie within the margin.
        margin: the equivalence margin; None: there is none.
        sequential: whether the e-process judges.
    """
    if not has_spread(differences):
        return None
    predict = _sequential_curve if sequential else _fixed_curve
    n, chances = len(differences), predict(differences, level, equal_level, margin)
    reached = [np.flatnonzero(chances >= share) for share in LIKELY]
    if any(not len(found) for found in reached):
        return None
    low, high = (n + 1 + int(found[0]) for found in reached)
    return low, high


def most_promised(n: int) -> int:
    """The most seeds that are promised to a study that has n."""
    return max(MOST_PROMISED, 4 * n)


def _fixed_curve(
    differences: Sequence[float], level: float, equal_level: float, margin: float | None
) -> np.ndarray:
    """The chance that n + 1, n + 2, ... seeds in all are conclusive by the paired t-test."""
    from scipy.special import chdtri, ndtr

    n, mean, sd = len(differences), statistics.fmean(differences), deviation(differences)
    total = np.arange(n + 1, most_promised(n) + 1)
    # The possible variances: (n - 1) sd^2 over quantiles of chi^2, each equally likely.
    possible = (n - 1) * sd**2 / chdtri(n - 1, (np.arange(NODES) + 0.5) / NODES)[:, None]
    seen = np.sqrt(((n - 1) * sd**2 + (total - n) * possible) / (total - 1) / total)
    move = np.sqrt(possible * (1 / n - 1 / total))  # how far the mean still moves
    significant = seen * [t_quantile(int(k) - 1, level) for k in total]
    equal = np.zeros_like(significant)
    if margin is not None:
        half = seen * [t_quantile(int(k) - 1, equal_level) for k in total]
        equal = np.clip(margin - half, 0.0, significant)

    def between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        chance: np.ndarray = ndtr((high - mean) / move) - ndtr((low - mean) / move)
        return chance

    # Inconclusive is a mean that is neither significant nor surely within the margin.
    inconclusive = between(-significant, -equal) + between(equal, significant)
    out: np.ndarray = 1 - inconclusive.mean(axis=0)
    return out


def _sequential_curve(
    differences: Sequence[float], level: float, equal_level: float, margin: float | None
) -> np.ndarray:
    """The same for the e-process, by simulation of how the study continues; the margin
    does not end it here."""
    rng, n = np.random.default_rng(0), len(differences)
    mean, sd = statistics.fmean(differences), deviation(differences)
    sds = sd * np.sqrt((n - 1) / rng.chisquare(n - 1, (DRAWS, 1)))
    means = mean + sds / math.sqrt(n) * rng.standard_normal((DRAWS, 1))
    further = means + sds * rng.standard_normal((DRAWS, most_promised(n) - n))
    whole = np.hstack([np.tile(differences, (DRAWS, 1)), further])
    decided = np.logical_or.accumulate(log_e_matrix(whole) >= -math.log(level), axis=1)
    out: np.ndarray = decided.mean(axis=0)[n - 1 :]
    return out


def shrunk_effect(differences: Sequence[float], level: float) -> float:
    """A significant mean difference without the optimism of having been selected for it (the
    winner's curse).

    The median-unbiased estimate given significance: the true standardized effect at which half of
    the t statistics beyond the critical value lie beyond the observed one. Between 0 and the
    observed mean; NaN where the difference is not significant at this level.

    Args:
        differences: paired, one per shared seed.
        level: at which significance was judged.
    """
    n = len(differences)
    if n < FEWEST or not has_spread(differences):
        return math.nan
    from scipy.optimize import brentq

    mean, sd = statistics.fmean(differences), deviation(differences)
    t, critical = math.sqrt(n) * abs(mean) / sd, t_quantile(n - 1, level)
    if t < critical:
        return math.nan

    def excess(noncentrality: float) -> float:
        beyond, selected = (1 - share_below(x, n - 1, noncentrality) for x in (t, critical))
        selected += share_below(-critical, n - 1, noncentrality)
        return beyond / selected - 0.5

    if excess(0.0) >= 0:
        return 0.0
    if not excess(t) > 0:  # far beyond the critical value there is nothing to take back
        return mean
    return math.copysign(float(brentq(excess, 0.0, t, xtol=1e-9)) * sd / math.sqrt(n), mean)


SAFE_SEEDS = 12
"""Skewed differences should have at least so many seeds."""
FALSE_CLAIMS = {
    3: (0.074, 0.160),
    5: (0.084, 0.178),
    8: (0.080, 0.169),
    12: (0.077, 0.153),
    16: (0.072, 0.140),
    24: (0.070, 0.127),
}
"""False claims of the t-test at 5 % where differences are lognormal, of log standard deviation 0.5
and 1, by number of seeds. From `benchmarks/records/verdict_limits.json`."""


def false_claims_to_expect(differences: Sequence[float]) -> tuple[float, float] | None:
    """The rate of false claims, as a range, where the differences are strongly skewed;
    None where they are not.

    Args:
        differences: paired, one per shared seed.
    """
    n = len(differences)
    if n < 4 or not has_spread(differences) or abs(skewness(differences)) <= _largest_skewness(n):
        return None
    return FALSE_CLAIMS[max(k for k in FALSE_CLAIMS if k <= n)]


def skewness(values: Sequence[float]) -> float:
    """The adjusted sample skewness, `G1` of Joanes and Gill (1998).

    Args:
        values: three or more that differ.
    """
    n, x = len(values), np.asarray(values) - statistics.fmean(values)
    return float(math.sqrt(n * (n - 1)) / (n - 2) * (x**3).mean() / (x**2).mean() ** 1.5)


@lru_cache(maxsize=256)
def _largest_skewness(n: int) -> float:
    """What 5 % of samples of a normal distribution exceed, by simulation."""
    x = np.random.default_rng(0).standard_normal((20_000, n))
    x -= x.mean(axis=1, keepdims=True)
    found = math.sqrt(n * (n - 1)) / (n - 2) * (x**3).mean(axis=1) / (x**2).mean(axis=1) ** 1.5
    return float(np.quantile(np.abs(found), 1 - LEVEL))


FAR = 7.0
"""Robust standard deviations from the median at which a seed is called an outlier."""


def outlying_seeds(values: Mapping[str, float]) -> list[str]:
    """Seeds whose value lies far from the others: more than `FAR` times 1.4826 of the median
    absolute deviation.

    Args:
        values: by seed; of fewer than five none is called an outlier.

    >>> outlying_seeds({"0": 80.0, "1": 81.0, "2": 79.5, "3": 80.5, "4": 10.0})
    ['4']
    """
    if len(values) < 5:
        return []
    middle = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(v - middle) for v in values.values())
    return [s for s, v in values.items() if spread > 0 and abs(v - middle) > FAR * spread]
