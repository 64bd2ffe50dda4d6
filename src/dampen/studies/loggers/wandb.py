"""Runs for Weights & Biases: one per trial, under the trial's id, so that a resumed trial goes on in its run.

Where it writes and whether it sends anything is Weights & Biases' own business: WANDB_MODE=offline keeps all here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from dampen.studies.config.trial import Run


class WandbLogger:
    """One run per trial; the rows of a study are a group."""

    def __init__(self, folder: Path, trial: Run, step: int):
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
