"""Running text for language modeling, by characters or in BPE, from any text file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.data.dataset import Dataset, DataSpec, Request
from dampen.studies.data.errors import DamagedData, require_complete
from dampen.studies.data.files import file_sha256, find
from dampen.studies.data.limits import read_file
from dampen.studies.data.splits import TextSplit
from dampen.studies.data.stratified import check_fraction
from dampen.studies.text import Bpe

TEXT = DataSpec(
    "text",
    "language",
    "any text file in UTF-8",
    "your own text",
    "a .txt file, given as data_dir, or input.txt in that folder",
)


def text_file(path: Path) -> Path | None:
    """The text at a path: the file itself, or input.txt in it."""
    file = path / "input.txt" if path.is_dir() else path
    return file if file.is_file() else None


def load_corpus(
    ask: Request,
    *,
    tokens: str = "character",
    vocabulary: int = 1000,
    context: int = 256,
    stride: int | None = None,
    test_fraction: float = 0.1,
) -> Dataset:
    """Windows of text: train, validation and test follow each other in one piece each.

    The last `test_fraction` is test, the rest is divided by `train_fraction`. Text is not shuffled, so the seed changes
    nothing here. `tokens` is `"character"` (the alphabet of the whole text) or `"bpe"` (byte-level, learned from the
    training part). `stride` is the step between training windows, by default
    the context: an epoch is one pass. `limit` counts characters before the test part, taken from the end.
    """
    if tokens not in ("character", "bpe"):
        raise ValueError(f"tokens must be 'character' or 'bpe': got {tokens!r}.")
    check_fraction(ask.train_fraction)
    check_fraction(1 - test_fraction)
    root = find(ask.spec, ask.data_dir, [ask.spec.name], lambda path: text_file(path) is not None)
    path = text_file(root) or root
    text = _read(path)
    short = ask.spec.characters is not None and len(text) < ask.spec.characters
    problems = [f"{len(text)} of {ask.spec.characters} characters"] if short else []
    departures = require_complete(problems, ask.partial, ask.spec.name)

    pool = round(len(text) * (1 - test_fraction))
    begin = max(pool - ask.limit, 0) if ask.limit is not None else 0
    if begin:
        departures.append(f"only {ask.limit} of {pool} characters before the test part were used (limit={ask.limit})")
    middle = begin + round((pool - begin) * ask.train_fraction)
    parts = {"train": text[begin:middle], "valid": text[middle:pool], "test": text[pool:]}
    if min(len(part) for part in parts.values()) < 2:
        raise DamagedData(f"{path} is too short: its {len(text)} characters cannot be split into three parts.")
    numbers, characters, extras = _by_character(text, parts) if tokens == "character" else _by_bpe(parts, vocabulary)
    train, valid, test = (
        TextSplit(numbers[part], context, (stride or context) if part == "train" else context)
        for part in ("train", "valid", "test")
    )
    info = {
        "layout": "text file",
        "source": path.name,
        "sha256": {path.name: file_sha256(path)},
        "characters": {part: len(content) for part, content in parts.items()},
        "tokens": {part: len(content) for part, content in numbers.items()},
        "partial": bool(problems),
        "departures": departures,
        "train_fraction": ask.train_fraction,
        "limit": ask.limit,
        "options": {
            "tokens": tokens,
            "vocabulary": len(characters),
            "context": context,
            "stride": stride or context,
            "test_fraction": test_fraction,
        },
    }
    extras["characters"] = characters
    model_args = {"vocab": len(characters), "context": context}
    return Dataset(ask.spec.name, ask.spec.task, train, valid, test, [], info, model_args, root=root, extras=extras)


def _read(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path} is not UTF-8 text: byte {error.start} of {path.stat().st_size} is "
            f"{error.object[error.start]:#04x}. Convert the file to UTF-8."
        ) from error


def _by_character(text: str, parts: dict[str, str]) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    alphabet = sorted(set(text))
    points = np.array([ord(c) for c in alphabet])
    numbers = {
        part: torch.from_numpy(np.searchsorted(points, np.array(list(content)).view(np.uint32)).astype(np.int32))
        for part, content in parts.items()
    }
    return numbers, torch.ones(len(alphabet), dtype=torch.float64), {"alphabet": alphabet}


def _by_bpe(parts: dict[str, str], vocabulary: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    bpe = Bpe.train(parts["train"].splitlines(keepends=True), vocabulary)
    numbers = {part: torch.tensor(bpe.encode([content])[0], dtype=torch.int32) for part, content in parts.items()}
    return numbers, bpe.characters(), {"bpe": bpe}
