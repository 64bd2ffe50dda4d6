"""Folders: of images, one folder per class, or as Hugging Face `datasets` saved them
(`save_to_disk`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import DamagedData, Dataset, DataSpec, MissingData, Request
from dampen.studies.data.files import file_sha256, find, joint_sha256, read_file, read_image
from dampen.studies.data.images import Labeled, image_dataset
from dampen.studies.data.splits import class_numbers
from dampen.studies.data.texts import LABEL, NAMES, Columns, Texts, column_of, text_reader, texts_of
from dampen.studies.files import fingerprint

# --- images
#
# Any folder of images, one folder per class.

FOLDER = DataSpec(
    "folder",
    "image",
    "any folder of images, one folder per class, resized to one size",
    "your own images",
    "CLASS/*.png|jpg|jpeg|bmp|gif|webp; or train/CLASS/..., and optionally test/CLASS/... and "
    "valid/CLASS/...",
)
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
VALID_NAMES = ("valid", "val", "validation")


def load_folder(
    request: Request,
    *,
    size: int = 32,
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images by class folder. The shorter side is resized to `size`, then the middle is cut out.

    Folders `train`, `test` and `valid` are used as splits where they exist. The other splits are
    drawn by class.

    Args:
        request: which folder and which draw.
        size: the side of the images in pixels.
        channels: 1 (gray) or 3 (RGB).
        test_fraction: the share to test on where there is no folder `test`.
        test_limit: how many test examples are kept.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (gray) or 3 (RGB): got {channels}.")
    if size < 1:
        raise ValueError(f"size is the side of the images in pixels: got {size}.")
    root = find(request.spec, request.data_dir, [], holds)
    train = _split(root, "train") or root
    folders = {
        "train": train,
        "valid": _split(root, *VALID_NAMES),
        "test": _split(root, "test"),
    }
    classes = class_folders(train)
    hashes: dict[str, str] = {}
    given = {
        split: _read(root, folder, classes, size, channels, hashes)
        for split, folder in folders.items()
        if folder is not None
    }
    facts = {
        "layout": "image folder",
        "source": root.name,
        "sha256": {"files": joint_sha256(hashes)},
        "files": len(hashes),
    }
    return image_dataset(
        request.spec,
        *given["train"],
        classes,
        facts,
        test=given.get("test"),
        valid=given.get("valid"),
        **request.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "test_fraction": test_fraction},
        root=root,
    )


def holds(path: Path) -> bool:
    """Whether a path is a folder of class folders.

    Args:
        path: the folder, or one with a folder `train` in it.
    """
    return bool(class_folders(_split(path, "train") or path))


def class_folders(root: Path) -> list[str]:
    """The sorted names of the folders that hold at least one image: the classes.

    Args:
        root: the folder they are in.
    """
    if not root.is_dir():
        return []
    folders = [p for p in root.iterdir() if p.is_dir()]
    return sorted(p.name for p in folders if any(_is_image(f) for f in p.iterdir()))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _split(root: Path, *names: str) -> Path | None:
    """The first of the named sub-folders that has class folders."""
    return next((root / name for name in names if class_folders(root / name)), None)


def _read(
    root: Path, folder: Path, classes: list[str], size: int, channels: int, hashes: dict[str, str]
) -> Labeled:
    """The images and labels of one split; adds the hash of each file to `hashes`."""
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise DamagedData(
            f"{folder} has classes that the training split lacks: {unknown}; it has {classes}."
        )
    images: list[Tensor] = []
    labels: list[int] = []
    mode = "RGB" if channels == 3 else "L"
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            continue
        for path in sorted(p for p in (folder / name).iterdir() if _is_image(p)):
            picture = read_image(path, read_file(path), FORMATS, mode)
            images.append(fitted(picture, size, channels))
            labels.append(label)
            hashes[path.relative_to(root).as_posix()] = file_sha256(path)
    if not images:
        raise DamagedData(f"{folder} holds no image of the classes {classes}.")
    return torch.stack(images), torch.tensor(labels)


def fitted(picture: Any, size: int, channels: int) -> Tensor:
    """A picture as uint8 (channels, size, size): the shorter side resized, the middle cut out.

    Args:
        picture: a PIL image.
        size: the side in pixels.
        channels: 1 (gray) or 3 (RGB).
    """
    from PIL import Image, ImageOps

    picture = picture.convert("RGB" if channels == 3 else "L")
    cut = ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR)
    pixels = np.array(cut, dtype=np.uint8).reshape(size, size, channels)
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


# --- what `datasets` saved
#
# A folder that Hugging Face `datasets` saved (`save_to_disk`): texts or images, one class each.

LAYOUT = (
    "what datasets.Dataset or DatasetDict.save_to_disk writes; splits train, and optionally "
    "validation and test"
)
HUB_TEXT = DataSpec(
    "hub_text", "text", "a folder saved by Hugging Face datasets, with texts", "yours", LAYOUT
)
HUB_IMAGES = DataSpec(
    "hub_images", "image", "a folder saved by Hugging Face datasets, with images", "yours", LAYOUT
)


def is_saved(path: Path) -> bool:
    """Whether `datasets` saved this folder.

    Args:
        path: the folder.
    """
    return path.is_dir() and any((path / n).is_file() for n in ("dataset_dict.json", "state.json"))


def open_saved(path: Path) -> dict[str, Any]:
    """The splits of a saved folder by name.

    Args:
        path: the folder.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingData(
            f"{path} was saved by Hugging Face datasets; run: pip install 'dampen[hf]'"
        ) from error
    irregular = next((p for p in path.rglob("*") if not p.is_file() and not p.is_dir()), None)
    if irregular is not None:
        raise DamagedData(f"{irregular} is no regular file, so {path} is not read. Remove it.")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # pyarrow, json and datasets raise anything for broken files
        raise _broken(path, error) from error
    saved = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    splits = {s: next((saved[n] for n in names if n in saved), None) for s, names in NAMES.items()}
    if splits["train"] is None:
        raise DamagedData(f"{path} has no split 'train'; it has {', '.join(saved)}.")
    return {split: content for split, content in splits.items() if content is not None}


def _broken(path: Path, error: Exception) -> DamagedData:
    return DamagedData(
        f"{path} is damaged or truncated, or was not saved by datasets: "
        f"{type(error).__name__}: {error}. Save or fetch it again."
    )


def _columns(content: Any, names: list[str], path: Path) -> dict[str, list[Any]]:
    """Columns as lists. The files are read only here, and may turn out to be damaged."""
    try:
        return {name: list(content[name]) for name in names}
    except Exception as error:
        raise _broken(path, error) from error


def image_column(splits: dict[str, Any]) -> str | None:
    """The column that holds images, if any.

    Args:
        splits: as `open_saved` gives them.
    """
    features = splits["train"].features
    return next((name for name, kind in features.items() if type(kind).__name__ == "Image"), None)


def _read_texts(path: Path, columns: Columns) -> tuple[dict[str, Texts], dict[str, Any]]:
    given: dict[str, Texts] = {}
    for split, content in open_saved(path).items():
        table = _columns(content, content.column_names, path)
        found = texts_of(table, path, columns)
        labels = _class_names(content, table, columns.label, path)
        given[split] = Texts(found.first, found.second, labels)
    files = {"files": fingerprint(path)}
    return given, {"layout": "datasets", "source": path.name, "sha256": files}


load_saved_text = text_reader(_read_texts)


def _class_names(
    content: Any, columns: dict[str, list[Any]], label: str | None, path: Path
) -> list[Any]:
    """The labels, as names where the dataset knows the names of its numbers."""
    column = column_of(columns, label, LABEL, path, "label")
    names = getattr(content.features[column], "names", None)
    return [names[v] for v in columns[column]] if names else columns[column]


def _pictures(content: Any, column: str, path: Path, channels: int) -> Iterator[Any]:
    """The pictures of a column.

    They are decoded here because `datasets` would let Pillow try every format it knows.
    """
    from datasets import Image
    from PIL import ImageOps

    stored = _columns(content.cast_column(column, Image(decode=False)), [column], path)[column]
    for number, cell in enumerate(stored):
        if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
            raise DamagedData(f"{path}: row {number + 1} has no image.")
        where = Path(f"{path}, row {number + 1}")
        pixels = cell["bytes"] or read_file(Path(cell["path"]))
        mode = "RGB" if channels == 3 else "L"
        yield ImageOps.exif_transpose(read_image(where, pixels, FORMATS, mode))


def load_saved_images(
    request: Request,
    *,
    label: str | None = None,
    size: int = 32,
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images with their classes, resized and cropped to `size` as in an image folder.

    Args:
        request: which folder and which draw.
        label: the column of the label.
        size: the side of the images in pixels.
        channels: 1 (gray) or 3 (RGB).
        test_fraction: the share to test on where there is no split `test`.
        test_limit: how many test examples are kept.
    """
    path = Path(request.data_dir or ".")
    saved = open_saved(path)
    column = image_column(saved)
    if column is None:
        raise DamagedData(
            f"{path} has no column of images; it has {', '.join(saved['train'].column_names)}."
        )
    images, names = {}, {}
    for split, content in saved.items():
        pictures = _pictures(content, column, path, channels)
        images[split] = torch.stack([fitted(p, size, channels) for p in pictures])
        rest = _columns(content, [n for n in content.column_names if n != column], path)
        names[split] = _class_names(content, rest, label, path)
    classes, labels = class_numbers(names, path.name)
    given = {split: (images[split], labels[split]) for split in images}
    files = {"files": fingerprint(path)}
    return image_dataset(
        request.spec,
        *given["train"],
        classes,
        {"layout": "datasets", "source": path.name, "sha256": files},
        test=given.get("test"),
        valid=given.get("valid"),
        **request.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "label": label},
        root=path,
    )
