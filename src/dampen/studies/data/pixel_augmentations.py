"""Augmentations of single images.

torchvision's RandomCrop, RandAugment, AutoAugment and TrivialAugment, image by image; flips act on
the whole batch, because targets such as boxes move with their image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dampen.studies.data.dataset import Batch, Dataset, Normalization


@dataclass(frozen=True)
class Crop:
    """torchvision's RandomCrop: pad with `padding` black pixels, cut out the old size at random."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    padding: int = 4

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        size = batch["inputs"][0].shape[-2:]
        return _pixelwise(torchvision_v2().RandomCrop(size, padding=self.padding), batch, dataset)


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with the given probability."""

    tasks: ClassVar = ("image",)
    probability: float = 0.5

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _mirrored(batch, dataset, self.probability, axis=-1)


@dataclass(frozen=True)
class VerticalFlip:
    """Mirror each image top to bottom with the given probability."""

    tasks: ClassVar = ("image",)
    probability: float = 0.5

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _mirrored(batch, dataset, self.probability, axis=-2)


def _mirrored(batch: Batch, dataset: Dataset, probability: float, axis: int) -> Batch:
    """Some images mirrored along an axis, with their targets where the data set says how those move."""
    x, *rest = batch["inputs"]
    mirrored = (torch.rand(len(x), 1, 1, 1) < probability).to(x.device)
    moved = batch | {"inputs": (torch.where(mirrored, x.flip(axis), x), *rest)}
    if dataset.mirror is not None:
        moved["target"] = dataset.mirror(batch["target"], mirrored[:, 0, 0, 0], axis)
    return moved


@dataclass(frozen=True)
class RandAugment:
    """torchvision's RandAugment (arXiv 1909.13719) on each image."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    operations: int = 2
    magnitude: int = 9

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        v2 = torchvision_v2()
        return _pixelwise(v2.RandAugment(self.operations, self.magnitude), batch, dataset)


@dataclass(frozen=True)
class AutoAugment:
    """torchvision's AutoAugment (arXiv 1805.09501) on each image, by a learned policy: cifar10, imagenet or svhn."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"
    policy: str = "cifar10"

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        v2 = torchvision_v2()
        return _pixelwise(v2.AutoAugment(v2.AutoAugmentPolicy(self.policy)), batch, dataset)


@dataclass(frozen=True)
class TrivialAugment:
    """torchvision's TrivialAugment Wide (arXiv 2103.10158) on each image."""

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        return _pixelwise(torchvision_v2().TrivialAugmentWide(), batch, dataset)


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


def torchvision_v2() -> Any:
    """The transforms of torchvision, imported when they are needed."""
    from torchvision.transforms import v2

    return v2
