"""The statistics that PLAN.md names and no general table has: slopes over seeds, exact shares, ratios, sets of leaders.

Intervals of a family of `k` are made at 0.05 / k (Bonferroni), and every outcome is read from its interval.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dampen.studies import (
    LEVEL,
    Entry,
    ResultTable,
    Summary,
    Verdict,
    judge_pairs,
    paired_differences,
    paired_interval,
    sentence,
    smallest_difference,
    summarize,
)

__all__ = ["sentence"]

Tables = Mapping[str, ResultTable]
"""By experiment, those that have a result file."""
GUESSING = 10.0
"""The accuracy of a run that diverged, on ten equally common classes."""
TRAINED = GUESSING + 5
"""A run has trained above this accuracy."""
TENTH = 0.1
"""The published reduction of the gradient variance, and the margin of the plan."""


@dataclass(frozen=True)
class Found:
    """A mean with its interval, and what the interval says."""

    mean: float
    low: float
    high: float
    n: int
    outcome: str


def series(table: ResultTable, method: str) -> dict[float, dict[str, float]]:
    """Accuracy by seed over the value of configurations such as `blur, w 9`, in the order of the values."""
    return over({e.name: e.values for e in table.entries}, method)


def over(rows: Mapping[str, dict[str, float]], method: str) -> dict[float, dict[str, float]]:
    """The configurations of a method by their value.

    >>> over({"blur, w 9": {"0": 80.0}, "blur, w 11": {"0": 78.0}, "dropout": {}}, "blur")
    {9.0: {'0': 80.0}, 11.0: {'0': 78.0}}
    """
    pattern = re.compile(rf"{re.escape(method)}, \w ([\d.]+)")
    found = {float(m[1]): values for name, values in rows.items() if (m := pattern.fullmatch(name))}
    return dict(sorted(found.items()))


def slopes(
    points: Mapping[float, Mapping[str, float]], start: float, step: float = 1.0
) -> dict[str, float]:
    """The least-squares slope over the value for each seed that all values have, from `start` on, per `step`.

    >>> slopes({1.0: {"0": 9.0}, 2.0: {"0": 5.0}, 4.0: {"0": 3.0}}, 2.0)
    {'0': -1.0}
    """
    used = {value: values for value, values in points.items() if value >= start}
    seeds = set.intersection(*(set(values) for values in used.values()))
    return {
        seed: step
        * statistics.linear_regression(list(used), [values[seed] for values in used.values()]).slope
        for seed in sorted(seeds, key=int)
    }


def slope(table: ResultTable, method: str, start: float, family: int, step: float = 1.0) -> Found:
    """The slope of accuracy over the value, from `start` on, tested over seeds."""
    return _signed(list(slopes(series(table, method), start, step).values()), family)


def gap(table: ResultTable, ours: str, theirs: str) -> Found:
    """The paired difference of two configurations."""
    return _signed(
        paired_differences(all_runs(table.entry(ours)), all_runs(table.entry(theirs))), 1
    )


def _signed(values: Sequence[float], family: int) -> Found:
    low, high = paired_interval(values, LEVEL / family)
    outcome = "falls" if high < 0 else "rises" if low > 0 else "open"
    return Found(statistics.fmean(values), low, high, len(values), outcome)


@dataclass(frozen=True)
class Share:
    """How many runs of a configuration train, with the exact 95 % interval, and the accuracy of those."""

    trained: int
    n: int
    low: float
    high: float
    accuracy: Summary

    @property
    def share(self) -> float:
        return self.trained / self.n


def shares(table: ResultTable) -> dict[str, Share]:
    """The share of runs that train, by configuration. A run that diverged has not trained."""
    return {entry.name: share(entry) for entry in table.entries if entry.setting.logged}


def share(entry: Entry) -> Share:
    good = [value for value in entry.values.values() if math.isfinite(value) and value > TRAINED]
    n = sum(run.status in ("finished", "diverged") for run in entry.setting.logged.values())
    low, high = exact_interval(len(good), n)
    return Share(len(good), n, low, high, summarize(good))


def all_runs(entry: Entry) -> dict[str, float]:
    """Accuracy by seed, where a run that diverged counts as guessing."""
    diverged = [seed for seed, run in entry.setting.logged.items() if run.status == "diverged"]
    return dict.fromkeys(diverged, GUESSING) | entry.values


def exact_interval(count: int, n: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share.

    >>> [round(v, 3) for v in exact_interval(0, 6)], [round(v, 3) for v in exact_interval(3, 6)]
    ([0.0, 0.459], [0.118, 0.882])
    """
    from scipy.stats import binomtest

    interval = binomtest(count, n).proportion_ci(1 - LEVEL, method="exact")
    return float(interval.low), float(interval.high)


def judged_by_depth(table: ResultTable) -> dict[str, Verdict]:
    """Every network without some skip against the one of its kind and depth with all: one family for each depth."""
    families: dict[str, dict[str, tuple[Mapping[str, float], Mapping[str, float]]]] = {}
    for entry in table.entries:
        kind, depth, *variant = entry.name.split(", ")
        if variant:
            families.setdefault(depth, {})[entry.name] = (
                all_runs(entry),
                all_runs(table.entry(f"{kind}, {depth}")),
            )
    return {
        name: c
        for pairs in families.values()
        for name, c in judge_pairs(pairs, table.metric).items()
    }


def ratio(table: ResultTable, ours: str, theirs: str, family: int) -> Found:
    """The ratio of two configurations over seeds: the geometric mean, its interval by Student's t on the logarithms.

    The outcome is that of a published contrast of one tenth: significant and half to twice that size.
    """
    a, b = table.entry(ours).values, table.entry(theirs).values
    logs = paired_differences(
        {s: math.log(v) for s, v in a.items()}, {s: math.log(v) for s, v in b.items()}
    )
    low, high = (math.exp(v) for v in paired_interval(logs, LEVEL / family))
    if high < 1:
        outcome = "published" if low < 1 - TENTH / 2 and high > 1 - 2 * TENTH else "lower"
    elif low > 1:
        outcome = "higher"
    else:
        outcome = "equal" if low > 1 - TENTH and high < 1 + TENTH else "open"
    return Found(math.exp(statistics.fmean(logs)), low, high, len(logs), outcome)


def power(table: ResultTable) -> str:
    """The difference that a study detects with 80 % power, as its own report says it.

    Args:
        table: the runs of a study, judged.
    """
    return f"{smallest_difference(table):.{table.metric.digits}f}{table.metric.points}"


def winners(table: ResultTable) -> str:
    """Which methods are significantly better than the reference, in a sentence."""
    reference = table.main_reference
    assert reference is not None
    rows = [
        (e, e.comparison)
        for e in table.compared()
        if not e.name.startswith("baseline") and e.comparison
    ]
    better = [
        f"{e.name} ({sentence(c, table.metric).partition(': ')[2]})"
        for e, c in rows
        if c.verdict == "better"
    ]
    n = max((c.n for _, c in rows), default=0)
    counted = f"of {len(rows)} methods tuned in the same way"
    against = f"the tuned {reference.name}" if table.study.search else f"the {reference.name}"
    told = f"{listed(better)}, {counted}" if better else f"none {counted}"
    undecided = sum(c.verdict == "inconclusive" for _, c in rows)
    inconclusive = (
        f" The study has 80 % power to detect {power(table)}; {undecided} methods are inconclusive."
        if undecided
        else ""
    )
    return f"Significantly better than {against}: {told} ({n} seeds, Holm).{inconclusive}"


def leading(table: ResultTable) -> tuple[Entry, list[Entry]]:
    """The best configuration and those that a paired test with Holm's correction cannot tell apart from it."""
    best, *others = table.ranked()
    found = judge_pairs({e.name: (e.values, best.values) for e in others}, table.metric)
    return best, [e for e in others if found[e.name].verdict != "worse"]


def leaders(table: ResultTable) -> str:
    """The best configuration and its equals, in a sentence."""
    best, equals = leading(table)
    alike = [e.name for e in equals]
    told = (
        f"cannot be told apart from it: {listed(alike)}"
        if alike
        else "every other one is significantly worse"
    )
    return f"The highest mean is that of {best.name}; {told}."


def best_points(table: ResultTable) -> list[tuple[str, float, float]]:
    """Of each curve over a coefficient: its name, the value with the highest mean, and that mean."""
    found: dict[str, tuple[str, float, float]] = {}
    for e in (e for e in table.entries if e.setting.grid and e.summary.n):
        point = (e.config.name, float(next(iter(e.setting.grid.values()))), e.summary.mean)
        if e.config.name not in found or point[2] > found[e.config.name][2]:
            found[e.config.name] = point
    return list(found.values())


def listed(parts: Iterable[str]) -> str:
    """`a, b and c`.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
