"""A plan made again from the trials in its folder, where plan.json is damaged: no trial is ever lost with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import HEADER, Comparison, Config, Setting
from dampen.studies.config.trial import Run
from dampen.studies.errors import LabError
from dampen.studies.records.record import RunStore


def load_comparison(folder: Path) -> Comparison:
    """The plan of a folder; where plan.json is damaged, what its trials say of it."""
    try:
        return Comparison.load(folder)
    except (LabError, KeyError, TypeError, AttributeError) as error:
        plan = rebuild_plan(folder)
        if not plan.trials:
            raise LabError(f"{folder / 'plan.json'} is damaged ({error}), and no trial lies beside it.") from error
        return plan


def rebuild_plan(folder: Path) -> Comparison:
    """One row for each list of methods, one point for each other difference; the row without methods is the baseline.

    Names of rows, published numbers and the command stood in plan.json alone; the command that made it brings them
    back, and finds every trial where it was.
    """
    trials = {t.id: t for t in (_trial(path.parent) for path in sorted(folder.glob("*/config.json"))) if t is not None}
    rows: dict[str, Config] = {}
    points: dict[tuple[str, str], Setting] = {}
    for id, trial in trials.items():
        name = " + ".join(_written(m) for m in trial.methods) or "plain"
        other = json.dumps({k: v for k, v in trial.canonical().items() if k not in ("seed", "methods")}, sort_keys=True)
        row = rows.setdefault(name, Config(name, list(trial.methods), [], baseline=not trial.methods))
        if (name, other) not in points:
            points[name, other] = Setting({}, {}, {})
            row.points.append(points[name, other])
        points[name, other].trials[str(trial.seed)] = id
    for row in rows.values():
        for i, point in enumerate(row.points if len(row.points) > 1 else []):
            point.grid["point"] = i
    finals = (_primary(folder / id) for id in trials)
    header: dict[str, Any] = dict.fromkeys(HEADER, "")
    header |= {"title": folder.name, "metric": next(filter(None, finals), ""), "report": "best", "cost": ""}
    departures = ["plan.json was damaged: rows and their names were made again from the trials"]
    seeds = sorted({t.seed for t in trials.values()})
    ordered = sorted(rows.values(), key=lambda row: not row.baseline)
    return Comparison(folder.name, "rebuilt", header, departures, seeds, ordered, trials)


def _trial(folder: Path) -> Run | None:
    try:
        return RunStore(folder).trial()
    except LabError:
        return None


def _primary(folder: Path) -> str:
    try:
        final = RunStore(folder).final() or {}
    except LabError:
        return ""
    return str((final.get("primary") or [""])[0])


def _written(method: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v)}" for k, v in method.items() if k != "name")
    return f"{method['name']}({arguments})" if arguments else str(method["name"])
