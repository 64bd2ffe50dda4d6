"""Standard augmentations of training batches, chosen by name; none by default.

Pixel transforms are torchvision's, applied image by image. Flips act on the whole batch, because
targets such as boxes move with their image. Mixup and CutMix mix pairs and make the targets soft.
All draw from torch's global generator, so a checkpoint that holds its state resumes exactly, or
from a generator that is passed in."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.extensions import Registry
from dampen.names import nearest
from dampen.studies.data.dataset import Batch, Dataset


def torchvision_v2() -> Any:
    """The transforms of torchvision, imported when they are needed."""
    declare_torchvision_operators()
    from torchvision.transforms import v2

    return v2


class PixelTransform:
    """A transform of torchvision on each image, in its bytes; targets stay.

    The way from normalized inputs to bytes and back is exact.
    """

    tasks: ClassVar = ("image",)
    needs: ClassVar = "torchvision"

    def transform(self, size: Sequence[int]) -> Any:
        """The transform of torchvision.

        Args:
            size: height and width of the images.
        """
        raise NotImplementedError

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        by = dataset.normalization
        if by is None:
            raise ValueError(
                f"{dataset.name} is not normalized per channel, so its pixels cannot be recovered."
            )
        x, *rest = batch["inputs"]
        mean, std = (values.to(x).view(1, -1, 1, 1) for values in (by.mean, by.std))
        pixels = (x * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
        transform = self.transform(x.shape[-2:])
        changed = torch.stack([transform(image) for image in pixels])
        return batch | {"inputs": ((changed.float() / 255 - mean) / std, *rest)}


@dataclass(frozen=True)
class Crop(PixelTransform):
    """RandomCrop: pad with `padding` black pixels, cut out the old size at random."""

    padding: int = 4

    def transform(self, size: Sequence[int]) -> Any:
        return torchvision_v2().RandomCrop(size, padding=self.padding)


@dataclass(frozen=True)
class RandAugment(PixelTransform):
    """RandAugment (arXiv 1909.13719)."""

    operations: int = 2
    magnitude: int = 9

    def transform(self, size: Sequence[int]) -> Any:
        return torchvision_v2().RandAugment(self.operations, self.magnitude)


@dataclass(frozen=True)
class AutoAugment(PixelTransform):
    """AutoAugment (arXiv 1805.09501), by a learned policy: cifar10, imagenet or svhn."""

    policy: str = "cifar10"

    def transform(self, size: Sequence[int]) -> Any:
        v2 = torchvision_v2()
        return v2.AutoAugment(v2.AutoAugmentPolicy(self.policy))


@dataclass(frozen=True)
class TrivialAugment(PixelTransform):
    """TrivialAugment Wide (arXiv 2103.10158)."""

    def transform(self, size: Sequence[int]) -> Any:
        return torchvision_v2().TrivialAugmentWide()


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with the given probability."""

    tasks: ClassVar = ("image",)
    axis: ClassVar = -1
    probability: float = 0.5

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        x, *rest = batch["inputs"]
        mirrored = (torch.rand(len(x), 1, 1, 1) < self.probability).to(x.device)
        flipped = batch | {"inputs": (torch.where(mirrored, x.flip(self.axis), x), *rest)}
        if dataset.mirror is not None:  # boxes and the like move with their image
            flipped["target"] = dataset.mirror(batch["target"], mirrored[:, 0, 0, 0], self.axis)
        return flipped


@dataclass(frozen=True)
class VerticalFlip(Flip):
    """Mirror each image top to bottom with the given probability."""

    axis: ClassVar = -2


@dataclass(frozen=True)
class Mixup:
    """`x = w x_i + (1 - w) x_j`, targets likewise, w ~ Beta(alpha, alpha) once per batch.

    arXiv 1710.09412. torchvision's MixUp would roll the batch instead of permuting it, and mixes
    no sequences with padding.
    """

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
        rest = [padding & padding[partner] for padding in rest]  # a token of either example counts
        target = _soft(batch["target"], dataset)
        target = weight * target + (1 - weight) * target[partner]
        return batch | {"inputs": (mixed, *rest), "target": target}


@dataclass(frozen=True)
class CutMix:
    """torchvision's CutMix (arXiv 1905.04899): paste a rectangle of another image.

    One rectangle per batch; targets share by area.
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


def _check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ValueError(
            f"alpha is a parameter of the Beta distribution and must be positive: got {alpha}."
        )


def _soft(target: Tensor, dataset: Dataset) -> Tensor:
    """Class probabilities (B, classes) from class numbers (B,); probabilities stay as they are."""
    if target.is_floating_point():
        return target
    return nn.functional.one_hot(target, len(dataset.classes)).float()


AUGMENTATIONS: Registry[Any] = Registry(
    "dampen.augmentations",
    {
        "crop": Crop,
        "flip": Flip,
        "vertical_flip": VerticalFlip,
        "randaugment": RandAugment,
        "autoaugment": AutoAugment,
        "trivialaugment": TrivialAugment,
        "mixup": Mixup,
        "cutmix": CutMix,
    },
)
"""Every augmentation by name: the built-in ones, and those that packages and plug-ins add.

Each is a dataclass whose fields are its options, with the `tasks` it applies to, called with a
batch and its dataset. """
MIRRORS = ("flip", "vertical_flip")
"""Those that also move targets, where the dataset defines how (`Dataset.mirror`)."""


class Augment:
    """Augmentations in their order, called on a training batch.

    Args:
        changes: the augmentations.
        dataset: what the batches come from.
    """

    def __init__(self, changes: Sequence[Any], dataset: Dataset):
        self.changes, self.dataset = list(changes), dataset

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        if generator is None:
            return self._apply(batch)
        # The libraries draw from the global generator alone: seed it here, then restore it.
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


def augment(
    chosen: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]], dataset: Dataset
) -> Augment:
    """Build augmentations from their names.

    Args:
        chosen: names, or tables with a name and its options; one or several.
        dataset: what the batches come from.

    >>> from dampen.studies.data import load
    >>> augment(["flip", {"name": "mixup", "alpha": 0.8}], load("digits"))
    Augment(Flip(probability=0.5), Mixup(alpha=0.8, probability=1.0))
    """
    items = [chosen] if isinstance(chosen, str | Mapping) else list(chosen)
    return Augment([_build(item, dataset) for item in items], dataset)


def _build(item: str | Mapping[str, Any], dataset: Dataset) -> Any:
    table = {"name": item} if isinstance(item, str) else dict(item)
    name = str(table.pop("name", None))
    if name not in AUGMENTATIONS:
        raise ValueError(f"Unknown augmentation {name!r}{nearest(name, AUGMENTATIONS)}")
    kind = AUGMENTATIONS[name]
    known = [f.name for f in fields(kind)]
    for key in table:
        if key not in known:
            raise ValueError(f"Augmentation {name!r} takes no option {key!r}{nearest(key, known)}")
    if dataset.task not in kind.tasks and not (dataset.mirror and name in MIRRORS):
        raise ValueError(
            f"Augmentation {name!r} is for {' and '.join(kind.tasks)} tasks: {dataset.name} is "
            f"{dataset.task}."
        )
    if problem := missing_for(name):
        raise ValueError(f"Augmentation {problem}.")
    return kind(**table)


def missing_for(name: str) -> str:
    """Which package an augmentation lacks here and how to get it; empty where nothing is missing.

    Args:
        name: the augmentation.
    """
    needs = getattr(AUGMENTATIONS[name], "needs", None)
    if needs is None or importlib.util.find_spec(needs) is not None:
        return ""
    return f"{name!r} needs {needs}, not installed here; run: pip install 'dampen[augment]'"
