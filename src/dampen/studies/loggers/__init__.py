"""Loggers that people have beside the record: TensorBoard, Weights & Biases, and what other packages bring.

A logger is a class made with (folder, trial, step), with `log(step, values)`, `finish(result)` and `close()`. Another
package offers one as an entry point of the group `dampen.loggers`. The record stays the truth: a logger is told what
was recorded, and nothing is ever read back from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dampen.extensions import from_plugins
from dampen.names import nearest
from dampen.studies.config.trial import Run
from dampen.studies.errors import ConfigError

LOGGERS = {
    "tensorboard": "dampen.studies.loggers.tensorboard:TensorBoardLogger",
    "wandb": "dampen.studies.loggers.wandb:WandbLogger",
}


class Logger(Protocol):
    """What a logger does."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Values of one line of the log, such as `valid/accuracy`."""

    def finish(self, result: Mapping[str, Any]) -> None:
        """The result, when the trial is done."""

    def close(self) -> None:
        """No more will come in this session."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuse names that are not known, before anything runs."""
    known = {*LOGGERS, *from_plugins("dampen.loggers")}
    problems = [f"unknown logger {name!r}{nearest(name, known)}" for name in names if name not in known]
    if problems:
        raise ConfigError("--logger", problems)


def open_loggers(names: Sequence[str], folder: Path, trial: Run, step: int) -> list[Logger]:
    """The chosen loggers for a trial that is at `step`."""
    check_loggers(names)
    return [_kind(name)(folder, trial, step) for name in dict.fromkeys(names)]


def _kind(name: str) -> Any:
    if name not in LOGGERS:
        return from_plugins("dampen.loggers")[name]
    module, cls = LOGGERS[name].split(":")
    try:
        return getattr(importlib.import_module(module), cls)
    except ModuleNotFoundError as error:
        told = f"{name} is not installed here ({error.name}); run: pip install 'dampen[{name}]'"
        raise ConfigError("--logger", [told]) from error


def flat(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the log, by group.

    >>> flat({"epoch": 1, "step": 3, "train": {"task": 0.5}, "valid": {"accuracy": None}, "lr": 0.1})
    {'train/task': 0.5, 'train/lr': 0.1}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{n}": float(v) for n, v in value.items() if isinstance(v, int | float)}
        elif key not in ("epoch", "step", "seconds") and isinstance(value, int | float):
            found[f"train/{key}"] = float(value)
    return found
