"""The three answers on top of a report: which method, at what cost, and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass

from dampen.lab.report.names import label, listed, plural, points
from dampen.lab.report.read import Run
from dampen.lab.report.table import Entry, Table
from dampen.lab.stats import FEWEST, compare_paired, decide

GOOD = 5
"""Seeds per row from which on a comparison is called well founded."""


@dataclass(frozen=True)
class Answer:
    """A headline and what stands behind it, in sentences."""

    headline: str
    details: list[str]
    tone: str = "plain"  # good, plain, caution: how a page may color it


@dataclass(frozen=True)
class Advice:
    """The three answers, and the row that is recommended."""

    which: Answer
    cost: Answer
    trust: Answer
    pick: str | None


def advise(table: Table) -> Advice:
    """Read the table for someone in a hurry."""
    reference = table.main_reference
    better = [e for e in table.ranked() if e.verdict == "better" and reference and e.reference == reference.name]
    pick = _cheapest_of_the_best(better, table)
    return Advice(
        _which(table, reference, better, pick), _cost(table, pick), _trust(table), pick.name if pick else None
    )


def _cheapest_of_the_best(better: list[Entry], table: Table) -> Entry | None:
    """Among methods shown better than the reference and not shown worse than the best: the cheapest step.

    Costs within 3 % of each other count as equal, and then the better mean decides.
    """
    if not better:
        return None
    equals = [better[0]]
    for entry in better[1:]:
        found = compare_paired(entry.values, better[0].values)
        if decide(found.difference, found.p, table.study.mode) != "worse":
            equals.append(entry)
    known = [e.cost.ratio for e in equals if e.cost.ratio]
    cheap = [e for e in equals if e.cost.ratio and e.cost.ratio <= 1.03 * min(known)] if known else equals
    return cheap[0]


def _which(table: Table, reference: Entry | None, better: list[Entry], pick: Entry | None) -> Answer:
    unit = points(table.study.metric)
    if reference is None:
        return _best_without_reference(table)
    if pick is not None and pick.comparison is not None:
        c = pick.comparison
        details = [
            f"{c.difference:+.2f}{unit} over {reference.name} "
            f"(95 % interval {c.low:+.2f} to {c.high:+.2f}, {c.n} shared seeds)."
        ]
        others = [e.name for e in better if e is not pick]
        if others:
            details.append(f"Also better than {reference.name}: {listed(others)}.")
        return Answer(f"Use {pick.name}", details, "good")
    tested = [e for e in table.entries if e.verdict in ("no difference shown", "worse")]
    few = [e for e in table.entries if e.verdict == "too few runs"]
    if not tested:
        told = f"Every comparison has fewer than {FEWEST} shared seeds, so spread and chance cannot be told apart."
        return Answer("Too few runs to say", [told, f"Run at least {GOOD} seeds per row."], "caution")
    told = f"None of {len(tested)} tested method{'s' * (len(tested) != 1)} was shown to beat {reference.name}."
    details = [told]
    hopeful = [e for e in table.ranked() if e.verdict == "no difference shown" and e.comparison]
    if hopeful and hopeful[0].comparison:
        e, c = hopeful[0], hopeful[0].comparison
        details.append(
            f"Nearest: {e.name}, {c.difference:+.2f}{unit} ({c.low:+.2f} to {c.high:+.2f}); more seeds may tell."
        )
    if few:
        details.append(f"Too few runs to judge: {listed([e.name for e in few])}.")
    return Answer(f"Stay with {reference.name}", details)


def _best_without_reference(table: Table) -> Answer:
    """Nothing to test against: what validation prefers, with its test result."""
    entries = [e for e in table.selected() if e.valid is not None]
    if not entries:
        return Answer("No finished run yet", ["Nothing can be said before runs finish."], "caution")
    best = max(entries, key=lambda e: (e.valid or 0.0) if table.study.mode == "max" else -(e.valid or 0.0))
    told = f"Best on validation; test {label(table.study.metric)} {best.summary.mean:.2f}"
    return Answer(best.name, [f"{told} over {plural(best.summary.n, 'run')}.", "There is no row to test against."])


def _cost(table: Table, pick: Entry | None) -> Answer:
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
    measure = "Median ratio of step times over shared seeds; dampen bench measures it closer."
    if pick is None or pick.cost.ratio is None:
        one = f"{low.cost.ratio:.2f}x" if low is high else f"{low.cost.ratio:.2f}x to {high.cost.ratio:.2f}x"
        return Answer(f"{one} a step", [spread, measure])
    saved = pick.cost.ratio
    tone = "good" if saved <= 1.1 else "plain" if saved <= 1.5 else "caution"
    range_ = f"Between seeds {pick.cost.low:.2f}x to {pick.cost.high:.2f}x. " if pick.cost.n > 1 else ""
    return Answer(f"{saved:.2f}x the time of a step", [f"{range_}{spread}", measure], tone)


def _trust(table: Table) -> Answer:
    """How well founded the table is, with every reason against it."""
    study = table.study
    counts = [e.comparison.n for e in table.entries if e.comparison]
    fewest = min(counts) if counts else min((e.summary.n for e in table.entries), default=0)
    against = []
    diverged, unfinished = (sum(getattr(e, k) for e in table.entries) for k in ("diverged", "unfinished"))
    if diverged:
        against.append(f"{plural(diverged, 'run')} diverged and {'is' if diverged == 1 else 'are'} not in the means.")
    if unfinished:
        against.append(f"{unfinished} of {study.planned()} planned runs not finished.")
    against += _mixed(study.runs())
    if any(r.final and r.final.get("data", {}).get("partial") for r in study.runs()):
        against.append("The copy of the data set is not complete.")
    basis = f"{plural(fewest, 'seed')} in the row with the fewest."
    if counts:
        basis = f"{plural(fewest, 'shared seed')} in the weakest comparison; paired tests, corrected for their number."
    chosen = "Settings and epoch chosen on validation, the test set used once."
    if fewest < FEWEST:
        return Answer("Little: too few seeds", [basis, *against, chosen], "caution")
    if fewest < GOOD or against:
        headline = f"Some: {fewest} seeds" + (", with reservations" if against else "")
        return Answer(headline, [basis, *against, chosen])
    return Answer(f"Well founded: {fewest} seeds", [basis, chosen], "good")


def _mixed(runs: list[Run]) -> list[str]:
    """Differences between the places where the runs were made."""
    last = [r.sessions[-1] for r in runs if r.sessions]
    told = []
    machines = {(s.get("cpu"), s.get("device"), s.get("threads")) for s in last}
    if len(machines) > 1:
        told.append(f"Runs come from {len(machines)} different machines or thread counts.")
    versions = {(s.get("packages", {}).get("torch"), s.get("packages", {}).get("dampen")) for s in last}
    if len(versions) > 1:
        told.append(f"Runs come from {len(versions)} different versions of torch or dampen.")
    commits = {s.get("commit") for s in last if s.get("commit")}
    if len(commits) > 1:
        told.append(f"Runs come from {len(commits)} different commits.")
    return told
