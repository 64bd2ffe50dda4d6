"""A study: the comparison as an object, to be printed, continued, and opened
again from its folder."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any

from dampen.studies.comparison import Comparison, Config, Setting
from dampen.studies.configs import PLAIN, read_rows
from dampen.studies.ensembles import Ensemble, ensembles
from dampen.studies.errors import LabError
from dampen.studies.files import fingerprint, read_json, write_json
from dampen.studies.plugins import load_plugins
from dampen.studies.recipe import merge
from dampen.studies.report.summary import counted
from dampen.studies.report.terminal import mean_sd
from dampen.studies.run import Run
from dampen.studies.sequential import Race
from dampen.studies.store import RunStore
from dampen.studies.table import Entry, ResultTable, comparison_table, read_results, read_runs
from dampen.studies.trainer.user_function import Function, Parts
from dampen.studies.trust import (
    KeptCode,
    approve,
    code_of_function,
    code_of_plan,
    require_approval,
)
from dampen.studies.user_code import Code, code_in_file


@dataclass
class Study:
    """What `dampen.compare` returns and `dampen.load` opens: rows of trials, judged
    against the reference row.

    Print it for the table; in a notebook it shows the table and a plot of the differences.
    """

    folder: Path
    plan: Comparison
    function: Function | None = None
    parts: Parts | None = None  # the user's model and data, for the built-in trainer
    settings: dict[str, Any] = field(default_factory=dict)  # how it was run, for `add`
    race: Race | None = None  # what became of it where it went on until it was decided

    @property
    def results(self) -> ResultTable:
        """The table of this study, as the page and every other format show it."""
        return comparison_table(self.plan, read_runs(self.plan, self.folder))

    @property
    def rows(self) -> list[Entry]:
        """Every row with its values by seed, mean, spread, cost and verdict."""
        return self.results.entries

    @property
    def best(self) -> Entry:
        """The row with the best mean; whether it was shown to be better than the reference, its
        verdict says."""
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
            for seed, run in row.setting.logged.items()
            if run.status == "failed"
        }

    def ensembles(self) -> list[Ensemble]:
        """The seeds of each configuration as one model, where the training function
        returns its predictions.

        Returns:
            one ensemble per configuration; none without predictions.
        """
        return ensembles(self.plan, self.folder)

    def table(self) -> str:
        """The table as text.

        Returns:
            what the terminal shows.
        """
        from rich.console import Console

        from dampen.studies.report.terminal import results_table

        text = io.StringIO()
        console = Console(file=text, width=120, highlight=False, force_terminal=False)
        console.print(results_table(self.results))
        return text.getvalue().rstrip()

    def to_pandas(self) -> Any:
        """A data frame with one line per finished trial: row, seed, status, every
        metric, and what a step took.

        Returns:
            a `pandas.DataFrame`.
        """
        import pandas as pd

        results, lines = read_results(self.plan, self.folder), []
        for row in self.plan.configs:
            for point in row.settings:
                for seed, trial in point.ids.items():
                    if trial in results:
                        lines.append(_line(row.name, point.grid, int(seed), results[trial]))
        return pd.DataFrame(lines)

    def report(self, path: Path | str = "report.html") -> Path:
        """Write the report; the ending of the name says in which format.

        Args:
            path: its ending says the format: html, md, csv, json or tex.

        Returns:
            the path that was written.
        """
        from dampen.studies.report import write_report

        write_report([self.folder], path)
        return Path(path)

    def add(self, seeds: int | Sequence[int] = 0, methods: Any = None, **settings: Any) -> Study:
        """Run more: `seeds` further seeds of every row (or a list of seeds),
        `methods` as further rows.

        Returns this study, which then has them. A study that was looked at and then extended by
        seeds is judged by the sequential test, which allows that. Methods that are added after a
        look are judged at a stricter level of their own, because adding methods until one is
        significant finds one by chance.

        Args:
            seeds: how many more, or which.
            methods: further configurations, as for `dampen.compare`.
            settings: how to run them, in place of how the study was run: workers, threads, engine,
                ....
        """
        from dampen.studies.compare import run

        require_approval(self.folder, code_of_plan(self.plan, self.folder))
        load_plugins(self.plan.header.get("plugins", ()), self.folder)
        if self.function is None and any(t.function for t in self.plan.runs.values()):
            self.function = load_function(self.folder)
        if self.parts is None and self.function is None:
            self.parts, place = load_parts(self.folder, self.plan)
            self.settings.setdefault("data_dir", place)
        objects: dict[str, bytes] = {}
        if methods is not None:
            baseline = next((row.name for row in self.plan.configs if row.baseline), PLAIN)
            known = {row.name for row in self.plan.configs}
            found = read_rows(methods)
            objects = found.objects
            if self.function is None:
                from dampen.studies.request import plain_rows

                plain_rows(found)  # refuses what the built-in trainer cannot take
            new = [row for row in found.rows if row.name not in known and row.name != PLAIN]
            if any(RunStore(self.folder / id).done for id in self.plan.runs):
                self.plan.note_addition(row.name for row in new)
            for row in new:
                _add_row(self.plan, baseline, row.name, row.methods, row.params)
        if seeds:
            self.plan.header["test"] = "sequential"
        _add_seeds(self.plan, seeds)
        run(self, objects, **{**self.settings, **settings})
        return self

    def __str__(self) -> str:
        told = [self.table(), *(found.in_words() for found in self.ensembles())]
        told += [f"{name} failed: {why}" for name, why in self.failures.items()]
        return "\n".join([*told, f"Records: {self.folder}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:

        return study_html(self)


def load(folder: Path | str, trust: bool = False) -> Study:
    """Open a study from its folder. No code of the folder runs.

    `add` runs the code that the study keeps or names: its training function, plug-ins, methods in
    files. It refuses what the user of this machine did not run or approve before.

    Args:
        folder: that `dampen.compare` or the command wrote.
        trust: approve that code as it is now, for this user and machine.

    Returns:
        the study: its table, its runs, and `add` for more of them.
    """
    folder = Path(folder)
    if not (folder / "plan.json").is_file():
        raise LabError(
            f"{folder} holds no study: there is no plan.json. "
            "Give the folder that dampen compare wrote."
        )
    study = Study(folder, Comparison.load(folder))
    if trust:
        approve(code_of_study(study))
    return study


def code_of_study(study: Study) -> list[KeptCode]:
    """All code that `Study.add` runs, of a study that was opened from its folder."""
    folder, code = study.folder, code_of_plan(study.plan, study.folder)
    if (folder / FILE).exists():
        code += code_of_function(_function(read_json(folder / FILE)), folder / FILE)
    if (folder / PARTS).exists():
        kept = read_json(folder / PARTS)
        for name in ("read", "build"):
            code += code_of_function(_maybe(kept[name]), folder / PARTS)
    return code


def _line(
    row: str, grid: Mapping[str, Any], seed: int, result: Mapping[str, Any]
) -> dict[str, Any]:
    valid = {f"valid_{k}": v for k, v in result.get("valid", {}).items()}
    cost = {k: result.get(k) for k in ("step_seconds", "step_cpu_seconds", "steps")}
    return {
        "row": row,
        "seed": seed,
        "status": result["status"],
        **grid,
        **result.get("test", {}),
        **valid,
        **cost,
    }


def _add_row(
    plan: Comparison, like: str, name: str, methods: list[dict[str, Any]], params: dict[str, Any]
) -> None:
    """One more row: the reference's trials with other methods and parameters."""
    (model,) = (row for row in plan.configs if row.name == like)
    points = []
    for point in model.settings:
        trials = {}
        for seed, id in point.ids.items():
            plain = merge(plan.runs[id].to_dict(), {"methods": methods})
            plain = merge(plain, _params(plain, name, params)) if params else plain
            trial = Run.from_dict(plain)
            plan.runs[trial.id] = trial
            trials[seed] = trial.id
        points.append(Setting(dict(point.grid), trials))
    plan.configs.append(Config(name, methods, points))


def _params(trial: dict[str, Any], row: str, params: dict[str, Any]) -> dict[str, Any]:
    """Where the parameters of a configuration are: in the user's function, or in the sections of
    the built-in trainer."""
    if "function" in trial:
        return {"function": {"params": params}}
    from dampen.studies.request import sections

    return sections(params, trial, f"params of row {row!r}")


def _add_seeds(plan: Comparison, seeds: int | Sequence[int]) -> None:
    """Further seeds for every row: so many after the last one, or those named. With folds, each is
    a round of them."""
    folds = plan.folds
    first = (max(plan.seeds, default=-1) + folds) // folds
    rounds = range(first, first + seeds) if isinstance(seeds, int) else seeds
    more = [folds * n + fold for n in rounds for fold in range(folds)]
    plan.seeds += [seed for seed in more if seed not in plan.seeds]
    for config in plan.configs:
        for setting in config.settings:
            for seed in plan.seeds:
                plan.run_of(setting, seed)


# --------------------
# What a study needs beside its plan, kept in its folder, so that a study opened from disk can go
# on: the user's own function, or where their model and data are.


FILE = "function.json"
PARTS = "parts.json"


def save_function(function: Function, folder: Path) -> None:
    """Write where the function is, or the function itself where it has no file."""
    folder.mkdir(parents=True, exist_ok=True)
    approve(code_of_function(function, folder / FILE))
    write_json(folder / FILE, _stored(function))


def load_function(folder: Path) -> Function:
    """Read it back where it was approved. One kept by value is unpickled when a trial runs, as it
    was the first time."""
    if not (folder / FILE).exists():
        raise LabError(
            f"{folder} does not say where its function is. Call dampen.compare with it again."
        )
    function = _function(read_json(folder / FILE))
    require_approval(folder, code_of_function(function, folder / FILE))
    return function


def save_parts(parts: Parts, folder: Path, data_dir: str | None = None) -> None:
    """Write where the user's own model and data are, and in which folder official
    sets were looked for."""
    folder.mkdir(parents=True, exist_ok=True)
    for function in (parts.read, parts.build):
        approve(code_of_function(function, folder / PARTS))
    places = {k: _stored(v) if isinstance(v, Function) else v for k, v in _shallow(parts).items()}
    write_json(
        folder / PARTS, places | {"data_dir": str(Path(data_dir).resolve()) if data_dir else None}
    )


def load_parts(folder: Path, plan: Comparison) -> tuple[Parts, str | None]:
    """Read them back, with the folder of official sets; raise where they are no longer what the
    study was run on."""
    sections = [section for trial in plan.runs.values() for section in (trial.data, trial.model)]
    if not (folder / PARTS).exists():
        if any("fingerprint" in section or "code" in section for section in sections):
            raise LabError(
                f"{folder} does not say where its data and model are. Call dampen.compare again."
            )
        return Parts(), None
    kept = read_json(folder / PARTS)
    data_dir = kept.pop("data_dir", None)
    parts = Parts(kept["data"], _maybe(kept["read"]), kept["model"], _maybe(kept["build"]))
    for function in (parts.read, parts.build):
        require_approval(folder, code_of_function(function, folder / PARTS))
    for trial in plan.runs.values():
        _check_place(parts.data, trial.data.get("fingerprint"), "data")
        _check_place(parts.model, trial.model.get("fingerprint"), "model")
    return parts, data_dir


def _check_place(place: str | None, planned: str | None, what: str) -> None:
    """The place must be there, with the content that the trials are known by."""
    if place is None or planned is None:
        return
    if not Path(place).exists():
        raise LabError(
            f"The {what} of this study is no longer at "
            f"{place}. Call dampen.compare with its new place."
        )
    if (found := fingerprint(place)) != planned:
        raise LabError(
            f"The {what} at {place} has changed since this study was run "
            f"(fingerprint {found}, not {planned}), so more "
            "of it would be another study. Call "
            "dampen.compare with it: other data makes other trials."
        )


def _shallow(parts: Parts) -> dict[str, Any]:
    return {field.name: getattr(parts, field.name) for field in fields(parts)}


def _stored(function: Function) -> dict[str, Any]:
    return {
        "name": function.code.name,
        "code": function.code.digest,
        "places": list(function.code.places),
        "file": function.file,
        "attribute": function.attribute,
        "pickled": _text(function.pickled) if function.pickled else None,
        "objects": {k: _text(v) for k, v in function.objects.items()},
        "metric": list(function.metric) if function.metric else None,
    }


def _maybe(kept: dict[str, Any] | None) -> Function | None:
    return _function(kept) if kept is not None else None


def _function(kept: dict[str, Any]) -> Function:
    file = Path(kept["file"]) if kept["file"] else None
    if file is not None and not file.is_file():
        raise LabError(
            f"The function {kept['name']} is no longer at "
            f"{file}. Call dampen.compare with it again."
        )
    code = Code(kept["name"], kept["code"])
    if file is not None:
        code = code_in_file(file, kept["attribute"], "", kept.get("places", ()))
        if code.digest != kept["code"]:
            raise LabError(
                f"The code of {kept['name']} has changed since this study "
                "was run, so more of it would be another "
                "study. Call dampen.compare with it: it runs new trials, "
                "or takes the old ones with same_code=True."
            )
        code = replace(code, name=kept["name"])
    objects = {k: base64.b64decode(v) for k, v in kept["objects"].items()}
    pickled = base64.b64decode(kept["pickled"]) if kept["pickled"] else None
    metric = (kept["metric"][0], kept["metric"][1]) if kept["metric"] else None
    return Function(code, kept["file"], kept["attribute"], pickled, objects, {}, metric)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


# --------------------
# A study inside a notebook: its table, and the differences from the reference as a plot, without
# scripts.


WIDTH, LINE, NAMES = 640, 24, 240


def study_html(study: Study) -> str:
    """Table and forest plot."""
    failures = "".join(
        f"<p>{escape(name)} failed: {escape(why)}</p>" for name, why in study.failures.items()
    )
    return f"<div>{table_html(study)}{forest_svg(study)}{failures}<p>Records: {escape(str(study.folder))}</p></div>"


def table_html(study: Study) -> str:
    """The table."""
    table = study.results
    head = ["row", f"test {table.metric.title}", "n", "cost", "verdict"]
    lines = []
    for row in table.entries:
        cost = f"{row.cost.ratio:.2f}x" if row.cost.ratio else "-"
        cells = [row.name, mean_sd(row, table.metric), counted(row, table), cost]
        lines.append([*cells, row.told(table.metric, numbers=True) or "-"])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in lines
    )
    return f"<table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead><tbody>{body}</tbody></table>"


def forest_svg(study: Study) -> str:
    """Each row's difference from the reference with its corrected interval; the line
    at 0 is the reference."""
    table = study.results
    reference = table.main_reference
    compared = [(row.name, row.comparison) for row in table.entries if row.comparison is not None]
    found = [(name, c.difference, c.low, c.high) for name, c in compared if not math.isnan(c.low)]
    if reference is None or not found:
        return ""
    ends = [v for _, _, low, high in found for v in (low, high)] + [0.0]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return round(NAMES + (value - low) / span * (WIDTH - NAMES - 20) + 5, 1)

    marks = [
        f'<line x1="{x(0)}" x2="{x(0)}" y1="0" '
        f'y2="{LINE * len(found)}" stroke="currentColor" opacity="0.4"/>'
    ]
    for i, (name, difference, left, right) in enumerate(found):
        y = LINE * i + LINE / 2
        shown = name if len(name) <= 34 else name[:33] + "…"
        marks.append(
            f'<text x="0" y="{y + 4}" font-size="12" fill="currentColor">{escape(shown)}</text>'
        )
        marks.append(
            f'<line x1="{x(left)}" x2="{x(right)}" y1="{y}" '
            f'y2="{y}" stroke="#3b6fb6" stroke-width="2"/>'
        )
        told = f"{difference:+.3g} [{left:+.3g}, {right:+.3g}]"
        marks.append(
            f'<circle cx="{x(difference)}" cy="{y}" r="4" '
            f'fill="#3b6fb6"><title>{told}</title></circle>'
        )
    title = f"Difference in test {escape(table.metric.title)} from {escape(reference.name)}, corrected interval"
    size = f'width="{WIDTH}" height="{LINE * len(found)}" viewBox="0 0 {WIDTH} {LINE * len(found)}"'
    return f'<p>{title}</p><svg role="img" aria-label="{title}" {size}>{"".join(marks)}</svg>'
