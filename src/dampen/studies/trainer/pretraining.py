"""Pretraining without labels: a masked autoencoder's trial in the folder `pretrain` of the trial that starts from it.

It is a trial like any other, so it is logged, resumed bit-exactly and closed like one; its weights enter the classifier
before that one's first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dampen.models import MaskedAutoencoder
from dampen.models.mae import load_encoder
from dampen.studies.config.trial import TrialSpec
from dampen.studies.data.dataset import Batch, Dataset, Split
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.metrics import judged_by
from dampen.studies.records.record import PRETRAIN, Record
from dampen.studies.trainer.build import derive
from dampen.studies.trainer.checkpoint import load_newest

FACTS = ("valid", "train", "selected_epoch", "epochs", "steps", "seconds", "parameters")


@dataclass(frozen=True)
class Pretrained:
    """What a classifier starts from: the autoencoder's weights, and what its training gave for the record."""

    weights: dict[str, Tensor]
    facts: dict[str, Any]

    def enter(self, model: nn.Module) -> None:
        """Put the encoder into a classifier; its head stays as it was initialized."""
        load_encoder(model, self.weights)


def load_pretrained(folder: Path) -> Pretrained:
    """The selected state of the pretraining in a trial's folder."""
    final = Record(folder / PRETRAIN).final()
    state, damage = load_newest(folder / PRETRAIN, "weights")
    if state is None or final is None:
        why = damage[0] if damage else "there are none"
        raise LabError(f"{folder / PRETRAIN} has no pretrained weights: {why}. Delete {folder} to run the trial again.")
    return Pretrained(state["model"], {key: final[key] for key in FACTS if key in final})


def close_with_pretraining(trial: TrialSpec, folder: Path) -> dict[str, Any]:
    """Write the result of a trial whose pretraining diverged: it diverged before its first step."""
    record, first = Record(folder), Record(folder / PRETRAIN)
    result = {**(first.final() or {}), "id": trial.id, **judged_by("image")}
    result["reason"] = f"In the pretraining ({PRETRAIN}/): {result['reason']}"
    record.start(trial, first.sessions()[-1])
    record.finish(result)
    return result


def told_as_pretraining(report: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """What the trial's listener hears of its pretraining: that it moves, not its epochs' results."""

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "progress", "warning"):
            report({**event, "phase": "pretraining"})

    return tell


def without_labels(data: Dataset, model: MaskedAutoencoder) -> Dataset:
    """The same images, to be guessed. Validation and test hide the same patches every time."""
    if data.task != "image":
        raise ConfigError("The trial", [f"model.name: 'mae' needs images; {data.name} is a data set for {data.task}"])
    patches = model.encoder.patch_embed.num_patches or 0
    valid, test = (_FixedHiding(getattr(data, name), patches, name) for name in ("valid", "test"))
    return replace(data, task="reconstruction", loss="reconstruction", valid=valid, test=test)


class _FixedHiding(Split):
    """Images with the numbers that decide which of their patches are hidden."""

    def __init__(self, images: Split, patches: int, name: str):
        generator = torch.Generator().manual_seed(derive(0, "hide", name))
        self.images, self.noise = images, torch.rand(len(images), patches, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: Tensor) -> Batch:
        batch = self.images.gather(indices)
        return {**batch, "inputs": (*batch["inputs"], self.noise[indices])}
