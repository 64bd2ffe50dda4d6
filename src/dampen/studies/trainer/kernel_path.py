"""The kernels that a trial runs on, torch's or the native ones: a trial that resumes stays on the path it began on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from dampen.native import library
from dampen.studies.errors import DamagedRecord, LabError
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import load_newest, saved_states

Train = Callable[..., dict[str, Any]]


def on_its_path(train: Train) -> Train:
    """Let a way of training, `train(trial, folder, ...)`, run on the kernels that the folder's trial began on.

    The two draw from different streams: changed halfway, a trial would be neither the one nor the other.
    """

    @wraps(train)
    def kept(trial: Run, folder: Path, *rest: Any) -> dict[str, Any]:
        before = path_before(folder)
        if not trial.methods or before in ("", library.path()):  # a model without methods uses neither
            return train(trial, folder, *rest)
        if before == "torch":
            with library.torch_only("this trial began on torch's kernels and keeps to them"):
                return train(trial, folder, *rest)
        raise LabError(
            f"The trial in {folder} began on the native kernels, which are not at hand now ({library.status()}). "
            "Build them with `dampen doctor --build`, or delete the folder to begin the trial anew."
        )

    return kept


def path_before(folder: Path) -> str:
    """The path that an unfinished trial was on; '' where it has no checkpoint to go on from, or is too old to say."""
    if not saved_states(folder, "checkpoint"):
        return ""
    try:
        sessions = RunStore(folder).sessions()
    except DamagedRecord:  # the checkpoint knows it too
        sessions = [load_newest(folder, "checkpoint")[0] or {}]
    return str(sessions[-1].get("kernels") or "") if sessions else ""
