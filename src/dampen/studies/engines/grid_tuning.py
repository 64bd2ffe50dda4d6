"""Choosing each row's setting on validation, with seeds that the table does not use, before the table is trained.

The settings come from the recipe's `[search]` (the same number for every row, the baseline too) or from its `[grid]`.
Each is trained on every tuning seed, and the best mean is chosen (`records/selection.py`). A choice at the end of a
range that was searched extends it once: a quarter as many settings again go on beyond that end, then the row chooses
anew. The test is read once per row, when the chosen setting is trained on `seeds`. What was tried is kept in
`search.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dampen.studies.config.design import SETTINGS, Axis, AxisValues
from dampen.studies.config.plan import Comparison, Config, Setting, design_of, make_comparison
from dampen.studies.config.recipe import Recipe
from dampen.studies.config.search_space import axis_of
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.files import read_json, write_json
from dampen.studies.records.metric import describe
from dampen.studies.records.selection import Selection, Tried, remarks, select
from dampen.studies.records.table import grid_text, read_results
from dampen.studies.trainer.function import Function

FOLDER = "search"
"""Trials of the tuning lie here, apart from those of the table."""
BEYOND = "beyond"
"""Said in the header of a plan whose trials lie beyond the ranges."""
GOING = (0, 1, 5)
"""Exit codes after which a choice is possible: settings whose runs failed or diverged lose, and nothing else does."""


@dataclass
class Tuning:
    """The settings that are tried: the plan of their trials, the axes of each row, and what extended them."""

    plan: Comparison
    axes: dict[str, list[Axis]]
    settings: int  # of each row; 0 for a grid, whose rows may differ
    extended: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by row

    def of(self, rows: Sequence[str], extension: bool = False) -> Comparison:
        """The plan of these rows alone, or of all; or that of their extensions."""
        kept = [row for row in self.plan.rows if not rows or row.name in rows]
        if extension:
            kept = [replace(row, points=row.points[self.settings :]) for row in kept if row.points[self.settings :]]
        used = {i for row in kept for point in row.points for i in point.trials.values()}
        header = self.plan.header | ({BEYOND: True} if extension else {})
        plan = Comparison(**{**self.plan.__dict__, "rows": kept, "header": header})
        plan.trials = {i: t for i, t in self.plan.trials.items() if i in used}
        return plan


def make_tuning(recipe: Recipe, scale: str | None, settings: Sequence[str]) -> Tuning | None:
    """What there is to choose, on the tuning seeds; None where nothing is."""
    at = recipe.at(scale)
    if at["search"]:
        axes, tried = design_of(recipe, scale, settings)
        plan = make_comparison(recipe, scale, settings, at["tuning_seeds"], points=tried)
        count = at["search"][SETTINGS]
    elif at.get("tuning_seeds"):
        plan, count = make_comparison(recipe, scale, settings, at["tuning_seeds"]), 0
        axes = {row.name: _grid_axes(row) for row in plan.rows if len(row.points) > 1}
    else:
        return None
    tuning = Tuning(plan, {row: own for row, own in axes.items() if own}, count)
    tuning.plan = tuning.of(list(tuning.axes) or [""])
    return tuning if tuning.plan.rows else None


def tuning_plan(recipe: Recipe, scale: str | None, settings: Sequence[str], rows: Sequence[str]) -> Comparison | None:
    """The trials that choose, without those of extended ranges; None where nothing is chosen."""
    tuning = make_tuning(recipe, scale, settings)
    plan = tuning.of(rows) if tuning is not None else None
    return plan if plan is not None and plan.rows else None


def _grid_axes(row: Config) -> list[Axis]:
    return [axis_of(key, [p.grid[key] for p in row.points]) for key in row.points[0].grid]


def as_large(plan: Comparison, tuning: Comparison) -> Comparison:
    """The plan with as many trials as it will have once its points are chosen, whichever they are."""
    return _at(plan, {row.name: row.points[0].grid for row in tuning.rows})


def _at(plan: Comparison, chosen: Mapping[str, AxisValues]) -> Comparison:
    """The plan with these rows at these grid points; a table that reports all keeps them all."""
    if plan.header["report"] == "all":
        return plan
    for row in plan.rows:
        if row.name in chosen:
            row.points = [p for p in row.points if p.grid == chosen[row.name]]
    used = {i for r in plan.rows for p in r.points for i in p.trials.values()}
    plan.trials = {i: t for i, t in plan.trials.items() if i in used}
    return plan


def tune(
    recipe: Recipe,
    plan: Comparison,
    folder: Path,
    scale: str | None,
    settings: Sequence[str],
    rows: Sequence[str],
    run: Callable[[Comparison, Path], int],
) -> tuple[Comparison, int]:
    """Run the tuning trials with `run` (a plan and a folder to an exit code) and choose. A code that is not 0 says why
    nothing could be chosen.

    With `rows` only these are run; the others keep what is recorded of them.
    """
    tuning = make_tuning(recipe, scale, settings)
    if tuning is None:
        return plan, 0
    if both := sorted({*plan.seeds} & {*tuning.plan.seeds}):
        raise ConfigError(recipe.name, [f"--seed: {both} are tuning seeds; settings chosen on them would gain there"])
    place = folder / FOLDER
    code = run(tuning.of(rows), place)
    if code not in GOING:
        return plan, code
    if tuning.settings and _extend(recipe, scale, settings, tuning, place):
        beyond = tuning.of(rows, extension=True)
        code = run(beyond, place) if beyond.rows else 0
        if code not in GOING:
            return plan, code
    tuning.plan.save(place)
    results = read_results(tuning.plan, place)
    found = _selections(tuning, results)
    chosen = {name: selection for name, selection in found.items() if selection is not None}
    record = _told(tuning, chosen, results)
    write_json(folder / "search.json", record)
    _check_chosen(tuning.of(rows), chosen, results, place)
    points = {name: found.chosen.values for name, found in chosen.items()}
    brief = {name: {k: v for k, v in row.items() if k != "trials"} for name, row in record["rows"].items()}
    plan.header["search"] = record | {"rows": brief}
    if not tuning.settings:
        return _at(plan, points), 0
    waiting = {row.name: [p.grid for p in row.points] for row in plan.rows}
    made = make_comparison(recipe, scale, settings, plan.seeds, points=waiting | {k: [v] for k, v in points.items()})
    made.header |= plan.header
    return made, 0


def _check_chosen(tuning: Comparison, chosen: Mapping[str, Any], results: Mapping[str, Any], place: Path) -> None:
    """A row of which nothing can be chosen stops the run, unless all its runs diverged: then that is its result."""
    for row in tuning.rows:
        ended = [id in results for point in row.points for id in point.trials.values()]
        if row.name not in chosen and not all(ended):
            raise LabError(
                f"No setting of {row.name!r} can be chosen: no tuning run of it came to an end. Its errors are in "
                f"{place}. Correct the row or take it out; the same command goes on with what is recorded."
            )


def own_metric(function: Function | None) -> tuple[str, str]:
    """The metric by which settings of a training of the user's own are chosen; refuses where none was said."""
    if function is None or function.metric is None:
        told = "say which validation metric of your function it goes by, such as --metric accuracy or --metric nll:min"
        raise ConfigError("The search", [f"metric: {told}"])
    return function.metric


def chosen_in_words(folder: Path) -> list[str]:
    """What was chosen for each row, a line each, from the record of a folder; nothing where nothing was tuned."""
    if not (folder / "search.json").exists():
        return []
    record = read_json(folder / "search.json")
    metric = describe(record["metric"])
    lines = []
    for name, row in record["rows"].items():
        what = "nothing chosen"
        if row.get("chosen") is not None:
            value = f"{metric.scale * row['valid']:.{metric.digits}f}"
            what = (
                f"{grid_text(row['chosen'])} (validation {metric.title} {value}, {len(record['seeds'])} tuning seeds)"
            )
        lines.append("; ".join([f"{name}: {what}", *remarks(row)]))
    return lines


def _extend(recipe: Recipe, scale: str | None, settings: Sequence[str], tuning: Tuning, place: Path) -> bool:
    """Add settings beyond the ends at which rows chose; whether there are any."""
    found = _selections(tuning, read_results(tuning.plan, place))
    points = {row.name: [p.grid for p in row.points] for row in tuning.plan.rows}
    for row, selection in found.items():
        more = _beyond(selection, tuning.axes[row], tuning.settings) if selection is not None else []
        for key, upwards, extra in more:
            points[row] += extra
            last = [s[key] for s in extra][-1]
            tuning.extended.setdefault(row, []).append({"axis": key, "end": _end(upwards), "to": last})
    if not tuning.extended:
        return False
    at = recipe.at(scale)
    others: dict[str, list[AxisValues]] = {row["name"]: [] for row in at["rows"] if row["name"] not in points}
    axes = tuning.axes
    tuning.plan = make_comparison(recipe, scale, settings, at["tuning_seeds"], points=points | others)
    tuning.plan = tuning.of(list(axes))
    return True


def _beyond(selection: Selection, axes: Sequence[Axis], settings: int) -> list[tuple[str, bool, list[AxisValues]]]:
    """A quarter of the settings again, shared by the ends at which the choice lies; the other values stay chosen."""
    by_key, chosen = {axis.key: axis for axis in axes}, selection.chosen.values
    ends = [(key, upwards) for key, upwards in selection.edges if by_key[key].beyond(upwards, 1)]
    count = max(math.ceil(settings / 4), len(ends))
    found = []
    for i, (key, upwards) in enumerate(ends):
        share = count // len(ends) + (i < count % len(ends))
        extra: list[AxisValues] = [{**chosen, key: value} for value in by_key[key].beyond(upwards, share)]
        found.append((key, upwards, extra))
    return found


def _end(upwards: bool) -> str:
    return "upper" if upwards else "lower"


def _selections(tuning: Tuning, results: Mapping[str, Any]) -> dict[str, Selection | None]:
    mode = _metric(results)[1]
    return {row.name: select(_tried(row, results, 0), tuning.axes[row.name], mode) for row in tuning.plan.rows}


def _metric(results: Mapping[str, Any]) -> tuple[str, str]:
    return next((tuple(r["selection"]) for r in results.values() if "selection" in r), ("", "max"))


def _tried(row: Config, results: Mapping[str, Any], settings: int) -> list[Tried]:
    """The settings of a row; those after the first `settings` came with an extension."""
    return [_one(p, results, bool(settings) and i >= settings) for i, p in enumerate(row.points)]


def _one(point: Setting, results: Mapping[str, Any], extension: bool) -> Tried:
    values: dict[str, float | None] = {}
    states = {}
    for seed, id in point.trials.items():
        found = results.get(id)
        done = found is not None and found["status"] == "finished"
        states[seed] = "complete" if done else found["status"] if found is not None else "failed"
        name = found["selection"][0] if found is not None and done else ""
        if found is not None and done and name not in found["valid"]:
            raise LabError(
                f"The training has no validation {name!r}, so no setting can be chosen by it. "
                "Give it to trial.log(valid={...}), or return it under 'valid'."
            )
        values[seed] = found["valid"][name] if found is not None and done else None
    return Tried(point.grid, values, point.trials, states, extension)


def _head(tuning: Tuning, results: Mapping[str, Any]) -> dict[str, Any]:
    metric, mode = _metric(results)
    count = tuning.settings or max(len(row.points) for row in tuning.plan.rows)
    kind = {"storage": "tuning" if tuning.settings else "grid", "settings": count}
    seeds = tuning.plan.seeds
    return {**kind, "trials": count * len(seeds), "seeds": seeds, "metric": metric, "mode": mode}


def _told(tuning: Tuning, chosen: Mapping[str, Selection], results: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was tried and what was chosen, for the record."""
    rows = {row.name: _row(row, tuning, chosen.get(row.name), results) for row in tuning.plan.rows}
    return _head(tuning, results) | {"rows": rows}


def _row(row: Config, tuning: Tuning, found: Selection | None, results: Mapping[str, Any]) -> dict[str, Any]:
    tried, extended = _tried(row, results, tuning.settings), tuning.extended.get(row.name, [])
    trials = [
        {"values": t.values, "valid": t.mean, "by_seed": t.by_seed, "ids": t.ids, "states": t.states}
        | {"state": "complete" if t.complete else "failed", "extension": t.extension}
        for t in tried
    ]
    told: dict[str, Any] = {"axes": [a.__dict__ for a in tuning.axes[row.name]], "tried": len(tried), "trials": trials}
    if found is None:
        return told | {"chosen": None}
    told |= {"chosen": found.chosen.values, "valid": found.chosen.mean, "tied": found.tied, "alike": found.alike}
    further = {(e["axis"], e["end"]) for e in extended}
    told["edges"] = [
        {"axis": k, "end": _end(up), "value": found.chosen.values[k], "extended": (k, _end(up)) in further}
        for k, up in found.edges
    ]
    return told | {"extended": extended}
