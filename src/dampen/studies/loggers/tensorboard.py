"""Curves for TensorBoard, in the folder `tensorboard` of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dampen.studies.config.trial import Run


class TensorBoardLogger:
    """One writer per trial. What was written after the step that a trial resumes at is left out of the curves."""

    def __init__(self, folder: Path, trial: Run, step: int):
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
