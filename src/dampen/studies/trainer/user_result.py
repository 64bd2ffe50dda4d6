"""What a user's function logged and returned, as log lines and a result with its costs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.native import library
from dampen.studies.errors import Refused
from dampen.studies.files import CHECKSUM, finite
from dampen.studies.loggers import Logger, flat
from dampen.studies.metric import describe
from dampen.studies.processes import describe_malloc
from dampen.studies.result import FORMAT
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import fingerprint
from dampen.studies.trainer.instrumented import Clock
from dampen.studies.trainer.optim import NotFinite

RESERVED = ("seconds", CHECKSUM)
"""Entries of a log line that dampen writes; a user's own values under these names would be lost."""
PENDING = 200
"""Calls of `log` without a step or validation that are averaged into one line of the log."""
POINTS = 2000
"""Lines above which a log is thinned: every second line without validation goes."""
WAIT = 1.0
"""Seconds that lines may wait before they are written: a file is not opened at every step."""


class UserLog:
    """Collects what the function logs; makes a line per step, validation,
    epoch, or `PENDING` calls.

    Lines wait in memory for up to `WAIT` seconds; `write` puts them on disk, as every checkpoint
    and the end of a run does.
    """

    def __init__(self, record: RunStore):
        self.record = record
        self.loggers: list[Logger] = []
        self.steps = self.epochs = self.lines = self.seen = 0
        self.every = 1  # of the lines without validation one in so many is kept
        self.known: dict[str, dict[str, float]] = {}  # the newest values of each group
        self.pending: list[dict[str, Any]] = []
        self.waiting: list[dict[str, Any]] = []  # lines that are not on disk yet
        self.written_at = 0.0
        self.open = False  # whether the log on disk belongs to this session

    def begin(self) -> None:
        """Drop the log of an earlier session that was not resumed."""
        if not self.open:
            self.record.keep_lines(0)
            self.open = True

    def add(self, groups: Mapping[str, Any], step: int | None, epoch: int | None) -> bool:
        """Add one call of `trial.log`; returns whether a line of the log is due."""
        reserved = [name for name in RESERVED if name in groups]
        if reserved:
            raise TypeError(
                f"trial.log({reserved[0]}=...): dampen writes {reserved[0]!r} into every line "
                f"itself. Use another name, such as my_{reserved[0]}."
            )
        for name in ("train", "valid"):
            if not isinstance(groups.get(name), Mapping | None):
                raise TypeError(
                    f"trial.log({name}=...) must be a dict of numbers, got {groups[name]!r}: "
                    f'write {name}={{"loss": ...}}.'
                )
        values = grouped({k: numbers(k, v) for k, v in groups.items() if v is not None})
        self.steps = self.steps if step is None else int(step)
        self.epochs = self.epochs if epoch is None else int(epoch)
        self.pending.append(values)
        self.known |= {k: v for k, v in values.items() if isinstance(v, dict)}
        told = step is not None or epoch is not None or "valid" in values
        return told or len(self.pending) >= PENDING

    def flush(self, seconds: float, at: int, epoch: int | None = None) -> dict[str, Any] | None:
        """Write what is pending as one line, and return it; `at` is the step for the loggers."""
        if not self.pending:
            return None
        thinned_out = "valid" not in self.pending[-1] and self.seen % self.every > 0
        self.seen += "valid" not in self.pending[-1]
        self.lines += not thinned_out
        line: dict[str, Any] = {"step": self.steps}
        if epoch is not None or not self.steps:
            line["epoch"] = self.lines if epoch is None else epoch
        line |= _means(self.pending)
        line["seconds"] = round(seconds, 4)
        self.pending, line = [], finite(line)
        if not thinned_out:
            self.waiting.append(line)
        for logger in self.loggers:
            logger.log(at, flat(line))
        if "valid" in line or time.monotonic() - self.written_at > WAIT:
            self.write()
        return line

    def write(self) -> None:
        """Put the lines that wait on disk, and thin the log where it has grown too long."""
        self.written_at = time.monotonic()
        if not self.waiting:
            return
        self.begin()
        self.record.log_lines(self.waiting)
        self.waiting = []
        if self.lines > POINTS:
            kept = thinned(self.record.lines())
            self.record.write_lines(kept)
            self.lines, self.every = len(kept), 2 * self.every

    def state(self) -> dict[str, Any]:
        """For the checkpoint; the lines before it are on disk."""
        self.write()
        names = ("steps", "epochs", "lines", "seen", "every", "known", "pending")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint: lines written after it will be written again."""
        self.steps, self.epochs, self.lines = state["steps"], state["epochs"], state["lines"]
        self.seen, self.every = state.get("seen", 0), state.get("every", 1)
        self.known, self.pending = (
            dict(state["known"]),
            list(state.get("pending", [])),
        )  # checkpoints before 0.2
        # The log may have been thinned since the checkpoint: then what came after
        # it is known by its step.
        kept = [
            line for line in self.record.lines()[: self.lines] if line.get("step", 0) <= self.steps
        ]
        self.record.write_lines(kept)
        self.lines, self.open = len(kept), True


def thinned(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Every second line without validation, and every line with it.

    Args:
        lines: of a log, in order.

    >>> thinned([{"step": i} for i in range(4)] + [{"step": 4, "valid": {}}, {"step": 5}])
    [{'step': 0}, {'step': 2}, {'step': 4, 'valid': {}}, {'step': 5}]
    """
    kept, odd = [], False
    for line in lines:
        if "valid" in line or not odd:
            kept.append(line)
        if "valid" not in line:
            odd = not odd
    return kept


GROUPS = {"valid_": "valid", "val_": "valid", "train_": "train"}
"""Prefixes of numbers that belong to a group: valid_accuracy=0.9 is valid={"accuracy": 0.9}."""


def grouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Single numbers in the group that their name names; `loss` is a training loss.

    Args:
        values: numbers and groups of numbers, by name.

    >>> grouped({"valid_accuracy": 0.9, "loss": 1.5, "lr": 0.1})
    {'lr': 0.1, 'valid': {'accuracy': 0.9}, 'train': {'loss': 1.5}}
    """
    found = {k: v for k, v in values.items() if isinstance(v, dict)}
    single = {k: v for k, v in values.items() if k not in found}
    kept: dict[str, Any] = {}
    for key, value in single.items():
        prefix = next((p for p in GROUPS if key.startswith(p) and key != p), "")
        group = "train" if key == "loss" else GROUPS.get(prefix, "")
        if group:
            found[group] = {key.removeprefix(prefix): value, **found.get(group, {})}
        else:
            kept[key] = value
    return kept | found


def numbers(group: str, value: Any) -> Any:
    """A number or a group of numbers as plain floats; tensors with one element count as numbers."""
    if isinstance(value, Mapping):
        return {str(k): _number(f"{group}.{k}", v) for k, v in value.items()}
    return _number(group, value)


def lost(values: Mapping[str, Any]) -> list[str]:
    """The names of losses that are NaN or infinite, among the values of one call of `trial.log`.

    Args:
        values: as `UserLog.add` keeps them.

    >>> lost({"train": {"loss": math.nan, "auc": math.nan}, "valid_loss": math.inf})
    ['train.loss', 'valid_loss']
    """
    named: dict[str, float] = {}
    for group, value in values.items():
        if isinstance(value, dict):
            named |= {f"{group}.{name}": number for name, number in value.items()}
        else:
            named[group] = value
    return [k for k, v in named.items() if "loss" in k.lower() and not math.isfinite(v)]


def _number(name: str, value: Any) -> float:
    if isinstance(value, str) or value is None:
        raise TypeError(f"{name} must be a number, got {value!r}.")
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{name} must be a number or a tensor with one element, got {type(value).__name__}."
        ) from error


def _means(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of every value over some calls of `log`; validation is the newest."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(k for call in calls for k in call):
        given = [call[key] for call in calls if key in call]
        if key == "valid" or not isinstance(given[-1], dict):
            found[key] = given[-1]
        else:
            names = dict.fromkeys(n for values in given if isinstance(values, dict) for n in values)
            found[key] = {
                n: statistics.fmean(v[n] for v in given if isinstance(v, dict) and n in v)
                for n in names
            }
    return found


WANTED = 'return {"accuracy": 0.9} or {"test": {...}, "valid": {...}}, of the test part'
RETURNED = "returned "
"""Prefix of the name of a returned metric that is not finite."""
Metrics = dict[str, float]


def read_metrics(returned: Any, named: str) -> tuple[Metrics, Metrics]:
    """Test and validation metrics from what the function `named` returned."""
    if not isinstance(returned, Mapping) or not returned:
        raise Refused(f"{named} returned {returned!r} instead of test metrics: {WANTED}.")
    if isinstance(returned.get("test"), Mapping):
        parts = {k: returned.get(k) or {} for k in ("test", "valid")}
    else:
        parts = {"test": returned, "valid": {}}
    test, valid = (_group(k, parts[k], named) for k in ("test", "valid"))
    if not test:
        raise Refused(f"{named} returned no test metrics: got {returned!r}; {WANTED}.")
    percent = [
        k
        for k, v in test.items()
        if describe(k).percent and not -1.0 <= v <= 1.0 and math.isfinite(v)
    ]
    if percent:
        value = f"{percent[0]} = {test[percent[0]]:g}"
        raise Refused(
            f"{named} returned {value}, but it is recorded as a fraction of 1: divide it by 100."
        )
    return test, valid


def _group(name: str, content: Any, named: str) -> Metrics:
    try:
        found = numbers(name, content)
    except TypeError as error:
        raise Refused(
            f"{named} returned metrics that are no numbers: {error} Instead, {WANTED}."
        ) from error
    if not isinstance(found, dict):
        raise Refused(
            f"{named} returned {name!r} = {content!r}, which is no group of metrics: {WANTED}."
        )
    return found


def judged_by(test: Metrics, wanted: tuple[str, str] | None) -> tuple[str, str]:
    """The metric of the study and the way it improves, or the first that came back."""
    if wanted is not None and wanted[0] in test:
        return wanted
    name = next(iter(test))
    return name, guess_direction(name)


def misfit(
    test: Metrics, valid: Metrics, wanted: tuple[str, str] | None, must_validate: bool, named: str
) -> str:
    """Why no run of this function can be judged as the comparison requires, or nothing."""
    if wanted is None:
        return ""
    kept = "What was trained is kept"
    if wanted[0] not in test:
        return (
            f"The study is judged by {wanted[0]!r}, but {named} returned only {', '.join(test)}. "
            f"{kept}: run it again with --metric {next(iter(test))}, or return {wanted[0]!r}."
        )
    if must_validate and wanted[0] not in valid:
        return (
            f"--tune chooses settings by {wanted[0]!r} on validation, but {named} gave none. "
            f'Return {{"test": {{...}}, "valid": {{"{wanted[0]}": ...}}}}, or call '
            f'trial.log(valid={{"{wanted[0]}": ...}}).'
        )
    return ""


def guess_direction(metric: str) -> str:
    """'max' or 'min': which way a metric of this name improves, as far as its name shows.

    >>> guess_direction("accuracy"), guess_direction("valid_loss"), guess_direction("rmse")
    ('max', 'min', 'min')
    """
    known = describe(metric).better
    if known is not None:
        return known
    falling = (
        "loss",
        "nll",
        "error",
        "perplexity",
        "bpc",
        "ece",
        "brier",
        "mse",
        "mae",
        "rmse",
        "wer",
        "cer",
        "fid",
    )
    return (
        "min"
        if any(part in falling for part in metric.lower().replace("-", "_").split("_"))
        else "max"
    )


def finished(
    id: str, test: Metrics, valid: Metrics, train: Metrics, judged: tuple[str, str]
) -> dict[str, Any]:
    """The result of a trial that came to its end, but for its costs."""
    result: dict[str, Any] = {"id": id, "format": FORMAT, "status": "finished", "task": "own"}
    result |= {"primary": list(judged), "selection": list(judged)}
    return result | {"test": test, "valid": valid, "train": train, "data": {}}


def diverged(id: str, bad: NotFinite, judged: tuple[str, str] | None) -> dict[str, Any]:
    """The result of a trial whose loss, or whose test metric, is no number."""
    before = ", ".join(f"{k} {v:.4g}" for k, v in bad.before.items()) or "nothing yet"
    terms = " and ".join(map(repr, bad.names))
    reason = f"Training stopped at step {bad.step}: {terms} became NaN or infinite first "
    reason += f"(the step before: {before})."
    if bad.names[0].startswith(RETURNED):
        reason = f"After {bad.step} steps the function {bad.names[0]} "
        reason += f"(the last training loss: {before})."
    result: dict[str, Any] = {
        "id": id,
        "format": FORMAT,
        "status": "diverged",
        "task": "own",
        "reason": reason,
    }
    result |= {"primary": list(judged or ("", "max")), "selection": list(judged or ("", "max"))}
    return result | {"terms": bad.names, "step": bad.step, "data": {}}


def costs(
    models: Sequence[nn.Module], clock: Clock, count: int, seconds: float, device: str
) -> dict[str, Any]:
    """Step times, total time, and what they depend on: device, threads, malloc, kernels."""
    steps = clock.steps()
    unique = {id(m): m for m in models}.values()
    return {
        "steps": count,
        "parameters": sum(p.numel() for m in unique for p in m.parameters()),
        "seconds": {
            "train": round(seconds, 3),
            "evaluate": 0.0,
            "cpu": round(sum(cpu for _, cpu in steps), 3),
        },
        "step_seconds": statistics.median(wall for wall, _ in steps) if steps else None,
        "step_cpu_seconds": statistics.median(cpu for _, cpu in steps) if steps else None,
        "device": device,
        "threads": torch.get_num_threads(),
        "malloc": describe_malloc(),
        "kernels": library.path(),
    }


def weights_of(models: Sequence[nn.Module]) -> str:
    """A checksum of the regularized models as the function left them; '' where there is none."""
    states = {
        f"{i}.{k}": v for i, model in enumerate(models) for k, v in model.state_dict().items()
    }
    tensors = {k: v for k, v in states.items() if isinstance(v, Tensor) and not v.is_meta}
    return fingerprint(tensors) if tensors else ""
