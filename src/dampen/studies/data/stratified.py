"""Seeded stratified draws: how a set without an official validation part gets one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.errors import DamagedData


def stratified(strata: Sequence[int] | Tensor | np.ndarray, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw round(fraction * n) examples; each stratum gives its proportional share, within one.

    scikit-learn's `resample(stratify=)`: unlike `train_test_split` it also draws from strata with
    a single member, and fewer examples than there are strata. The result depends on the arguments
    alone.

    Args:
        strata: The stratum (class, genre, digit and speaker, ...) of each example.
        fraction: The share of the examples to draw, in [0, 1].
        seed: Any whole number from 0.

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
    strata: Sequence[int] | Tensor | np.ndarray, train_fraction: float, seed: int, limit: int | None
) -> tuple[Tensor, Tensor, list[str]]:
    """The papers' protocol: cut the pool to `limit` examples, then draw train and validation from it.

    Returns the two index sets and notes: what the limit left out, which strata a split lacks.
    """
    check_fraction(train_fraction)
    keys = np.asarray(strata)
    pool, departures = limited(keys, limit, seed)
    train, valid = stratified(keys[pool.numpy()], train_fraction, seed)
    if not len(train) or not len(valid):
        raise DamagedData(
            f"{len(pool)} examples at train_fraction={train_fraction} leave {len(train)} to train and {len(valid)} to "
            "validate on: give more examples, raise the limit or move the fraction."
        )
    for split, rows in (("training", train), ("validation", valid)):
        absent = np.setdiff1d(keys, keys[pool[rows].numpy()])
        if len(absent):
            total = len(np.unique(keys))
            departures.append(f"{len(absent)} of {total} strata have no {split} example")
    return pool[train], pool[valid], departures


def limited(strata: np.ndarray, limit: int | None, seed: int) -> tuple[Tensor, list[str]]:
    """At most `limit` examples, drawn by strata, and a note in words where some were left out."""
    total = len(strata)
    if limit is None or limit >= total:
        return torch.arange(total), []
    if limit < 2:
        raise ValueError(f"limit counts the examples to train and validate on: got {limit}, need 2 or more.")
    kept, _ = stratified(strata, limit / total, seed)
    return kept, [f"only {len(kept)} of {total} examples outside the test set were used (limit={limit})"]


def check_fraction(train_fraction: float) -> None:
    if not 0.0 < train_fraction < 1.0:
        raise ValueError(f"train_fraction must lie strictly between 0 and 1: got {train_fraction}; the papers use 0.7.")
