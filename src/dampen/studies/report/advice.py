"""The three answers on top of a report: which method, at what cost, and how far to trust it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dampen.studies.records.stats import FEWEST
from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.records.verdict import Test, judge_pairs
from dampen.studies.report.names import listed, plural
from dampen.studies.report.trust import Answer, shared_seeds, trust


@dataclass(frozen=True)
class Advice:
    """The three answers, and the row that is recommended."""

    which: Answer
    cost: Answer
    trust: Answer
    pick: str | None


def advise(table: ResultTable) -> Advice:
    """Read the table for someone in a hurry."""
    reference = table.main_reference
    better = [
        e
        for e in table.ranked()
        if e.verdict == "better" and not e.same_as and reference and e.reference == reference.name
    ]
    pick = _cheapest_of_the_best(better, table)
    return Advice(_which(table, reference, better, pick), _cost(table, pick), trust(table), pick.name if pick else None)


def in_words(advice: Advice) -> list[str]:
    """The answers as a few lines of plain text, for a terminal."""
    parts = (advice.which, advice.cost, advice.trust)
    shown = [f"{part.headline}. {' '.join(part.details[:most])}" for part, most in zip(parts, (9, 2, 2), strict=True)]
    return [line.replace("..", ".") for line in shown]


def _cheapest_of_the_best(better: list[Entry], table: ResultTable) -> Entry | None:
    """Among methods shown better than the reference and not shown worse than the best: the cheapest step.

    Costs within 3 % of each other count as equal, and then the better mean decides.
    """
    if not better:
        return None
    best = better[0]
    test: Test = "sequential" if table.study.test == "sequential" else "fixed"
    against = judge_pairs(
        {e.name: (e.values, best.values) for e in better[1:]}, table.metric, better=table.study.mode, test=test
    )
    equals = [best, *(e for e in better[1:] if against[e.name].verdict != "worse")]
    known = [e.cost.ratio for e in equals if e.cost.ratio]
    cheap = [e for e in equals if e.cost.ratio and e.cost.ratio <= 1.03 * min(known)] if known else equals
    return cheap[0]


def _which(table: ResultTable, reference: Entry | None, better: list[Entry], pick: Entry | None) -> Answer:
    if reference is None:
        return _best_without_reference(table)
    compared, name = table.compared(), table.reference_name
    if not any(e.summary.n for e in table.entries):
        failed = [e.name for e in table.entries if e.verdict == "failed"]
        told = f"Failed: {listed(failed)}." if failed else "No run has finished yet."
        return Answer("No result yet", [told], "caution")
    elsewhere = [e.name for e in compared if e.verdict == "better" and e.reference != reference.name]
    told_elsewhere = [f"Better than {name}: {listed(elsewhere)}."] if elsewhere else []
    if pick is not None:
        details = [f"{_gain(pick, table)} against {reference.name}, over {plural(shared_seeds(pick), 'shared seed')}."]
        others = [e.name for e in better if e is not pick]
        if others:
            details.append(f"Also better than {reference.name}: {listed(others)}.")
        return Answer(f"Use {pick.name}", [*details, *told_elsewhere, *_others(compared, table)], "good")
    if elsewhere:
        return Answer("It depends on the model", [*told_elsewhere, *_others(compared, table)])
    if not any(e.comparison and e.comparison.p is not None for e in compared):
        told = f"Every comparison has fewer than {FEWEST} shared seeds, so spread and chance cannot be told apart."
        return Answer("Too few runs to say", [told, "Run more seeds per row; --until-decided adds them."], "caution")
    if all(e.verdict != "not decided" for e in compared):
        told = f"No method here beats {name}; {plural(len(compared), 'row')} decided."
        return Answer(f"Stay with {name}", [told, *_others(compared, table)])
    return Answer("Not decided yet", [f"No row is shown better than {name}.", *_others(compared, table)])


def _gain(entry: Entry, table: ResultTable) -> str:
    c, metric = entry.comparison, table.metric
    if c is None:
        return ""
    interval = "" if math.isnan(c.low) else f" ({c.low:+.{metric.digits}f} to {c.high:+.{metric.digits}f})"
    return f"{c.difference:+.{metric.digits}f}{metric.points}{interval}"


def _others(compared: list[Entry], table: ResultTable) -> list[str]:
    """What became of the rows that are not better, a sentence per verdict."""
    by_word = {w: [e for e in compared if e.verdict == w] for w in ("equal", "worse", "no gain", "not decided")}
    told = []
    if by_word["equal"]:
        margin = f"{table.margin:g}{table.metric.points}"
        told.append(f"Equal within {margin}: {listed([e.name for e in by_word['equal']])}.")
    if by_word["worse"]:
        told.append(f"Worse: {listed([e.name for e in by_word['worse']])}.")
    if by_word["no gain"]:
        told.append(f"No gain of the margin: {listed([e.name for e in by_word['no gain']])}.")
    open_ = [e for e in by_word["not decided"] if e.comparison and e.comparison.p is not None]
    if open_:
        nearest = min(open_, key=lambda e: (e.comparison.needed if e.comparison else None) or math.inf)
        needs = nearest.comparison.needed if nearest.comparison else None
        who = "it" if len(open_) == 1 else f"the nearest, {nearest.name},"
        next_ = f"; {who} needs about {needs:,} seeds" if needs else ""
        told.append(f"Not decided: {listed([e.name for e in open_])}{next_}.")
    few = [e.name for e in by_word["not decided"] if not e.comparison or e.comparison.p is None]
    failed = [e.name for e in table.entries if e.verdict == "failed"]
    told += [f"Too few runs to judge: {listed(few)}."] if few else []
    return told + ([f"Failed: {listed(failed)}."] if failed else [])


def _best_without_reference(table: ResultTable) -> Answer:
    """Nothing to test against: what validation prefers, with its test result."""
    entries = [e for e in table.selected() if e.valid is not None]
    if not entries:
        return Answer("No finished run yet", ["Nothing can be said before runs finish."], "caution")
    best = max(entries, key=lambda e: (e.valid or 0.0) if table.study.mode == "max" else -(e.valid or 0.0))
    told = f"Best on validation; test {table.metric.label} {best.summary.mean:.2f}"
    return Answer(best.name, [f"{told} over {plural(best.summary.n, 'run')}.", "There is no row to test against."])


SMALL_STEP = 0.03
"""Seconds. Of a step this short a good part is Python's, and so is what a method adds to it."""


def _cost(table: ResultTable, pick: Entry | None) -> Answer:
    known = [e for e in table.entries if e.cost.ratio and e.reference]
    if not known:
        seconds = [e.cost.train_seconds for e in table.entries if e.cost.train_seconds]
        if seconds:
            told = [
                f"Training took {min(seconds):.3g} to {max(seconds):.3g} s per run.",
                "No row to take a ratio against.",
            ]
            return Answer(f"{sum(seconds) / len(seconds):.3g} s per run", told)
        return Answer("Cost not known", ["No two runs of one seed on the same machine give a ratio of step times."])
    low, high = min(known, key=lambda e: e.cost.ratio or 0), max(known, key=lambda e: e.cost.ratio or 0)
    spread = f"All methods here: {low.cost.ratio:.2f}x ({low.name}) to {high.cost.ratio:.2f}x ({high.name})."
    spread = spread if low is not high else f"Of {low.name}; no other method has a cost yet."
    note = small_model_note(table)
    measure = note or "Median ratio of step times over shared seeds; dampen bench measures it closer."
    if pick is None or pick.cost.ratio is None:
        one = f"{low.cost.ratio:.2f}x" if low is high else f"{low.cost.ratio:.2f}x to {high.cost.ratio:.2f}x"
        return Answer(f"{one} a step", [spread, measure])
    saved = pick.cost.ratio
    tone = "good" if saved <= 1.1 else "plain" if saved <= 1.5 else "caution"
    range_ = f"Between seeds {pick.cost.low:.2f}x to {pick.cost.high:.2f}x. " if pick.cost.n > 1 else ""
    return Answer(f"{saved:.2f}x the time of a step", [f"{range_}{spread}", measure], tone)


def small_model_note(table: ResultTable) -> str:
    """Why ratios of a small model are no guide to a large one; empty where steps are long enough."""
    reference = table.main_reference
    step = reference.cost.step_seconds if reference else None
    if not step or step > SMALL_STEP:
        return ""
    return (
        f"A step of this small model takes {1000 * step:.0f} ms, most of it spent outside the arithmetic, so a few "
        "extra operations weigh much here and little in a model of usual size: see docs/costs.md or run dampen bench."
    )
