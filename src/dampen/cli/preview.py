"""`dampen compare --dry-run`: the plan, the identity of each part, and an estimate of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dampen.cli.common import print_json

if TYPE_CHECKING:
    from dampen.studies.study.request import ComparisonRequest


def preview(
    asked: ComparisonRequest, execution: dict[str, Any], workers: int | None, as_json: bool, tune: int | None = None
) -> None:
    """Take a few steps of every row and say what would run; exits with 1 if a row cannot."""
    from dampen.studies.config.search_space import tuned_recipe
    from dampen.studies.engines.grid_tuning import tuning_plan
    from dampen.studies.records.environment import usable_cores
    from dampen.studies.study.preflight import probe
    from dampen.studies.trainer.state import Execution

    plan, folder = asked.plan, asked.folder
    tuning = tuning_plan(tuned_recipe(asked.recipe, tune, asked.settings), None, (), ())[1] if tune else 0
    probes = probe(plan, Execution(**execution))
    left = [t.id for t in asked.wanted if not (folder / t.id / "final.json").exists()]
    at_once = workers or max(1, min(usable_cores(), len(left) or 1))
    known = {p.row: p.seconds for p in probes}
    rows = {i: row.name for row in plan.rows for point in row.points for i in point.trials.values()}
    each = [known[rows[i]] for i in left]
    total = sum(s for s in each if s is not None) / at_once if all(s is not None for s in each) else None
    identity = identities(asked)
    if as_json:
        told = [{"row": p.row, "problem": p.problem, "step_seconds": p.step_seconds, "steps": p.steps} for p in probes]
        body = {
            "folder": str(folder),
            "trials": len(asked.wanted),
            "left": len(left),
            "seeds": plan.seeds,
            "tuning": tuning,
        }
        print_json({**body, "identity": identity, "rows": told, "seconds": total})
    else:
        console = Console(highlight=False, soft_wrap=True)
        counts = f"{len(asked.wanted)} trials, {len(asked.wanted) - len(left)} already recorded"
        if tune:
            counts = f"{tuning} trials that choose on validation, then {len(asked.wanted)} trials"
        console.print(f"{plan.header['title']}: {counts}, in {folder}", markup=False)
        for name, value in identity.items():
            console.print(f"  {name}: {value}", markup=False)
        for p in probes:
            pace = f"{1000 * p.step_seconds:.1f} ms a step" if p.step_seconds is not None else "no step was seen"
            length = f", {p.steps} steps" if p.steps else ""
            console.print(f"  {p.row}: {'cannot run: ' + p.problem if p.problem else pace + length}", markup=False)
        if total is not None:
            console.print(f"About {_words(total)} with {at_once} at once, evaluation not counted.", markup=False)
    if any(p.problem for p in probes):
        raise typer.Exit(1)


def identities(asked: ComparisonRequest) -> dict[str, str]:
    """What each part of the trials is known by."""
    trial = asked.wanted[0]
    if trial.function is not None:
        found = {"function": f"{trial.function['name']}, code {trial.function['code']}"}
        return found | ({"params": str(trial.function["params"])} if trial.function["params"] else {})
    found = {}
    for section in ("data", "model"):
        part: dict[str, Any] = getattr(trial, section)
        marks = [f"{key} {part[key]}" for key in ("fingerprint", "code") if key in part]
        found[section] = ", ".join([part.get("source", part["name"]), *marks])
    return found


def _words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
