"""Looking before leaping: can every row run on this model, and how long will it take?"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from dampen.handle import regularize
from dampen.studies.config.methods_text import build_methods
from dampen.studies.config.names import brings_task
from dampen.studies.config.plan import Comparison
from dampen.studies.config.trial import Run
from dampen.studies.errors import ConfigError, Interrupted, LabError
from dampen.studies.trainer.build import load_data, make_model, places, seed_all
from dampen.studies.trainer.losses import loss_of
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial

STEPS = 6
"""Steps that a dry run takes of each row."""


def check_rows(plan: Comparison, folder: Path, execution: Execution) -> None:
    """Refuse rows that cannot run on the model, all at once and before anything starts: one step with two examples.

    Rows that have a result already are not asked again; a training of the user's own, and pretraining, are not ours
    to cut short.
    """
    problems, state = [], torch.get_rng_state()
    for row in plan.rows:
        trial = plan.trials[next(iter(row.points[0].trials.values()))]
        done = any((folder / i / "final.json").exists() for p in row.points for i in p.trials.values())
        if trial.function is None and trial.pretrain is None and brings_task(trial.model["name"]) is None and not done:
            problem = _problem(trial, execution)
            problems += [f"row {row.name!r} cannot run on {trial.model['name']}: {problem}"] if problem else []
    torch.set_rng_state(state)
    if problems:
        raise ConfigError("The comparison", problems)


def _problem(trial: Run, execution: Execution) -> str:
    """Why the methods of a trial do not work on its model, or nothing. What is wrong without them is raised."""
    data = load_data(trial.data, execution.data_dir, execution.parts, trial.seed)
    trial.train.steps_per_epoch(len(data.train))  # raises where there are fewer examples than one batch has
    seed_all(0)
    try:
        model = make_model(trial.model, data.model_args, execution.parts).train()
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("The model", [f"{trial.model['name']} cannot be built for this data: {error}"]) from error
    batch = data.train.batch([0, min(1, len(data.train) - 1)])

    def criterion(output: Any) -> torch.Tensor:
        return loss_of(data, output, batch["target"], batch.get("valid"))

    if not trial.methods:
        try:
            criterion(model(*batch["inputs"]))
        except (ValueError, TypeError, RuntimeError, AssertionError) as error:
            shapes = [tuple(x.shape) for x in batch["inputs"]]
            problem = f"{trial.model['name']} cannot take the data, inputs of shape {shapes}: {error}"
            raise ConfigError("The model", [problem]) from error
        return ""
    try:
        handle = regularize(model, build_methods(trial.methods), **places(trial.sites))
        handle.loss(lambda: model(*batch["inputs"]), criterion, valid=batch.get("valid"))
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class RowProbe:
    """What a few steps of a row said: whether it runs, what a step takes, and how long a trial will."""

    row: str
    problem: str = ""
    step_seconds: float | None = None
    steps: int | None = None

    @property
    def seconds(self) -> float | None:
        """The steps of one trial, without evaluation; None where the training does not say how long it is."""
        return self.step_seconds * self.steps if self.step_seconds is not None and self.steps else None


def probe(plan: Comparison, execution: Execution) -> list[RowProbe]:
    """Run a few steps of the first trial of each row, in a folder that is thrown away."""
    return [_probe(row.name, plan.trials[next(iter(row.points[0].trials.values()))], execution) for row in plan.rows]


def _probe(row: str, trial: Run, execution: Execution) -> RowProbe:
    seen: list[tuple[float, int, int | None]] = []

    def report(event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            count, total = event.get("count", event["step"]), event["steps"]
            if "fraction" in event:  # one's own training tells the share that is done before a step
                total = round((count - 1) / event["fraction"]) if event["fraction"] and count > 1 else None
            if not seen or count > seen[-1][1]:
                seen.append((time.perf_counter(), count, total))

    quick = replace(execution, progress_seconds=0.0, keep_weights=False)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_trial(trial, Path(folder) / trial.id, quick, report, lambda: len(seen) >= STEPS)
        except Interrupted:
            pass  # as asked
        except LabError as error:
            return RowProbe(row, str(error))
        except Exception as error:  # data and models raise their own kinds; a dry run tells all of them
            return RowProbe(row, f"{type(error).__name__}: {error}")
    gaps = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(seen) if b[1] > a[1]]
    total = next((t for _, _, t in reversed(seen) if t), None)
    return RowProbe(row, "", statistics.median(gaps) if gaps else None, total)
