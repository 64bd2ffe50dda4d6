"""Verdicts: better, worse, equal within the margin, or inconclusive; each with the interval that says the same.

Two kinds of test. A *fixed plan* (the number of seeds was chosen before) is judged by paired t-tests; a plan that was
looked at while it grew is judged by the e-process of `sequential.py`. Either way p values are corrected over the rows
by Holm's method, and a row's interval is made at the level at which the row was judged.

>>> plain = {"0": 70.0, "1": 72.0, "2": 71.0, "3": 69.0, "4": 70.5}
>>> rows = {"plain": plain, "a": {s: v + 2 + 0.1 * i for i, (s, v) in enumerate(plain.items())}}
>>> print(sentence(judge(rows, "plain", "accuracy")["a"], "accuracy"))
better: +2.20 points (2.00 to 2.40)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dampen.studies.metric import Metric, describe
from dampen.studies.stats import (
    FEWEST,
    LEVEL,
    detectable,
    deviation,
    effect_interval,
    has_spread,
    hedges_g,
    holm,
    holm_levels,
    paired_differences,
    paired_interval,
    paired_p,
    seeds_needed,
    seeds_to_decide,
    sequential_interval,
    sequential_p,
    wilcoxon_p,
)

Word = Literal["better", "worse", "equal", "inconclusive", "no gain"]
"""`no gain` exists in races only: the row cannot win by the margin any more, and gets no more seeds."""
Test = Literal["fixed", "sequential"]
KINDS: dict[Test, str] = {
    "fixed": "paired t-test, number of seeds planned before",
    "sequential": "sequential test (e-process), valid at every look",
}
MOST_EFFECTS = 500
"""In larger families effects and second opinions are left out: they would take most of the time."""
Values = Mapping[str, float]
"""A number by seed, in the unit of tables."""


@dataclass(frozen=True)
class Verdict:
    """A row against its reference in one metric. `low` to `high` is the row's interval at `level`."""

    difference: float
    n: int
    sd: float  # of the differences
    low: float
    high: float
    level: float
    p: float | None  # None with too few shared seeds
    corrected: float | None  # p after Holm's correction
    verdict: Word
    small: bool  # better or worse by less than the margin
    margin: float | None
    needed: (
        int | None
    )  # seeds in all at which this difference and spread would be decided, where it is not
    detectable: float  # the smallest difference these seeds show with power 0.8
    test: str  # which test p comes from, in words
    wilcoxon_p: float | None = None  # a second opinion, where n lets it reach 0.05
    effect: float = math.nan  # Hedges' g of the differences, with its exact 95 % interval
    effect_low: float = math.nan
    effect_high: float = math.nan
    because: str = ""  # why a row got no more seeds

    @property
    def decided(self) -> bool:
        return self.verdict != "inconclusive"


def judge(
    rows: Mapping[str, Values],
    reference: str,
    metric: str | Metric,
    *,
    better: str | None = None,
    margin: float | None = None,
    test: Test = "fixed",
) -> dict[str, Verdict]:
    """Every row (a value per seed) against the reference row. `better` ('max' or 'min') overrides the metric's own.

    Args:
        rows: a value per seed for each configuration, in the unit of tables.
        reference: the configuration that the others are compared with.
        metric: the metric, or its name.
        better: 'max' or 'min'; default: the metric's own direction.
        margin: the smallest difference of interest; default: the metric's.
        test: 'fixed' for a number of seeds chosen before, 'sequential' for one that grew.
    """
    if reference not in rows:
        raise ValueError(f"there is no row {reference!r} to compare with; rows: {', '.join(rows)}")
    pairs = {name: (row, rows[reference]) for name, row in rows.items() if name != reference}
    return judge_pairs(pairs, metric, better=better, margin=margin, test=test)


def judge_pairs(
    pairs: Mapping[str, tuple[Values, Values]],
    metric: str | Metric,
    *,
    better: str | None = None,
    margin: float | None = None,
    test: Test = "fixed",
) -> dict[str, Verdict]:
    """Rows with their references, as one family: p values are corrected over all of them.

    A row with too few shared seeds counts in the number of tests, so that verdicts do not change when it fills up.

    Args:
        pairs: for each configuration its values and those of its reference, by seed.
        metric: the metric, or its name.
        better: 'max' or 'min'; default: the metric's own direction.
        margin: the smallest difference of interest; default: the metric's.
        test: 'fixed' for a number of seeds chosen before, 'sequential' for one that grew.
    """
    metric = describe(metric) if isinstance(metric, str) else metric
    upwards = (better or metric.better or "max") == "max"
    few = len(pairs) <= MOST_EFFECTS
    differences = {name: paired_differences(*pair) for name, pair in pairs.items()}
    tested = {name: _p(d, test) for name, d in differences.items()}
    filled = [1.0 if p is None else p for p in tested.values()]
    levels, decided = holm_levels(filled)
    corrected = holm(filled)
    judged = {}
    for i, (name, d) in enumerate(differences.items()):
        theirs = pairs[name][1].values()
        mean = statistics.fmean(theirs) if theirs else math.nan
        limit = margin if margin is not None else metric.margin_at(mean)
        judged[name] = _judged(
            d,
            tested[name],
            corrected[i],
            levels[i],
            decided[i],
            len(pairs),
            limit,
            upwards,
            test,
            few,
        )
    return _beaten(judged, upwards) if test == "sequential" else judged


def _beaten(judged: dict[str, Verdict], upwards: bool) -> dict[str, Verdict]:
    """In a race an open row whose interval lies wholly below that of the best row is out as well."""
    better = {name: c for name, c in judged.items() if c.verdict == "better"}
    if not better:
        return judged
    sure = {name: c.low if upwards else -c.high for name, c in better.items()}
    best = max(sure, key=lambda name: sure[name])
    for name, c in judged.items():
        if c.verdict == "inconclusive" and (c.high if upwards else -c.low) < sure[best]:
            judged[name] = replace(
                c, verdict="no gain", because=f"cannot reach {best} any more", needed=None
            )
    return judged


def _p(differences: Sequence[float], test: Test) -> float | None:
    if len(differences) < FEWEST:
        return None
    return sequential_p(differences) if test == "sequential" else paired_p(differences)


def _judged(
    d: Sequence[float],
    p: float | None,
    corrected: float,
    level: float,
    decided: bool,
    rows: int,
    margin: float | None,
    upwards: bool,
    test: Test,
    effects: bool,
) -> Verdict:
    mean = statistics.fmean(d) if d else math.nan
    sd = deviation(d) if len(d) > 1 else math.nan
    interval = sequential_interval if test == "sequential" else paired_interval
    low, high = interval(d, level) if p is not None else (math.nan, math.nan)
    widest = interval(d, LEVEL / rows) if p is not None else (math.nan, math.nan)
    word, because = _word(mean, decided and p is not None, widest, margin, upwards, test)
    open_ = p is not None and word == "inconclusive"
    effect_low, effect_high = effect_interval(d) if effects else (math.nan, math.nan)
    return Verdict(
        difference=mean,
        n=len(d),
        sd=sd,
        low=low,
        high=high,
        level=level,
        p=p,
        corrected=None if p is None else corrected,
        verdict=word,
        small=word in ("better", "worse") and margin is not None and _inside((low, high), margin),
        margin=margin,
        needed=_needed(d, mean, sd, level, LEVEL / rows, margin, test)
        if open_
        else FEWEST
        if p is None
        else None,
        detectable=detectable(sd, len(d), LEVEL / rows),
        test=_named(d, test) if p is not None else "none",
        wilcoxon_p=wilcoxon_p(d) if p is not None and effects else None,
        effect=hedges_g(d),
        effect_low=effect_low,
        effect_high=effect_high,
        because=because,
    )


def _word(
    mean: float,
    decided: bool,
    widest: tuple[float, float],
    margin: float | None,
    upwards: bool,
    test: Test,
) -> tuple[Word, str]:
    """The verdict, and the reason of a row that is out of a race. `widest` is the interval at level / rows."""
    if decided and mean != 0:
        return ("better" if (mean > 0) == upwards else "worse"), ""
    if margin is not None and _inside(widest, margin):
        return "equal", ""
    if test == "sequential" and margin is not None:
        best = widest[1] if upwards else -widest[0]
        if best < margin:
            return "no gain", "cannot win by the margin any more"
    return "inconclusive", ""


def _inside(interval: tuple[float, float], margin: float) -> bool:
    return -margin < interval[0] and interval[1] < margin


def _needed(
    d: Sequence[float],
    mean: float,
    sd: float,
    level: float,
    widest: float,
    margin: float | None,
    test: Test,
) -> int | None:
    """Seeds at which this difference and spread would be decided: as a difference, or as equal, whichever is first."""
    if not has_spread(d) and test == "sequential":
        return None  # the e-process has nothing to divide by
    if not has_spread(d):
        return max(len(d) + 1, math.ceil(math.log2(2 / level)))
    ways = []
    for gap, at in ((abs(mean), level), ((margin or 0.0) - abs(mean), widest)):
        if gap > 0:
            ways.append(
                seeds_to_decide(gap / sd, at) if test == "sequential" else seeds_needed(gap, sd, at)
            )
    found = [n for n in ways if n is not None]
    return max(len(d) + 1, min(found)) if found else None


def _named(d: Sequence[float], test: Test) -> str:
    if test == "sequential":
        return "e-process"
    return "paired t-test" if has_spread(d) else "sign-flip test (all differences are equal)"


def words(c: Verdict, metric: str | Metric) -> str:
    """The verdict in a few words, without numbers of its own but the margin's and the seeds'.

    Args:
        c: a verdict.
        metric: the metric, or its name.

    >>> c = judge({"a": {"0": 1.0, "1": 4.0, "2": 2.0}, "b": {"0": 0.5, "1": 2.0, "2": 2.5}}, "b", "accuracy")["a"]
    >>> words(c, "accuracy")
    'inconclusive, needs about 30 seeds'
    """
    metric = describe(metric) if isinstance(metric, str) else metric
    if c.verdict == "equal":
        return f"equal within {c.margin:.{_digits(c.margin)}f}{metric.points}"
    if c.verdict == "no gain":
        return c.because or "no gain of the margin"
    if c.verdict == "inconclusive":
        if c.p is None:
            return f"inconclusive, needs at least {FEWEST} shared seeds"
        if c.needed is None and c.sd == 0:
            return (
                "inconclusive, the same difference in every seed"
                if c.difference
                else "inconclusive, no seed differs"
            )
        return (
            f"inconclusive, needs about {c.needed:,} seeds"
            if c.needed
            else "inconclusive, out of reach of more seeds"
        )
    return f"{c.verdict}, by less than the margin" if c.small else c.verdict


def _digits(margin: float | None) -> int:
    return 1 if margin is None or round(margin, 1) == margin else 3


def sentence(c: Verdict, metric: str | Metric) -> str:
    """Verdict, difference and interval.

    Args:
        c: a verdict.
        metric: the metric, or its name.
    """
    metric = describe(metric) if isinstance(metric, str) else metric
    if math.isnan(c.difference):
        return words(c, metric)
    digits = metric.digits if metric.percent else max(2, metric.digits)
    interval = "" if math.isnan(c.low) else f" ({c.low:.{digits}f} to {c.high:.{digits}f})"
    return f"{words(c, metric)}: {c.difference:+.{digits}f}{metric.points}{interval}"
