"""A study: runs that belong into one table, by row, grid point and seed. Mixing protocols is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.lab.plan import Plan
from dampen.lab.plan import Row as PlannedRow
from dampen.lab.report.protocol import check_protocol, protocol_groups
from dampen.lab.report.read import Collection, Run, Skipped


@dataclass
class Cell:
    """One grid point of a row: its values, and the run of each seed."""

    grid: dict[str, Any]
    runs: dict[str, Run]
    planned: int
    published: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def finished(self) -> dict[str, Run]:
        """The runs with a result, by seed."""
        return {s: r for s, r in self.runs.items() if r.status == "finished"}


@dataclass
class StudyRow:
    """One row of the table with all its grid points."""

    name: str
    methods: list[dict[str, Any]]
    cells: list[Cell]
    published: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    note: str = ""


@dataclass
class Study:
    """A table to be: rows of runs under one protocol."""

    name: str
    title: str
    metric: str
    mode: str
    rows: list[StudyRow]
    header: dict[str, Any] = field(default_factory=dict)
    departures: list[str] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)
    show_all: bool = False  # every grid point is a row of its own
    search: dict[str, Any] = field(default_factory=dict)  # what a search tried, where there was one

    def runs(self) -> list[Run]:
        """Every run of the study."""
        return [run for row in self.rows for cell in row.cells for run in cell.runs.values()]

    def grid_keys(self) -> list[str]:
        """The names of the grid's axes, in the order of the plan."""
        return list(dict.fromkeys(key for row in self.rows for cell in row.cells for key in cell.grid))

    def planned(self) -> int:
        return sum(cell.planned for row in self.rows for cell in row.cells)


def make_studies(found: Collection, split: bool = False) -> tuple[list[Study], list[Skipped]]:
    """One study per plan, and one per folder of trials without a plan; what belongs nowhere is listed.

    Raises ProtocolMismatch where a folder mixes protocols; `split=True` makes one study per protocol instead.
    """
    studies, skipped, claimed = [], list(found.skipped), set[Path]()
    by_id: dict[str, list[Run]] = {}
    for run in found.runs.values():
        by_id.setdefault(run.id, []).append(run)
    for folder, plan in found.plans.items():
        study, used = _from_plan(folder, plan, by_id, found.searches)
        claimed |= used
        for run in found.runs.values():
            if run.folder.parent == folder and run.folder not in used:
                claimed.add(run.folder)
                reason = "belongs to no row of plan.json; it was run under an earlier plan or other settings"
                skipped.append(Skipped(run.folder.name, reason))
        if study.runs():
            study.protocol = check_protocol(study.name, study.runs(), study.grid_keys(), planned=True)
            studies.append(study)
        else:
            skipped.append(Skipped(folder.name, f"none of its {len(plan.trials)} planned trials has been started"))
    loose: dict[Path, list[Run]] = {}
    for run in found.runs.values():
        if run.folder not in claimed:
            loose.setdefault(run.folder.parent, []).append(run)
    for folder, runs in loose.items():
        for group in protocol_groups(runs) if split else [runs]:
            study = _from_runs(folder, group)
            study.protocol = check_protocol(study.name, study.runs(), study.grid_keys(), planned=False)
            studies.append(study)
    return studies, skipped


def _from_plan(
    folder: Path, plan: Plan, by_id: Mapping[str, list[Run]], searches: Mapping[Path, dict[str, Any]]
) -> tuple[Study, set[Path]]:
    used: set[Path] = set()

    def find(id: str) -> Run | None:
        runs = by_id.get(id, [])
        own = [r for r in runs if r.folder.parent == folder] or runs  # a shared store of trials serves many plans
        used.update(r.folder for r in own[:1])
        return own[0] if own else None

    def cells(row: PlannedRow) -> list[Cell]:
        made = []
        for point in row.points:
            runs = {seed: run for seed, id in point.trials.items() if (run := find(id))}
            model = plan.trials[next(iter(point.trials.values()))].model
            made.append(Cell(point.grid, runs, len(point.trials), point.published, model))
        return made

    rows = [StudyRow(r.name, r.methods, cells(r), r.published, r.baseline, r.note) for r in plan.rows]
    study = Study(plan.name, plan.header.get("title") or plan.name, "", "max", rows, plan.header, plan.departures)
    study.header = {**plan.header, "scale": plan.scale}
    study.show_all = plan.header.get("report") == "all"
    study.search = searches.get(folder, {})
    _set_metric(study, plan.header.get("metric"))
    return study, used


def _from_runs(folder: Path, runs: list[Run]) -> Study:
    """Trials without a plan: a row per set of methods, a grid point per learning rate."""
    rows: dict[str, StudyRow] = {}
    several_rates = len({r.config["train"]["lr"] for r in runs}) > 1
    for run in sorted(runs, key=lambda r: (bool(r.config["methods"]), r.id)):
        name = describe(run.config["methods"])
        row = rows.setdefault(name, StudyRow(name, run.config["methods"], [], baseline=not run.config["methods"]))
        grid = {"train.lr": run.config["train"]["lr"]} if several_rates else {}
        cell = next((c for c in row.cells if c.grid == grid), None)
        if cell is None:
            cell = Cell(grid, {}, 0, model=run.config["model"])
            row.cells.append(cell)
        cell.runs[run.seed] = run
        cell.planned += 1
    name = folder.resolve().name
    study = Study(name, name, "", "max", list(rows.values()))
    _set_metric(study, None)
    return study


def describe(methods: Iterable[Mapping[str, Any]]) -> str:
    """Methods as one would write them on the command line.

    >>> describe([{"name": "drop_key", "rate": {"linear": [0.3, 0]}}, {"name": "drop_path"}])
    'drop_key(rate=linear(0.3, 0)) + drop_path'
    >>> describe([])
    'plain'
    """
    parts = []
    for method in methods:
        arguments = ", ".join(f"{k}={_argument(v)}" for k, v in method.items() if k != "name")
        parts.append(f"{method['name']}({arguments})" if arguments else str(method["name"]))
    return " + ".join(parts) or "plain"


def _argument(value: Any) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, Mapping):
            return f"{name}({', '.join(f'{k}={_argument(v)}' for k, v in arguments.items())})"
        items = arguments if isinstance(arguments, list | tuple) else [arguments]
        return f"{name}({', '.join(map(_argument, items))})"
    return json.dumps(value) if isinstance(value, str) else str(value)


def _set_metric(study: Study, wanted: str | None) -> None:
    """The metric of the table and its direction. Only some metrics improve by growing."""
    finals = [r.final for r in study.runs() if r.final and r.status == "finished"]
    study.metric = wanted or (finals[0]["primary"][0] if finals else "accuracy")
    known = {f[key][0]: f[key][1] for f in finals for key in ("selection", "primary")}
    study.mode = known.get(study.metric, direction(study.metric))


def direction(metric: str) -> str:
    """'max' or 'min': which way a metric improves.

    >>> direction("accuracy"), direction("ece")
    ('max', 'min')
    """
    return "min" if metric in ("nll", "ece", "adaptive_ece", "brier", "bpc", "perplexity") else "max"
