"""Image datasets: the split that holds them, their normalization, and scikit-learn's digits."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import (
    Batch,
    ClassSplit,
    Dataset,
    DataSpec,
    Normalization,
    Refolded,
    Request,
)
from dampen.studies.data.files import sha256
from dampen.studies.data.splits import split_rows

Labeled = tuple[Tensor, Tensor]
"""Images as uint8 (n, channels, height, width), and class numbers (n,)."""
CACHED = 2**21
"""Pixels up to which a split keeps its images normalized (8 MB): it saves tiny models a part of
every step."""
DIGITS = DataSpec(
    "digits",
    "image",
    "handwritten digits: 1,797 images, 8 x 8, 10 classes; embedded in scikit-learn, works offline",
    "comes with scikit-learn (`pip install 'dampen[studies]'`)",
    "none: part of scikit-learn",
)


class ImageSplit(ClassSplit):
    """Images as uint8 (n, channels, height, width) with one class number each.

    >>> unit = Normalization(torch.tensor([0.5]), torch.tensor([0.25]))
    >>> white = torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)
    >>> batch = ImageSplit(white, torch.tensor([0, 1, 1]), unit).batch([2])
    >>> batch["inputs"][0].flatten().tolist(), batch["target"].tolist()
    ([2.0, 2.0, 2.0, 2.0], [1])
    """

    def __init__(self, images: Tensor, labels: Tensor, normalization: Normalization):
        if images.dtype != torch.uint8 or images.dim() != 4 or len(images) != len(labels):
            raise ValueError(
                "Images are uint8 (n, channels, height, width) with n labels: got "
                f"{images.dtype} {tuple(images.shape)} and {len(labels)} labels."
            )
        self.images, self.labels, self.normalization = images, labels.long(), normalization
        self._scale = (1 / (255 * normalization.std)).view(1, -1, 1, 1)
        self._shift = (normalization.mean / normalization.std).view(1, -1, 1, 1)
        self._cached: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: Tensor) -> Batch:
        target = self.labels.index_select(0, indices)
        if self.images.numel() > CACHED:
            images = self._normalized(self.images.index_select(0, indices))
            return {"inputs": (images,), "target": target}
        if self._cached is None:
            self._cached = self._normalized(self.images)
        return {"inputs": (self._cached.index_select(0, indices),), "target": target}

    def refold(self, data: Dataset, rows: dict[str, Tensor]) -> Refolded:
        splits: list[Any] = list(data.splits.values())
        images = torch.cat([split.images for split in splits])
        labels = torch.cat([split.labels for split in splits])
        normalization = channel_statistics(images[rows["train"]])
        return Refolded(
            {name: ImageSplit(images[i], labels[i], normalization) for name, i in rows.items()},
            normalization,
            info={"normalization": normalization.facts()},
        )

    def _normalized(self, images: Tensor) -> Tensor:
        return images.float().mul_(self._scale).sub_(self._shift)  # (x / 255 - mean) / std


def image_dataset(
    spec: DataSpec,
    images: Tensor,
    labels: Tensor,
    classes: list[str],
    info: dict[str, Any],
    *,
    test: Labeled | None,
    valid: Labeled | None = None,
    test_limit: int | None = None,
    options: dict[str, Any] | None = None,
    root: Path | None = None,
    test_fraction: float = 0.25,
    **cuts: Any,
) -> Dataset:
    """Split labeled images by the papers' protocol and wrap them.

    An official test split is kept apart. Without one, `test_fraction` of the images is drawn by
    class. Without an official validation split, train and validation are a draw by class.

    Args:
        spec: the dataset.
        images: uint8 (n, channels, height, width), outside the test split where that is given.
        labels: their class numbers.
        classes: the names of the classes.
        info: facts for the record.
        test: the official test split.
        valid: the official validation split.
        test_limit: how many test examples are kept.
        options: the reader's options, for the record.
        root: where the files are.
        test_fraction: the share to draw as test split.
        cuts: `Request.cuts`: seeds, training fraction and limit.
    """
    given = {"train": (images, labels)}
    given |= {name: part for name, part in (("valid", valid), ("test", test)) if part is not None}
    drawn = split_rows(
        {name: numbers for name, (_, numbers) in given.items()},
        **cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
    )
    chosen = {
        name: (given[source][0][index], given[source][1][index])
        for name, (source, index) in drawn.rows.items()
    }
    normalization = channel_statistics(chosen["train"][0])
    splits = {name: ImageSplit(*part, normalization) for name, part in chosen.items()}
    channels, height, width = images.shape[1:]
    facts = {
        "partial": info.get("partial", False),
        "departures": [*info.get("departures", []), *drawn.notes],
        "drawn": drawn.drawn,
        **cuts,
        "options": {**(options or {}), "test_limit": test_limit},
        "normalization": normalization.facts(),
    }
    return Dataset(
        spec.name,
        spec.task,
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        classes=classes,
        info=info | facts,
        model_args={
            "image_size": height if height == width else (height, width),
            "channels": channels,
            "classes": len(classes),
        },
        normalization=normalization,
        root=root,
    )


def channel_statistics(images: Tensor) -> Normalization:
    """Exact mean and standard deviation of each channel, in units of 0 to 1.

    Args:
        images: uint8 (n, channels, height, width).

    >>> channel_statistics(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).mean
    tensor([0.5000])
    """
    value = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        # The histogram of byte values holds all there is to know, and its sums are exact.
        weight = torch.bincount(images[:, channel].flatten().int(), minlength=256).double()
        weight /= weight.sum()
        mean = (weight * value).sum()
        means.append(mean)
        deviations.append((weight * (value - mean).square()).sum().sqrt())
    # A channel without any contrast is only shifted.
    std = torch.stack([d if d > 0 else torch.ones_like(d) for d in deviations])
    return Normalization(torch.stack(means).float(), std.float())


@cache
def embedded_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the embedded digits, read once; callers copy what they change."""
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    return (bunch.images * 15).round().astype(np.uint8)[:, None], bunch.target.astype(np.int64)


def load_digits(
    request: Request,
    *,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """The embedded digits, with a fixed quarter as test split. Gray values 0..16 become 0..255.

    Args:
        request: which draw of the dataset.
        test_fraction: the share to test on.
        test_limit: how many test examples are kept.
    """
    images, labels = (torch.from_numpy(part.copy()) for part in embedded_digits())
    hashes = {"images": images, "labels": labels.to(torch.uint8)}
    info = {
        "layout": "embedded",
        "source": "scikit-learn",
        "sha256": {name: sha256(x.numpy().tobytes()) for name, x in hashes.items()},
    }
    return image_dataset(
        request.spec,
        images,
        labels,
        [str(digit) for digit in range(10)],
        info,
        test=None,
        **request.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"test_fraction": test_fraction},
    )
