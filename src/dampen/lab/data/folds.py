"""Cross-validation of small sets: each example is tested once per round of folds.

All parts are pooled; the seed of a trial says which round and which fold of it (seed = round x folds + fold). The fold
is tested on, the rest is drawn by class into train and validation. Tables average the folds of a round first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.lab.data.dataset import Dataset, Split
from dampen.lab.data.labeled import ArraySplit, TokenSplit
from dampen.lab.data.splits import ImageSplit
from dampen.lab.data.stratified import stratified

REMARK = "the vocabulary or normalization is that of one training draw, the same for all folds"


def fold_of(data: Dataset, folds: int, seed: int, train_fraction: float = 0.7) -> Dataset:
    """The data set in which one fold tests and the others train and validate."""
    from sklearn.model_selection import StratifiedKFold

    pool = joined([data.train, data.valid, data.test])
    labels = pool.labels
    fewest = int(torch.bincount(labels).min())
    if fewest < folds:
        raise ValueError(f"{folds} folds need as many examples of every class: the smallest class has {fewest}.")
    number, fold = divmod(seed, folds)
    cut = StratifiedKFold(folds, shuffle=True, random_state=number)
    rest, held = list(cut.split(labels.numpy(), labels.numpy()))[fold]
    train, valid = stratified(labels[rest], train_fraction, number)
    rows = {
        "train": torch.from_numpy(rest)[train],
        "valid": torch.from_numpy(rest)[valid],
        "test": torch.from_numpy(held),
    }
    parts = {name: taken(pool, index) for name, index in rows.items()}
    said = f"cross-validation, fold {fold + 1} of {folds} in round {number + 1}"
    info = {**data.info, "departures": [*data.info.get("departures", []), said, REMARK]}
    info.pop("examples", None)
    return replace(data, train=parts["train"], valid=parts["valid"], test=parts["test"], info=info)


def joined(splits: Sequence[Split]) -> Any:
    """Parts of one set, one behind the other."""
    kind = type(splits[0])
    whole: Any = list(splits)
    labels = torch.cat([s.labels for s in whole]) if all(hasattr(s, "labels") for s in whole) else None
    if labels is not None and kind is ImageSplit:
        return ImageSplit(torch.cat([s.images for s in whole]), labels, whole[0].normalization)
    if labels is not None and kind is ArraySplit:
        columns = zip(*(s.inputs for s in whole), strict=True)
        return ArraySplit(tuple(torch.cat(column) for column in columns), labels)
    if labels is not None and kind is TokenSplit:
        width = max(s.ids.shape[1] for s in whole)
        ids = torch.cat([_wide(s.ids, width) for s in whole])
        types = torch.cat([_wide(s.types, width) for s in whole]) if whole[0].types is not None else None
        return TokenSplit(ids, torch.cat([s.lengths for s in whole]), labels, types)
    raise ValueError("Folds are for images, texts and arrays with one class each: this set has other targets.")


def _wide(table: Tensor, width: int) -> Tensor:
    return F.pad(table, (0, width - table.shape[1]))  # what is beyond a text's length is never looked at


def taken(split: Any, index: Tensor) -> Split:
    """Some examples of a joined set."""
    labels = split.labels[index]
    if isinstance(split, ImageSplit):
        return ImageSplit(split.images[index], labels, split.normalization)
    if isinstance(split, ArraySplit):
        return ArraySplit(tuple(x[index] for x in split.inputs), labels)
    types = split.types[index] if split.types is not None else None
    return TokenSplit(split.ids[index], split.lengths[index], labels, types)
