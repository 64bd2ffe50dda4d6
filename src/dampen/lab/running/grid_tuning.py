"""Choosing each row's grid point on validation, with seeds that the table does not use, before the table is trained.

The test is then read once per row: what validation preferred on `tuning_seeds` is trained anew on `seeds`. Rows with
one point have nothing to choose. What was tried is kept in `search.json`, as a search's trials are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dampen.lab.config.plan import Plan, PlannedRow, Point, make_plan
from dampen.lab.config.recipe import Recipe
from dampen.lab.config.search_space import axis_of
from dampen.lab.files import write_json
from dampen.lab.records.table import best_point, read_results

FOLDER = "search"
"""Trials of the tuning lie here, apart from those of the table."""


def tuning_plan(recipe: Recipe, scale: str | None, settings: Sequence[str], rows: Sequence[str]) -> Plan | None:
    """The trials that choose: rows with several points, on the tuning seeds. None where there are no such seeds."""
    seeds = recipe.at(scale).get("tuning_seeds")
    if not seeds:
        return None
    plan = make_plan(recipe, scale, settings, seeds)
    plan.rows = [r for r in plan.rows if len(r.points) > 1 and (not rows or r.name in rows)]
    used = {i for r in plan.rows for p in r.points for i in p.trials.values()}
    plan.trials = {i: t for i, t in plan.trials.items() if i in used}
    return plan if plan.rows else None


def choose(plan: Plan, tuning: Plan, folder: Path) -> Plan:
    """The plan with each tuned row at the point that validation preferred."""
    results = read_results(tuning, folder / FOLDER)
    by_name = {row.name: row for row in tuning.rows}
    write_json(folder / "search.json", _told(tuning, results))
    return _at(plan, {name: best_point(row, results) for name, row in by_name.items()})


def as_large(plan: Plan, tuning: Plan) -> Plan:
    """The plan with as many trials as it will have once its points are chosen, whichever they are."""
    return _at(plan, {row.name: row.points[0] for row in tuning.rows})


def _at(plan: Plan, points: Mapping[str, Point]) -> Plan:
    """The plan with these rows at these grid points; a table that reports all keeps them all."""
    if plan.header["report"] == "all":
        return plan
    for row in plan.rows:
        if row.name in points:
            row.points = [p for p in row.points if p.grid == points[row.name].grid]
    used = {i for r in plan.rows for p in r.points for i in p.trials.values()}
    plan.trials = {i: t for i, t in plan.trials.items() if i in used}
    return plan


def _told(tuning: Plan, results: Mapping[str, Any]) -> dict[str, Any]:
    rows = {row.name: {"axes": _axes(row), "trials": _tried(row, results)} for row in tuning.rows}
    metric, mode = next((tuple(r["selection"]) for r in results.values() if "selection" in r), ("", "max"))
    count = max(len(row.points) for row in tuning.rows) * len(tuning.seeds)
    return {"storage": "grid", "trials": count, "seeds": tuning.seeds, "metric": metric, "mode": mode, "rows": rows}


def _axes(row: PlannedRow) -> list[dict[str, Any]]:
    return [axis_of(key, [p.grid[key] for p in row.points]).__dict__ for key in row.points[0].grid]


def _tried(row: PlannedRow, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    tried = []
    for point in row.points:
        for id in point.trials.values():
            found = results.get(id)
            done = found is not None and found["status"] == "finished"
            value = found["valid"][found["selection"][0]] if found is not None and done else None
            tried.append({"values": point.grid, "valid": value, "state": "complete" if done else "pruned", "id": id})
    return tried


def tune(
    recipe: Recipe,
    plan: Plan,
    folder: Path,
    scale: str | None,
    settings: Sequence[str],
    rows: Sequence[str],
    run: Callable[[Plan, Path], int],
) -> tuple[Plan, int]:
    """Run the tuning trials with `run` (a plan and a folder to an exit code) and choose; the code says how it went."""
    tuning = tuning_plan(recipe, scale, settings, rows)
    if tuning is None:
        return plan, 0
    code = run(tuning, folder / FOLDER)
    return (choose(plan, tuning, folder), code) if code in (0, 5) else (plan, code)  # 5: some points diverged
