"""Cross-validation of small sets: each example is tested once per round of folds.

All parts are pooled; the seed of a trial says which round and which fold of it (seed = round x folds + fold). The fold
is tested on, the rest is drawn by class into train and validation. What is learned from data before training, a
normalization or a vocabulary, is learned from the fold's own training part. Tables average the folds of a round first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.arrays import feature_axis, statistics_of
from dampen.studies.data.dataset import Dataset, Normalization, Split
from dampen.studies.data.images import channel_statistics
from dampen.studies.data.labeled import ArraySplit, TokenSplit
from dampen.studies.data.splits import ImageSplit
from dampen.studies.data.stratified import stratified


def fold_of(data: Dataset, folds: int, seed: int, train_fraction: float = 0.7) -> Dataset:
    """The data set in which one fold tests and the others train and validate."""
    from sklearn.model_selection import StratifiedKFold

    from dampen.studies.data.sets import DATASETS

    if data.name in DATASETS and (why := DATASETS[data.name].spec.no_folds):
        raise ValueError(f"{data.name} cannot be cross-validated: {why}. Leave out folds.")
    labels = labels_of([data.train, data.valid, data.test])
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
    said = f"cross-validation, fold {fold + 1} of {folds} in round {number + 1}"
    info = {**data.info, "departures": [*data.info.get("departures", []), said]}
    del info["examples"]  # counted anew
    if "encode" in data.extras:
        return _texts_cut(data, labels, rows, info)
    return _cut(data, joined([data.train, data.valid, data.test], labels), rows, info)


def _texts_cut(data: Dataset, labels: Tensor, rows: dict[str, Tensor], info: dict[str, Any]) -> Dataset:
    """These rows of all texts as the parts; a vocabulary is learned from the training rows alone."""
    texts = reduce(operator.add, data.extras["texts"].values())
    chosen = {part: texts.take(index) for part, index in rows.items()}
    splits, learned = data.extras["encode"](chosen, {part: labels[index] for part, index in rows.items()})
    info["cut_to_max_tokens"] = learned.pop("cut")
    return replace(data, **splits, info=info, model_args={**data.model_args, **learned})


def _cut(data: Dataset, pool: ImageSplit | ArraySplit, rows: dict[str, Tensor], info: dict[str, Any]) -> Dataset:
    """These rows of the pool as the parts, normalized by the training rows alone."""
    change = data.normalization
    if isinstance(pool, ImageSplit):
        change = channel_statistics(pool.images[rows["train"]])
        pool = ImageSplit(pool.images, pool.labels, change)
    elif change is not None:
        pool, change = _renormalized(pool, rows["train"], change)
    info |= {"normalization": change.facts()} if change is not None else {}
    train, valid, test = (taken(pool, rows[part]) for part in ("train", "valid", "test"))
    return replace(data, train=train, valid=valid, test=test, info=info, normalization=change)


def _renormalized(pool: ArraySplit, train: Tensor, before: Normalization) -> tuple[ArraySplit, Normalization]:
    """Arrays that one draw's statistics have normalized, by those of other rows: two such steps make one.

    ((x - m) / s - m') / s' = (x - (m + s m')) / (s s')
    """
    x = pool.inputs[0]
    axis = feature_axis(x)
    own = statistics_of(x[train], axis)
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    inputs = ((x - own.mean.view(shape)) / own.std.view(shape), *pool.inputs[1:])
    return ArraySplit(inputs, pool.labels), Normalization(before.mean + before.std * own.mean, before.std * own.std)


def labels_of(splits: Sequence[Any]) -> Tensor:
    """The classes of all examples, part after part."""
    if not all(isinstance(s, ImageSplit | ArraySplit | TokenSplit) for s in splits):
        raise ValueError("Folds are for images, texts and arrays with one class each: this set has other targets.")
    return torch.cat([s.labels for s in splits])


def joined(splits: Sequence[Any], labels: Tensor) -> ImageSplit | ArraySplit:
    """Parts of one set, one behind the other."""
    if isinstance(splits[0], ImageSplit):
        return ImageSplit(torch.cat([s.images for s in splits]), labels, splits[0].normalization)
    columns = zip(*(s.inputs for s in splits), strict=True)
    return ArraySplit(tuple(torch.cat(column) for column in columns), labels)


def taken(split: ImageSplit | ArraySplit, index: Tensor) -> Split:
    """Some examples of a joined set."""
    if isinstance(split, ImageSplit):
        return ImageSplit(split.images[index], split.labels[index], split.normalization)
    return ArraySplit(tuple(x[index] for x in split.inputs), split.labels[index])
