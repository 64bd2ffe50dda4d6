"""What a user's function logged and returned, as log lines and a result with its costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.native import library
from dampen.studies.errors import LabError
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
"""Calls of `log` without validation that are averaged into one line of the log."""


class UserLog:
    """Collects what the function logs; writes a line per validation, epoch, or `PENDING` calls."""

    def __init__(self, record: RunStore):
        self.record = record
        self.loggers: list[Logger] = []
        self.steps = self.epochs = self.lines = 0
        self.known: dict[str, dict[str, float]] = {}  # the newest values of each group
        self.pending: list[dict[str, Any]] = []
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
        values = {k: numbers(k, v) for k, v in groups.items() if v is not None}
        self.steps = self.steps if step is None else int(step)
        self.epochs = self.epochs if epoch is None else int(epoch)
        self.pending.append(values)
        self.known |= {k: v for k, v in values.items() if isinstance(v, dict)}
        return "valid" in values or epoch is not None or len(self.pending) >= PENDING

    def flush(self, seconds: float, at: int, epoch: int | None = None) -> dict[str, Any] | None:
        """Write what is pending as one line, and return it; `at` is the step for the loggers."""
        if not self.pending:
            return None
        self.begin()
        self.lines += 1
        line: dict[str, Any] = {"epoch": self.lines if epoch is None else epoch, "step": self.steps}
        line |= _means(self.pending)
        line["seconds"] = round(seconds, 4)
        self.pending, line = [], finite(line)
        self.record.log(line)
        for logger in self.loggers:
            logger.log(at, flat(line))
        return line

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        names = ("steps", "epochs", "lines", "known", "pending")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint: lines written after it will be written again."""
        self.steps, self.epochs, self.lines = state["steps"], state["epochs"], state["lines"]
        self.known, self.pending = (
            dict(state["known"]),
            list(state.get("pending", [])),
        )  # checkpoints before 0.2
        self.record.keep_lines(self.lines)
        self.open = True


def numbers(group: str, value: Any) -> Any:
    """A number or a group of numbers as plain floats; tensors with one element count as numbers."""
    if isinstance(value, Mapping):
        return {str(k): _number(f"{group}.{k}", v) for k, v in value.items()}
    return _number(group, value)


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
        raise LabError(f"{named} returned {returned!r} instead of test metrics: {WANTED}.")
    if isinstance(returned.get("test"), Mapping):
        parts = {k: returned.get(k) or {} for k in ("test", "valid")}
    else:
        parts = {"test": returned, "valid": {}}
    test, valid = (_group(k, parts[k], named) for k in ("test", "valid"))
    if not test:
        raise LabError(f"{named} returned no test metrics: got {returned!r}; {WANTED}.")
    percent = [
        k
        for k, v in test.items()
        if describe(k).percent and not -1.0 <= v <= 1.0 and math.isfinite(v)
    ]
    if percent:
        value = f"{percent[0]} = {test[percent[0]]:g}"
        raise LabError(
            f"{named} returned {value}, but it is recorded as a fraction of 1: divide it by 100."
        )
    return test, valid


def _group(name: str, content: Any, named: str) -> Metrics:
    try:
        found = numbers(name, content)
    except TypeError as error:
        raise LabError(
            f"{named} returned metrics that are no numbers: {error} Instead, {WANTED}."
        ) from error
    if not isinstance(found, dict):
        raise LabError(
            f"{named} returned {name!r} = {content!r}, which is no group of metrics: {WANTED}."
        )
    return found


def judged_by(test: Metrics, wanted: tuple[str, str] | None, named: str) -> tuple[str, str]:
    """The metric of the study and the way it improves, or the first that came back."""
    if wanted is None:
        name = next(iter(test))
        return name, guess_direction(name)
    if wanted[0] not in test:
        raise LabError(
            f"The study is judged by {wanted[0]!r}, but {named} returned only {', '.join(test)}. "
            "Return it, or name another metric."
        )
    return wanted


def guess_direction(metric: str) -> str:
    """'max' or 'min': which way a metric of this name improves, as far as its name tells.

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
