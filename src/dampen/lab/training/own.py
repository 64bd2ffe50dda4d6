"""A trial that is a user's own training: the function gets a `Trial`, does what it likes, and returns test metrics.

What the lab does around it: seeds, the row's methods, curves, checkpoints, the times of steps, and a record like that
of any other trial. Errors inside the function name its file and line and end this trial only.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dampen.handle import Regularization, regularize
from dampen.lab.allocator import describe_malloc
from dampen.lab.config.methods_text import OBJECT, build_methods
from dampen.lab.config.trial import TrialSpec
from dampen.lab.errors import ConfigError, LabError, OwnCodeError, Stopped
from dampen.lab.loggers import Logger, flat, open_loggers
from dampen.lab.records import environment
from dampen.lab.records.final import FORMAT
from dampen.lab.records.metric import describe
from dampen.lab.records.record import Record
from dampen.lab.training.bookkeeping import Event, _finite, set_threads
from dampen.lab.training.build import seed_all
from dampen.lab.training.checkpoint import fingerprint, load_newest, rng_state, save_state, saved_states, set_rng_state
from dampen.lab.training.function import Function
from dampen.lab.training.losses import Meter, NotFinite
from dampen.lab.training.state import Execution
from dampen.lab.training.watched import Clock, PlainHandle, Stream, Watch, watch

PENDING = 200
"""Calls of `log` without validation that are averaged into one line of the log."""
OUTPUT = "output.txt"
"""What the function prints goes into this file of the trial's folder: several trials share one terminal."""


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
        spec: TrialSpec,
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
        self._record = Record(folder)
        self._stream, self._clock, self._meter = Stream(spec.seed), Clock(), Meter(torch.device("cpu"))
        self._handles: list[Any] = []
        self._waiting: list[Any] = []  # states of handles from a checkpoint, for handles that are not made yet
        self._steps = self._lines = self._epochs = self._resumed = 0
        self._known: dict[str, dict[str, float]] = {}  # the newest logged values of each group
        self._pending: list[dict[str, dict[str, float]]] = []
        self._fraction = 0.0
        self._began = self._told_at = self._saved_at = self._asked_at = time.monotonic()
        self._spent = 0.0  # seconds of earlier sessions
        self._loggers: list[Logger] = []
        self._open = False  # whether the log belongs to this session

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
            handle = watch(regularize(model, self._methods(), sites, **options), observer)
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
            groups = {"train": train, "valid": valid, **more}
            values = {k: _numbers(k, v) for k, v in groups.items() if v is not None}
            self._steps = self._steps if step is None else int(step)
            self._epochs = self._epochs if epoch is None else int(epoch)
            self._pending.append(values)
            self._known |= {k: v for k, v in values.items() if isinstance(v, dict)}
            if valid is not None or epoch is not None or len(self._pending) >= PENDING:
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
                self._begin()
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
        self._steps, self._epochs, self._lines = found["steps"], found["epochs"], found["lines"]
        self._known, self._spent = found["known"], found["seconds"]
        self._clock.times = {k: [tuple(t) for t in v.tolist()] for k, v in found["times"].items()}
        self._record.keep_lines(self._lines)
        self._open, self._resumed = True, len(self._record.sessions()) - 1
        set_rng_state(found["rng"], self._device())
        self._report({"kind": "start", "step": int(100 * self._fraction), "steps": 100, "resumed": self._resumed})
        return found["state"]

    # --- what the lab does

    def _methods(self) -> list[Any]:
        objects = self._function.objects if self._function else {}
        made = []
        for spec in self._spec.methods:
            if OBJECT not in spec:
                made += build_methods([spec])
                continue
            if spec[OBJECT] not in objects:
                problem = f"the regularizer {spec['name']!r} of row {self.row!r} is an object that was not sent along"
                raise ConfigError("The trial", [f"{problem}; start the comparison from where it is defined"])
            import cloudpickle

            made.append(cloudpickle.loads(objects[spec[OBJECT]]))
        return made

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

    def _begin(self) -> None:
        """The log of an earlier session that nobody resumed is not part of this one."""
        if not self._open:
            self._record.keep_lines(0)
            self._open = True

    def _flush(self, epoch: int | None = None) -> None:
        if not self._pending:
            return
        self._begin()
        self._lines += 1
        line: dict[str, Any] = {"epoch": self._lines if epoch is None else epoch, "step": self._steps}
        line |= _means(self._pending)
        line["seconds"] = round(self._seconds(), 4)
        self._pending = []
        self._record.log(_finite(line))
        for logger in self._loggers:
            logger.log(self._count(), flat(_finite(line)))
        if "valid" in line:
            self._report({"kind": "epoch", **_finite(line), "epochs": None})

    def _tell(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told_at < self._execution.progress_seconds:
            return
        self._told_at = now
        passed, left = now - self._began, None
        if 0 < self._fraction <= 1:
            left = round(passed * (1 - self._fraction) / self._fraction, 1)
        latest = dict(self._meter.latest) or self._known.get("train", {})
        terms = {k: v for k, v in latest.items() if math.isfinite(v)}
        told = {"kind": "progress", "step": int(100 * self._fraction), "steps": 100, "epoch": self._epochs or None}
        self._report(
            {
                **told,
                "epochs": None,
                "count": self._count(),
                "fraction": self._fraction,
                "terms": terms,
                "eta": left,
            }
        )

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
        return max(self._steps, self._clock.count)

    def _seconds(self) -> float:
        return self._spent + time.monotonic() - self._began

    def _device(self) -> torch.device:
        parameter = next((p for h in self._handles for p in h.model.parameters()), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    def _state(self, state: Any) -> dict[str, Any]:
        return {
            "trial": self._spec.id,
            "state": state,
            "handles": [h.state_dict() for h in self._handles],
            "stream": dict(self._stream.states),
            "rng": rng_state(self._device()),
            "steps": self._steps,
            "epochs": self._epochs,
            "lines": self._lines,
            "known": self._known,
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
        test, valid = self._metrics(returned)
        name, mode = self._judged_by(test)
        percent = [k for k, v in test.items() if describe(k).percent and not -1.0 <= v <= 1.0 and math.isfinite(v)]
        if percent:
            told = f"{percent[0]} = {test[percent[0]]:g}"
            raise LabError(f"{self._named()} returned {told}, but it is recorded as a fraction of 1: divide it by 100.")
        if not math.isfinite(test[name]):
            raise NotFinite(self._count(), [f"test {name}"], self._known.get("train", {}))
        self._flush()
        result = {
            "id": self._spec.id,
            "format": FORMAT,
            "status": "finished",
            "task": "own",
            "primary": [name, mode],
            "selection": [name, mode],
            "test": test,
            "valid": valid or self._known.get("valid", {}),
            "train": self._meter.latest or self._known.get("train", {}),
            "epochs": self._epochs or self._lines,
            **self._cost(),
            "last_weights": self._weights(),
            "data": {},
        }
        self._close(result)
        self._report({"kind": "finish", "status": "finished", "test": test, "valid": result["valid"]})
        return result

    def _diverged(self, bad: NotFinite) -> dict[str, Any]:
        before = ", ".join(f"{k} {v:.4g}" for k, v in bad.before.items()) or "nothing yet"
        terms = " and ".join(map(repr, bad.names))
        reason = (
            f"Training stopped at step {bad.step}: {terms} became NaN or infinite first (the step before: {before})."
        )
        result = {"id": self._spec.id, "status": "diverged", "reason": reason, "terms": bad.names, "step": bad.step}
        result["format"] = FORMAT
        judged = list(self._function.metric) if self._function and self._function.metric else ["", "max"]
        result |= {"task": "own", "primary": judged, "selection": judged, **self._cost(), "data": {}}
        self._close(result)
        self._report({"kind": "finish", "status": "diverged", "reason": reason})
        return result

    def _close(self, result: dict[str, Any]) -> None:
        self._record.finish(_finite(result))
        for logger in self._loggers:
            logger.finish(_finite(result))
        for path in saved_states(self.folder, "checkpoint"):
            path.unlink(missing_ok=True)

    def _metrics(self, returned: Any) -> tuple[dict[str, float], dict[str, float]]:
        """Test and validation metrics from what the function returned."""
        wanted = 'return {"accuracy": 0.9} or {"test": {...}, "valid": {...}}, of the test part'
        if not isinstance(returned, Mapping) or not returned:
            raise LabError(f"{self._named()} returned {returned!r} instead of test metrics: {wanted}.")
        if isinstance(returned.get("test"), Mapping):
            parts = {k: returned.get(k) or {} for k in ("test", "valid")}
        else:
            parts = {"test": returned, "valid": {}}
        test, valid = (_numbers(k, parts[k]) for k in ("test", "valid"))
        if not isinstance(test, dict) or not test or not isinstance(valid, dict):
            raise LabError(f"{self._named()} returned no test metrics: got {returned!r}; {wanted}.")
        return test, valid

    def _judged_by(self, test: Mapping[str, float]) -> tuple[str, str]:
        """The metric of the study, or the first that came back."""
        wanted = self._function.metric if self._function else None
        if wanted is None:
            name = next(iter(test))
            return name, direction(name)
        if wanted[0] not in test:
            raise LabError(
                f"The study is judged by {wanted[0]!r}, but {self._named()} returned only {', '.join(test)}. "
                "Return it, or name another metric."
            )
        return wanted

    def _cost(self) -> dict[str, Any]:
        steps = self._clock.steps()
        models = {id(h.model): h.model for h in self._handles}
        return {
            "steps": self._count(),
            "parameters": sum(p.numel() for m in models.values() for p in m.parameters()),
            "seconds": {"train": round(self._seconds(), 3), "evaluate": 0.0, "cpu": round(sum(c for _, c in steps), 3)},
            "step_seconds": statistics.median(wall for wall, _ in steps) if steps else None,
            "step_cpu_seconds": statistics.median(cpu for _, cpu in steps) if steps else None,
            "device": self._device().type,
            "threads": torch.get_num_threads(),
            "malloc": describe_malloc(),
            "resumed": self._resumed,
        }

    def _weights(self) -> str:
        """A checksum of the regularized models as the function left them; '' where there is none."""
        states = {f"{i}.{k}": v for i, h in enumerate(self._handles) for k, v in h.model.state_dict().items()}
        tensors = {k: v for k, v in states.items() if isinstance(v, Tensor) and not v.is_meta}
        return fingerprint(tensors) if tensors else ""

    def _named(self) -> str:
        return self._spec.function["name"] if self._spec.function else "the function"


def run_own(
    spec: TrialSpec, folder: Path, execution: Execution, report: Callable[[Event], None], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Run a user's function as a trial, and record it; the folder's lock is held by the caller."""
    if execution.function is None:
        named = spec.function["name"] if spec.function else ""
        raise LabError(
            f"The trial is a run of {named}, which is not at hand. Start it with dampen compare or dampen.compare."
        )
    record = Record(folder)
    set_threads(execution, record)
    function = execution.function.load()
    trial = Trial(spec, folder, execution, report, stop)
    record.start(spec, environment.describe(torch.get_num_threads(), "cpu"))
    report({"kind": "start", "step": 0, "steps": 100, "resumed": 0})
    trial._loggers = open_loggers(execution.log_to, folder, spec, trial._resume_step())
    seed_all(spec.seed)
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with (folder / OUTPUT).open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            returned = function(trial)
        return trial._finish(returned)
    except NotFinite as bad:
        return trial._diverged(bad)
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        raise _in_their_words(error, execution.function, trial) from error
    finally:
        for logger in trial._loggers:
            logger.close()
        # The worker's next trial starts from the same state.
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])


def _in_their_words(error: BaseException, function: Function, trial: Trial) -> OwnCodeError:
    """The error with the place in the user's code where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(function.code.root) if function.code.root else None
    own = [f for f in frames if _theirs(f.filename, root, function)]
    place = own[-1] if own else frames[-1]
    name = Path(place.filename).name if not place.filename.startswith("<") else place.filename
    message = "".join(traceback.format_exception_only(error)).strip()
    told = OwnCodeError(
        f"{name}, line {place.lineno}, in {place.name}: {message} (row {trial.row!r}, seed {trial.seed})"
    )
    told.add_note("".join(traceback.format_exception(error)))
    return told


def _theirs(file: str, root: str | None, function: Function) -> bool:
    if root is None:
        return file.startswith("<") or "ipykernel" in file
    return any(file == str(Path(root) / name) for name in function.code.files) or Path(file).name in {
        Path(name).name for name in function.code.files
    }


def direction(metric: str) -> str:
    """'max' or 'min': which way a metric of this name improves, as far as its name tells.

    >>> direction("accuracy"), direction("valid_loss"), direction("rmse")
    ('max', 'min', 'min')
    """
    known = describe(metric).better
    if known is not None:
        return known
    falling = ("loss", "nll", "error", "perplexity", "bpc", "ece", "brier", "mse", "mae", "rmse", "wer", "cer", "fid")
    return "min" if any(part in falling for part in metric.lower().replace("-", "_").split("_")) else "max"


def _numbers(group: str, value: Any) -> Any:
    """A number or a group of numbers as plain floats; tensors with one element count as numbers."""
    if isinstance(value, Mapping):
        return {str(k): _number(f"{group}.{k}", v) for k, v in value.items()}
    return _number(group, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) or value is None:
        raise TypeError(f"{name} must be a number, got {value!r}.")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number or a tensor with one element, got {type(value).__name__}.") from error


def _means(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every value over some calls of `log`; validation is the newest."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(k for call in calls for k in call):
        given = [call[key] for call in calls if key in call]
        if key == "valid" or not isinstance(given[-1], dict):
            found[key] = given[-1]
        else:
            names = dict.fromkeys(n for values in given for n in values)
            found[key] = {n: statistics.fmean(v[n] for v in given if n in v) for n in names}
    return found
