"""Which runs belong into one table: one per plan, one per folder of loose trials. Mixing protocols is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison
from dampen.studies.config.written import describe
from dampen.studies.records.logged_run import LoggedRun
from dampen.studies.records.study_runs import Cell, StudyRow, StudyRuns, runs_of_plan
from dampen.studies.report.protocol import check_protocol, protocol_groups
from dampen.studies.report.read import Collection, Skipped


def make_studies(found: Collection, split: bool = False) -> tuple[list[StudyRuns], list[Skipped]]:
    """One study per plan, and one per folder of trials without a plan; what belongs nowhere is listed.

    Raises ProtocolMismatch where a folder mixes protocols; `split=True` makes one study per protocol instead.
    """
    studies, skipped, claimed = [], list(found.skipped), set[Path]()
    by_id: dict[str, list[LoggedRun]] = {}
    for run in found.runs.values():
        by_id.setdefault(run.id, []).append(run)
    for folder, plan in found.plans.items():
        study, used = _from_plan(folder, plan, by_id, found.searches)
        claimed |= used
        for run in found.runs.values():
            if run.folder.parent == folder and run.folder not in used:
                claimed.add(run.folder)
                skipped.append(Skipped(run.folder.name, _why_not(run, plan)))
        if study.runs():
            study.protocol = check_protocol(study.name, study.runs(), study.grid_keys(), planned=True)
            studies.append(study)
        else:
            skipped.append(Skipped(folder.name, f"none of its {len(plan.trials)} planned trials has been started"))
    loose: dict[Path, list[LoggedRun]] = {}
    for run in found.runs.values():
        if run.folder not in claimed:
            loose.setdefault(run.folder.parent, []).append(run)
    for folder, runs in loose.items():
        for group in protocol_groups(runs) if split else [runs]:
            study = _from_runs(folder, group)
            study.protocol = check_protocol(study.name, study.runs(), study.grid_keys(), planned=False)
            studies.append(study)
    return studies, skipped


def _why_not(run: LoggedRun, plan: Comparison) -> str:
    """Why a trial beside a plan is in none of its rows."""
    function = run.config.get("function") or {}
    codes = {t.function["code"] for t in plan.trials.values() if t.function}
    if codes and function.get("code") not in codes:
        row = f"{describe(run.config['methods'])}, seed {run.seed}"
        return f"a result of older code of {function.get('name')} ({row}); --same-code (same_code=True) counts it"
    return "belongs to no row of plan.json; it was run under an earlier plan or other settings"


def _from_plan(
    folder: Path, plan: Comparison, by_id: Mapping[str, list[LoggedRun]], searches: Mapping[Path, dict[str, Any]]
) -> tuple[StudyRuns, set[Path]]:
    used: set[Path] = set()

    def find(id: str) -> LoggedRun | None:
        runs = by_id.get(id, [])
        own = [r for r in runs if r.folder.parent == folder] or runs  # a shared store of trials serves many plans
        used.update(r.folder for r in own[:1])
        return own[0] if own else None

    study = runs_of_plan(plan, find)
    study.search = searches.get(folder, study.search)
    return study, used


def _from_runs(folder: Path, runs: list[LoggedRun]) -> StudyRuns:
    """Trials without a plan: a row per set of methods, a grid point per learning rate."""
    rows: dict[str, StudyRow] = {}
    several_rates = len({_rate(r) for r in runs}) > 1
    for run in sorted(runs, key=lambda r: (bool(r.config["methods"]), r.id)):
        name = describe(run.config["methods"])
        row = rows.setdefault(name, StudyRow(name, run.config["methods"], [], baseline=not run.config["methods"]))
        grid = {"train.lr": _rate(run)} if several_rates else {}
        cell = next((c for c in row.cells if c.grid == grid), None)
        if cell is None:
            cell = Cell(grid, {}, 0, model=run.config.get("model", {}))
            row.cells.append(cell)
        cell.runs[run.seed] = run
        cell.planned += 1
    name = folder.resolve().name
    study = StudyRuns(name, name, "", "max", list(rows.values()))
    study.judge_by(None)
    return study


def _rate(run: LoggedRun) -> float | None:
    """The learning rate; a training of the user's own has none that we know of."""
    out: float | None = run.config.get("train", {}).get("lr")
    return out
