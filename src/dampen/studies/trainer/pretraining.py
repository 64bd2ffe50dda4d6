"""What a run takes over from its pretraining: weights, facts for the record, the prepared data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from dampen.studies.checks import brings_task
from dampen.studies.data.dataset import Dataset
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.metrics import judged_by
from dampen.studies.run import Run
from dampen.studies.store import PRETRAIN, RunStore
from dampen.studies.trainer.checkpoint import load_newest

FACTS = ("valid", "train", "selected_epoch", "epochs", "steps", "seconds", "parameters")


@dataclass(frozen=True)
class Pretrained:
    """What a classifier starts from: the autoencoder's weights, and what its training gave for the
    record.
    """

    model: str
    weights: dict[str, Tensor]
    facts: dict[str, Any]

    def enter(self, model: nn.Module) -> None:
        """Put the encoder into a classifier; its head stays as it was initialized."""
        brings_task(self.model).load_encoder(model, self.weights)


def load_pretrained(folder: Path) -> Pretrained:
    """The selected state of the pretraining in a trial's folder."""
    final = RunStore(folder / PRETRAIN).final()
    state, damage = load_newest(folder / PRETRAIN, "weights")
    if state is None or final is None:
        why = damage[0] if damage else "there are none"
        raise LabError(
            f"{folder / PRETRAIN} has no pretrained weights: {why}. Delete {folder} to run the "
            "trial again."
        )
    return Pretrained(
        RunStore(folder / PRETRAIN).trial().model["name"],
        state["model"],
        {key: final[key] for key in FACTS if key in final},
    )


def close_with_pretraining(trial: Run, folder: Path) -> dict[str, Any]:
    """Write the result of a trial whose pretraining diverged: it diverged before its first step."""
    record, first = RunStore(folder), RunStore(folder / PRETRAIN)
    result = {**(first.final() or {}), "id": trial.id, **judged_by("image")}
    result["reason"] = f"In the pretraining ({PRETRAIN}/): {result['reason']}"
    record.start(trial, first.sessions()[-1])
    record.finish(result)
    return result


def report_as_pretraining(
    report: Callable[[dict[str, Any]], None],
) -> Callable[[dict[str, Any]], None]:
    """The events of a pretraining that its trial reports: progress, not results of epochs."""

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "progress", "warning"):
            report({**event, "phase": "pretraining"})

    return tell


def prepared_by(model: nn.Module, name: str, data: Dataset) -> Dataset:
    """The data as the model wants it: unchanged, but for a model that brings its own task."""
    kind = brings_task(name)
    if kind is None:
        return data
    if data.task not in kind.takes:
        needs = " or ".join(kind.takes)
        raise ConfigError(
            "The trial",
            [f"model.name: {name!r} needs {needs} data; {data.name} is a data set for {data.task}"],
        )
    prepared: Dataset = cast(Any, model).prepare(data)
    return prepared
