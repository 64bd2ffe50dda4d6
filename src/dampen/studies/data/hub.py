"""A folder that Hugging Face `datasets` saved (`save_to_disk`): texts or images, one class each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dampen.studies.data.dataset import DamagedData, Dataset, DataSpec, MissingData, Request
from dampen.studies.data.files import read_file, read_image
from dampen.studies.data.folder import FORMATS, fitted
from dampen.studies.data.images import image_dataset
from dampen.studies.data.splits import class_numbers
from dampen.studies.data.texts import LABEL, NAMES, Columns, Texts, column_of, text_reader, texts_of
from dampen.studies.files import fingerprint

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
