"""A study: the comparison as an object, to be printed, continued, and opened again from its folder."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison, Config, Setting
from dampen.studies.config.recipe import merge
from dampen.studies.config.trial import Run
from dampen.studies.engines.racing import Race
from dampen.studies.errors import LabError
from dampen.studies.plugins import load_plugins
from dampen.studies.records.table import Entry, ResultTable, comparison_table, read_results, read_runs
from dampen.studies.study.kept import load_function, load_parts
from dampen.studies.study.rows import PLAIN, read_rows
from dampen.studies.trainer.function import Function
from dampen.studies.trainer.parts import Parts


@dataclass
class Study:
    """What `dampen.compare` returns and `dampen.load` opens: rows of trials, judged against the reference row.

    Print it for the table; in a notebook it shows the table and a plot of the differences.
    """

    folder: Path
    plan: Comparison
    function: Function | None = None
    parts: Parts | None = None  # the user's own model and data, where the lab trains them
    settings: dict[str, Any] = field(default_factory=dict)  # how it was run, for `add`
    race: Race | None = None  # what became of it where it went on until it was decided

    @property
    def results(self) -> ResultTable:
        """The lab's table of this study, as the page and every other format show it."""
        return comparison_table(self.plan, read_runs(self.plan, self.folder))

    @property
    def rows(self) -> list[Entry]:
        """Every row with its values by seed, mean, spread, cost and verdict."""
        return self.results.entries

    @property
    def best(self) -> Entry:
        """The row with the best mean; whether it was shown to be better than the reference, its verdict says."""
        ranked = self.results.ranked()
        if not ranked:
            raise LabError(f"No trial of {self.folder} has finished, so there is no best row.")
        return ranked[0]

    @property
    def verdicts(self) -> dict[str, str]:
        """What can be said of each row against the reference."""
        table = self.results
        return {row.name: row.told(table.metric, numbers=True) for row in table.entries}

    @property
    def metric(self) -> str:
        """The test metric that the study is judged by."""
        return self.results.study.metric

    @property
    def mode(self) -> str:
        """'max' or 'min': which way the metric improves."""
        return self.results.study.mode

    @property
    def failures(self) -> dict[str, str]:
        """Trials that failed, by row and seed, with the reason."""
        return {
            f"{row.name} seed {seed}": run.reason
            for row in self.rows
            for seed, run in row.cell.runs.items()
            if run.status == "failed"
        }

    def table(self) -> str:
        """The table as text."""
        from rich.console import Console

        from dampen.studies.report.terminal import results_table

        text = io.StringIO()
        console = Console(file=text, width=120, highlight=False, force_terminal=False)
        console.print(results_table(self.results))
        return text.getvalue().rstrip()

    def to_pandas(self) -> Any:
        """A data frame with one line per finished trial: row, seed, status, every metric, and what a step took."""
        import pandas as pd

        results, lines = read_results(self.plan, self.folder), []
        for row in self.plan.rows:
            for point in row.points:
                for seed, trial in point.trials.items():
                    if trial in results:
                        lines.append(_line(row.name, point.grid, int(seed), results[trial]))
        return pd.DataFrame(lines)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write the report; the ending of the name says in which format."""
        from dampen.studies.report import write_report

        write_report([self.folder], path)
        return Path(path)

    def add(self, seeds: int | Sequence[int] = 0, methods: Any = None, **settings: Any) -> Study:
        """Run more: `seeds` further seeds of every row (or a list of seeds), `methods` as further rows.

        Returns this study, which then has them. A study that was looked at and then extended is judged by the
        sequential test, which allows that.
        """
        from dampen.studies.study.compare import run

        load_plugins(self.plan.header.get("plugins", ()), self.folder)
        if self.function is None and any(t.function for t in self.plan.trials.values()):
            self.function = load_function(self.folder)
        if self.parts is None and self.function is None:
            self.parts, place = load_parts(self.folder, self.plan)
            self.settings.setdefault("data_dir", place)
        objects: dict[str, bytes] = {}
        if methods is not None:
            baseline = next((row.name for row in self.plan.rows if row.baseline), PLAIN)
            known = {row.name for row in self.plan.rows}
            found = read_rows(methods)
            objects = found.objects
            if self.function is None:
                from dampen.studies.study.parts import plain_rows

                plain_rows(found)  # refuses what the lab's trainer cannot take
            for row in found.rows:
                if row.name not in known and row.name != PLAIN:
                    _add_row(self.plan, baseline, row.name, row.methods, row.params)
        if seeds:
            self.plan.header["test"] = "sequential"
        _add_seeds(self.plan, seeds)
        run(self, objects, **{**self.settings, **settings})
        return self

    def __str__(self) -> str:
        told = [self.table()]
        told += [f"{name} failed: {why}" for name, why in self.failures.items()]
        return "\n".join([*told, f"Records: {self.folder}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from dampen.studies.study.notebook import study_html

        return study_html(self)


def load(folder: Path | str) -> Study:
    """Open a study from its folder."""
    folder = Path(folder)
    if not (folder / "plan.json").is_file():
        raise LabError(f"{folder} holds no study: there is no plan.json. Give the folder that dampen compare wrote.")
    return Study(folder, Comparison.load(folder))


def _line(row: str, grid: Mapping[str, Any], seed: int, result: Mapping[str, Any]) -> dict[str, Any]:
    valid = {f"valid_{k}": v for k, v in result.get("valid", {}).items()}
    cost = {k: result.get(k) for k in ("step_seconds", "step_cpu_seconds", "steps")}
    return {"row": row, "seed": seed, "status": result["status"], **grid, **result.get("test", {}), **valid, **cost}


def _add_row(plan: Comparison, like: str, name: str, methods: list[dict[str, Any]], params: dict[str, Any]) -> None:
    """One more row: the reference's trials with other methods and parameters."""
    (model,) = (row for row in plan.rows if row.name == like)
    points = []
    for point in model.points:
        trials = {}
        for seed, id in point.trials.items():
            plain = merge(plan.trials[id].to_dict(), {"methods": methods})
            plain = merge(plain, _params(plain, name, params)) if params else plain
            trial = Run.from_dict(plain)
            plan.trials[trial.id] = trial
            trials[seed] = trial.id
        points.append(Setting(dict(point.grid), trials))
    plan.rows.append(Config(name, methods, points))


def _params(trial: dict[str, Any], row: str, params: dict[str, Any]) -> dict[str, Any]:
    """Where the parameters of a row stand: in the user's function, or in the sections of the lab's trainer."""
    if "function" in trial:
        return {"function": {"params": params}}
    from dampen.studies.study.parts import sections

    return sections(params, trial, f"params of row {row!r}")


def _add_seeds(plan: Comparison, seeds: int | Sequence[int]) -> None:
    """Further seeds for every row: so many after the last one, or those named. With folds, each is a round of them."""
    folds = plan.folds
    first = (max(plan.seeds, default=-1) + folds) // folds
    rounds = range(first, first + seeds) if isinstance(seeds, int) else seeds
    more = [folds * n + fold for n in rounds for fold in range(folds)]
    plan.seeds += [seed for seed in more if seed not in plan.seeds]
    for row in plan.rows:
        for point in row.points:
            template = plan.trials[next(iter(point.trials.values()))]
            for seed in plan.seeds:
                if str(seed) not in point.trials:
                    trial = Run.from_dict({**template.to_dict(), "seed": seed})
                    plan.trials[trial.id] = trial
                    point.trials[str(seed)] = trial.id
