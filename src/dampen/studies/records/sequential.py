"""A test that may be looked at after every seed: an e-process for 'no difference', its p value and its interval.

With differences d_1..d_n of a row, t their t statistic and nu = n - 1,

    E_n = (1 + n g)^(-1/2) [(1 + t^2 / nu) / (1 + t^2 / (nu (1 + n g)))]^((nu + 1) / 2),   g = 1

is the likelihood of a normal mixture over the standardized effect against 'no difference', with the right-invariant
prior on the spread: whatever the spread is, E_n exceeds 1 / level at any look with probability at most `level` where
there is no difference. So `1 / max E` is a p value at every stopping time, and Holm's correction holds over rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from dampen.studies.records.stats import LEVEL, POWER, deviation, has_spread

if TYPE_CHECKING:
    import numpy as np

G = 1.0
"""The variance of the mixture over standardized effects."""
MOST = 400
"""Seeds up to which a simulation looks for a decision."""


def log_e(t_squared: float, n: int) -> float:
    """log E_n from the square of the t statistic of n differences."""
    nu, spread = n - 1, 1 + n * G
    ratio = math.log1p(t_squared / nu) - math.log1p(t_squared / (nu * spread))
    return -0.5 * math.log(spread) + 0.5 * (nu + 1) * ratio


def sequential_p(differences: Sequence[float]) -> float:
    """1 / max E over all looks so far, at most 1.

    Looks at which all differences are equal say nothing: coarse metrics make such, and the formula would take them for
    certainty.

    >>> round(sequential_p([1.0, 1.2, 0.9, 1.1, 1.3]), 4)
    0.0338
    >>> sequential_p([1.0, 1.0, 1.0])
    1.0
    """
    largest = 0.0
    for n in range(2, len(differences) + 1):
        seen = differences[:n]
        if has_spread(seen):
            t = math.sqrt(n) * statistics.fmean(seen) / deviation(seen)
            largest = max(largest, log_e(t * t, n))
    return math.exp(-largest)


def sequential_interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The mean differences that no look so far rejects at this level; NaN while none is rejected.

    At look n these are `mean +- t_n sd / sqrt(n)` with `t_n^2 = nu (r - 1) / (1 - r / (1 + n g))` and
    `r = (sqrt(1 + n g) / level)^(2 / (nu + 1))`; where r reaches 1 + n g nothing can be rejected yet.
    """
    low, high = -math.inf, math.inf
    last = (math.nan, math.nan)
    for n in range(2, len(differences) + 1):
        seen = differences[:n]
        half = _half_width(n, level) * deviation(seen) / math.sqrt(n)
        if has_spread(seen) and math.isfinite(half):
            mean = statistics.fmean(seen)
            last = (mean - half, mean + half)
            low, high = max(low, last[0]), min(high, last[1])
    if math.isinf(low):
        return math.nan, math.nan
    return (low, high) if low <= high else last  # looks that contradict each other: the newest speaks


def _half_width(n: int, level: float) -> float:
    nu, spread = n - 1, 1 + n * G
    r = (math.sqrt(spread) / level) ** (2 / (nu + 1))
    return math.sqrt(nu * (r - 1) / (1 - r / spread)) if r < spread else math.inf


def first_round(rows: int, level: float = LEVEL) -> int:
    """The fewest seeds that can decide anything: `E_n <= (1 + n)^((n - 1) / 2)` must reach `rows / level`.

    >>> first_round(1), first_round(11)
    (5, 7)
    """
    n = 2
    while (n - 1) / 2 * math.log1p(n * G) < math.log(max(1, rows) / level):
        n += 1
    return n


def seeds_to_decide(effect: float, level: float, power: float = POWER) -> int | None:
    """How many seeds decide a standardized effect with the given power, by simulation; None above `MOST`.

    The effect is rounded to a twentieth (above 5 to a whole), so that a table asks for few simulations.
    """
    size = min(abs(effect), 20.0)
    return _simulated(round(20 * size) / 20 if size < 5 else float(round(size)), round(level, 6), power)


@lru_cache(maxsize=1024)
def _simulated(effect: float, level: float, power: float) -> int | None:
    import numpy as np

    if effect < 0.1:
        return None
    looks = MOST if effect < 0.5 else 100
    decided = first_decisions(np.random.default_rng(0).standard_normal((200, looks)) + effect, level)
    at = float(np.quantile(decided, power))
    return math.ceil(at) if at <= looks else None


def first_decisions(differences: np.ndarray, level: float) -> np.ndarray:
    """For each row of differences (draws, looks) the look at which E first reaches 1 / level; one beyond if never."""
    import numpy as np

    e = log_e_matrix(differences)
    reached = e >= -math.log(level)
    out: np.ndarray = np.where(reached.any(axis=1), reached.argmax(axis=1) + 2, differences.shape[1] + 1)
    return out


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
