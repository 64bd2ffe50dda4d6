"""Seeded, stratified draws of training, validation and test splits, and cross-validation folds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import TEST_SEED, ClassSplit, DamagedData, Dataset


def stratified(
    strata: Sequence[int] | Tensor | np.ndarray, fraction: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Draw round(fraction * n) examples; each stratum gives its proportional share, within one.

    scikit-learn's `resample(stratify=)`: unlike `train_test_split` it also draws from strata with
    a single member, and fewer examples than there are strata. The result depends on the arguments
    alone.

    Args:
        strata: the stratum (class, genre, digit and speaker, ...) of each example.
        fraction: the share of the examples to draw, in [0, 1].
        seed: any whole number from 0.

    Returns:
        The drawn and the remaining indices, each sorted.

    >>> drawn, rest = stratified([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], 0.5, seed=0)
    >>> len(drawn), len(rest), int((drawn < 4).sum())
    (5, 5, 2)
    """
    from sklearn.utils import resample

    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"The fraction to draw must lie in [0, 1]: got {fraction}.")
    keys = np.asarray(strata)
    if keys.ndim != 1:
        raise ValueError(f"Strata are one number per example: got shape {keys.shape}.")
    rows = np.arange(len(keys))
    count = round(fraction * len(keys))
    if count == 0:  # resample draws at least one
        return torch.from_numpy(rows[:0]), torch.from_numpy(rows)
    generator = np.random.RandomState(np.random.PCG64(seed))  # a bare seed must fit in 32 bits
    drawn = resample(rows, replace=False, n_samples=count, stratify=keys, random_state=generator)
    return torch.from_numpy(np.sort(drawn)), torch.from_numpy(np.setdiff1d(rows, drawn))


def train_and_valid(
    strata: Sequence[int] | Tensor | np.ndarray,
    train_fraction: float,
    seed: int,
    limit: int | None,
) -> tuple[Tensor, Tensor, list[str]]:
    """The papers' protocol: reduce the pool to `limit` examples, then draw train and validation.

    Args:
        strata: the stratum of each example of the pool.
        train_fraction: the share of the pool to train on; the rest validates.
        seed: of both draws.
        limit: how many examples the pool keeps at most; None keeps all.

    Returns:
        Training indices, validation indices, and notes: what the limit left out, and which strata
        a split lacks.
    """
    if not 0.0 < train_fraction < 1.0:
        raise ValueError(
            f"train_fraction must lie strictly between 0 and 1: got {train_fraction}; the papers "
            "use 0.7."
        )
    keys = np.asarray(strata)
    pool, notes = limited(keys, limit, seed)
    train, valid = stratified(keys[pool.numpy()], train_fraction, seed)
    if not len(train) or not len(valid):
        raise DamagedData(
            f"{len(pool)} examples at train_fraction={train_fraction} leave {len(train)} to train "
            f"and {len(valid)} to validate on: give more examples, raise the limit or change the "
            "fraction."
        )
    for split, rows in (("training", train), ("validation", valid)):
        absent = np.setdiff1d(keys, keys[pool[rows].numpy()])
        if len(absent):
            total = len(np.unique(keys))
            notes.append(f"{len(absent)} of {total} strata have no {split} example")
    return pool[train], pool[valid], notes


def limited(strata: np.ndarray, limit: int | None, seed: int) -> tuple[Tensor, list[str]]:
    """At most `limit` examples, drawn by strata, and a note where some were left out.

    Args:
        strata: the stratum of each example.
        limit: how many to keep; None keeps all.
        seed: of the draw.
    """
    total = len(strata)
    if limit is None or limit >= total:
        return torch.arange(total), []
    if limit < 2:
        raise ValueError(
            f"limit counts the examples to train and validate on: got {limit}, need 2 or more."
        )
    kept, _ = stratified(strata, limit / total, seed)
    return kept, [
        f"only {len(kept)} of {total} examples outside the test set were used (limit={limit})"
    ]


@dataclass(frozen=True)
class Division:
    """Which examples of which given split train, validate and test, and notes on what was drawn.

    Attributes:
        rows: for each split, the name of the given split that it comes from and the indices there.
        notes: what was drawn or left out, in words.
        drawn: the splits that were not given.
    """

    rows: dict[str, tuple[str, Tensor]]
    notes: list[str]
    drawn: list[str]

    @property
    def train(self) -> Tensor:
        return self.rows["train"][1]


def split_rows(
    labels: Mapping[str, Tensor],
    *,
    seed: int,
    train_fraction: float,
    limit: int | None,
    test_seed: int = TEST_SEED,
    test_fraction: float,
    test_limit: int | None,
) -> Division:
    """Keep the splits that are given; draw the missing ones by class.

    Args:
        labels: class numbers of each given split; `train` is required.
        seed: draws training and validation examples.
        train_fraction: the share to train on where no validation split is given.
        limit: how many examples outside the test split are kept; None keeps all.
        test_seed: draws the test split, or the subset of it that `test_limit` keeps.
        test_fraction: the share to test on where no test split is given.
        test_limit: how many test examples are kept; None keeps all.
    """
    pool, notes = torch.arange(len(labels["train"])), list[str]()
    test_from = "test" if "test" in labels else "train"
    if test_from == "test":
        test = torch.arange(len(labels["test"]))
    else:
        test, pool = stratified(labels["train"], test_fraction, test_seed)
        how = draw_name(test_seed)
        notes.append(f"no test split: {how} by class of {len(test)} examples serves as test")
    if "valid" in labels:
        valid = torch.arange(len(labels["valid"]))
        kept, cut = limited(labels["train"][pool].numpy(), limit, seed)
        train = pool[kept]
    else:
        kept, held, cut = train_and_valid(labels["train"][pool], train_fraction, seed, limit)
        train, valid = pool[kept], pool[held]
    chosen, test_cut = limited(labels[test_from][test].numpy(), test_limit, test_seed)
    if test_cut:
        notes.append(
            f"only {len(chosen)} of {len(test)} test examples were used (test_limit={test_limit})"
        )
    rows = {
        "train": ("train", train),
        "valid": ("valid" if "valid" in labels else "train", valid),
        "test": (test_from, test[chosen]),
    }
    # A given split that is empty is an incomplete copy, which the dataset itself reports.
    given = [split for split, numbers in labels.items() if not len(numbers)]
    empty = [split for split, (_, i) in rows.items() if not len(i) and split not in given]
    if empty:
        counts = ", ".join(f"{len(numbers)} in {split}" for split, numbers in labels.items())
        raise DamagedData(
            f"Too few examples: got {counts}, and none is left for {' and '.join(empty)} "
            f"(train_fraction={train_fraction:g}, test_fraction={test_fraction:g}, limit={limit}, "
            f"test_limit={test_limit}). Give more examples of every class, or other fractions."
        )
    return Division(rows, notes + cut, [name for name in ("valid", "test") if name not in labels])


def draw_name(test_seed: int) -> str:
    """How the test split was drawn, in words.

    Args:
        test_seed: the seed it was drawn with.
    """
    return "a fixed draw" if test_seed == TEST_SEED else "a draw"


def class_numbers(
    labels: Mapping[str, Sequence[Any]], where: str
) -> tuple[list[str], dict[str, Tensor]]:
    """The sorted classes of the training split, and each split's labels as positions in them.

    Args:
        labels: the labels of each split, as numbers or names; whole numbers are sorted by size.
        where: the file or function they come from, for errors.
    """
    odd = {"nan", "inf", "-inf"} & {
        _class_name(v) for values in labels.values() for v in values if not isinstance(v, str)
    }
    if odd:
        raise DamagedData(
            f"{where} has the label {odd.pop()}, which is no class. Remove its examples or label "
            "them."
        )
    names = sorted({_class_name(v) for v in labels["train"]}, key=_class_order)
    place = {name: i for i, name in enumerate(names)}
    numbered = {}
    for split, values in labels.items():
        unknown = sorted({_class_name(v) for v in values} - set(place))
        if unknown:
            raise DamagedData(
                f"{where}: the {split} split has classes that the training split lacks: "
                f"{unknown[:5]}."
            )
        numbered[split] = torch.tensor([place[_class_name(v)] for v in values])
    if len(names) < 2:
        raise DamagedData(
            f"{where}: all examples are of one class, {names}; say which column is the label."
        )
    return names, numbered


def _class_name(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _class_order(name: str) -> tuple[bool, int, str]:
    """Whole numbers first, by size; then names."""
    # Not everything that Unicode calls a digit is a number, and '--5' is none either.
    whole = re.fullmatch(r"-?[0-9]{1,30}", name) is not None
    return (not whole, int(name) if whole else 0, name)


def fold_of(data: Dataset, folds: int, seed: int, train_fraction: float = 0.7) -> Dataset:
    """The dataset of one cross-validation fold: it is tested on, the others train and validate.

    All splits are pooled. What is learned from data before training, a normalization or a
    vocabulary, is learned from the fold's own training split.

    Args:
        data: the dataset as loaded.
        folds: how many folds a round has.
        seed: says which fold: seed = round * folds + fold. A table averages the folds of a round.
        train_fraction: the share of the other folds to train on.
    """
    from sklearn.model_selection import StratifiedKFold

    from dampen.studies.data.sets import DATASETS

    if data.name in DATASETS and (why := DATASETS[data.name].spec.no_folds):
        raise ValueError(f"{data.name} cannot be cross-validated: {why}. Leave out folds.")
    if not isinstance(data.train, ClassSplit):
        raise ValueError(
            f"Folds are for images, texts and arrays with one class each: {data.name} has other "
            "targets."
        )
    pooled = [s for s in data.splits.values() if isinstance(s, ClassSplit)]
    labels = torch.cat([split.labels for split in pooled])
    fewest = int(torch.bincount(labels).min())
    if fewest < folds:
        raise ValueError(
            f"{folds} folds need as many examples of every class: the smallest class has {fewest}."
        )
    number, fold = divmod(seed, folds)
    cut = StratifiedKFold(folds, shuffle=True, random_state=number)
    rest, held = list(cut.split(labels.numpy(), labels.numpy()))[fold]
    train, valid = stratified(labels[rest], train_fraction, number)
    rows = {
        "train": torch.from_numpy(rest)[train],
        "valid": torch.from_numpy(rest)[valid],
        "test": torch.from_numpy(held),
    }
    change = data.train.refold(data, rows)
    note = f"cross-validation, fold {fold + 1} of {folds} in round {number + 1}"
    info = {**data.info, "departures": [*data.info.get("departures", []), note], **change.info}
    del info["examples"]  # counted anew
    return replace(
        data,
        train=change.splits["train"],
        valid=change.splits["valid"],
        test=change.splits["test"],
        info=info,
        model_args={**data.model_args, **change.model_args},
        normalization=change.normalization,
    )
