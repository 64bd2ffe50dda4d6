"""The training loop, and what runs before it: pretraining.

batch -> inputs -> tokens
      -> [(operands -> product -> qkv -> mask -> logits -> probs -> heads) -> branch -> block] x L
      -> outputs -> penalties by name -> loss = task + sum -> backward -> metrics -> record

A pretraining without labels is a run of its own in the folder `pretrain` of the run that starts
from it. It is logged, resumed bit-exactly and finished like any other run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dampen.studies.errors import Diverged
from dampen.studies.run import Run
from dampen.studies.store import PRETRAIN, RunStore, clean_folder, locked
from dampen.studies.trainer.bookkeeping import Bookkeeping, Event, set_threads
from dampen.studies.trainer.checkpoint import keeps_kernels
from dampen.studies.trainer.distributed import launch
from dampen.studies.trainer.models import (
    close_with_pretraining,
    load_pretrained,
    report_as_pretraining,
)
from dampen.studies.trainer.optim import NotFinite, learning_rate, set_learning_rate
from dampen.studies.trainer.state import Execution, TrialState
from dampen.studies.trainer.user_trial import train_user_function


def run_trial(
    trial: Run,
    folder: Path | str,
    execution: Execution | None = None,
    report: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Train one trial in `folder` and return its result, the content of final.json: a pure function
    of the trial.

    A finished trial is not run again; an unfinished one resumes from its last checkpoint
    taken. `report` receives events while it runs; when `stop()` turns true, a checkpoint is written
    and Interrupted raised."""
    folder, execution = Path(folder), execution or Execution()
    with locked(folder):
        record = RunStore(folder)
        result = record.final()
        if result is None:
            clean_folder(folder)
            run = _way(trial)
            result = _pretrain(trial, folder, execution, report, stop) or run(
                trial, folder, execution, report, stop
            )
        if result["status"] == "diverged":
            raise Diverged(result["reason"])
        return result


def _way(trial: Run) -> Callable[..., dict[str, Any]]:
    """How to train: the user's own way, in this process, or on several devices."""
    if trial.function is not None:
        return train_user_function
    return train if trial.train.devices == 1 else _train_on_ranks


@keeps_kernels
def train(
    trial: Run,
    folder: Path,
    execution: Execution,
    report: Callable[[Event], None],
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """The whole of training, in this process (each rank runs it; rank 0 writes)."""
    options, record = trial.train, RunStore(folder)
    set_threads(execution, record)
    s = TrialState(trial, execution, load_pretrained(folder) if trial.pretrain else None)
    keeper = Bookkeeping(s, record, report, stop)
    keeper.start()
    s.model.train()
    try:
        while not s.done:
            for parts in s.batches():  # batch
                began, cpu_began = time.perf_counter(), time.process_time()
                set_learning_rate(s.stepper, learning_rate(s.step, s.total, s.per_epoch, options))
                if s.handle is not None:
                    s.handle.progress(s.step / s.total)  # schedules over training
                for i, (batch, share) in enumerate(parts):
                    with s.part_of_step(last=i + 1 == len(parts)):
                        loss, terms = s.losses(
                            batch
                        )  # inputs -> ... -> outputs -> penalties by name
                        s.meter.add(
                            s.step, terms, share
                        )  # raises NotFinite before a bad gradient reaches the weights
                        s.backward(loss if share == 1 else loss * share)
                s.check_gradient()
                if options.clip is not None:
                    s.fabric.clip_gradients(
                        s.model, s.optimizer, max_norm=options.clip, error_if_nonfinite=False
                    )
                s.stepper.step()
                s.stepper.zero_grad(set_to_none=True)
                if s.average is not None:
                    s.average.update(s.raw)
                s.step += 1
                s.clock(time.perf_counter() - began, time.process_time() - cpu_began)
                keeper.after_step()
            keeper.after_epoch()
        return keeper.finish()
    except NotFinite as bad:
        return keeper.diverged(bad)
    finally:
        keeper.close()


def _pretrain(
    trial: Run,
    folder: Path,
    execution: Execution,
    report: Callable[[Event], None],
    stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Run the trial that goes before this one, if there is one. If it diverges, so did this one:
    that is its result.
    """
    first = trial.pretraining()
    if first is None:
        return None
    kept = replace(execution, keep_weights=True)
    try:
        run_trial(first, folder / PRETRAIN, kept, report_as_pretraining(report), stop)
    except Diverged:
        return close_with_pretraining(trial, folder)
    return None


def _train_on_ranks(
    trial: Run,
    folder: Path,
    execution: Execution,
    report: Callable[[Event], None],
    stop: Callable[[], bool],
) -> dict[str, Any]:
    out: dict[str, Any] = launch(train, trial, folder, execution, report, stop)
    return out
