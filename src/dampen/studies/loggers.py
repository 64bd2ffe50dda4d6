"""Loggers beside the record: TensorBoard, Weights & Biases, and those of plug-ins.

A logger is a class made with (folder, trial, step), with `log(step, values)`, `finish(result)` and
`close()`. Packages add one by the entry point `dampen.loggers`. The record is the source of truth:
loggers receive what was recorded, and nothing is ever read back from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dampen.extensions import Registry
from dampen.names import nearest
from dampen.studies.errors import ConfigError
from dampen.studies.run import Run


class Logger(Protocol):
    """What a logger implements."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the values of one line of the log.

        Args:
            step: optimizer steps done.
            values: by name, such as `valid/accuracy`.
        """

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result of the trial.

        Args:
            result: the content of final.json.
        """

    def close(self) -> None:
        """Nothing more will come in this session."""


class TensorBoardLogger:
    """Curves in the folder `tensorboard` of each trial.

    Points after the step that a trial resumes at are removed from the curves.
    """

    def __init__(self, folder: Path, trial: Run, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, result: Mapping[str, Any]) -> None:
        for name, value in result.get("test", {}).items():
            if isinstance(value, int | float):
                self.writer.add_scalar(f"test/{name}", value, result.get("steps") or 0)

    def close(self) -> None:
        self.writer.close()


class WandbLogger:
    """One run per trial under the trial's id, so that it resumes there; a study is a group.

    Where it writes and what it sends is set by the variables of Weights & Biases, such as
    WANDB_MODE=offline.
    """

    def __init__(self, folder: Path, trial: Run, step: int):
        import wandb

        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dampen"),
            id=trial.id,
            resume="allow",
            group=folder.resolve().parent.name,
            config={"id": trial.id, **trial.to_dict()},
            dir=str(folder),
            reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def finish(self, result: Mapping[str, Any]) -> None:
        for name, value in result.get("test", {}).items():
            self.run.summary[f"test/{name}"] = value
        self.run.summary["status"] = result["status"]

    def close(self) -> None:
        self.run.finish()


LOGGERS: Registry[Any] = Registry(
    "dampen.loggers", {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}
)
"""The loggers by name: the built-in ones, and those that packages and plug-ins add."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise for unknown names, before anything runs.

    Args:
        names: of loggers.
    """
    unknown = [name for name in names if name not in LOGGERS]
    problems = [f"unknown logger {name!r}{nearest(name, LOGGERS)}" for name in unknown]
    if problems:
        raise ConfigError("--logger", problems)


def open_loggers(names: Sequence[str], folder: Path, trial: Run, step: int) -> list[Logger]:
    """The chosen loggers for a trial.

    Args:
        names: of loggers.
        folder: the trial's.
        trial: what is logged.
        step: where it begins or resumes.
    """
    check_loggers(names)
    opened: list[Logger] = []
    for name in dict.fromkeys(names):
        try:
            opened.append(LOGGERS[name](folder, trial, step))
        except ModuleNotFoundError as error:
            problem = f"{name} is not installed here ({error.name})"
            raise ConfigError(
                "--logger", [f"{problem}; run: pip install 'dampen[{name}]'"]
            ) from error
    return opened


def flat(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of the log, by group.

    Args:
        line: as in log.jsonl.

    >>> flat({"epoch": 1, "train": {"task": 0.5}, "valid": {"accuracy": None}, "lr": 0.1})
    {'train/task': 0.5, 'train/lr': 0.1}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            numbers = {n: v for n, v in value.items() if isinstance(v, int | float)}
            found |= {f"{key}/{name}": float(number) for name, number in numbers.items()}
        elif key not in ("epoch", "step", "seconds") and isinstance(value, int | float):
            found[f"train/{key}"] = float(value)
    return found
