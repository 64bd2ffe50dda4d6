"""From a study to its table: mean, spread, cost, comparison with the reference and with the paper, row by row."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from dampen.lab.allocator import AS_FOUND
from dampen.lab.plan import Point
from dampen.lab.plan import Row as PlannedRow
from dampen.lab.report.names import unit
from dampen.lab.report.paper import AgainstPaper, Published, against_paper
from dampen.lab.report.study import Cell, Study, StudyRow
from dampen.lab.stats import Comparison, Summary, compare_paired, decide, holm, summarize
from dampen.lab.summary import best_point

PAPER_SEEDS = 5
"""Runs behind a published standard deviation where a recipe does not say: the papers report five seeds."""


@dataclass(frozen=True)
class Cost:
    """Time of a training step; `ratio` is the median over shared seeds against the reference on the same machine.

    On a CPU it is processor time, so that other programs do not count.
    """

    step_seconds: float | None
    train_seconds: float | None
    ratio: float | None = None
    low: float | None = None  # the smallest and the largest ratio
    high: float | None = None
    ratios: tuple[float, ...] = ()  # seed by seed
    n: int = 0


@dataclass
class Entry:
    """A row as every format shows it. Values are in the unit of the table (percent where papers use it)."""

    name: str
    row: StudyRow
    cell: Cell
    values: dict[str, float]
    summary: Summary
    metrics: dict[str, Summary]  # every test metric
    valid: float | None
    cost: Cost
    diverged: int
    unfinished: int
    reference: str | None = None  # the entry it is compared with; None if it is a reference itself
    comparison: Comparison | None = None
    verdict: str = "reference"
    published: dict[str, Published] = field(default_factory=dict)
    against: dict[str, AgainstPaper] = field(default_factory=dict)
    claim: str = ""

    def measured(self, metric: str) -> Summary | None:
        """Our figure beside a published one: a test metric, or what a step costs against the reference's."""
        if metric == "cost_ratio":
            return summarize(list(self.cost.ratios)) if self.cost.ratios else None
        return self.metrics.get(metric)


@dataclass
class Table:
    """All entries of a study, in the order of the plan."""

    study: Study
    entries: list[Entry]

    def entry(self, name: str) -> Entry:
        return next(e for e in self.entries if e.name == name)

    @property
    def main_reference(self) -> Entry | None:
        """What most rows are compared with."""
        names = [e.reference for e in self.entries if e.reference]
        return self.entry(max(names, key=names.count)) if names else None

    def selected(self) -> list[Entry]:
        """The grid point of each row that validation chooses: every entry, unless the plan shows all grid points."""
        if not self.study.show_all:
            return [e for e in self.entries if e.summary.n]
        chosen = [chosen_cell(row) for row in self.study.rows]
        return [e for e in self.entries if e.summary.n and any(e.cell is c for c in chosen)]

    def ranked(self) -> list[Entry]:
        """Entries with results, best mean first."""
        done = [e for e in self.entries if e.summary.n]
        return sorted(done, key=lambda e: e.summary.mean, reverse=self.study.mode == "max")


def make_table(study: Study) -> Table:
    """Summaries, comparisons and verdicts of every row (or of every grid point, where the plan shows them all)."""
    entries = []
    for row in study.rows:
        cells = row.cells if study.show_all else [chosen_cell(row)]
        for cell in cells:
            name = f"{row.name} · {grid_text(cell.grid)}" if study.show_all and cell.grid else row.name
            entries.append(_entry(study, name, row, cell))
    table = Table(study, entries)
    _compare(table)
    _against_paper(table)
    return table


def grid_text(grid: dict[str, Any]) -> str:
    """A grid point in words.

    >>> grid_text({"lambda": 0.001, "train.lr": 0.0005})
    'lambda 0.001, lr 0.0005'
    """
    return ", ".join(
        f"{axis_name(k)} {v:g}" if isinstance(v, float) else f"{axis_name(k)} {v}" for k, v in grid.items()
    )


def axis_name(key: str) -> str:
    """The last part of a dotted key."""
    return key.rsplit(".", 1)[-1]


def chosen_cell(row: StudyRow) -> Cell:
    """The grid point that validation chooses; the test has no say."""
    points = [Point(c.grid, {s: r.id for s, r in c.runs.items()}) for c in row.cells]
    results = {r.id: r.final for c in row.cells for r in c.runs.values() if r.final}
    best = best_point(PlannedRow(row.name, row.methods, points), results)
    return row.cells[points.index(best)]


def _entry(study: Study, name: str, row: StudyRow, cell: Cell) -> Entry:
    finals = {seed: run.final for seed, run in cell.finished().items() if run.final}
    found = {s: {**f["test"], **diagnosed(cell.runs[s].measured)} for s, f in finals.items()}
    keys = list(dict.fromkeys(k for values in found.values() for k in values))
    by_metric = {k: {s: unit(k) * v[k] for s, v in found.items() if v.get(k) is not None} for k in keys}
    values = by_metric.get(study.metric, {})
    selection = [f["valid"].get(f["selection"][0]) for f in finals.values()]
    known = [v for v in selection if v is not None]
    steps = [t for f in finals.values() if (t := step_time(f))]
    seconds = [f["seconds"]["train"] for f in finals.values() if f.get("seconds")]
    statuses = [run.status for run in cell.runs.values()]
    return Entry(
        name=name,
        row=row,
        cell=cell,
        values=values,
        summary=summarize(list(values.values())),
        metrics={k: summarize(list(v.values())) for k, v in by_metric.items()},
        valid=statistics.fmean(known) if known else None,
        cost=Cost(statistics.median(steps) if steps else None, statistics.median(seconds) if seconds else None),
        diverged=statuses.count("diverged"),
        unfinished=cell.planned - statuses.count("finished") - statuses.count("diverged"),
        published=_published(cell.published or row.published),
    )


def diagnosed(measured: dict[str, Any]) -> dict[str, float]:
    """The single numbers of a diagnosis: the strongest attacks, mean corruption, calibration, gradients, the gap."""
    found: dict[str, Any] = {}
    for attack in ("pgd", "fgsm"):
        own = [a for a in measured.get("robustness", []) if a["attack"] == attack]
        if own:
            found[f"{attack}_accuracy"] = max(own, key=lambda a: a["eps"])["accuracy"]
    found["corrupted_accuracy"] = measured.get("corruptions", {}).get("mean_accuracy")
    found["adaptive_ece"] = measured.get("calibration", {}).get("adaptive_ece")
    found["gradient_variance"] = measured.get("gradient_variance", {}).get("normalized")
    found["accuracy_gap"] = measured.get("generalization", {}).get("accuracy_gap")
    return {k: v for k, v in found.items() if v is not None}


def _published(figures: dict[str, Any]) -> dict[str, Published]:
    found = {}
    for metric, value in figures.items():
        mean, sd = value if isinstance(value, list) and len(value) == 2 else (value, None)
        mean = mean[0] if isinstance(mean, list) else mean
        found[metric] = Published(float(mean), None if sd is None else float(sd), None if sd is None else PAPER_SEEDS)
    return found


def _compare(table: Table) -> None:
    """Each row against the reference of its model; p values are corrected over the whole table."""
    groups: dict[str, list[Entry]] = {}
    for entry in table.entries:
        groups.setdefault(_model_of(entry), []).append(entry)
    tested: list[Entry] = []
    if table.study.show_all and not any(row.baseline for row in table.study.rows):
        for entry in table.entries:  # a grid has no row to test against
            entry.verdict = "diverged" if entry.diverged and not entry.summary.n else ""
        return
    for entries in groups.values():
        reference = _reference(entries)
        for entry in entries:
            if entry is reference:
                entry.cost = replace(entry.cost, ratio=1.0 if entry.cost.step_seconds else None)
                continue
            entry.reference = reference.name
            entry.comparison = compare_paired(entry.values, reference.values)
            entry.cost = _cost_ratio(entry, reference)
            tested.append(entry)
    with_p = [(e, e.comparison, e.comparison.p) for e in tested if e.comparison and e.comparison.p is not None]
    for (entry, comparison, _), p in zip(with_p, holm([p for _, _, p in with_p]), strict=True):
        entry.comparison = replace(comparison, corrected=p)
    for entry in tested:
        if entry.comparison:
            entry.verdict = decide(entry.comparison.difference, entry.comparison.corrected, table.study.mode)
    for entry in table.entries:
        if not entry.summary.n:
            entry.verdict = "diverged" if entry.diverged else "no run yet"


def _model_of(entry: Entry) -> str:
    """Rows with another kind of model are not compared with each other."""
    config = next((r.config for r in entry.cell.runs.values()), {"model": entry.cell.model})
    return str(config["model"].get("name", ""))


def _reference(entries: list[Entry]) -> Entry:
    """The row that says so; else the one without methods; else the first."""
    flagged = [e for e in entries if e.row.baseline] or [e for e in entries if not e.row.methods] or entries
    return next((e for e in flagged if e.summary.n), flagged[0])


def _cost_ratio(entry: Entry, reference: Entry) -> Cost:
    """Step times seed by seed, of runs on the same machine with as many threads and the same malloc."""
    ratios = []
    for seed, run in entry.cell.finished().items():
        other = reference.cell.finished().get(seed)
        if other and run.final and other.final and _machine(run) == _machine(other):
            ours, theirs = step_time(run.final), step_time(other.final)
            if ours and theirs:
                ratios.append(ours / theirs)
    if not ratios:
        return entry.cost
    return replace(
        entry.cost,
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        ratios=tuple(ratios),
        n=len(ratios),
    )


def step_time(final: dict[str, Any]) -> float | None:
    """The time of a step that ratios are made of: processor time on the CPU, wall time elsewhere."""
    on_cpu = final.get("device") == "cpu" and final.get("step_cpu_seconds")
    return final["step_cpu_seconds"] if on_cpu else final.get("step_seconds")


def _machine(run: Any) -> tuple[Any, ...]:
    last = run.sessions[-1] if run.sessions else {}
    return (*(last.get(k) for k in ("cpu", "threads", "device")), last.get("malloc", AS_FOUND))


def _against_paper(table: Table) -> None:
    """Our figures next to the published ones, and whether the paper's gain over its reference shows here too."""
    for entry in table.entries:
        for metric, paper in entry.published.items():
            entry.against[metric] = against_paper(entry.measured(metric), paper, table.study.departures)
        entry.claim = _claim(entry, table)


def _claim(entry: Entry, table: Table) -> str:
    """The paper's difference to its reference row, and ours: absolute figures may differ where gains agree."""
    metric, ours = table.study.metric, entry.comparison
    reference = table.entry(entry.reference) if entry.reference else None
    if reference is None or ours is None or metric not in entry.published or metric not in reference.published:
        return ""
    gain = entry.published[metric].mean - reference.published[metric].mean
    if entry.verdict in ("too few runs", "diverged"):
        return f"paper {gain:+.2f}, here {entry.verdict}"
    shown = f"paper {gain:+.2f}, here {ours.difference:+.2f}"
    if entry.verdict == "no difference shown":
        return f"{shown}: not shown here"
    return f"{shown}: {'same direction' if gain * ours.difference > 0 else 'opposite direction'}"
