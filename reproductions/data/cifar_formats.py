"""The layouts CIFAR-10 and CIFAR-100 come in, read into the rows of the binary layout: labels, then
3072 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dampen.studies.plugins import DamagedData, damaged, read_image, sha256
from reproductions.data.archives import Store, parse_json
from reproductions.data.unpickle import safe_unpickle

PIXELS = 3072  # 3 x 32 x 32, channel by channel, row by row
BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
NAMES_10 = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]


@dataclass(frozen=True)
class FileLayout:
    """File names of one layout: training parts in order, the test part, where class names stand."""

    kind: str  # binary, python or mosaic
    train: list[str]
    test: str
    names: str
    extra: tuple[str, ...] = ()

    @property
    def files(self) -> set[str]:
        return {*self.train, self.test, self.names, *self.extra}


LAYOUTS = {
    "cifar10": [
        FileLayout("binary", [f"{b}.bin" for b in BATCHES], "test_batch.bin", "batches.meta.txt"),
        FileLayout("python", BATCHES, "test_batch", "batches.meta"),
        FileLayout(
            "mosaic",
            [f"{b}.png" for b in BATCHES],
            "test_batch.png",
            "",
            ("train_lables.json", "test_lables.json"),
        ),
    ],
    "cifar100": [
        FileLayout(
            "binary", ["train.bin"], "test.bin", "fine_label_names.txt", ("coarse_label_names.txt",)
        ),
        FileLayout("python", ["train"], "test", "meta"),
    ],
}


@dataclass
class Copy:
    """One copy of a set on the disk: its layout, rows (labels first, as in the binary layout) and
    what is missing.
    """

    path: Path
    layout: FileLayout
    train: np.ndarray
    test: np.ndarray
    classes: dict[str, list[str]]
    problems: list[str]

    def hashes(self) -> dict[str, str]:
        return {"train": sha256(self.train.tobytes()), "test": sha256(self.test.tobytes())}


def recognize(name: str, path: Path) -> tuple[Store, FileLayout] | None:
    """The layout that lies at a path, if any."""
    if path.is_file() and not path.name.endswith((".tar.gz", ".tgz", ".tar")):
        return None
    store = Store(path, {file for layout in LAYOUTS[name] for file in layout.files if file})
    names = store.names()
    found = [layout for layout in LAYOUTS[name] if names & {*layout.train, layout.test}]
    return (
        (store, max(found, key=lambda layout: len(names & {*layout.train, layout.test})))
        if found
        else None
    )


def read_copy(name: str, store: Store, layout: FileLayout) -> Copy:
    """All rows of a copy, checked: sizes, labels in range, and how much of the official set is
    there.
    """
    have = store.names()
    problems = [f"{file} is not there" for file in (*layout.train, layout.test) if file not in have]
    read = {"binary": _binary, "python": _python, "mosaic": _mosaic}[layout.kind]
    parts = [read(name, store, file) for file in layout.train if file in have]
    width = label_bytes(name) + PIXELS
    train = np.concatenate(parts) if parts else np.empty((0, width), np.uint8)
    test = read(name, store, layout.test) if layout.test in have else np.empty((0, width), np.uint8)
    for part, rows, official in (("training", train, 50_000), ("test", test, 10_000)):
        if len(rows) != official:
            problems.append(f"{len(rows)} of {official} {part} images")
    return Copy(store.path, layout, train, test, _class_names(name, store, layout), problems)


def write_binary(copy: Copy, folder: Path) -> None:
    """Write a copy of CIFAR-10 in the official binary layout, file by file, each whole or not at
    all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = len(copy.train) // len(BATCHES)
    parts = {f"{name}.bin": copy.train[i * size : (i + 1) * size] for i, name in enumerate(BATCHES)}
    texts = {"batches.meta.txt": "\n".join(NAMES_10) + "\n"}
    contents = {
        name: rows.tobytes() for name, rows in (parts | {"test_batch.bin": copy.test}).items()
    }
    for name, content in (contents | {name: text.encode() for name, text in texts.items()}).items():
        beginning = folder / f".{name}.part"
        beginning.write_bytes(content)
        beginning.replace(folder / name)


def label_bytes(name: str) -> int:
    """Label bytes before each image in the binary layout: one, or coarse and fine."""
    return 1 if name == "cifar10" else 2


def _binary(name: str, store: Store, file: str) -> np.ndarray:
    content, width = store.read(file), label_bytes(name) + PIXELS
    if not content or len(content) % width:
        official = width * (10_000 if name == "cifar10" or file == "test.bin" else 50_000)
        raise damaged(store.path / file, "bytes", len(content), f"{official} (rows of {width})")
    return np.frombuffer(content, np.uint8).reshape(-1, width)


def _python(name: str, store: Store, file: str) -> np.ndarray:
    where = store.path / file
    table = safe_unpickle(store.read(file), str(where))
    keys = ["labels"] if name == "cifar10" else ["coarse_labels", "fine_labels"]
    if not isinstance(table, dict):
        raise damaged(where, "object", type(table).__name__, "a dict with data and labels")
    entries = {
        key.decode() if isinstance(key, bytes) else key: value for key, value in table.items()
    }
    data = entries.get("data")
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != PIXELS
    ):
        got = (data.dtype, data.shape) if isinstance(data, np.ndarray) else type(data).__name__
        raise damaged(where, "as data", got, f"uint8 rows of {PIXELS}")
    columns = []
    for key in keys:
        column = np.asarray(entries.get(key, []))
        if column.shape != (len(data),) or not np.issubdtype(column.dtype, np.integer):
            raise damaged(where, key, column.shape, f"{len(data)} whole numbers")
        if column.min() < 0 or column.max() > 255:
            raise damaged(
                where, f"as smallest and largest of {key}", (column.min(), column.max()), "0 to 255"
            )
        columns.append(column.astype(np.uint8)[:, None])
    return np.concatenate([*columns, data], axis=1)


def _mosaic(name: str, store: Store, file: str) -> np.ndarray:
    """One PNG per batch: each row of pixels is one image, 1024 pixels of 3 bytes, to be read as 32
    x 32 x 3.
    """
    where = store.path / file
    pixels = np.asarray(read_image(where, store.read(file), ("PNG",), "RGB"))
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[1:] != (1024, 3):
        raise damaged(
            where, "as mosaic", (pixels.dtype, pixels.shape), "uint8 RGB rows of 1024 pixels"
        )
    table = (
        "test_lables.json" if file.startswith("test") else "train_lables.json"
    )  # sic, as the package spells it
    if table not in store.names():
        raise DamagedData(
            f"{store.path} has no {table}, so {file} has no labels. Fetch the package again."
        )
    numbers = parse_json(store.read(table), store.path / table)
    if not isinstance(numbers, list) or not all(
        type(n) is int and 0 <= n < len(NAMES_10) for n in numbers
    ):
        raise damaged(
            store.path / table,
            "as labels",
            "others",
            f"a list of whole numbers below {len(NAMES_10)}",
        )
    labels = np.asarray(numbers)
    parts = 1 if file.startswith("test") else len(BATCHES)
    part = 0 if parts == 1 else BATCHES.index(file.removesuffix(".png"))
    if labels.ndim != 1 or len(labels) != parts * len(pixels):
        raise damaged(store.path / table, "labels", labels.shape, f"{parts} x {len(pixels)}")
    own = labels[part * len(pixels) : (part + 1) * len(pixels)].astype(np.uint8)
    planes = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2).reshape(-1, PIXELS)
    return np.concatenate([own[:, None], planes], axis=1)


def _class_names(name: str, store: Store, layout: FileLayout) -> dict[str, list[str]]:
    have, counts = store.names(), {"fine": 100, "coarse": 20}
    if name == "cifar10":
        return {"fine": NAMES_10}
    if layout.kind == "python" and "meta" in have:
        meta = safe_unpickle(store.read("meta"), str(store.path / "meta"))
        lists = {
            k: meta.get(f"{k}_label_names".encode(), meta.get(f"{k}_label_names")) for k in counts
        }
        return {k: _names(lists[k], counts[k], store.path / "meta") for k in counts}
    texts = {k: f"{k}_label_names.txt" for k in counts}
    return {
        k: _names(store.read(file).split(), counts[k], store.path / file)
        if file in have
        else [str(i) for i in range(counts[k])]
        for k, file in texts.items()
    }


def _names(found: Any, count: int, path: Path) -> list[str]:
    """Class names as text, as many as there are classes."""
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(n, bytes | str) for n in found)
    ):
        raise damaged(path, "as class names", type(found).__name__, f"a list of {count} names")
    try:
        return [n.decode() if isinstance(n, bytes) else n for n in found]
    except UnicodeDecodeError as error:
        raise damaged(
            path, "in a class name", f"byte {error.object[error.start]:#04x}", "UTF-8 text"
        ) from error
