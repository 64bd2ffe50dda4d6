"""Examples with one class each, from any source: how they are split, and the split that holds them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.dataset import TEST_SEED, Batch, Split
from dampen.studies.data.errors import DamagedData
from dampen.studies.data.images import a_draw
from dampen.studies.data.stratified import limited, stratified, train_and_valid

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Division:
    """Which examples of which given part train, validate and test, and in words what was drawn."""

    train: Tensor
    valid: Tensor
    test: Tensor
    valid_from: str  # 'train' or 'valid': the part that the validation rows count in
    test_from: str
    departures: list[str]
    drawn: list[str]  # the splits that were not given


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
    """Keep the splits that are there; draw by class what is missing, the test split with a seed of its own."""
    pool, departures = torch.arange(len(labels["train"])), list[str]()
    test_from = "test" if "test" in labels else "train"
    if test_from == "test":
        test = torch.arange(len(labels["test"]))
    else:
        test, pool = stratified(labels["train"], test_fraction, test_seed)
        departures.append(f"no test part: {a_draw(test_seed)} by class of {len(test)} examples serves as test")
    if "valid" in labels:
        valid = torch.arange(len(labels["valid"]))
        kept, cut = limited(labels["train"][pool].numpy(), limit, seed)
        train = pool[kept]
    else:
        own, held, cut = train_and_valid(labels["train"][pool], train_fraction, seed, limit)
        train, valid = pool[own], pool[held]
    chosen, test_cut = limited(labels[test_from][test].numpy(), test_limit, test_seed)
    if test_cut:
        departures.append(f"only {len(chosen)} of {len(test)} test examples were used (test_limit={test_limit})")
    test = test[chosen]
    empty = [name for name, rows in (("training", train), ("validation", valid), ("test", test)) if not len(rows)]
    if empty:
        counts = ", ".join(f"{len(numbers)} in {part}" for part, numbers in labels.items())
        raise DamagedData(
            f"Too few examples: got {counts}, of which none is left for {' and '.join(empty)} (train_fraction="
            f"{train_fraction:g}, test_fraction={test_fraction:g}, limit={limit}, test_limit={test_limit}). Give more "
            "examples of every class, or other fractions."
        )
    valid_from = "valid" if "valid" in labels else "train"
    drawn = [name for name in ("valid", "test") if name not in labels]
    return Division(train, valid, test, valid_from, test_from, departures + cut, drawn)


def class_numbers(labels: Mapping[str, Sequence[Any]], where: str) -> tuple[list[str], dict[str, Tensor]]:
    """The classes of the training part, sorted (numbers as numbers), and each part's labels as their places in it."""
    names = sorted({_name(v) for v in labels["train"]}, key=_order)
    odd = {"nan", "inf", "-inf"} & {_name(v) for values in labels.values() for v in values if not isinstance(v, str)}
    if odd:
        raise DamagedData(f"{where} has the label {odd.pop()}, which is no class. Remove its examples or label them.")
    place = {name: i for i, name in enumerate(names)}
    numbered = {}
    for part, values in labels.items():
        unknown = sorted({_name(v) for v in values} - set(place))
        if unknown:
            raise DamagedData(f"{where}: the {part} part has classes that the training part lacks: {unknown[:5]}.")
        numbered[part] = torch.tensor([place[_name(v)] for v in values])
    if len(names) < 2:
        raise DamagedData(f"{where}: all examples are of one class, {names}; say which column is the label.")
    return names, numbered


def _name(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _order(name: str) -> tuple[bool, int, str]:
    """Whole numbers first, by size; then names. Not all that Unicode calls a digit is a number, '--5' neither."""
    whole = re.fullmatch(r"-?[0-9]{1,30}", name) is not None
    return (not whole, int(name) if whole else 0, name)


class ArraySplit(Split):
    """Float inputs of one shape each, already normalized: `inputs` is a tuple of tensors with one row per example."""

    def __init__(self, inputs: tuple[Tensor, ...], labels: Tensor):
        if any(len(x) != len(labels) for x in inputs):
            sizes = [len(x) for x in inputs]
            raise ValueError(f"Inputs and labels must match one to one: got {sizes} and {len(labels)}.")
        self.inputs, self.labels = inputs, labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Batch:
        return {"inputs": tuple(x[indices] for x in self.inputs), "target": self.labels[indices]}


class TokenSplit(Split):
    """Texts as token numbers with one class each: `inputs = (ids, padding)`, and `types` third where texts are pairs.

    A batch is cut to its longest text, rounded up to a multiple of 8; `padding` is True where there is none.
    """

    def __init__(self, ids: Tensor, lengths: Tensor, labels: Tensor, types: Tensor | None = None, multiple: int = 8):
        self.ids, self.lengths, self.labels, self.types, self.multiple = ids, lengths, labels.long(), types, multiple

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Batch:
        lengths = self.lengths[indices]
        longest = -(-int(lengths.max()) // self.multiple) * self.multiple
        longest = min(longest, self.ids.shape[1])
        ids = self.ids[indices, :longest].long()
        padding = torch.arange(longest) >= lengths[:, None]
        types = () if self.types is None else (self.types[indices, :longest].long(),)
        return {"inputs": (ids, padding, *types), "target": self.labels[indices]}
