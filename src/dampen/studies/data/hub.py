"""A folder that Hugging Face `datasets` saved (`save_to_disk`): texts or images, with one class each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dampen.studies.data.dataset import Dataset, DataSpec, Request
from dampen.studies.data.errors import DamagedData, MissingData
from dampen.studies.data.folder import FORMATS, fitted
from dampen.studies.data.images import image_dataset
from dampen.studies.data.labeled import class_numbers
from dampen.studies.data.limits import read_file, read_image
from dampen.studies.data.text_sets import Columns, Texts, text_reader
from dampen.studies.data.texts import LABEL, NAMES, column_of, texts_of
from dampen.studies.files import fingerprint

LAYOUT = "what datasets.Dataset or DatasetDict.save_to_disk writes; splits train, validation, test where they exist"
HUB_TEXT = DataSpec("hub_text", "text", "a folder saved by Hugging Face datasets, with texts", "yours", LAYOUT)
HUB_IMAGES = DataSpec("hub_images", "image", "a folder saved by Hugging Face datasets, with images", "yours", LAYOUT)


def is_saved(path: Path) -> bool:
    """Whether `datasets` saved this folder."""
    return path.is_dir() and any((path / n).is_file() for n in ("dataset_dict.json", "state.json"))


def open_saved(path: Path) -> dict[str, Any]:
    """The parts by name."""
    try:
        import datasets
    except ImportError as error:
        raise MissingData(f"{path} was saved by Hugging Face datasets; run: pip install 'dampen[hf]'") from error
    irregular = next((p for p in path.rglob("*") if not p.is_file() and not p.is_dir()), None)
    if irregular is not None:
        raise DamagedData(f"{irregular} is no regular file, so {path} is not read. Remove it.")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # pyarrow, json and datasets raise all kinds for broken files
        raise _broken(path, error) from error
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    parts = {part: next((splits[n] for n in names if n in splits), None) for part, names in NAMES.items()}
    if parts["train"] is None:
        raise DamagedData(f"{path} has no split 'train'; it has {', '.join(splits)}.")
    return {part: content for part, content in parts.items() if content is not None}


def _broken(path: Path, error: Exception) -> DamagedData:
    told = f"{path} is damaged or truncated, or was not saved by datasets: {type(error).__name__}: {error}."
    return DamagedData(f"{told} Save or fetch it again.")


def _columns(content: Any, names: list[str], path: Path) -> dict[str, list[Any]]:
    """Columns as lists. What lies in the files is read only here, and may turn out to be damaged."""
    try:
        return {name: list(content[name]) for name in names}
    except Exception as error:
        raise _broken(path, error) from error


def image_column(parts: dict[str, Any]) -> str | None:
    """The column that holds images, if any."""
    features = parts["train"].features
    return next((name for name, kind in features.items() if type(kind).__name__ == "Image"), None)


def _read_texts(path: Path, said: Columns) -> tuple[dict[str, Texts], dict[str, Any]]:
    parts: dict[str, Texts] = {}
    for part, content in open_saved(path).items():
        table = _columns(content, content.column_names, path)
        found = texts_of(table, path, said)
        parts[part] = Texts(found.first, found.second, _named(content, table, said.label, path))
    return parts, {"layout": "datasets", "source": path.name, "sha256": {"files": fingerprint(path)}}


load_saved_text = text_reader(_read_texts)


def _named(content: Any, columns: dict[str, list[Any]], label: str | None, path: Path) -> list[Any]:
    """Class names instead of numbers where the set knows them."""
    column = column_of(columns, label, LABEL, path, "label")
    names = getattr(content.features[column], "names", None)
    return [names[v] for v in columns[column]] if names else columns[column]


def _pictures(content: Any, column: str, path: Path, channels: int) -> Iterator[Any]:
    """The pictures of a column, decoded here: `datasets` would let Pillow try every format it knows."""
    from datasets import Image
    from PIL import ImageOps

    stored = _columns(content.cast_column(column, Image(decode=False)), [column], path)[column]
    for number, cell in enumerate(stored):
        if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
            raise DamagedData(f"{path}: row {number + 1} has no image.")
        where = Path(f"{path}, row {number + 1}")
        pixels = cell["bytes"] or read_file(Path(cell["path"]))
        yield ImageOps.exif_transpose(read_image(where, pixels, FORMATS, "RGB" if channels == 3 else "L"))


def load_saved_images(
    ask: Request,
    *,
    label: str | None = None,
    size: int = 32,
    channels: int = 3,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Images with their classes, resized and cut to `size` as those of an image folder are."""
    path = Path(ask.data_dir or ".")
    parts = open_saved(path)
    column = image_column(parts)
    if column is None:
        raise DamagedData(f"{path} has no column of images; it has {', '.join(parts['train'].column_names)}.")
    images, named = {}, {}
    for part, content in parts.items():
        images[part] = torch.stack([fitted(p, size, channels) for p in _pictures(content, column, path, channels)])
        rest = _columns(content, [n for n in content.column_names if n != column], path)
        named[part] = _named(content, rest, label, path)
    classes, labels = class_numbers(named, path.name)
    given = {part: (images[part], labels[part]) for part in images}
    facts = {"layout": "datasets", "source": path.name, "sha256": {"files": fingerprint(path)}}
    return image_dataset(
        ask.spec,
        *given["train"],
        classes,
        facts,
        test=given.get("test"),
        valid=given.get("valid"),
        **ask.cuts,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "label": label},
        root=path,
    )
