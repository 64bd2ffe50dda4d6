"""Augmentations that mix examples (mixup, CutMix) or mask spectrograms (SpecAugment)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dampen.lab.data.dataset import Batch, Dataset


@dataclass(frozen=True)
class Mixup:
    """`x = w x_i + (1 - w) x_j`, targets likewise, w ~ Beta(alpha, alpha) once per batch (arXiv 1710.09412)."""

    tasks: ClassVar = ("image", "audio", "classification")
    alpha: float = 0.2
    probability: float = 1.0

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        partner, weight = _partner(batch, self.alpha, self.probability)
        x, *rest = batch["inputs"]
        mixed = weight * x + (1 - weight) * x[partner]
        rest = [padding & padding[partner] for padding in rest]  # what either of the two holds is there
        return batch | {"inputs": (mixed, *rest), "target": _mixed_target(batch, partner, weight, dataset)}


@dataclass(frozen=True)
class CutMix:
    """Paste a rectangle of another image; targets share by area (arXiv 1905.04899). One rectangle per batch."""

    tasks: ClassVar = ("image",)
    alpha: float = 1.0
    probability: float = 1.0

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        partner, weight = _partner(batch, self.alpha, self.probability)
        x, *rest = batch["inputs"]
        h, w = x.shape[-2:]
        side = float(1 - weight) ** 0.5
        center = [int(torch.randint(0, n, ())) for n in (h, w)]
        spans = [
            (max(round(c - n * side / 2), 0), min(round(c + n * side / 2), n))
            for c, n in zip(center, (h, w), strict=True)
        ]
        (top, bottom), (left, right) = spans
        mixed = x.clone()
        mixed[..., top:bottom, left:right] = x[partner][..., top:bottom, left:right]
        kept = 1 - torch.tensor((bottom - top) * (right - left) / (h * w))
        return batch | {"inputs": (mixed, *rest), "target": _mixed_target(batch, partner, kept, dataset)}


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


def _partner(batch: Batch, alpha: float, probability: float) -> tuple[Tensor, Tensor]:
    """A random permutation of the batch and the weight of the first image; weight 1 when the batch stays as it is."""
    if not alpha > 0:
        raise ValueError(f"alpha is a parameter of the Beta distribution and must be positive: got {alpha}.")
    weight = torch.distributions.Beta(alpha, alpha).sample()
    skip = torch.rand(()) >= probability
    return torch.randperm(len(batch["target"])), torch.where(skip, torch.ones(()), weight)


def _mixed_target(batch: Batch, partner: Tensor, weight: Tensor, dataset: Dataset) -> Tensor:
    target = batch["target"]
    if not target.is_floating_point():
        target = nn.functional.one_hot(target, len(dataset.classes)).float()
    out: Tensor = weight * target + (1 - weight) * target[partner]
    return out


def _stretch(rows: int, length: int, widest: int) -> Tensor:
    """For each row, a stretch of 0 to `widest` positions at a random place, as (rows, length) of bool."""
    width = torch.randint(0, min(widest, length) + 1, (rows, 1))
    start = (torch.rand(rows, 1) * (length - width + 1)).floor()
    position = torch.arange(length)
    return (position >= start) & (position < start + width)
