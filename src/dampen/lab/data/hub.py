"""A folder that Hugging Face `datasets` saved (`save_to_disk`): texts or images, with one class each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dampen.lab.data.dataset import Dataset, DataSpec, Request
from dampen.lab.data.errors import DamagedData, MissingData
from dampen.lab.data.folder import fitted
from dampen.lab.data.images import image_dataset
from dampen.lab.data.labeled import class_numbers
from dampen.lab.data.text_sets import Columns, Texts, text_reader
from dampen.lab.data.texts import LABEL, NAMES, column_of, texts_of
from dampen.lab.records.fingerprint import fingerprint

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
    found = datasets.load_from_disk(str(path))
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    parts = {part: next((splits[n] for n in names if n in splits), None) for part, names in NAMES.items()}
    if parts["train"] is None:
        raise DamagedData(f"{path} has no split 'train'; it has {', '.join(splits)}.")
    return {part: content for part, content in parts.items() if content is not None}


def image_column(parts: dict[str, Any]) -> str | None:
    """The column that holds images, if any."""
    features = parts["train"].features
    return next((name for name, kind in features.items() if type(kind).__name__ == "Image"), None)


def _read_texts(path: Path, said: Columns) -> tuple[dict[str, Texts], dict[str, Any]]:
    parts: dict[str, Texts] = {}
    for part, content in open_saved(path).items():
        table = {name: list(content[name]) for name in content.column_names}
        found = texts_of(table, path, said)
        parts[part] = Texts(found.first, found.second, _named(content, table, said.label, path))
    return parts, {"layout": "datasets", "source": path.name, "sha256": {"files": fingerprint(path)}}


load_saved_text = text_reader(_read_texts)


def _named(content: Any, columns: dict[str, list[Any]], label: str | None, path: Path) -> list[Any]:
    """Class names instead of numbers where the set knows them."""
    column = column_of(columns, label, LABEL, path, "label")
    names = getattr(content.features[column], "names", None)
    return [names[v] for v in columns[column]] if names else columns[column]


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
        images[part] = torch.stack([fitted(picture, size, channels) for picture in content[column]])
        rest = {n: list(content[n]) for n in content.column_names if n != column}
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
        seed=ask.seed,
        train_fraction=ask.train_fraction,
        limit=ask.limit,
        test_fraction=test_fraction,
        test_limit=test_limit,
        options={"size": size, "channels": channels, "label": label},
        root=path,
    )
