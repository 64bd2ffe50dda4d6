"""The user's training function: the `Trial` it receives, and how it is run and recorded.

Around the function dampen sets the seeds, adds the methods, writes curves, checkpoints and a record
like that of any other run. Errors inside the function name its file and line and end this run only.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dampen.deprecated import accepts_old_arguments
from dampen.handle import Handle, regularize
from dampen.native import library
from dampen.studies import environment
from dampen.studies.ensembles import FILE as PREDICTIONS
from dampen.studies.ensembles import RETURNED as PREDICTED
from dampen.studies.ensembles import take_predictions
from dampen.studies.errors import LabError, OwnCodeError, Refused, Stopped
from dampen.studies.files import LARGEST, atomic_file, finite
from dampen.studies.loggers import open_loggers
from dampen.studies.processes import is_ctrl_c
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.bookkeeping import Event, set_threads
from dampen.studies.trainer.checkpoint import (
    check_readable,
    keeps_kernels,
    load_newest,
    rng_state,
    save_state,
    saved_states,
    set_rng_state,
)
from dampen.studies.trainer.data import seed_all
from dampen.studies.trainer.instrumented import (
    BaselineHandle,
    Clock,
    Observer,
    RandomStream,
    instrument,
)
from dampen.studies.trainer.optim import Meter, NotFinite
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.user_function import Function, row_methods
from dampen.studies.trainer.user_result import (
    RETURNED,
    UserLog,
    costs,
    diverged,
    finished,
    judged_by,
    lost,
    misfit,
    read_metrics,
    weights_of,
)


class Trial:
    """One running trial, as the user's function sees it.

    Attributes:
        seed: torch, numpy and random are already seeded with it.
        row: the name of the configuration in the table.
        params: the parameters of the comparison and of this configuration.
        folder: the trial's folder; files written here stay with the record.
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
        self._log = UserLog(RunStore(folder))
        self._stream, self._clock, self._meter = (
            RandomStream(spec.seed),
            Clock(),
            Meter(torch.device("cpu")),
        )
        self._handles: list[Any] = []
        self._waiting: list[
            Any
        ] = []  # states of handles from a checkpoint, for handles that are not made yet
        self._resumed, self._fraction = 0, 0.0
        self._began = self._reported_at = self._saved_at = self._asked_at = time.monotonic()
        self._spent = 0.0  # seconds of earlier sessions

    # --- called by the user's function

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested: the next `log` or `checkpoint` raises `dampen.Stopped`."""
        return bool(self._stop())

    @accepts_old_arguments
    def regularize(
        self, model: nn.Module, target_modules: str | Sequence[str] = "*", **options: Any
    ) -> Handle:
        """Put the configuration's methods into `model`: the handle of `dampen.regularize`, with the
        same arguments.

        On the baseline the handle has the same methods and does nothing.

        Args:
            model: any model with softmax attention.
            target_modules: pattern(s) of dotted names of layers or attention modules.
            options: the other keywords of `dampen.regularize`.

        Returns:
            the handle of `dampen.regularize`.
        """
        observer = Observer(self._stream, self._clock, self._step)
        handle: Handle
        if self._spec.methods:
            methods = row_methods(self._spec, self._function, self.row)
            handle = instrument(regularize(model, methods, target_modules, **options), observer)
        else:
            handle = BaselineHandle(model, observer)
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
        """Keep values for curves and the live table; raises `dampen.Stopped` when the trial is to
        end.

        Calls with `step`, `epoch` or `valid` make a line of the log each (a log of more than 2,000
        lines is thinned); other calls are averaged until the next such call, or until there are
        200. `valid_accuracy=0.9` is `valid={"accuracy": 0.9}`, `train_loss` and `loss` belong to
        `train`. Other keywords are numbers (`lr=...`) or groups of numbers. A loss that is NaN or
        infinite ends the trial as diverged.

        Args:
            step: the step of the values.
            epoch: the epoch of the values.
            train: training values by name; a NaN loss ends the run.
            valid: validation values by name.
            more: other numbers, or groups of them.

        Raises:
            Stopped: the run is to end.
        """
        with self._clock.pause():
            before = dict(self._log.known.get("train", {}))
            groups = {"train": train, "valid": valid, **more}
            due = self._log.add(groups, step, epoch)
            if bad := lost(self._log.pending[-1]):
                raise NotFinite(self._count(), bad, before)
            if due:
                self._flush(epoch)
            self._report_progress(force=valid is not None)
        if self.stopping:
            raise self._stopped()

    def checkpoint(self, state: Any) -> None:
        """Save the state that `resume` gives back, with the generators and the regularizers beside
        it.

        `state` is made of dicts, lists, numbers, strings, tensors and numpy arrays, such as
        state_dicts; anything else raises TypeError, because it could not be read back. Or a
        function that makes one: then it is called, and something written, only when a checkpoint is
        due. Raises `dampen.Stopped` after writing when the trial is to end: nothing is lost.

        Args:
            state: what to save, or a function that returns it.

        Raises:
            TypeError: the state could not be read back.
            Stopped: the run is to end; the checkpoint is written.
        """
        stopping = self.stopping
        with self._clock.pause():
            if not callable(state) or stopping or self._due():
                self._log.begin()
                given = state() if callable(state) else state
                check_readable(given, "state")
                save_state(self.folder, "checkpoint", self._count(), self._state(given))
                self._saved_at = time.monotonic()
        if stopping:
            raise self._stopped()

    def resume(self) -> Any:
        """The state of the newest checkpoint, with generators and regularizers as they were; None
        at a fresh start.

        Returns:
            the saved state, or None.
        """
        found, damage = load_newest(self.folder, "checkpoint")
        for problem in damage:
            self._report({"kind": "warning", "message": f"{problem} Going on from the one before."})
        if found is None:
            return None
        if found["trial"] != self._spec.id:
            raise LabError(
                f"{self.folder} has a checkpoint of trial {found['trial']}, not of {self._spec.id}."
            )
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

    # --- called by dampen

    def _step(self, progress: float | None, terms: Mapping[str, Tensor] | None) -> None:
        """A handle was used: check the loss, report progress, and stop where requested."""
        if progress is not None:
            self._fraction = progress
        if terms:
            self._meter.add(self._meter.count, dict(terms))
        now = time.monotonic()
        if now - self._reported_at >= self._execution.progress_seconds:
            self._report_progress()
        if now - self._asked_at >= 0.2:
            self._asked_at = now
            if self.stopping:
                raise self._stopped()

    def _stopped(self) -> Stopped:
        kept = (
            "its checkpoint resumes it"
            if saved_states(self.folder, "checkpoint")
            else "it starts again"
        )
        return Stopped(
            f"Stopped after {self._count()} steps; the next run of the same command: {kept}."
        )

    def _flush(self, epoch: int | None = None) -> None:
        line = self._log.flush(self._seconds(), self._count(), epoch)
        if line is not None and "valid" in line:
            known = ("epoch", "step", "train", "valid")  # other keywords are the user's
            event: dict[str, Any] = {k: line[k] for k in known if k in line}
            self._report({"kind": "epoch", **event, "epochs": None})

    def _report_progress(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._reported_at < self._execution.progress_seconds:
            return
        self._reported_at = now
        passed, left = now - self._began, None
        if 0 < self._fraction <= 1:
            left = round(passed * (1 - self._fraction) / self._fraction, 1)
        latest = dict(self._meter.latest) or self._log.known.get("train", {})
        event = {
            "kind": "progress",
            "step": int(100 * self._fraction),
            "steps": 100,
            "epoch": self._log.epochs or None,
        }
        event |= {"epochs": None, "count": self._count(), "fraction": self._fraction, "eta": left}
        self._report(event | {"terms": {k: v for k, v in latest.items() if math.isfinite(v)}})

    def _resume_step(self) -> int:
        """The step of the newest checkpoint, which `resume` would load."""
        kept = saved_states(self.folder, "checkpoint")
        return int(kept[0].name.split("-")[1]) if kept else 0

    def _due(self) -> bool:
        every = self._execution.checkpoint_steps
        if every is not None and self._count() % every == 0:
            return True
        return time.monotonic() - self._saved_at >= self._execution.checkpoint_seconds

    def _count(self) -> int:
        """Steps done, as far as they were reported."""
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
            "times": {
                k: torch.tensor(v, dtype=torch.float64) for k, v in self._clock.times.items()
            },
        }

    def _finish(self, returned: Any) -> dict[str, Any]:
        """Write the result; drop the checkpoints."""
        if self._spec.methods and not self._handles:
            raise Refused(
                f"{self._named()} never called trial.regularize(model), so the methods of "
                f"{self.row!r} were "
                "not applied. Call it right after building the model."
            )
        returned, predictions = take_predictions(returned, self._named())
        test, valid = read_metrics(returned, self._named())
        if predictions:
            with atomic_file(self.folder / PREDICTIONS) as file:
                p, y = (predictions[name] for name in PREDICTED)
                np.savez_compressed(file, predictions=p, targets=y)
        wanted = self._function.metric if self._function else None
        judged = judged_by(test, wanted)
        known = self._log.known
        if not abs(test[judged[0]]) <= LARGEST:
            name = f"{RETURNED}{judged[0]} = {test[judged[0]]}, the metric of this study"
            raise NotFinite(self._count(), [name], known.get("train", {}))
        self._flush()
        train = self._meter.latest or known.get("train", {})
        result = finished(self._spec.id, test, valid or known.get("valid", {}), train, judged)
        result |= {
            "epochs": self._log.epochs or self._log.lines,
            **self._cost(),
            "last_weights": weights_of(self._models()),
        }
        self._close(result)
        self._report(
            {"kind": "finish", "status": "finished", "test": test, "valid": result["valid"]}
        )
        must_validate = self._function is not None and self._function.must_validate
        if problem := misfit(test, result["valid"], wanted, must_validate, self._named()):
            raise Refused(problem)
        return result

    def _diverged(self, bad: NotFinite) -> dict[str, Any]:
        result = (
            diverged(self._spec.id, bad, self._function.metric if self._function else None)
            | self._cost()
        )
        self._close(result)
        self._report({"kind": "finish", "status": "diverged", "reason": result["reason"]})
        return result

    def _close(self, result: dict[str, Any]) -> None:
        self._log.write()
        self._log.record.finish(finite(result))
        for logger in self._log.loggers:
            logger.finish(finite(result))
        for path in saved_states(self.folder, "checkpoint"):
            path.unlink(missing_ok=True)

    def _cost(self) -> dict[str, Any]:
        device = self._device().type
        return costs(self._models(), self._clock, self._count(), self._seconds(), device) | {
            "resumed": self._resumed
        }

    def _models(self) -> list[nn.Module]:
        return [handle.model for handle in self._handles]

    def _named(self) -> str:
        return self._spec.function["name"] if self._spec.function else "the function"


OUTPUT = "output.txt"
"""The file of the trial's folder that the function prints to: trials share one terminal."""


@keeps_kernels
def train_user_function(
    spec: Run,
    folder: Path,
    execution: Execution,
    report: Callable[[Event], None],
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Run a user's function as a trial, and record it; the folder's lock is held by the caller."""
    if execution.function is None:
        named = spec.function["name"] if spec.function else ""
        raise LabError(
            f"The trial is a run of {named}, which is not at hand. Start it with dampen compare or "
            "dampen.compare."
        )
    record = RunStore(folder)
    set_threads(execution, record)
    function = execution.function.load()
    trial = Trial(spec, folder, execution, report, stop)
    where = environment.describe(torch.get_num_threads(), "cpu")
    record.start(spec, where | {"code": environment.git_state(execution.function.code.root)})
    report({"kind": "start", "step": 0, "steps": 100, "resumed": 0})
    trial._log.loggers = open_loggers(execution.log_to, folder, spec, trial._resume_step())
    seed_all(spec.seed)
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with (
            (folder / OUTPUT).open("a") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            returned = function(trial)
        return trial._finish(returned)
    except NotFinite as bad:
        return trial._diverged(bad)
    except LabError:
        raise
    except BaseException as error:  # CancelledError, SystemExit and others are no Exception
        if is_ctrl_c(error):
            raise
        raise _locate_error(error, execution.function) from error
    finally:
        trial._log.write()
        for logger in trial._log.loggers:
            logger.close()
        # The worker's next trial starts from the same state.
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])


def _locate_error(error: BaseException, function: Function) -> OwnCodeError:
    """The error with the place in the user's code where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(function.code.root) if function.code.root else None
    in_user_code = [f for f in frames if _is_user_file(f.filename, root, function)]
    place = (in_user_code or frames)[-1]
    name = Path(place.filename).name if not place.filename.startswith("<") else place.filename
    message = "".join(traceback.format_exception_only(error)).strip()
    failure = OwnCodeError(f"{name}, line {place.lineno}, in {place.name}: {message}")
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _is_user_file(file: str, root: str | None, function: Function) -> bool:
    if root is None:
        return file.startswith("<") or "ipykernel" in file
    return any(file == str(Path(root) / name) for name in function.code.files) or Path(
        file
    ).name in {Path(name).name for name in function.code.files}
