"""Augmentations of single images: crop, flip, and torchvision's RandAugment, AutoAugment and TrivialAugment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dampen.lab.data.dataset import Batch, Dataset, Normalization


@dataclass(frozen=True)
class Crop:
    """Pad with black by `padding` pixels, then cut out the old size at a random place, each image its own."""

    tasks: ClassVar = ("image",)
    padding: int = 4

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        x, *rest = batch["inputs"]
        b, c, h, w = x.shape
        black = _channel(-_normalization(dataset).mean / _normalization(dataset).std, x)
        wide = nn.functional.pad(x - black, [self.padding] * 4) + black
        row = torch.randint(0, 2 * self.padding + 1, (b, 1, 1, 1)) + torch.arange(h).view(1, 1, h, 1)
        column = torch.randint(0, 2 * self.padding + 1, (b, 1, 1, 1)) + torch.arange(w)
        image, channel = torch.arange(b).view(b, 1, 1, 1), torch.arange(c).view(1, c, 1, 1)
        return batch | {"inputs": (wide[image, channel, row, column], *rest)}


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with the given probability; boxes move with it."""

    tasks: ClassVar = ("image", "objects")
    probability: float = 0.5

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _mirrored(batch, dataset, self.probability, axis=-1, center=1)


@dataclass(frozen=True)
class VerticalFlip:
    """Mirror each image top to bottom with the given probability; boxes move with it."""

    tasks: ClassVar = ("image", "objects")
    probability: float = 0.5

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _mirrored(batch, dataset, self.probability, axis=-2, center=2)


def _mirrored(batch: Batch, dataset: Dataset, probability: float, axis: int, center: int) -> Batch:
    """Some images mirrored along an axis; `center` is the column of a box's center along it."""
    x, *rest = batch["inputs"]
    mirrored = (torch.rand(len(x), 1, 1, 1) < probability).to(x.device)
    moved = batch | {"inputs": (torch.where(mirrored, x.flip(axis), x), *rest)}
    if dataset.task == "objects":
        target = batch["target"].clone()  # (B, T, 5); rows of class -1 are no boxes, so nothing reads their places
        here = target[..., center]
        target[..., center] = torch.where(mirrored[:, 0, 0], 1 - here, here)
        moved["target"] = target
    return moved


@dataclass(frozen=True)
class RandAugment:
    """torchvision's RandAugment (arXiv 1909.13719) on each image."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    operations: int = 2
    magnitude: int = 9

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _pixelwise(_transforms().RandAugment(self.operations, self.magnitude), batch, dataset)


@dataclass(frozen=True)
class AutoAugment:
    """torchvision's AutoAugment (arXiv 1805.09501) on each image, by a learned policy: cifar10, imagenet or svhn."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    policy: str = "cifar10"

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        v2 = _transforms()
        return _pixelwise(v2.AutoAugment(v2.AutoAugmentPolicy(self.policy)), batch, dataset)


@dataclass(frozen=True)
class TrivialAugment:
    """torchvision's TrivialAugment Wide (arXiv 2103.10158) on each image."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _pixelwise(_transforms().TrivialAugmentWide(), batch, dataset)


def _normalization(dataset: Dataset) -> Normalization:
    if dataset.normalization is None:
        raise ValueError(f"{dataset.name} is not normalized per channel, so its pixels cannot be recovered.")
    return dataset.normalization


def _channel(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x).view(1, -1, 1, 1)


def _pixelwise(transform: Any, batch: Batch, dataset: Dataset) -> Batch:
    """Apply a transform of uint8 images to each image of a normalized batch; the way there and back is exact."""
    x, *rest = batch["inputs"]
    mean, std = (_channel(v, x) for v in (_normalization(dataset).mean, _normalization(dataset).std))
    pixels = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    changed = torch.stack([transform(image) for image in pixels])
    return batch | {"inputs": ((changed.float() / 255 - mean) / std, *rest)}


def _transforms() -> Any:
    from torchvision.transforms import v2

    return v2
