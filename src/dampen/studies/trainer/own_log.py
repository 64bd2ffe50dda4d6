"""The log of a user's own training: what `trial.log` was told, as lines of the record and for the loggers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dampen.studies.loggers import Logger, flat
from dampen.studies.store import RunStore
from dampen.studies.trainer.bookkeeping import _finite

PENDING = 200
"""Calls of `log` without validation that are averaged into one line of the log."""


class OwnLog:
    """Takes what the function tells, and writes a line per validation, epoch, or `PENDING` calls."""

    def __init__(self, record: RunStore):
        self.record = record
        self.loggers: list[Logger] = []
        self.steps = self.epochs = self.lines = 0
        self.known: dict[str, dict[str, float]] = {}  # the newest values of each group
        self.pending: list[dict[str, Any]] = []
        self.open = False  # whether the log on disk belongs to this session

    def begin(self) -> None:
        """The log of an earlier session that nobody resumed is not part of this one."""
        if not self.open:
            self.record.keep_lines(0)
            self.open = True

    def add(self, groups: Mapping[str, Any], step: int | None, epoch: int | None) -> bool:
        """Take one call; whether it makes a line of the log."""
        values = {k: numbers(k, v) for k, v in groups.items() if v is not None}
        self.steps = self.steps if step is None else int(step)
        self.epochs = self.epochs if epoch is None else int(epoch)
        self.pending.append(values)
        self.known |= {k: v for k, v in values.items() if isinstance(v, dict)}
        return "valid" in values or epoch is not None or len(self.pending) >= PENDING

    def flush(self, seconds: float, at: int, epoch: int | None = None) -> dict[str, Any] | None:
        """Write what is pending as one line, and return it; `at` is the step that loggers are told."""
        if not self.pending:
            return None
        self.begin()
        self.lines += 1
        line: dict[str, Any] = {"epoch": self.lines if epoch is None else epoch, "step": self.steps}
        line |= _means(self.pending)
        line["seconds"] = round(seconds, 4)
        self.pending, line = [], _finite(line)
        self.record.log(line)
        for logger in self.loggers:
            logger.log(at, flat(line))
        return line

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        names = ("steps", "epochs", "lines", "known", "pending")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was taken: lines that came after it will come again."""
        self.steps, self.epochs, self.lines = state["steps"], state["epochs"], state["lines"]
        self.known, self.pending = dict(state["known"]), list(state.get("pending", []))  # checkpoints before 0.2
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
            names = dict.fromkeys(n for values in given if isinstance(values, dict) for n in values)
            found[key] = {n: statistics.fmean(v[n] for v in given if isinstance(v, dict) and n in v) for n in names}
    return found
