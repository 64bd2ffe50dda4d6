"""Arrays of one's own in an npz file: images, or sequences of feature vectors, with one class each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import Dataset, DataSpec, Normalization, Request
from dampen.studies.data.errors import DamagedData
from dampen.studies.data.images import image_dataset
from dampen.studies.data.labeled import ArraySplit, class_numbers, split_rows
from dampen.studies.data.limits import read_npz
from dampen.studies.files import file_hash

LAYOUT = "x and y, or x_train, y_train, x_test, y_test (also x_valid, y_valid); x also as images, features, inputs"
IMAGE_ARRAYS = DataSpec(
    "image_arrays", "image", "an npz file of images (n, height, width[, channels])", "yours", LAYOUT
)
FEATURE_ARRAYS = DataSpec(
    "feature_arrays", "classification", "an npz file of sequences (n, tokens, features)", "yours", LAYOUT
)
X, Y = ("x", "images", "features", "inputs", "data"), ("y", "labels", "label", "target", "targets")


def read_arrays(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs and labels of each part that the file has."""
    arrays = {name.lower(): array for name, array in read_npz(path, "biufUS").items()}
    found = {}
    for part, endings in {"train": ("_train", ""), "valid": ("_valid", "_val"), "test": ("_test",)}.items():
        for ending in endings:
            x = next((arrays[n + ending] for n in X if n + ending in arrays), None)
            y = next((arrays[n + ending] for n in Y if n + ending in arrays), None)
            if x is not None and y is not None and part not in found:
                found[part] = (x, y.reshape(-1))
    if "train" not in found:
        raise DamagedData(f"{path} has the arrays {', '.join(arrays)}; expected {LAYOUT}.")
    return {part: (_usable(x, f"{path}: the {part} part", len(y)), y) for part, (x, y) in found.items()}


def _usable(x: np.ndarray, where: str, labels: int) -> np.ndarray:
    """Inputs as bytes or as finite floats, one for each label; anything else is said to be wrong."""
    count = len(x) if x.ndim else 0
    if count != labels or not count:
        raise DamagedData(f"{where} has {count} inputs and {labels} labels.")
    if x.dtype.kind not in "biuf":
        raise DamagedData(f"{where} has inputs of {x.dtype}; whole numbers and floats are read.")
    if x.dtype == np.uint8:
        return x.copy(order="C")  # what lies in the file's bytes cannot be written to, which torch warns of
    with np.errstate(over="ignore"):  # a double may be finite and too large for a float
        floats = x.astype(np.float32, order="C")
    if not np.isfinite(floats).all():
        odd = np.argwhere(~np.isfinite(floats))[0].tolist()
        raise DamagedData(f"{where} has an input that is no finite number, at {odd}. Remove it or fill it in.")
    return floats


def is_images(x: np.ndarray) -> bool:
    """Whether an array holds images: bytes, or with two axes of space and one of channels."""
    return x.ndim == 4 or (x.ndim == 3 and x.dtype == np.uint8)


def load_arrays(
    ask: Request,
    *,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images as bytes go the way of all images; everything else is normalized by the training part."""
    path = Path(ask.data_dir or ".")
    parts = read_arrays(path)
    classes, labels = class_numbers({k: list(y) for k, (_, y) in parts.items()}, path.name)
    cuts = ask.cuts | {"test_fraction": test_fraction, "test_limit": test_limit}
    facts: dict[str, Any] = {"layout": "npz", "source": path.name, "sha256": {path.name: file_hash(path)}}
    arrays = {part: _channels_first(x) if is_images(x) else torch.from_numpy(x) for part, (x, _) in parts.items()}
    if arrays["train"].dtype == torch.uint8 and ask.spec.task == "image":
        given = {part: (arrays[part], labels[part]) for part in arrays}
        return image_dataset(
            ask.spec,
            *given["train"],
            classes,
            facts,
            test=given.get("test"),
            valid=given.get("valid"),
            root=path,
            **cuts,
        )
    return array_dataset(ask.spec, {k: (x.float(),) for k, x in arrays.items()}, labels, classes, facts, cuts)


def array_dataset(
    spec: DataSpec,
    inputs: dict[str, tuple[Tensor, ...]],
    labels: dict[str, Tensor],
    classes: list[str],
    facts: dict[str, Any],
    cuts: dict[str, Any],
    normalize: bool = True,
) -> Dataset:
    """Split and wrap float arrays; each channel (images) or feature (sequences) is normalized by the training part."""
    rows = split_rows(labels, **cuts)
    places = {
        "train": ("train", rows.train),
        "valid": (rows.valid_from, rows.valid),
        "test": (rows.test_from, rows.test),
    }
    first = inputs["train"][0]
    axis = feature_axis(first)
    change = statistics_of(inputs["train"][0][rows.train], axis) if normalize else None
    splits = {}
    for part, (where, index) in places.items():
        x = tuple(t[index] for t in inputs[where])
        if change is not None:
            shape = [-1 if i == axis else 1 for i in range(first.dim())]
            x = ((x[0] - change.mean.view(shape)) / change.std.view(shape), *x[1:])
        splits[part] = ArraySplit(x, labels[where][index])
    model: dict[str, Any] = {"classes": len(classes)}
    if first.dim() == 4:
        height, width = first.shape[2:]
        model |= {"image_size": height if height == width else (height, width), "channels": first.shape[1]}
    elif first.dim() == 3:
        model |= {"features": first.shape[2], "max_tokens": first.shape[1]}
    facts |= {"departures": rows.departures, "drawn": rows.drawn, "partial": False, **cuts}
    facts |= {"normalization": change.facts()} if change is not None else {}
    made = (splits["train"], splits["valid"], splits["test"])
    return Dataset(spec.name, spec.task, *made, classes, facts, model, normalization=change)


def feature_axis(x: Tensor) -> int:
    """The axis that is normalized: the channels of images, the features of sequences."""
    return 1 if x.dim() == 4 else x.dim() - 1


def statistics_of(x: Tensor, axis: int) -> Normalization:
    """Mean and standard deviation of each entry along an axis; what never varies is only shifted."""
    others = [i for i in range(x.dim()) if i != axis]
    std = x.std(dim=others, correction=0)
    return Normalization(x.mean(dim=others), torch.where(std > 0, std, torch.ones_like(std)))


def _channels_first(x: np.ndarray) -> Tensor:
    images = torch.from_numpy(np.ascontiguousarray(x))
    if images.dim() == 3:
        return images[:, None]
    last = images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)
    return images.permute(0, 3, 1, 2).contiguous() if last else images
