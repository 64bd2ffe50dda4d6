"""Every published claim beside what our records say: shown, contradicted, equivalent, inconclusive or not testable.

All claims that a record can answer are one family: each interval is made at 0.05 divided by their number, and every
outcome is read from that interval (`python -m reproductions.pages.questions` writes the page).
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from dampen.studies import (
    FEWEST_SEEDS,
    LEVEL,
    Metric,
    describe_metric,
    detectable,
    deviation,
    effect_agreement,
    paired_differences,
    paired_interval,
)
from reproductions.pages import design
from reproductions.pages.claimed import CLAIMS, PAPERS, SKIPS, Claim, figures
from reproductions.pages.curves import read as read_curves
from reproductions.pages.planned import command
from reproductions.pages.planned_statistics import all_runs, over, slopes
from reproductions.pages.publish import committed_report, stated

RECORDS = Path(__file__).resolve().parents[2] / "reproductions"

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
    reference = values[claim.reference].get(claim.metric, {})
    if math.isnan(claim.start):
        differences = paired_differences(values[claim.row].get(claim.metric, {}), reference)
    else:
        accuracy = {name: metrics[claim.metric] for name, metrics in values.items()}
        lost = slopes(over(accuracy, claim.row), claim.start, -claim.step)
        differences = list(lost.values())
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
            return f"{open_[:-1]}; below the reference, perhaps by less than the margin)"
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

**Limits.** {} of these claims rest on one split, at most one tuning seed and a baseline that was not tuned. {} more
wait for a record; the command below each table runs what is missing.
"""


def judged() -> dict[Claim, tuple[Found, str]]:
    """Every claim that a record can answer, with the record's splits and tuning."""
    asked = [c for c in CLAIMS if c.record and (RECORDS / c.record).is_file()]
    records = {name: read(RECORDS / name) for name in dict.fromkeys(c.record for c in asked)}
    return {c: (compare(c, records[c.record][0], len(asked)), records[c.record][1]) for c in asked}


def page() -> str:
    """A table for each paper, with a line for every claim."""
    found = judged()
    weak = sum(told.startswith("one split") for _, told in found.values())
    limits = "All" if weak == len(found) else str(weak)
    waiting = [c for c in CLAIMS if c not in found and not c.untestable]
    margin = f"{describe_metric('accuracy').margin:g}"
    lines = [HEAD.format(len(found), len(found), margin, limits, len(waiting) or "None")]
    for paper, name in PAPERS.items():
        lines += [f"## {name} ({paper})", ""]
        lines += [inconsistencies(), ""] if name == "Explicit Dropout" else []
        lines += [
            "| claim | kind | source | published | here | outcome | seeds, splits, tuning | record |",
            "|---" * 8 + "|",
        ]
        claims = [c for c in CLAIMS if c.paper == paper]
        lines += [_line(claim, found.get(claim)) for claim in claims]
        missing = list(dict.fromkeys(experiment(c.record) for c in claims if c in waiting))
        lines += ["", *(["```", command(missing), "```", ""] if missing else [])]
    return "\n".join(lines).rstrip("\n") + "\n"


def experiment(record: str) -> str:
    """The experiment of the campaign that makes a result file.

    >>> experiment("explicit_dropout/results/table_2-study.json.xz")
    'explicit_dropout/table_2'
    """
    group, _, table = record.split("/")
    return f"{group}/{table.removesuffix('.json.xz').removesuffix('-study')}"


def _line(claim: Claim, found: tuple[Found, str] | None) -> str:
    metric = describe_metric(claim.metric)
    head = f"| {claim.text} | {claim.kind} | {claim.source} | {_published(claim, metric)}"
    if claim.untestable:
        return f"{head} | | not testable here: {claim.untestable} | | |"
    if found is None:
        return f"{head} | | not run yet | | `{claim.record}` |"
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
