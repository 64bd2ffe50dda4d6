"""Wrong labels on purpose: a share of the training examples gets another class, drawn once from the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.dataset import Batch, Dataset, Split
from dampen.studies.data.files import sha256

STEP = 1024  # examples whose labels are read at once


class RelabeledSplit(Split):
    """The examples of another split under other class numbers."""

    def __init__(self, split: Split, labels: Tensor):
        self.split, self.labels = split, labels

    def __len__(self) -> int:
        return len(self.split)

    def gather(self, indices: Tensor) -> Batch:
        return self.split.gather(indices) | {"target": self.labels[indices]}


def wrong_labels(labels: Tensor, classes: int, share: float, seed: int) -> Tensor:
    """`labels` with round(share x n) of them replaced by another class, uniformly drawn among the others.

    The same seed changes the same examples to the same classes at every share, a smaller share some of them only.

    >>> labels = torch.zeros(10, dtype=torch.int64)
    >>> (wrong_labels(labels, 3, 0.3, seed=0) != labels).sum().item()
    3
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    shift = torch.randint(1, classes, (len(labels),), generator=generator)  # never 0: another class for certain
    chosen = order[: round(share * len(labels))]
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + shift[chosen]) % classes
    return wrong


def with_label_noise(data: Dataset, share: float, seed: int) -> Dataset:
    """The data set with `share` of its training labels wrong; validation and test keep theirs. The record says so."""
    first = data.train.batch([0])["target"]
    if first.dim() != 1 or first.is_floating_point() or data.loss != "cross_entropy":
        raise ValueError(f"noise is for sets with one class each: {data.name} is {data.task}.")
    right = torch.cat([data.train.batch(rows)["target"] for rows in torch.arange(len(data.train)).split(STEP)])
    wrong = wrong_labels(right, len(data.classes), share, seed)
    changed = int((wrong != right).sum())
    facts: dict[str, Any] = {
        "share": share,
        "changed": changed,
        "seed": seed,
        "sha256": sha256(wrong.numpy().tobytes()),
    }
    said = f"{changed} of {len(right)} training labels are wrong on purpose (noise={share:g})"
    info = data.info | {"noise": facts, "departures": [*data.info.get("departures", []), said]}
    return replace(data, train=RelabeledSplit(data.train, wrong), info=info)
