"""Runs that belong into one table, by row, grid point and seed: what a table is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dampen.studies.config.plan import Comparison, Config
from dampen.studies.records.logged_run import LoggedRun
from dampen.studies.records.metric import direction


@dataclass
class Cell:
    """One grid point of a row: its values, and the run of each seed."""

    grid: dict[str, Any]
    runs: dict[str, LoggedRun]
    planned: int
    published: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def finished(self) -> dict[str, LoggedRun]:
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
class StudyRuns:
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

    @property
    def margin(self) -> float | None:
        """The margin that the user said, in the unit of the table; None for the metric's own."""
        return self.header.get("margin")

    @property
    def test(self) -> str:
        """'fixed', or 'sequential' for a plan that was looked at while it grew."""
        out: str = self.header.get("test", "fixed")
        return out

    def runs(self) -> list[LoggedRun]:
        """Every run of the study."""
        return [run for row in self.rows for cell in row.cells for run in cell.runs.values()]

    def grid_keys(self) -> list[str]:
        """The names of the grid's axes, in the order of the plan."""
        return list(dict.fromkeys(key for row in self.rows for cell in row.cells for key in cell.grid))

    def planned(self) -> int:
        return sum(cell.planned for row in self.rows for cell in row.cells)

    def judge_by(self, wanted: str | None) -> None:
        """Set the metric of the table and its direction, from what was asked for and what the runs recorded."""
        finals = [r.final for r in self.runs() if r.final and r.status == "finished"]
        self.metric = wanted or (finals[0].primary[0] if finals else "accuracy")
        known = {name: mode for final in finals for name, mode in (final.selection, final.primary)}
        self.mode = direction(self.metric, known.get(self.metric))


def runs_of_plan(plan: Comparison, find: Callable[[str], LoggedRun | None]) -> StudyRuns:
    """The rows of a plan with the runs that `find` knows by their trials' ids."""

    def cells(row: Config) -> list[Cell]:
        made = []
        for point in row.points:
            runs = {seed: run for seed, id in point.trials.items() if (run := find(id))}
            first = next(iter(point.trials.values()), "")
            model = plan.trials[first].model if first in plan.trials else {}
            made.append(Cell(point.grid, runs, len(point.trials), point.published, model))
        return made

    rows = [StudyRow(r.name, r.methods, cells(r), r.published, r.baseline, r.note) for r in plan.rows]
    header = {**plan.header, "scale": plan.scale}
    study = StudyRuns(
        plan.name, plan.header.get("title") or plan.name, "", "max", rows, header, departures=plan.departures
    )
    study.search = dict(plan.header.get("search") or {})
    study.show_all = plan.header.get("report") == "all"
    study.judge_by(plan.header.get("metric"))
    return study
