"""Search beyond the grid with Optuna: TPE proposes, hopeless trials are pruned, the best is judged on all seeds.

Each row of a recipe is a study of its own with the same number of trials, scored on validation with the first seed.
Studies live in an SQLite file in the run's folder, or at any SQLAlchemy URL, where a team's machines can work on them
together. What was cut off is resumed from its checkpoint.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dampen.studies.checks import task_of
from dampen.studies.comparison import Comparison
from dampen.studies.environment import asked_threads, usable_cores
from dampen.studies.errors import ConfigError, Diverged, Interrupted, LabError, Locked
from dampen.studies.files import write_json
from dampen.studies.plugins import activate
from dampen.studies.processes import (
    context,
    end_soon_after_parent,
    keep_freed_memory,
    stop_on_signals,
    without_main,
)
from dampen.studies.recipe import Recipe
from dampen.studies.search_space import Axis
from dampen.studies.trainer.checkpoint import saved_states
from dampen.studies.trainer.state import Execution
from dampen.studies.tuning import make_searchable, own_metric, plan_at

TUNING_SEED = 10_000
"""The seed that rows are tuned on. No table uses it, so that what was chosen by luck on it gains nothing there."""
SEARCH_FOLDER = "search"
"""Trials of the search lie here, apart from those of the table."""


@dataclass(frozen=True)
class Search:
    """What to search, where to remember it, and how to run it."""

    recipe: Recipe
    folder: Path
    axes: dict[str, list[Axis]]
    url: str
    trials: int
    execution: Execution
    selection: tuple[str, str]  # the validation metric that chooses, and 'max' or 'min'
    scale: str | None = None
    settings: tuple[str, ...] = ()
    seed: int = 0
    rows: list[str] = field(default_factory=list)


def search(
    recipe: Recipe,
    folder: Path,
    execution: Execution,
    trials: int = 20,
    storage: str | None = None,
    workers: int | None = None,
    scale: str | None = None,
    settings: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Search every row and return the plan of the best: each row at the point that validation prefers, on all seeds.

    Ctrl-C stops after a checkpoint and raises Interrupted; the same call goes on.

    Args:
        recipe: what to search.
        folder: for the runs and the record of the search.
        execution: how runs are executed.
        trials: proposals for each configuration.
        storage: an SQLAlchemy URL that several machines share; default: a file in the folder.
        workers: processes; default: one per core.
        scale: of the recipe.
        settings: changes as on the command line.
        seeds: of the table; default: the recipe's.
        report: receives a line for each proposal that ended.
    """
    if trials < 1:
        raise ValueError(f"trials must be 1 or more, got {trials}.")
    if importlib.util.find_spec("optuna") is None:
        told = (
            "optuna is not installed here, and tuning needs it; run: pip install 'dampen[search]'"
        )
        raise ConfigError("The search", [told])
    opened, axes = make_searchable(recipe, scale)
    at = opened.at(scale)
    selection = _selection(at, recipe, execution)
    folder.mkdir(parents=True, exist_ok=True)
    all_seeds = list(seeds) if seeds is not None else at.get("seeds", [0])
    url = storage or f"sqlite:///{(folder / 'search.db').resolve()}"
    what = Search(
        opened, folder, axes, url, trials, execution, selection, scale, tuple(settings), TUNING_SEED
    )
    what = replace(what, rows=[r["name"] for r in at["rows"]])
    for row in what.rows:  # names, ranges and storage are checked before any process starts
        _release_dead(_study(what, row))
        plan_at(
            opened,
            scale,
            settings,
            row,
            {a.key: a.choices[0] if a.choices else a.low for a in axes[row]},
            [0],
        )
    if any(
        count < trials for count in _counts({row: _study(what, row) for row in what.rows}).values()
    ):
        _run_workers(what, workers, report)
    plan, record = _best_plan(what, all_seeds), _told(what)
    write_json(folder / "search.json", record)
    plan.header["search"] = {
        key: value for key, value in record.items() if key in ("metric", "trials", "seeds")
    }
    return plan


def _selection(at: dict[str, Any], recipe: Recipe, execution: Execution) -> tuple[str, str]:
    """What validation chooses by: the task's metric, or the one that was said for a training of the user's own."""
    from dampen.studies.metrics import selection

    if "function" not in at:
        return selection(task_of(at["data"]["name"], at.get("model", {}).get("name", "")))
    return own_metric(execution.function)


def _study(what: Search, row: str, worker: int = 0) -> Any:
    """The Optuna study of a row, made when it is not there yet."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    waits = {"connect_args": {"timeout": 100}} if what.url.startswith("sqlite") else None
    try:
        database = optuna.storages.RDBStorage(what.url, engine_kwargs=waits)
    except Exception as error:  # SQLAlchemy and drivers raise their own kinds
        raise LabError(
            f"The storage for the search cannot be used: {type(error).__name__}: {error}"
        ) from error
    study = optuna.create_study(
        storage=database,
        study_name=f"{what.recipe.name} {what.scale or what.recipe.scale}: {row}",
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=max(3, what.trials // 4), n_warmup_steps=2
        ),
        direction="maximize" if what.selection[1] == "max" else "minimize",
        load_if_exists=True,
    )
    # Repeatable with one process; another start, or another process, must not propose the same points again.
    seed = zlib.crc32(f"{row} {worker} {len(study.trials)}".encode())
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(3, what.trials // 4))
    return study


def _release_dead(study: Any) -> None:
    """Trials that a killed process of this machine left running are tried again, from their checkpoints."""
    import optuna

    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        host, _, pid = str(trial.user_attrs.get("holder", "")).rpartition(":")
        if host == socket.gethostname() and not _alive(int(pid)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _run_workers(what: Search, workers: int | None, report: Callable[[str], None]) -> None:
    """Processes that each take the next trial of the row with the fewest, until all rows have theirs."""
    count = min(workers or usable_cores(), what.trials * len(what.rows))
    threads = what.execution.threads or asked_threads() or max(1, usable_cores() // count)
    what = replace(what, execution=replace(what.execution, threads=threads))
    start = context()
    stop, lines = start.Event(), start.SimpleQueue()
    crew = [
        start.Process(target=_work, args=(what, i, stop, lines), name="dampen search")
        for i in range(count)
    ]
    with without_main():
        for process in crew:
            process.start()
    interrupted = False
    while any(p.is_alive() for p in crew) or not lines.empty():
        try:
            while not lines.empty():
                report(lines.get())
            for process in crew:
                process.join(0.2 / count)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            stop.set()
    if interrupted:
        raise Interrupted(
            f"The search stopped; what it found is in {what.folder}. The same command goes on."
        )
    dead = [p.exitcode for p in crew if p.exitcode]
    if dead:
        raise LabError(
            f"{len(dead)} of {count} processes of the search died (exit codes {dead}). Run again to go on."
        )


def _work(what: Search, worker: int, stop: Any, lines: Any) -> None:
    """The life of one process."""
    end_soon_after_parent()
    stop_on_signals(signal.SIG_IGN)  # the parent decides
    keep_freed_memory()
    activate(what.execution.plugins)
    studies = {row: _study(what, row, worker) for row in what.rows}
    while not stop.is_set():
        counts = _counts(studies)
        row = min(counts, key=lambda r: counts[r])
        if counts[row] >= what.trials:
            return
        trial = studies[row].ask()
        trial.set_user_attr("holder", f"{socket.gethostname()}:{os.getpid()}")
        told = run_one(what, row, studies[row], trial, stop.is_set)
        lines.put(f"{row}: trial {counts[row] + 1} of {what.trials}, {told}")


def _counts(studies: dict[str, Any]) -> dict[str, int]:
    """How many trials each row has had or has running."""
    from optuna.trial import TrialState

    open_ = (TrialState.FAIL, TrialState.WAITING)
    return {row: sum(t.state not in open_ for t in study.trials) for row, study in studies.items()}


def run_one(
    what: Search, row: str, study: Any, trial: Any, stop: Callable[[], bool] = lambda: False
) -> str:
    """Run one proposal and tell the study how it went; returns that in words."""
    import optuna

    from dampen.studies.trainer.train import run_trial

    states = optuna.trial.TrialState
    chosen = {axis.key: axis.suggest(trial) for axis in what.axes[row]}
    plan = plan_at(what.recipe, what.scale, what.settings, row, chosen, [what.seed])
    ((id, content),) = plan.runs.items()
    trial.set_user_attr("id", id)
    folder, pruned = what.folder / SEARCH_FOLDER / id, False

    def listen(event: dict[str, Any]) -> None:
        nonlocal pruned
        if event["kind"] == "epoch" and "valid" in event:
            value = event["valid"].get(what.selection[0])
            if value is not None:
                trial.report(value, event["epoch"])
                pruned = trial.should_prune()

    try:
        result = run_trial(
            content, folder, _for_row(what.execution, id, row), listen, lambda: pruned or stop()
        )
    except Interrupted:
        if pruned:
            study.tell(trial, state=states.PRUNED)
            _drop_checkpoints(folder)
            return "pruned"
        study.tell(trial, state=states.FAIL)
        study.enqueue_trial(trial.params)  # goes on from its checkpoint next time
        return "stopped"
    except Diverged:
        study.tell(trial, state=states.PRUNED)
        return "diverged"
    except Locked as error:
        study.tell(trial, state=states.FAIL)
        return str(error)
    if result["selection"][0] not in result["valid"]:
        raise LabError(
            f"The training has no validation {result['selection'][0]!r}, so a search cannot choose by it. "
            "Give it to trial.log(valid={...}), or return it under 'valid'."
        )
    value = result["valid"][result["selection"][0]]
    study.tell(
        trial,
        value if math.isfinite(value) else None,
        state=None if math.isfinite(value) else states.FAIL,
    )
    return f"validation {value:.4f}"


def _for_row(execution: Execution, trial: str, row: str) -> Execution:
    """A training of the user's own knows the name of its row."""
    if execution.function is None:
        return execution
    return replace(execution, function=replace(execution.function, rows={trial: row}))


def _drop_checkpoints(folder: Path) -> None:
    """A pruned trial keeps its log; what it would need to go on is only in the way."""
    for path in saved_states(folder, "checkpoint"):
        path.unlink(missing_ok=True)


def _best_plan(what: Search, seeds: Sequence[int]) -> Comparison:
    """Every row at its best point, on all seeds; the search's own run of that point becomes the table's."""
    whole: Comparison | None = None
    for row in what.rows:
        study = _study(what, row)
        if not study.best_trials:
            raise LabError(
                f"No trial of {row!r} came to an end, so nothing can be chosen. See {what.folder / SEARCH_FOLDER}."
            )
        plan = plan_at(what.recipe, what.scale, what.settings, row, study.best_trial.params, seeds)
        if whole is None:
            whole = plan
        else:
            whole.configs += plan.configs
            whole.runs |= plan.runs
        for trial in plan.runs:
            found = what.folder / SEARCH_FOLDER / trial
            if (found / "final.json").exists() and not (what.folder / trial).exists():
                shutil.copytree(found, what.folder / trial)
    assert whole is not None  # a recipe has at least one row
    return whole


def _told(what: Search) -> dict[str, Any]:
    """Everything that was tried, for the record; no password of a storage."""
    from sqlalchemy.engine import make_url

    rows = {}
    for row in what.rows:
        tried = [
            {
                "values": t.params,
                "valid": t.value,
                "state": t.state.name.lower(),
                "id": t.user_attrs.get("id"),
            }
            for t in _study(what, row).trials
        ]
        rows[row] = {"axes": [a.__dict__ for a in what.axes[row]], "trials": tried}
    place = make_url(what.url)
    shown = (
        place.render_as_string(hide_password=True)
        if not place.drivername.startswith("sqlite")
        else "search.db"
    )
    return {
        "storage": shown,
        "trials": what.trials,
        "metric": what.selection[0],
        "mode": what.selection[1],
        "seeds": [what.seed],
        "rows": rows,
    }
