"""Verdicts: better, worse, equal within the margin, or inconclusive; each with the
interval that says the same.

Two kinds of test. A *fixed plan* (the number of seeds was chosen before) is judged by paired
t-tests; a plan that was looked at while it grew is judged by the e-process of `stats.py`. Either
way p values are corrected over the rows by Holm's method, and a row's interval is made at the level
at which the row was judged. Rows that were added after the study had been looked at share a level
of their own (`LATER`): whoever adds methods until one is significant is not
given 5 % anew each time.

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
from dampen.studies.prediction import (
    SAFE_SEEDS,
    false_claims_to_expect,
    most_promised,
    outlying_seeds,
    seeds_to_conclusion,
    shrunk_effect,
)
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
    sequential_interval,
    sequential_p,
    strongest_look,
    wilcoxon_p,
)

Word = Literal["better", "worse", "equal", "inconclusive", "no gain"]
"""`no gain` exists in races only: the row cannot win by the margin any more,
and gets no more seeds."""
Test = Literal["fixed", "sequential"]
KINDS: dict[Test, str] = {
    "fixed": "paired t-test, number of seeds planned before",
    "sequential": "sequential test (e-process), valid at every look",
}
MOST_EFFECTS = 500
"""In larger families effects and second opinions are left out: they would take most of the time."""
LATER = 0.2
"""Share of the level that all rows added after a look have together; each later addition gets half
of what is left."""
TURNED = "earlier seeds pointed the other way than the mean of all seeds"
"""The evidence of a sequential test is that of its strongest look, which the
mean may have left since."""
NO_VARIATION = "the metric does not vary with the seed"
Values = Mapping[str, float]
"""A number by seed, in the unit of tables."""


@dataclass(frozen=True)
class Verdict:
    """A row against its reference in one metric. `low` to `high` is the
    row's interval at `level`."""

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
    needed: int | None  # seeds in all at which 80 % of such studies are conclusive, where it is not
    detectable: float  # the smallest difference these seeds show with power 0.8
    test: str  # which test p comes from, in words
    wilcoxon_p: float | None = None  # a second opinion, where n lets it reach 0.05
    effect: float = math.nan  # Hedges' g of the differences, with its exact 95 % interval
    effect_low: float = math.nan
    effect_high: float = math.nan
    because: str = ""  # why a row got no more seeds, or why there is no verdict
    needed_from: int | None = None  # seeds at which half of such studies are conclusive
    shrunk: float = math.nan  # a significant difference without the optimism of its selection
    false_claims: tuple[float, float] | None = None  # to expect where the differences are skewed
    outliers: tuple[str, ...] = ()  # shared seeds whose value lies far from the others

    @property
    def decided(self) -> bool:
        return self.verdict != "inconclusive"

    @property
    def caution(self) -> str:
        """In words, why to distrust this verdict; empty where there is no reason."""
        if self.false_claims is None:
            return ""
        low, high = (f"{100 * rate:.0f}" for rate in self.false_claims)
        more = f"; use at least {SAFE_SEEDS} seeds" if self.n < SAFE_SEEDS else ""
        far = f" (far from the others: seed {', '.join(self.outliers)})" if self.outliers else ""
        return (
            f"skewed differences{far}, expect {low} to {high} % false claims instead of 5 %{more}"
        )


def judge(
    rows: Mapping[str, Values],
    reference: str,
    metric: str | Metric,
    *,
    better: str | None = None,
    margin: float | None = None,
    test: Test = "fixed",
    added: Mapping[str, int] | None = None,
) -> dict[str, Verdict]:
    """Every row (a value per seed) against the reference row. `better` ('max' or 'min') overrides
    the metric's own.

    Args:
        rows: a value per seed for each configuration, in the unit of tables.
        reference: the configuration that the others are compared with.
        metric: the metric, or its name.
        better: 'max' or 'min'; default: the metric's own direction.
        margin: the smallest difference of interest; default: the metric's.
        test: 'fixed' for a number of seeds chosen before, 'sequential' for one that grew.
        added: as for `judge_pairs`.
    """
    if reference not in rows:
        raise ValueError(f"there is no row {reference!r} to compare with; rows: {', '.join(rows)}")
    pairs = {name: (row, rows[reference]) for name, row in rows.items() if name != reference}
    return judge_pairs(pairs, metric, better=better, margin=margin, test=test, added=added)


def judge_pairs(
    pairs: Mapping[str, tuple[Values, Values]],
    metric: str | Metric,
    *,
    better: str | None = None,
    margin: float | None = None,
    test: Test = "fixed",
    added: Mapping[str, int] | None = None,
) -> dict[str, Verdict]:
    """Rows with their references, as one family: p values are corrected over all of them.

    A row with too few shared seeds counts in the number of tests, so that verdicts do not change
    when it fills up.

    Args:
        pairs: for each configuration its values and those of its reference, by seed.
        metric: the metric, or its name.
        better: 'max' or 'min'; default: the metric's own direction.
        margin: the smallest difference of interest; default: the metric's.
        test: 'fixed' for a number of seeds chosen before, 'sequential' for one that grew.
        added: the number of the addition, from 1, of configurations added
            after a look at the others.
    """
    metric = describe(metric) if isinstance(metric, str) else metric
    upwards = (better or metric.better or "max") == "max"
    families: dict[int, dict[str, tuple[Values, Values]]] = {}
    for name, pair in pairs.items():
        families.setdefault((added or {}).get(name, 0), {})[name] = pair
    judged: dict[str, Verdict] = {}
    for addition, family in families.items():
        level = LEVEL * (LATER / 2**addition if addition else 1.0)
        judged |= _judge_family(family, metric, upwards, margin, test, level)
    judged = {name: judged[name] for name in pairs}
    return _beaten(judged, upwards) if test == "sequential" else judged


def _judge_family(
    pairs: Mapping[str, tuple[Values, Values]],
    metric: Metric,
    upwards: bool,
    margin: float | None,
    test: Test,
    level: float,
) -> dict[str, Verdict]:
    """Rows that are corrected together, at a level for all of them."""
    few = len(pairs) <= MOST_EFFECTS
    differences = {name: paired_differences(*pair) for name, pair in pairs.items()}
    tested = {
        name: None if _is_constant(*pairs[name]) else _p(d, test) for name, d in differences.items()
    }
    filled = [1.0 if p is None else p for p in tested.values()]
    levels, decided = holm_levels(filled, level)
    corrected = [min(1.0, p * LEVEL / level) for p in holm(filled)]
    judged = {}
    for i, (name, d) in enumerate(differences.items()):
        theirs = pairs[name][1].values()
        mean = statistics.fmean(theirs) if theirs else math.nan
        limit = margin if margin is not None else metric.margin_at(mean)
        at = Levels(levels[i], level / len(pairs), decided[i])
        found = _judged(d, tested[name], corrected[i], at, limit, upwards, test, few)
        if _is_constant(*pairs[name]):
            found = replace(found, because=NO_VARIATION, needed=None)
        elif found.false_claims is not None:
            shared = {s: v for s, v in pairs[name][0].items() if s in pairs[name][1]}
            found = replace(found, outliers=tuple(outlying_seeds(shared)))
        judged[name] = found
    return judged


def _is_constant(ours: Values, theirs: Values) -> bool:
    """Whether neither configuration varies over the shared seeds: then all of them are one
    observation."""
    shared = [s for s in ours if s in theirs]
    return len(shared) > 1 and not any(
        has_spread([row[s] for s in shared]) for row in (ours, theirs)
    )


def _beaten(judged: dict[str, Verdict], upwards: bool) -> dict[str, Verdict]:
    """In a race an open row whose interval lies wholly below that of the
    best row is out as well."""
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


@dataclass(frozen=True)
class Levels:
    """The level of a row's own interval, that of the widest one of its family, and
    whether the row is decided."""

    own: float
    widest: float
    decided: bool


def _judged(
    d: Sequence[float],
    p: float | None,
    corrected: float,
    at: Levels,
    margin: float | None,
    upwards: bool,
    test: Test,
    effects: bool,
) -> Verdict:
    mean = statistics.fmean(d) if d else math.nan
    sd = deviation(d) if len(d) > 1 else math.nan
    interval = sequential_interval if test == "sequential" else paired_interval
    low, high = interval(d, at.own) if p is not None else (math.nan, math.nan)
    widest = interval(d, at.widest) if p is not None else (math.nan, math.nan)
    decided = at.decided and p is not None
    word, because = _word(_pointing(d, test), decided, (low, high), widest, margin, upwards, test)
    needed: tuple[int, int] | None = None if p is not None else (FEWEST, FEWEST)
    if p is not None and word == "inconclusive" and not because:
        needed = _needed(d, at, margin, test)
    significant = word in ("better", "worse")
    effect_low, effect_high = effect_interval(d) if effects else (math.nan, math.nan)
    return Verdict(
        difference=mean,
        n=len(d),
        sd=sd,
        low=low,
        high=high,
        level=at.own,
        p=p,
        corrected=None if p is None else corrected,
        verdict=word,
        small=significant and margin is not None and _inside((low, high), margin),
        margin=margin,
        needed=needed[1] if needed else None,
        detectable=detectable(sd, len(d), at.widest),
        test=_named(d, test) if p is not None else "none",
        wilcoxon_p=wilcoxon_p(d) if p is not None and effects else None,
        effect=hedges_g(d),
        effect_low=effect_low,
        effect_high=effect_high,
        because=because,
        needed_from=needed[0] if needed else None,
        shrunk=shrunk_effect(d, at.own)
        if significant and effects and test == "fixed"
        else math.nan,
        false_claims=false_claims_to_expect(d)
        if p is not None and effects and test == "fixed"
        else None,
    )


def _pointing(d: Sequence[float], test: Test) -> float:
    """A number with the sign of the evidence of `_p`."""
    if test == "sequential":
        return strongest_look(d)[1]
    return statistics.fmean(d) if d else math.nan


def _word(
    pointing: float,
    decided: bool,
    own: tuple[float, float],
    widest: tuple[float, float],
    margin: float | None,
    upwards: bool,
    test: Test,
) -> tuple[Word, str]:
    """The verdict, and the reason of a row that is out of a race or whose
    looks contradict each other.

    `own` is the row's interval and `widest` that at level / rows. `pointing` has
    the sign of the evidence.
    """
    if decided and pointing != 0:
        if test == "sequential" and not (own[0] > 0 if pointing > 0 else own[1] < 0):
            return "inconclusive", TURNED
        return ("better" if (pointing > 0) == upwards else "worse"), ""
    if margin is not None and _inside(widest, margin) and _inside(own, margin):
        return "equal", ""
    if test == "sequential" and margin is not None:
        best = max(own[1], widest[1]) if upwards else -min(own[0], widest[0])
        if best < margin:
            return "no gain", "cannot win by the margin any more"
    return "inconclusive", ""


def _inside(interval: tuple[float, float], margin: float) -> bool:
    return -margin < interval[0] and interval[1] < margin


def _needed(
    d: Sequence[float], at: Levels, margin: float | None, test: Test
) -> tuple[int, int] | None:
    """Seeds at which half and 80 % of such studies are conclusive, as a difference or as equal."""
    if has_spread(d):
        return seeds_to_conclusion(d, at.own, at.widest, margin, test == "sequential")
    if test == "sequential":
        return None  # the e-process has nothing to divide by
    decides = max(len(d) + 1, math.ceil(math.log2(2 / at.own)))
    return decides, decides


def _named(d: Sequence[float], test: Test) -> str:
    if test == "sequential":
        return "e-process"
    return "paired t-test" if has_spread(d) else "sign-flip test (all differences are equal)"


def contenders(rows: Mapping[str, Values], mode: str, test: Test = "fixed") -> list[str]:
    """The rows that do not differ significantly from the one with the best mean, that one first.

    The row that is truly best is among them in at least 95 of 100 tables: it is left out only where
    the leading row is significantly better than it, one-sided, at 5 % divided by the
    number of the other rows.

    Args:
        rows: a value per seed for each configuration.
        mode: 'max' or 'min': which way the metric improves.
        test: as for `judge`.
    """
    sign = 1.0 if mode == "max" else -1.0
    ranked = sorted(
        (name for name, values in rows.items() if values),
        key=lambda name: -sign * statistics.fmean(rows[name].values()),
    )
    if not ranked:
        return []
    best, *others = ranked
    kept = [best]
    for name in others:
        d = paired_differences(rows[best], rows[name])
        p = None if _is_constant(rows[best], rows[name]) else _p(d, test)
        behind = p is not None and sign * statistics.fmean(d) > 0 and sign * _pointing(d, test) > 0
        two_sided = LEVEL / len(others) * (2 if test == "fixed" else 1)
        if not behind or p is None or p > two_sided:
            kept.append(name)
    return kept


def words(c: Verdict, metric: str | Metric) -> str:
    """The verdict in a few words, without numbers of its own but the margin's and the seeds'.

    Args:
        c: a verdict.
        metric: the metric, or its name.

    >>> c = judge({"a": {"0": 1.0, "1": 4.0, "2": 2.0}, "b": {"0": 0.5, "1": 2.0, "2": 2.5}}, "b", "accuracy")["a"]
    >>> words(c, "accuracy")
    'inconclusive, needs about 17 to 54 seeds'
    """
    metric = describe(metric) if isinstance(metric, str) else metric
    if c.verdict == "equal":
        return f"equal within {c.margin:.{_digits(c.margin)}f}{metric.points}"
    if c.verdict == "no gain":
        return c.because or "no gain of the margin"
    if c.verdict == "inconclusive":
        return _open_words(c)
    return f"{c.verdict}, by less than the margin" if c.small else c.verdict


def _open_words(c: Verdict) -> str:
    if c.because:
        return f"no verdict: {c.because}"
    if c.p is None:
        return f"inconclusive, needs at least {FEWEST} shared seeds"
    if c.needed is None and c.sd == 0:
        same = "the same difference in every seed" if c.difference else "no seed differs"
        return f"inconclusive, {same}"
    if c.needed is None:
        return f"inconclusive, likely still with {most_promised(c.n):,} seeds"
    seeds = f"{c.needed:,}" if c.needed_from == c.needed else f"{c.needed_from:,} to {c.needed:,}"
    return f"inconclusive, needs about {seeds} seeds"


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
