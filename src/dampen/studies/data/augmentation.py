"""Standard augmentations of training batches: chosen by name, none by default.

Pixel ones (crop, flips, RandAugment, AutoAugment, TrivialAugment) act on each image, flips on
targets such as boxes too; mixup and CutMix mix pairs and make the targets soft; SpecAugment masks spectrograms.
torchvision (`pip install 'dampen[augment]'`) does what it has in the same meaning; flips,
mixup of clips with padding and SpecAugment are written here. All draw from torch's global generator,
so that a checkpoint that holds its state resumes exactly, or from one that is handed in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from dampen.names import nearest
from dampen.studies.data.dataset import Batch, Dataset
from dampen.studies.data.mixing_augmentations import CutMix, Mixup, SpecAugment
from dampen.studies.data.pixel_augmentations import AutoAugment, Crop, Flip, RandAugment, TrivialAugment, VerticalFlip

AUGMENTATIONS: dict[str, Any] = {
    "crop": Crop,
    "flip": Flip,
    "vertical_flip": VerticalFlip,
    "randaugment": RandAugment,
    "autoaugment": AutoAugment,
    "trivialaugment": TrivialAugment,
    "mixup": Mixup,
    "cutmix": CutMix,
    "specaugment": SpecAugment,
}


MIRRORS = ("flip", "vertical_flip")
"""Those that also move targets, where the data set says how (`Dataset.mirror`)."""


class Augment:
    """The chosen augmentations in their order; call it on a training batch."""

    def __init__(self, changes: Sequence[Any], dataset: Dataset):
        self.changes, self.dataset = list(changes), dataset

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if generator is None:
            return self._apply(batch)
        # The libraries draw from the global generator alone: lend it a seed of ours, then give it back.
        seed = int(torch.randint(2**62, (), generator=generator))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._apply(batch)

    def _apply(self, batch: Batch) -> Batch:
        for change in self.changes:
            batch = change(batch, self.dataset)
        return batch

    def __repr__(self) -> str:
        return f"Augment({', '.join(map(repr, self.changes))})"


def augment(chosen: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]], dataset: Dataset) -> Augment:
    """Build augmentations from their names, each a string or a table with its options.

    >>> from dampen.studies.data import load
    >>> augment(["flip", {"name": "mixup", "alpha": 0.8}], load("digits"))
    Augment(Flip(probability=0.5), Mixup(alpha=0.8, probability=1.0))
    """
    items = [chosen] if isinstance(chosen, str | Mapping) else list(chosen)
    return Augment([_build(item, dataset) for item in items], dataset)


def _build(item: str | Mapping[str, Any], dataset: Dataset) -> Any:
    table = {"name": item} if isinstance(item, str) else dict(item)
    name = table.pop("name", None)
    if name not in AUGMENTATIONS:
        raise ValueError(f"Unknown augmentation {name!r}{nearest(str(name), AUGMENTATIONS)}")
    kind = AUGMENTATIONS[name]
    known = [f.name for f in fields(kind)]
    for key in table:
        if key not in known:
            raise ValueError(f"Augmentation {name!r} takes no option {key!r}{nearest(key, known)}")
    if dataset.task not in kind.tasks and not (dataset.mirror and name in MIRRORS):
        raise ValueError(
            f"Augmentation {name!r} is for {' and '.join(kind.tasks)} tasks: {dataset.name} is {dataset.task}."
        )
    if problem := missing_for(name):
        raise ValueError(f"Augmentation {problem}.")
    return kind(**table)


def missing_for(name: str) -> str:
    """What an augmentation needs that is not installed here, and how to get it; empty where nothing is missing."""
    needs = getattr(AUGMENTATIONS[name], "needs", None)
    if needs is None or importlib.util.find_spec(needs) is not None:
        return ""
    return f"{name!r} needs {needs}, not installed here; run: pip install 'dampen[augment]'"
