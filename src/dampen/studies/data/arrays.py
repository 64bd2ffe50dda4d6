"""Arrays from an npz file or from a function: images or sequences of features, one class each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import (
    Batch,
    ClassSplit,
    DamagedData,
    Dataset,
    DataSpec,
    Normalization,
    Refolded,
    Request,
)
from dampen.studies.data.files import read_npz
from dampen.studies.data.images import image_dataset
from dampen.studies.data.splits import class_numbers, split_rows
from dampen.studies.files import file_hash

LAYOUT = (
    "x and y, or x_train, y_train, x_test, y_test (also x_valid, y_valid); "
    "x also as images, features, inputs"
)
IMAGE_ARRAYS = DataSpec(
    "image_arrays", "image", "an npz file of images (n, height, width[, channels])", "yours", LAYOUT
)
FEATURE_ARRAYS = DataSpec(
    "feature_arrays",
    "classification",
    "an npz file of sequences (n, tokens, features)",
    "yours",
    LAYOUT,
)
FUNCTION = DataSpec(
    "function",
    "classification",
    "a function that returns a dict of torch Datasets (train, optional valid and test) of (input, "
    "class)",
    "file.py:load",
    "each item is (tensor or tuple of tensors, class); all of one shape",
)
X, Y = ("x", "images", "features", "inputs", "data"), ("y", "labels", "label", "target", "targets")
SUFFIXES = {"train": ("_train", ""), "valid": ("_valid", "_val"), "test": ("_test",)}

Arrays = dict[str, tuple[tuple[Tensor, ...], list[Any]]]
"""Inputs and labels of each split that a function returned."""


class ArraySplit(ClassSplit):
    """Float inputs of one shape each, already normalized.

    Args:
        inputs: tensors with one row per example: the arguments of the model.
        labels: class numbers.
    """

    def __init__(self, inputs: tuple[Tensor, ...], labels: Tensor):
        if any(len(x) != len(labels) for x in inputs):
            sizes = [len(x) for x in inputs]
            raise ValueError(
                f"Inputs and labels must match one to one: got {sizes} and {len(labels)}."
            )
        self.inputs, self.labels = inputs, labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Batch:
        return {"inputs": tuple(x[indices] for x in self.inputs), "target": self.labels[indices]}

    def refold(self, data: Dataset, rows: dict[str, Tensor]) -> Refolded:
        pooled: list[Any] = list(data.splits.values())
        columns = zip(*(split.inputs for split in pooled), strict=True)
        inputs = tuple(torch.cat(column) for column in columns)
        labels = torch.cat([split.labels for split in pooled])
        normalization, info = data.normalization, {}
        if normalization is not None:
            inputs, normalization = _renormalized(inputs, rows["train"], normalization)
            info = {"normalization": normalization.facts()}
        splits = {n: ArraySplit(tuple(x[i] for x in inputs), labels[i]) for n, i in rows.items()}
        return Refolded({**splits}, normalization, info)


def _renormalized(
    inputs: tuple[Tensor, ...], rows: Tensor, before: Normalization
) -> tuple[tuple[Tensor, ...], Normalization]:
    """Inputs that other rows have normalized, normalized by these rows."""
    x = inputs[0]
    axis = feature_axis(x)
    by = statistics_of(x[rows], axis)
    # ((x - m) / s - m') / s' = (x - (m + s m')) / (s s')
    both = Normalization(before.mean + before.std * by.mean, before.std * by.std)
    return (normalized(x, by, axis), *inputs[1:]), both


def read_arrays(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each split that an npz file has.

    Args:
        path: the file.
    """
    arrays = {name.lower(): array for name, array in read_npz(path, "biufUS").items()}
    found = {}
    for split, suffixes in SUFFIXES.items():
        for suffix in suffixes:
            x = next((arrays[n + suffix] for n in X if n + suffix in arrays), None)
            y = next((arrays[n + suffix] for n in Y if n + suffix in arrays), None)
            if x is not None and y is not None and split not in found:
                y = y.reshape(-1)
                found[split] = (_checked(x, f"{path}: the {split} split", len(y)), y)
    if "train" not in found:
        raise DamagedData(f"{path} has the arrays {', '.join(arrays)}; expected {LAYOUT}.")
    return found


def _checked(x: np.ndarray, where: str, labels: int) -> np.ndarray:
    """Inputs as bytes or as finite floats, one for each label; anything else raises."""
    count = len(x) if x.ndim else 0
    if count != labels or not count:
        raise DamagedData(f"{where} has {count} inputs and {labels} labels.")
    if x.dtype.kind not in "biuf":
        raise DamagedData(f"{where} has inputs of {x.dtype}; whole numbers and floats are read.")
    if x.dtype == np.uint8:
        return x.copy(order="C")  # the file's bytes are read-only, and torch warns about that
    with np.errstate(over="ignore"):  # a double may be finite and too large for a float
        floats = x.astype(np.float32, order="C")
    if not np.isfinite(floats).all():
        odd = np.argwhere(~np.isfinite(floats))[0].tolist()
        raise DamagedData(
            f"{where} has an input that is no finite number, at {odd}. Remove it or fill it in."
        )
    return floats


def is_images(x: np.ndarray) -> bool:
    """Whether an array holds images: bytes (n, height, width), or any (n, a, b, c).

    Args:
        x: the array.
    """
    return x.ndim == 4 or (x.ndim == 3 and x.dtype == np.uint8)


def load_arrays(
    request: Request,
    *,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """An npz file. Byte images are stored as such; all else is normalized by the training split.

    Args:
        request: which file and which draw.
        test_fraction: the share to test on where the file has no test split.
        test_limit: how many test examples are kept.
    """
    path = Path(request.data_dir or ".")
    given = read_arrays(path)
    classes, labels = class_numbers({k: list(y) for k, (_, y) in given.items()}, path.name)
    cuts = request.cuts | {"test_fraction": test_fraction, "test_limit": test_limit}
    facts: dict[str, Any] = {
        "layout": "npz",
        "source": path.name,
        "sha256": {path.name: file_hash(path)},
    }
    arrays = {split: _tensor(x) for split, (x, _) in given.items()}
    if arrays["train"].dtype != torch.uint8 or request.spec.task != "image":
        inputs: dict[str, tuple[Tensor, ...]] = {n: (x.float(),) for n, x in arrays.items()}
        return array_dataset(request.spec, inputs, labels, classes, facts, cuts)
    parts = {split: (x, labels[split]) for split, x in arrays.items()}
    train = parts.pop("train")
    return image_dataset(
        request.spec,
        *train,
        classes,
        facts,
        test=parts.get("test"),
        valid=parts.get("valid"),
        root=path,
        **cuts,
    )


def _tensor(x: np.ndarray) -> Tensor:
    """A tensor; images get their channels in front."""
    if not is_images(x):
        return torch.from_numpy(x)
    images = torch.from_numpy(np.ascontiguousarray(x))
    if images.dim() == 3:
        return images[:, None]
    last = images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)
    return images.permute(0, 3, 1, 2).contiguous() if last else images


def array_dataset(
    spec: DataSpec,
    inputs: dict[str, tuple[Tensor, ...]],
    labels: dict[str, Tensor],
    classes: list[str],
    facts: dict[str, Any],
    cuts: dict[str, Any],
    normalize: bool = True,
) -> Dataset:
    """Split and wrap float arrays.

    Args:
        spec: the dataset.
        inputs: the arguments of the model for each given split.
        labels: class numbers of each given split.
        classes: the names of the classes.
        facts: for the record.
        cuts: the arguments of `split_rows`.
        normalize: whether each channel (images) or feature (sequences) of the first input is
            normalized by the training split.
    """
    drawn = split_rows(labels, **cuts)
    first = inputs["train"][0]
    axis = feature_axis(first)
    normalization = statistics_of(first[drawn.train], axis) if normalize else None
    splits = {}
    for split, (source, index) in drawn.rows.items():
        x = tuple(t[index] for t in inputs[source])
        if normalization is not None:
            x = (normalized(x[0], normalization, axis), *x[1:])
        splits[split] = ArraySplit(x, labels[source][index])
    model: dict[str, Any] = {"classes": len(classes)}
    if first.dim() == 4:
        height, width = first.shape[2:]
        size = height if height == width else (height, width)
        model |= {"image_size": size, "channels": first.shape[1]}
    elif first.dim() == 3:
        model |= {"features": first.shape[2], "max_tokens": first.shape[1]}
    facts |= {"departures": drawn.notes, "drawn": drawn.drawn, "partial": False, **cuts}
    if normalization is not None:
        facts["normalization"] = normalization.facts()
    return Dataset(
        spec.name,
        spec.task,
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        classes=classes,
        info=facts,
        model_args=model,
        normalization=normalization,
    )


def feature_axis(x: Tensor) -> int:
    """The axis that is normalized: the channels of images, the features of sequences.

    Args:
        x: inputs of any shape (n, ...).
    """
    return 1 if x.dim() == 4 else x.dim() - 1


def statistics_of(x: Tensor, axis: int) -> Normalization:
    """Mean and standard deviation of each entry along an axis; constants are only shifted.

    Args:
        x: the training inputs.
        axis: as `feature_axis` gives it.
    """
    others = [i for i in range(x.dim()) if i != axis]
    std = x.std(dim=others, correction=0)
    return Normalization(x.mean(dim=others), torch.where(std > 0, std, torch.ones_like(std)))


def normalized(x: Tensor, by: Normalization, axis: int) -> Tensor:
    """Inputs shifted and scaled along an axis.

    Args:
        x: the inputs.
        by: mean and standard deviation of each entry along the axis.
        axis: which one.
    """
    shape = [-1 if i == axis else 1 for i in range(x.dim())]
    return (x - by.mean.view(shape)) / by.std.view(shape)


def read_function(load: Callable[[], Any], name: str) -> Arrays:
    """Call a user's function and read every example of the datasets that it returns.

    Args:
        load: returns a dict of torch Datasets, or a tuple (train, test) or (train, valid, test).
        name: of the function, for errors.
    """
    returned = load()
    if isinstance(returned, tuple | list):
        names = ("train", "test") if len(returned) == 2 else ("train", "valid", "test")
        returned = dict(zip(names, returned, strict=True))
    known = {"train", "valid", "test"}
    if not isinstance(returned, Mapping) or "train" not in returned or set(returned) - known:
        got = sorted(returned) if isinstance(returned, Mapping) else repr(returned)
        raise DamagedData(
            f"{name} must return a dict with train and optionally valid and test, got {got}."
        )
    return {split: _examples(content, f"{name}, {split}") for split, content in returned.items()}


def _examples(content: Any, where: str) -> tuple[tuple[Tensor, ...], list[Any]]:
    inputs, labels = [], []
    for i in range(len(content)):
        x, y = content[i]
        arguments = x if isinstance(x, tuple | list) else (x,)
        inputs.append(tuple(torch.as_tensor(t) for t in arguments))
        labels.append(y.item() if isinstance(y, Tensor) else y)
    try:
        return tuple(torch.stack(column) for column in zip(*inputs, strict=True)), labels
    except RuntimeError as error:
        raise DamagedData(
            f"{where}: the examples are not all of one shape: {error}. Resize or pad them."
        ) from error


def content_hash(arrays: Arrays) -> str:
    """A hash of every value that a function returned: the identity of its data.

    Args:
        arrays: as `read_function` gives them.
    """
    sha = hashlib.sha256()
    for split in sorted(arrays):
        inputs, labels = arrays[split]
        for x in inputs:
            sha.update(f"{split} {x.dtype} {tuple(x.shape)}".encode())
            sha.update(x.contiguous().numpy().tobytes())
        sha.update(repr(labels).encode())
    return sha.hexdigest()[:16]


def function_dataset(arrays: Arrays, name: str, fingerprint: str, **cuts: Any) -> Dataset:
    """The dataset that a user's function returned; its inputs reach the model unchanged.

    Args:
        arrays: as `read_function` gives them.
        name: of the function.
        fingerprint: their `content_hash`.
        cuts: arguments of `split_rows`.
    """
    classes, labels = class_numbers({k: y for k, (_, y) in arrays.items()}, name)
    facts = {"layout": "function", "source": name, "sha256": {"content": fingerprint}}
    cuts = {"test_fraction": 0.25, "test_limit": None, **cuts}
    inputs = {k: x for k, (x, _) in arrays.items()}
    return array_dataset(FUNCTION, inputs, labels, classes, facts, cuts, normalize=False)
