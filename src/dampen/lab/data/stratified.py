"""Seeded stratified draws: how a set without an official validation part gets one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dampen.lab.data.errors import DamagedData


def stratified(strata: Sequence[int] | Tensor | np.ndarray, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `fraction` of the examples so that every stratum gives its share; return (drawn, rest), each sorted.

    The number drawn is round(fraction * n). Each stratum gives the whole part of its share; what is left over goes to
    the strata with the largest remainders, ties broken by the seeded generator. The draw depends on nothing but
    its arguments (numpy's PCG64).

    >>> drawn, rest = stratified([0, 0, 0, 0, 1, 1, 1, 1, 1, 1], 0.5, seed=0)
    >>> len(drawn), len(rest), int((drawn < 4).sum())
    (5, 5, 2)
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"The fraction to draw must lie in [0, 1]: got {fraction}.")
    keys = np.asarray(strata)
    if keys.ndim != 1:
        raise ValueError(f"Strata are one number per example: got shape {keys.shape}.")
    generator = np.random.Generator(np.random.PCG64(seed))
    values, members = np.unique(keys, return_inverse=True)
    counts = np.bincount(members, minlength=len(values))
    shares = fraction * counts
    take = np.floor(shares + 1e-9).astype(int)
    left = round(fraction * len(keys)) - int(take.sum())
    order = np.lexsort((generator.random(len(values)), take - shares))  # largest remainder first
    take[order[: max(left, 0)]] += 1
    chosen = np.zeros(len(keys), dtype=bool)
    for stratum in range(len(values)):
        indices = generator.permutation(np.flatnonzero(members == stratum))
        chosen[indices[: take[stratum]]] = True
    return torch.from_numpy(np.flatnonzero(chosen)), torch.from_numpy(np.flatnonzero(~chosen))


def train_and_valid(
    strata: Sequence[int] | Tensor | np.ndarray, train_fraction: float, seed: int, limit: int | None
) -> tuple[Tensor, Tensor, list[str]]:
    """The papers' protocol: cut the pool to `limit` examples, then draw train and validation from it.

    Returns the two index sets and, in words, what the limit left out.
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
