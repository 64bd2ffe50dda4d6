"""Augmentations that mix examples (mixup, CutMix) or mask spectrograms (SpecAugment)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dampen.studies.data.dataset import Batch, Dataset
from dampen.studies.data.pixel_augmentations import torchvision_v2


@dataclass(frozen=True)
class Mixup:
    """`x = w x_i + (1 - w) x_j`, targets likewise, w ~ Beta(alpha, alpha) once per batch (arXiv 1710.09412)."""

    tasks: ClassVar = ("image", "audio", "classification")
    alpha: float = 0.2
    probability: float = 1.0

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        _check_alpha(self.alpha)
        weight = torch.distributions.Beta(self.alpha, self.alpha).sample()
        skip = torch.rand(()) >= self.probability
        weight = torch.where(skip, torch.ones(()), weight)  # 1: every example stays as it is
        partner = torch.randperm(len(batch["target"]))
        x, *rest = batch["inputs"]
        mixed = weight * x + (1 - weight) * x[partner]
        rest = [padding & padding[partner] for padding in rest]  # present where either example is
        target = _soft(batch["target"], dataset)
        target = weight * target + (1 - weight) * target[partner]
        return batch | {"inputs": (mixed, *rest), "target": target}


@dataclass(frozen=True)
class CutMix:
    """torchvision's CutMix: paste a rectangle of another image; targets share by area.

    One rectangle per batch (arXiv 1905.04899).
    """

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    alpha: float = 1.0
    probability: float = 1.0

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        _check_alpha(self.alpha)
        x, *rest = batch["inputs"]
        target = _soft(batch["target"], dataset)
        if torch.rand(()) < self.probability:
            x, target = torchvision_v2().CutMix(alpha=self.alpha)(x, target)
        return batch | {"inputs": (x, *rest), "target": target}


@dataclass(frozen=True)
class SpecAugment:
    """Set random bands and random stretches of time to the mean (arXiv 1904.08779, without time warping).

    Each mask covers 0 to `band_width` mel bands, or 0 to `time_width` tokens; each example has its own. Where several
    frames make a token, a band is masked in all of them.
    """

    tasks: ClassVar = ("audio", "detection")
    bands: int = 2
    band_width: int = 8
    times: int = 2
    time_width: int = 10

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        x, *rest = batch["inputs"]
        b, n, features = x.shape
        count = dataset.extras.get("bands", features)
        hidden = torch.zeros(b, 1, count, dtype=torch.bool)
        for _ in range(self.bands):
            hidden |= _stretch(b, count, self.band_width)[:, None, :]
        gone = hidden.repeat(1, 1, features // count)
        for _ in range(self.times):
            gone = gone | _stretch(b, n, self.time_width)[:, :, None]
        return batch | {"inputs": (x.masked_fill(gone.to(x.device), 0.0), *rest)}


def _check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ValueError(f"alpha is a parameter of the Beta distribution and must be positive: got {alpha}.")


def _soft(target: Tensor, dataset: Dataset) -> Tensor:
    """Class probabilities (B, classes) from class numbers (B,); probabilities stay as they are."""
    if target.is_floating_point():
        return target
    return nn.functional.one_hot(target, len(dataset.classes)).float()


def _stretch(rows: int, length: int, widest: int) -> Tensor:
    """For each row, a stretch of 0 to `widest` positions at a random place, as (rows, length) of bool."""
    width = torch.randint(0, min(widest, length) + 1, (rows, 1))
    start = (torch.rand(rows, 1) * (length - width + 1)).floor()
    position = torch.arange(length)
    return (position >= start) & (position < start + width)
