"""What all image sets share: the draw of the splits and the normalization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.dataset import TEST_SEED, Dataset, DataSpec, Normalization
from dampen.studies.data.splits import ImageSplit
from dampen.studies.data.stratified import limited, stratified, train_and_valid

Labeled = tuple[Tensor, Tensor]  # uint8 (n, channels, height, width) and class numbers (n,)


def image_dataset(
    spec: DataSpec,
    images: Tensor,
    labels: Tensor,
    classes: list[str],
    info: dict[str, Any],
    *,
    test: Labeled | None,
    valid: Labeled | None = None,
    seed: int,
    train_fraction: float,
    limit: int | None,
    test_seed: int = TEST_SEED,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
    options: dict[str, Any] | None = None,
    root: Path | None = None,
) -> Dataset:
    """Split labeled images by the papers' protocol and wrap them.

    An official test part is kept apart. Without one, `test_fraction` of the images is drawn by class with `test_seed`.
    Without an official validation part, train and validation are a draw by class with `seed`.
    """
    departures = list(info.pop("departures", []))
    parts = [name for name, given in (("valid", valid), ("test", test)) if given is None]
    if test is None:
        drawn, rest = stratified(labels, test_fraction, test_seed)
        test, (images, labels) = (images[drawn], labels[drawn]), (images[rest], labels[rest])
        departures.append(f"no official test part: {a_draw(test_seed)} by class of {len(drawn)} images serves as test")
    if valid is None:
        train_rows, valid_rows, cut = train_and_valid(labels, train_fraction, seed, limit)
        valid = images[valid_rows], labels[valid_rows]
    else:
        train_rows, cut = limited(labels.numpy(), limit, seed)
    train = images[train_rows], labels[train_rows]
    test_rows, test_cut = limited(test[1].numpy(), test_limit, test_seed)
    if test_cut:
        departures.append(f"only {len(test_rows)} of {len(test[1])} test images were used (test_limit={test_limit})")
    normalization = channel_statistics(train[0])
    channels, height, width = images.shape[1:]
    return Dataset(
        spec.name,
        spec.task,
        ImageSplit(*train, normalization),
        ImageSplit(*valid, normalization),
        ImageSplit(test[0][test_rows], test[1][test_rows], normalization),
        classes,
        info
        | {
            "partial": info.get("partial", False),
            "departures": departures + cut,
            "drawn": parts,
            "seed": seed,
            "test_seed": test_seed,
            "train_fraction": train_fraction,
            "limit": limit,
            "options": {**(options or {}), "test_limit": test_limit},
            "normalization": normalization.facts(),
        },
        {
            "image_size": height if height == width else (height, width),
            "channels": channels,
            "classes": len(classes),
        },
        normalization=normalization,
        root=root,
    )


def a_draw(test_seed: int) -> str:
    """In words, how the test split was drawn."""
    return "a fixed draw" if test_seed == TEST_SEED else "a draw"


def channel_statistics(images: Tensor) -> Normalization:
    """Mean and standard deviation of each channel in units of 0 to 1, exact: from the histogram of byte values.

    >>> channel_statistics(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)).mean
    tensor([0.5000])
    """
    value = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        weight = torch.bincount(images[:, channel].flatten().int(), minlength=256).double()
        weight /= weight.sum()
        mean = (weight * value).sum()
        means.append(mean)
        deviations.append((weight * (value - mean).square()).sum().sqrt())
    # A channel without any contrast is only shifted.
    std = torch.stack([d if d > 0 else torch.ones_like(d) for d in deviations])
    return Normalization(torch.stack(means).float(), std.float())
