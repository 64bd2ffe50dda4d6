"""Wrong labels on purpose (`data.noise`): a share of the training examples gets another class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dampen.studies.plugins import Batch, Dataset, DataTransform, Split, sha256

STEP = 1024
"""Examples whose labels are read at once."""


class RelabeledSplit(Split):
    """The examples of another split under other class numbers."""

    def __init__(self, split: Split, labels: Tensor):
        self.split, self.labels = split, labels

    def __len__(self) -> int:
        return len(self.split)

    def gather(self, indices: Tensor) -> Batch:
        return self.split.gather(indices) | {"target": self.labels[indices]}


def wrong_labels(labels: Tensor, classes: int, share: float, seed: int) -> Tensor:
    """`labels` with round(share * n) of them replaced by another class, drawn uniformly.

    The same seed changes the same examples to the same classes at every share; a smaller share
    changes a subset of them.

    Args:
        labels: class numbers.
        classes: how many classes there are.
        share: of the labels to change.
        seed: of the draw.

    >>> labels = torch.zeros(10, dtype=torch.int64)
    >>> (wrong_labels(labels, 3, 0.3, seed=0) != labels).sum().item()
    3
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    # Never 0, so that the class is certain to change.
    shift = torch.randint(1, classes, (len(labels),), generator=generator)
    chosen = order[: round(share * len(labels))]
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + shift[chosen]) % classes
    return wrong


def with_label_noise(data: Dataset, share: float, seed: int) -> Dataset:
    """The dataset with `share` of its training labels wrong; validation and test keep theirs.

    Args:
        data: a dataset with one class each.
        share: of the training labels to change.
        seed: of the draw.
    """
    first = data.train.batch([0])["target"]
    if first.dim() != 1 or first.is_floating_point() or data.loss != "cross_entropy":
        raise ValueError(f"noise is for sets with one class each: {data.name} is {data.task}.")
    rows = torch.arange(len(data.train)).split(STEP)
    right = torch.cat([data.train.batch(index)["target"] for index in rows])
    wrong = wrong_labels(right, len(data.classes), share, seed)
    changed = int((wrong != right).sum())
    facts: dict[str, Any] = {
        "share": share,
        "changed": changed,
        "seed": seed,
        "sha256": sha256(wrong.numpy().tobytes()),
    }
    note = f"{changed} of {len(right)} training labels are wrong on purpose (noise={share:g})"
    info = data.info | {"noise": facts, "departures": [*data.info.get("departures", []), note]}
    return replace(data, train=RelabeledSplit(data.train, wrong), info=info)


def _problem(share: Any, has_classes: bool) -> str:
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 <= share < 1:
        return f"the share of wrong training labels, a number in [0, 1), got {share!r}"
    if share and not has_classes:
        return "wrong labels are for sets with one class each"
    return ""


LABEL_NOISE = DataTransform(with_label_noise, _problem)
