"""A trial at work, as the user's function sees it: methods, curves, checkpoints, a seed and a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dampen.handle import Regularization, regularize
from dampen.native import library
from dampen.studies.errors import LabError, Stopped
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.bookkeeping import Event, _finite
from dampen.studies.trainer.checkpoint import load_newest, rng_state, save_state, saved_states, set_rng_state
from dampen.studies.trainer.function import Function, row_methods
from dampen.studies.trainer.losses import Meter, NotFinite
from dampen.studies.trainer.own_costs import costs, weights_of
from dampen.studies.trainer.own_log import OwnLog
from dampen.studies.trainer.own_result import RETURNED, diverged, finished, judged_by, read_metrics
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.watched import Clock, PlainHandle, RandomStream, Watch, watch


class Trial:
    """One trial at work, as the user's function sees it.

    Attributes:
        seed: torch, numpy and random are seeded with it already.
        row: the name of the row in the table.
        params: the parameters of the comparison and of this row.
        folder: the trial's folder; what is written here stays with the record.
    """

    def __init__(
        self,
        spec: Run,
        folder: Path,
        execution: Execution,
        report: Callable[[Event], None] = lambda event: None,
        stop: Callable[[], bool] = lambda: False,
    ):
        assert spec.function is not None  # run_trial sends only such trials here
        self._spec, self._execution, self._report, self._stop = spec, execution, report, stop
        self._function: Function | None = execution.function
        self.seed, self.folder = spec.seed, folder
        self.params: dict[str, Any] = dict(spec.function["params"])
        self.row = self._function.rows.get(spec.id, "") if self._function else ""
        self._log = OwnLog(RunStore(folder))
        self._stream, self._clock, self._meter = RandomStream(spec.seed), Clock(), Meter(torch.device("cpu"))
        self._handles: list[Any] = []
        self._waiting: list[Any] = []  # states of handles from a checkpoint, for handles that are not made yet
        self._resumed, self._fraction = 0, 0.0
        self._began = self._told_at = self._saved_at = self._asked_at = time.monotonic()
        self._spent = 0.0  # seconds of earlier sessions

    # --- what the user's function calls

    @property
    def stopping(self) -> bool:
        """Whether the trial was asked to stop; the next call of `log` or `checkpoint` raises `dampen.Stopped`."""
        return bool(self._stop())

    def regularize(self, model: nn.Module, sites: str | Sequence[str] = "*", **options: Any) -> Regularization:
        """Put the row's methods into `model`: the handle of `dampen.regularize`, with the same arguments.

        On the plain row the handle has the same methods and does nothing.
        """
        observer = Watch(self._stream, self._clock, self._step)
        handle: Regularization
        if self._spec.methods:
            methods = row_methods(self._spec, self._function, self.row)
            handle = watch(regularize(model, methods, sites, **options), observer)
        else:
            handle = PlainHandle(model, observer)
        self._handles.append(handle)
        self._meter.every = Meter(self._device()).every
        if self._waiting:
            handle.load_state_dict(self._waiting.pop(0))
        return handle

    def log(
        self,
        *,
        step: int | None = None,
        epoch: int | None = None,
        train: Mapping[str, Any] | None = None,
        valid: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Keep values for curves and the live table; raises `dampen.Stopped` when the trial is to end.

        Calls with `valid` make a line of the log each; calls without are averaged until the next such call, or until
        there are 200. Other keywords are numbers (`lr=...`) or groups of numbers.
        """
        with self._clock.pause():
            if self._log.add({"train": train, "valid": valid, **more}, step, epoch):
                self._flush(epoch)
            self._tell(force=valid is not None)
        if self.stopping:
            raise self._stopped()

    def checkpoint(self, state: Any) -> None:
        """Save the state that `resume` gives back, with the generators and the regularizers beside it.

        `state` is made of dicts, lists, numbers, strings and tensors, such as state_dicts. Or a function that makes
        one: then it is called, and something written, only when a checkpoint is due. Raises `dampen.Stopped` after
        writing when the trial is to end: nothing is lost.
        """
        stopping = self.stopping
        with self._clock.pause():
            if not callable(state) or stopping or self._due():
                self._log.begin()
                save_state(self.folder, "checkpoint", self._count(), self._state(state() if callable(state) else state))
                self._saved_at = time.monotonic()
        if stopping:
            raise self._stopped()

    def resume(self) -> Any:
        """The state of the newest checkpoint, with generators and regularizers as they were; None at a fresh start."""
        found, damage = load_newest(self.folder, "checkpoint")
        for problem in damage:
            self._report({"kind": "warning", "message": f"{problem} Going on from the one before."})
        if found is None:
            return None
        if found["trial"] != self._spec.id:
            raise LabError(f"{self.folder} has a checkpoint of trial {found['trial']}, not of {self._spec.id}.")
        states = list(found["handles"])
        for handle in self._handles:
            handle.load_state_dict(states.pop(0))
        self._waiting = states
        self._stream.states = dict(found["stream"])
        self._log.load_state(found)
        self._spent = found["seconds"]
        self._clock.times = {k: [tuple(t) for t in v.tolist()] for k, v in found["times"].items()}
        self._resumed = len(self._log.record.sessions()) - 1
        set_rng_state(found["rng"], self._device())
        at = {"step": int(100 * self._fraction), "steps": 100, "count": self._count()}
        self._report({"kind": "start", **at, "resumed": self._resumed})
        return found["state"]

    # --- what the lab does

    def _step(self, progress: float | None, terms: Mapping[str, Tensor] | None) -> None:
        """A handle was used: look at the loss, tell how far we are, and hear whether to stop."""
        if progress is not None:
            self._fraction = progress
        if terms:
            self._meter.add(self._meter.count, dict(terms))
        now = time.monotonic()
        if now - self._told_at >= self._execution.progress_seconds:
            self._tell()
        if now - self._asked_at >= 0.2:
            self._asked_at = now
            if self.stopping:
                raise self._stopped()

    def _stopped(self) -> Stopped:
        kept = "its checkpoint resumes it" if saved_states(self.folder, "checkpoint") else "it starts again"
        return Stopped(f"Stopped after {self._count()} steps; the next run of the same command: {kept}.")

    def _flush(self, epoch: int | None = None) -> None:
        line = self._log.flush(self._seconds(), self._count(), epoch)
        if line is not None and "valid" in line:
            known = ("epoch", "step", "train", "valid")  # other keywords are the user's
            told: dict[str, Any] = {k: line[k] for k in known if k in line}
            self._report({"kind": "epoch", **told, "epochs": None})

    def _tell(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told_at < self._execution.progress_seconds:
            return
        self._told_at = now
        passed, left = now - self._began, None
        if 0 < self._fraction <= 1:
            left = round(passed * (1 - self._fraction) / self._fraction, 1)
        latest = dict(self._meter.latest) or self._log.known.get("train", {})
        told = {"kind": "progress", "step": int(100 * self._fraction), "steps": 100, "epoch": self._log.epochs or None}
        told |= {"epochs": None, "count": self._count(), "fraction": self._fraction, "eta": left}
        self._report(told | {"terms": {k: v for k, v in latest.items() if math.isfinite(v)}})

    def _resume_step(self) -> int:
        """The step of the newest checkpoint, which `resume` would go on from."""
        kept = saved_states(self.folder, "checkpoint")
        return int(kept[0].name.split("-")[1]) if kept else 0

    def _due(self) -> bool:
        every = self._execution.checkpoint_steps
        if every is not None and self._count() % every == 0:
            return True
        return time.monotonic() - self._saved_at >= self._execution.checkpoint_seconds

    def _count(self) -> int:
        """Steps done, as far as anybody told."""
        return max(self._log.steps, self._clock.count)

    def _seconds(self) -> float:
        return self._spent + time.monotonic() - self._began

    def _device(self) -> torch.device:
        parameter = next((p for h in self._handles for p in h.model.parameters()), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    def _state(self, state: Any) -> dict[str, Any]:
        return {
            "trial": self._spec.id,
            "kernels": library.path(),
            "state": state,
            "handles": [h.state_dict() for h in self._handles],
            "stream": dict(self._stream.states),
            "rng": rng_state(self._device()),
            **self._log.state(),
            "seconds": self._seconds(),
            "times": {k: torch.tensor(v, dtype=torch.float64) for k, v in self._clock.times.items()},
        }

    def _finish(self, returned: Any) -> dict[str, Any]:
        """Write the result; drop the checkpoints."""
        if self._spec.methods and not self._handles:
            raise LabError(
                f"Row {self.row!r} has methods, but {self._named()} never called trial.regularize(model): it would "
                "have trained the plain model under their name. Call it once the model is made."
            )
        test, valid = read_metrics(returned, self._named())
        judged = judged_by(test, self._function.metric if self._function else None, self._named())
        known = self._log.known
        if not math.isfinite(test[judged[0]]):
            told = f"{RETURNED}{judged[0]} = {test[judged[0]]}, by which this study is judged"
            raise NotFinite(self._count(), [told], known.get("train", {}))
        self._flush()
        train = self._meter.latest or known.get("train", {})
        result = finished(self._spec.id, test, valid or known.get("valid", {}), train, judged)
        result |= {
            "epochs": self._log.epochs or self._log.lines,
            **self._cost(),
            "last_weights": weights_of(self._models()),
        }
        self._close(result)
        self._report({"kind": "finish", "status": "finished", "test": test, "valid": result["valid"]})
        return result

    def _diverged(self, bad: NotFinite) -> dict[str, Any]:
        result = diverged(self._spec.id, bad, self._function.metric if self._function else None) | self._cost()
        self._close(result)
        self._report({"kind": "finish", "status": "diverged", "reason": result["reason"]})
        return result

    def _close(self, result: dict[str, Any]) -> None:
        self._log.record.finish(_finite(result))
        for logger in self._log.loggers:
            logger.finish(_finite(result))
        for path in saved_states(self.folder, "checkpoint"):
            path.unlink(missing_ok=True)

    def _cost(self) -> dict[str, Any]:
        device = self._device().type
        return costs(self._models(), self._clock, self._count(), self._seconds(), device) | {"resumed": self._resumed}

    def _models(self) -> list[nn.Module]:
        return [handle.model for handle in self._handles]

    def _named(self) -> str:
        return self._spec.function["name"] if self._spec.function else "the function"
