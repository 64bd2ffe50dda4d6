"""Data that a user's own function returns: torch Datasets of (input, class), read into memory once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.arrays import array_dataset
from dampen.studies.data.dataset import Dataset, DataSpec
from dampen.studies.data.errors import DamagedData
from dampen.studies.data.labeled import class_numbers

FUNCTION = DataSpec(
    "function",
    "classification",
    "what your function returns: a dict of torch Datasets, train and perhaps valid and test, of (input, class)",
    "file.py:load",
    "each item is (tensor or tuple of tensors, class); all of one shape",
)

Parts = dict[str, tuple[tuple[Tensor, ...], list[Any]]]


def read_parts(load: Callable[[], Any], name: str) -> Parts:
    """Call the function and read every example."""
    returned = load()
    if isinstance(returned, tuple | list):
        returned = dict(
            zip(("train", "test") if len(returned) == 2 else ("train", "valid", "test"), returned, strict=True)
        )
    if not isinstance(returned, Mapping) or "train" not in returned or set(returned) - {"train", "valid", "test"}:
        told = sorted(returned) if isinstance(returned, Mapping) else repr(returned)
        raise DamagedData(f"{name} must return a dict with train and perhaps valid and test, got {told}.")
    return {part: _read(content, f"{name}, {part}") for part, content in returned.items()}


def _read(content: Any, where: str) -> tuple[tuple[Tensor, ...], list[Any]]:
    inputs, labels = [], []
    for i in range(len(content)):
        x, y = content[i]
        inputs.append(tuple(torch.as_tensor(t) for t in x) if isinstance(x, tuple | list) else (torch.as_tensor(x),))
        labels.append(y.item() if isinstance(y, Tensor) else y)
    try:
        return tuple(torch.stack(column) for column in zip(*inputs, strict=True)), labels
    except RuntimeError as error:
        raise DamagedData(f"{where}: the examples are not all of one shape: {error}. Resize or pad them.") from error


def content_hash(parts: Parts) -> str:
    """The identity of what was returned: a hash of every value."""
    sha = hashlib.sha256()
    for part in sorted(parts):
        inputs, labels = parts[part]
        for x in inputs:
            sha.update(f"{part} {x.dtype} {tuple(x.shape)}".encode())
            sha.update(x.contiguous().numpy().tobytes())
        sha.update(repr(labels).encode())
    return sha.hexdigest()[:16]


def load_own(parts: Parts, name: str, fingerprint: str, **cuts: Any) -> Dataset:
    """The data set of what a function returned; inputs go to the model as they are."""
    classes, labels = class_numbers({k: y for k, (_, y) in parts.items()}, name)
    facts = {"layout": "function", "source": name, "sha256": {"content": fingerprint}}
    cuts = {"test_fraction": 0.25, "test_limit": None, **cuts}
    inputs = {k: x for k, (x, _) in parts.items()}
    return array_dataset(FUNCTION, inputs, labels, classes, facts, cuts, normalize=False)
