"""Statistics over seeds: summaries, paired comparison, correction for many comparisons, and a verdict in plain words.

Runs of two methods with the same seed share their initial weights, their split and their order of batches, so that
differences are taken seed by seed; a difference has far less spread than either method alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["better", "worse", "no difference shown", "too few runs"]

LEVEL = 0.05
FEWEST = 3
"""With fewer shared seeds no test is made."""


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
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan, len(values))


@dataclass(frozen=True)
class Comparison:
    """A paired comparison: mean difference, its 95 % interval, p value (None with too few runs), and how many pairs."""

    difference: float
    low: float  # Student's t
    high: float
    p: float | None
    n: int
    test: str = "none"  # which test `p` comes from, in words
    wilcoxon_p: float | None = None  # a second opinion, where n lets it reach 0.05
    boot_low: float = math.nan  # bootstrap interval of the mean difference
    boot_high: float = math.nan
    effect: float = math.nan  # Hedges' g of the differences, with its bootstrap interval
    effect_low: float = math.nan
    effect_high: float = math.nan
    corrected: float | None = None  # p after correction for the number of comparisons in the table


def compare_paired(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Comparison:
    """Compare two methods over the seeds that both have, by the paired t-test.

    >>> result = compare_paired({"0": 0.92, "1": 0.90, "2": 0.95}, {"0": 0.90, "1": 0.89, "2": 0.92})
    >>> round(result.difference, 3), round(result.p, 3), result.n
    (0.02, 0.074, 3)
    """
    seeds = [s for s in ours if s in theirs]
    # What is left between 0.4 - 0.3 and 0.3 - 0.2 in floating point is rounding, not spread.
    differences = [round(ours[s] - theirs[s], 12) for s in seeds]
    if len(differences) < 2:
        mean = differences[0] if differences else math.nan
        return Comparison(mean, math.nan, math.nan, None, len(differences))
    low, high = t_interval(differences)
    found = Comparison(statistics.fmean(differences), low, high, None, len(differences))
    if len(differences) < FEWEST:
        return found
    boot_low, boot_high = bootstrap_interval(differences)
    effect_low, effect_high = bootstrap_effect(differences)
    return replace(
        found,
        p=paired_p(differences),
        test="paired t-test" if has_spread(differences) else "sign-flip test (all differences are equal)",
        wilcoxon_p=wilcoxon_p(differences),
        boot_low=boot_low,
        boot_high=boot_high,
        effect=hedges_g(differences),
        effect_low=effect_low,
        effect_high=effect_high,
    )


def compare_all(rows: Mapping[str, Mapping[str, float]], reference: str) -> dict[str, Comparison]:
    """Every row (a value per seed) against the reference row, with p corrected for the number of comparisons."""
    if reference not in rows:
        raise ValueError(f"there is no row {reference!r} to compare with; rows: {', '.join(rows)}")
    found = {name: compare_paired(row, rows[reference]) for name, row in rows.items() if name != reference}
    tested = [(name, c.p) for name, c in found.items() if c.p is not None]
    for (name, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        found[name] = replace(found[name], corrected=p)
    return found


def has_spread(differences: Sequence[float]) -> bool:
    """Whether the differences differ; small test sets make metrics coarse, so that they may not."""
    largest = max(1.0, *(abs(d) for d in differences))
    return len(differences) > 1 and statistics.stdev(differences) > 1e-12 * largest


def paired_p(differences: Sequence[float]) -> float:
    """Two-sided p value of 'the mean difference is zero' (t-test).

    Where all differences are equal the t-test has no spread to go by; then the exact sign-flip test speaks, whose p is
    at least 2 / 2^n.
    """
    from scipy.special import stdtr

    n, mean = len(differences), statistics.fmean(differences)
    if not has_spread(differences):
        return 1.0 if abs(mean) <= 1e-12 else 2.0 / 2**n
    return float(2 * stdtr(n - 1, -abs(mean) / (statistics.stdev(differences) / math.sqrt(n))))


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
    mean, half = statistics.fmean(values), t_quantile(n - 1, level) * statistics.stdev(values) / math.sqrt(n)
    return mean - half, mean + half


def t_quantile(freedom: float, level: float = LEVEL) -> float:
    """How many standard errors bound a mean with confidence 1 - level."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2))


def hedges_g(differences: Sequence[float]) -> float:
    """The mean difference in units of the differences' standard deviation, corrected for small n; NaN without spread.

    `g = mean / sd * (1 - 3 / (4 (n - 1) - 1))` (Hedges 1981).
    """
    if not has_spread(differences):
        return math.nan
    return statistics.fmean(differences) / statistics.stdev(differences) * _small_sample(len(differences))


def bootstrap_interval(
    values: Sequence[float], level: float = LEVEL, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean. Below about 8 values it is too narrow: use `t_interval` there.

    Up to six values all n^n resamples are taken and nothing is random.
    """
    if not values:
        return math.nan, math.nan
    return _percentiles(_resamples(values, draws, seed).mean(axis=1), level)


def bootstrap_effect(
    differences: Sequence[float], level: float = LEVEL, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """The same for Hedges' g; resamples without spread have none and are left out. NaN where all are such."""
    x = _resamples(differences, draws, seed)
    sd = x.std(axis=1, ddof=1)
    some = sd > 1e-12 * max(1.0, *(abs(d) for d in differences))
    if not some.any():
        return math.nan, math.nan
    return _percentiles(x[some].mean(axis=1) / sd[some] * _small_sample(len(differences)), level)


def _small_sample(n: int) -> float:
    return 1 - 3 / (4 * (n - 1) - 1)


def _resamples(values: Sequence[float], draws: int, seed: int) -> np.ndarray:
    import numpy as np

    x, n = np.asarray(values, dtype=float), len(values)
    if n <= 6:
        return x[np.stack(np.meshgrid(*[np.arange(n)] * n, indexing="ij"), axis=-1).reshape(-1, n)]
    return x[np.random.default_rng(seed).integers(0, n, (draws, n))]


def _percentiles(values: np.ndarray, level: float) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(values, [level / 2, 1 - level / 2])
    return float(low), float(high)


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


def decide(difference: float, p: float | None, mode: str = "max") -> Verdict:
    """The verdict as one of four words; `p` is the corrected p value.

    >>> decide(-0.3, 0.01), decide(-0.3, 0.01, "min"), decide(0.3, 0.2), decide(0.3, None)
    ('worse', 'better', 'no difference shown', 'too few runs')
    """
    if p is None:
        return "too few runs"
    if p >= LEVEL or difference == 0:
        return "no difference shown"
    return "better" if (difference > 0) == (mode == "max") else "worse"


def verdict(comparison: Comparison, p: float | None, mode: str = "max", scale: float = 1.0, unit: str = "") -> str:
    """Plain words. `p` is the corrected p value; `mode` says whether more or less is better.

    >>> verdict(Comparison(0.02, 0.01, 0.03, 0.004, 5), 0.01, scale=100, unit=" points")
    'better: +2.00 points (95% 1.00 to 3.00, n=5)'
    >>> verdict(Comparison(0.02, -0.01, 0.05, 0.1, 3), 0.2, scale=100)
    'no difference shown (+2.00, 95% -1.00 to 5.00, n=3)'
    >>> verdict(Comparison(0.02, 0.01, 0.03, None, 2), None)
    'too few runs (n=2)'
    """
    word = decide(comparison.difference, p, mode)
    if word == "too few runs":
        return f"{word} (n={comparison.n})"
    mean, low, high = (scale * v for v in (comparison.difference, comparison.low, comparison.high))
    if word == "no difference shown":
        return f"{word} ({mean:+.2f}{unit}, 95% {low:.2f} to {high:.2f}, n={comparison.n})"
    return f"{word}: {mean:+.2f}{unit} (95% {low:.2f} to {high:.2f}, n={comparison.n})"
