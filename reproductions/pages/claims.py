"""Every published claim beside what our records say: shown, contradicted, equivalent, inconclusive or not testable.

All claims that a record can answer are one family: each interval is made at 0.05 divided by their number, and every
outcome is read from that interval (`python -m reproductions.pages.questions` writes the page).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dampen.studies import (
    FEWEST_SEEDS,
    LEVEL,
    Metric,
    ResultTable,
    Verdict,
    describe_metric,
    detectable,
    deviation,
    effect_agreement,
    paired_differences,
    paired_interval,
    sentence,
)
from reproductions.pages import design
from reproductions.pages.claimed import CLAIMS, PAPERS, SKIPS, Claim, figures
from reproductions.pages.curves import read as read_curves
from reproductions.pages.planned_statistics import all_runs
from reproductions.pages.publish import committed_report, stated

RECORDS = Path(__file__).resolve().parents[2] / "reproductions"
FAILED = 20.0
"""A run on ten equally common classes has failed below this accuracy (twice that of guessing), or if it diverged."""

Values = dict[str, dict[str, dict[str, float]]]
"""Of a record: row, metric, seed."""


@dataclass(frozen=True)
class Found:
    """Our difference (row minus reference) with the interval of the page's family."""

    difference: float
    n: int
    low: float
    high: float
    detectable: float
    margin: float
    published: float | None  # the published effect, in our unit

    def text(self, metric: Metric) -> str:
        digits = metric.digits if metric.percent else max(2, metric.digits)
        interval = (
            "" if math.isnan(self.low) else f" ({self.low:.{digits}f} to {self.high:.{digits}f})"
        )
        return f"{self.difference:+.{digits}f}{metric.points}{interval}"


def read(path: Path) -> tuple[Values, str]:
    """A packed study, or one of the small files of `skip_story`; and its splits and tuning in words."""
    if path.suffix == ".json" and "rows" in (content := json.loads(path.read_text())):
        values: Values = {
            row: {
                "accuracy": {
                    str(t["seed"]): describe_metric("accuracy").scale * t["accuracy"]
                    for t in trials
                }
            }
            for row, trials in content["rows"].items()
        }
        return (
            values,
            "one split, not tuned",
        )  # these three recipes have neither a grid nor a split of each seed
    table = committed_report(path).tables[0]
    told = design.summary(table, path)
    if path == RECORDS / SKIPS:  # a run that diverged counts as guessing, see PLAN.md
        return {e.name: {"accuracy": all_runs(e)} for e in table.entries}, told
    if not table.study.show_all:
        return {e.name: e.by_seed for e in table.entries}, told
    curves = read_curves(
        path, path.name
    )  # every row at the value that validation chose on a tuning seed
    return {
        row: curves.entry(row).by_seed
        for row in dict.fromkeys(e.config.name for e in table.entries)
    }, told


def compare(claim: Claim, values: Values, family: int) -> Found:
    """The claim's row against its reference, with an interval for one of `family` claims."""
    row, reference = (values[name].get(claim.metric, {}) for name in (claim.row, claim.reference))
    differences = paired_differences(row, reference)
    if not differences:
        raise ValueError(
            f"{claim.record} holds no {claim.metric} of {claim.row} and {claim.reference} in one seed."
        )
    mean, metric = statistics.fmean(reference.values()), describe_metric(claim.metric)
    enough = len(differences) >= FEWEST_SEEDS
    low, high = paired_interval(differences, LEVEL / family) if enough else (math.nan, math.nan)
    published = claim.effect.difference * (mean if claim.share else 1.0) if claim.effect else None
    return Found(
        statistics.fmean(differences),
        len(differences),
        low,
        high,
        detectable(deviation(differences), len(differences), LEVEL / family)
        if enough
        else math.nan,
        metric.margin_at(mean) or 0.0,
        published,
    )


def outcome(claim: Claim, found: Found) -> str:
    """The claim's fate, read from the interval.

    *better*: shown above 0, contradicted below. *no worse*: shown above minus the margin, contradicted below it.
    *equal*: shown within the margin, contradicted outside. *contrast*: by direction and size; contradicted also where
    half the published effect is excluded.
    """
    metric = describe_metric(claim.metric)
    if math.isnan(found.low):
        return "inconclusive (too few seeds)"
    sign = -1.0 if metric.better == "min" else 1.0
    if claim.kind == "contrast" and found.published is not None:
        sign = math.copysign(1.0, found.published)
    low, high = sorted((sign * found.low, sign * found.high))
    margin = found.margin
    within = -margin < low and high < margin
    digits = metric.digits if metric.percent else max(2, metric.digits)
    open_ = f"inconclusive (could detect {found.detectable:.{digits}f}{metric.points})"
    if claim.kind == "no worse":
        if -margin > low and -margin < high < 0:
            return "inconclusive (below the reference, perhaps by less than the margin)"
        return "shown" if low > -margin else "contradicted" if high < -margin else open_
    if claim.kind == "equal":
        return "shown" if within else "contradicted" if low > margin or high < -margin else open_
    if high < 0:
        return "contradicted"
    if claim.kind == "better":
        return "shown" if low > 0 else "equivalent" if within else open_
    if found.published is None:
        raise ValueError(f"A contrast needs a published effect: {claim.text}")
    if low > 0:
        agreement = effect_agreement(low, high, abs(found.published))
        return "shown" if agreement == "same direction and size" else agreement
    if within:
        return "equivalent"
    return (
        "contradicted (half the published effect is excluded)"
        if high < abs(found.published) / 2
        else open_
    )


def _differences(found: Sequence[Verdict]) -> str:
    return ", ".join(f"{c.difference:+.1f}" for c in found)


def _worse(found: Sequence[Verdict]) -> str:
    return f"{sum(c.verdict == 'worse' for c in found)} of {len(found)}"


def _compared(table: ResultTable, names: Sequence[str]) -> list[Verdict]:
    """The comparisons of these rows, in the family of their page."""
    return [c for name in names if (c := table.entry(name).comparison) is not None]


def failed(table: ResultTable, name: str) -> int:
    """How many runs of a row ended near guessing or diverged."""
    entry = table.entry(name)
    return entry.diverged + sum(value < FAILED for value in entry.values.values())


def depth(table: ResultTable) -> str:
    """What a Transformer loses without either skip, over depth, at one learning rate."""
    depths = (2, 4, 8, 12)
    attention, ffn = (
        _compared(table, [f"{n} layers, no {part} skip" for n in depths])
        for part in ("attention", "feed-forward")
    )
    lost = [failed(table, f"12 layers, no {part} skip") for part in ("attention", "feed-forward")]
    return stated(
        f"With one learning rate for all depths, a ViT of 2, 4, 8 and 12 layers loses "
        f"{_differences(attention)} points without attention's skip and {_differences(ffn)} without "
        f"the feed-forward's. At 12 layers {lost[0]} and {lost[1]} of {ffn[-1].n} runs fail. "
        "With a learning rate for each network nearly every run trains",
        attention[-1].verdict == ffn[-1].verdict == "worse",
        min(lost) > 0,
    )


def convolutions(table: ResultTable) -> str:
    """What convolutions lose without their skips, over the number of layers."""
    kinds = {
        k: _compared(table, [f"{k}, {n} layers, no skips" for n in (4, 8, 12)])
        for k in ("ConvMixer", "CNN")
    }
    parts = [
        f"{kind} {_differences(f)} points, significantly worse at {_worse(f)}"
        for kind, f in kinds.items()
    ]
    return f"**Without skips**, at 4, 8 and 12 layers: {'; '.join(parts)} (digits)"


def sweeps(table: ResultTable) -> str:
    """What larger rates and windows than the paper's limits cost, against the page's reference (p 0.5)."""
    rates = _compared(table, [f"hard masking, p {p}" for p in (0.6, 0.7, 0.9)])
    widths = _compared(table, [f"blur, w {w}" for w in (5, 9, 11, 13, 15)])
    return (
        f"**Hard masking at p 0.6, 0.7 and 0.9**: {_differences(rates)} points against p 0.5, significantly worse at "
        f"{_worse(rates)}. **Blur over 5, 9, 11, 13 and 15 keys**: {_differences(widths)} points against the same "
        f"reference, significantly worse at {_worse(widths)} (digits)"
    )


def attacked(table: ResultTable) -> str:
    """Which rows stand an attack better than dropout; the family is the rows of this page under attack."""
    metric = describe_metric("pgd_accuracy")
    rows = {
        name: table.entry(name).secondary["pgd_accuracy"]
        for name in ("R-Drop on dropout", "hard masking", "blur + consistency")
    }
    told = "; ".join(f"{name} {sentence(c, metric)}" for name, c in rows.items())
    return f"**Accuracy under PGD at 16/255, against dropout**: {told}. Corrected over all rows under attack (Holm)"


FOUND: Mapping[str, Callable[[ResultTable], str]] = {
    "depth": depth,
    "convolutions": convolutions,
    "sweeps": sweeps,
    "robust": attacked,
}
"""Questions whose rows are not alternatives: what was found, in a sentence."""


def inconsistencies() -> str:
    """What does not agree within Explicit Dropout itself."""
    content = figures("explicit_dropout")
    rows = {(r["attention"], r["ffn"]): r["cifar100"][0] for r in content["tables_1_to_4"]["rows"]}
    value, ffn, implicit = (
        rows["explicit_v", "explicit"],
        rows["none", "explicit"],
        rows["none", "implicit"],
    )
    peaks = {}
    for term in ("q", "k", "v", "av"):
        cells = [
            (c[0], rate)
            for at in content["table_5"][term].values()
            for c, rate in zip(at, content["table_5"]["learning_rates"], strict=True)
        ]
        peaks[term] = max(cells)[1]
    rates = ", ".join(f"{rate:g} for {term}" for term, rate in peaks.items())
    return stated(
        "The paper disagrees with itself in two places. The peak learning rate of its text is not that of its Table 5, "
        f"whose best cells lie at {rates}. Its text credits the value term on CIFAR-100; its Table 2 has that row at "
        f"{value}, below explicit feed-forward alone ({ffn}) and implicit dropout ({implicit}).",
        len(set(peaks.values())) > 1,
        value < ffn < implicit,
    )


HEAD = """# The papers' claims, one by one

<!-- Generated by `python -m reproductions.pages.questions` from the records in `reproductions/`. -->

Small models and little data: an outcome holds for this regime. **Published** is the paper's difference (95 % interval
where it gives standard deviations), **here** is ours. The figures of DropKey, AttentionDrop and Always Skip Attention
are from secondary sources.

**One correction family**: the {} claims that a record can answer. Every interval is made at 0.05 / {}, and every
outcome is read from it. *No worse* is shown above minus the margin ({} points of accuracy), *equal* within it. A
*contrast* is shown where our interval overlaps half to twice the published effect, else it is "same direction, much
smaller" or "much larger". An inconclusive claim names the difference that these seeds could detect with 80 % power.

**Limits.** {} of these claims rest on one split, at most one tuning seed and a baseline that was not tuned.
"""


def judged() -> dict[Claim, tuple[Found, str]]:
    """Every claim that a record can answer, with the record's splits and tuning."""
    asked = [c for c in CLAIMS if c.record and (RECORDS / c.record).is_file()]
    records = {name: read(RECORDS / name) for name in dict.fromkeys(c.record for c in asked)}
    return {c: (compare(c, records[c.record][0], len(asked)), records[c.record][1]) for c in asked}


def page() -> str:
    """A table for each paper; what has not run is a line below it."""
    found = judged()
    weak = sum(told.startswith("one split") for _, told in found.values())
    limits = "All" if weak == len(found) else str(weak)
    lines = [HEAD.format(len(found), len(found), f"{describe_metric('accuracy').margin:g}", limits)]
    for paper, name in PAPERS.items():
        lines += [f"## {name} ({paper})", ""]
        lines += [inconsistencies(), ""] if name == "Explicit Dropout" else []
        lines += [
            "| claim | kind | source | published | here | outcome | seeds, splits, tuning | record |",
            "|---" * 8 + "|",
        ]
        claims = [c for c in CLAIMS if c.paper == paper]
        for claim in (c for c in claims if c in found or c.untestable):
            lines.append(_line(claim, found.get(claim)))
        waiting = [c.record for c in claims if c not in found and not c.untestable]
        records = ", ".join(f"`{r}` ({waiting.count(r)})" for r in dict.fromkeys(waiting))
        lines += [
            "",
            *([f"{len(waiting)} claims wait for a record: {records}.", ""] if waiting else []),
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(claim: Claim, found: tuple[Found, str] | None) -> str:
    metric = describe_metric(claim.metric)
    head = f"| {claim.text} | {claim.kind} | {claim.source} | {_published(claim, metric)}"
    if found is None:
        return f"{head} | | not testable here: {claim.untestable} | | |"
    ours, how = found
    result = f"{ours.text(metric)} | **{outcome(claim, ours)}**"
    return f"{head} | {result} | {ours.n} seeds, {how} | `{claim.record}` |"


def _published(claim: Claim, metric: Metric) -> str:
    if claim.effect is None:
        return "no figure"
    if claim.share:
        return f"{100 * claim.effect.difference:+.0f} %"
    digits = metric.digits if metric.percent else max(2, metric.digits)
    bounds = claim.effect.low, claim.effect.high
    interval = (
        "" if math.isnan(bounds[0]) else f" ({bounds[0]:.{digits}f} to {bounds[1]:.{digits}f})"
    )
    return f"{claim.effect.difference:+.{digits}f}{interval}"
