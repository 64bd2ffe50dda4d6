"""Running text for language modeling, by characters or BPE: any text file, and tinyshakespeare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.plugins import (
    Batch,
    Bpe,
    DamagedData,
    Dataset,
    DataSource,
    DataSpec,
    Request,
    Split,
    file_sha256,
    find,
    read_file,
    require_complete,
)

CHARACTERS = 1_115_394
"""Of tinyshakespeare."""


class TextSplit(Split):
    """Windows of running text: `context` tokens in, the same shifted by one as target.

    Windows start every `stride` tokens. The last one may be short and is then padded on the right,
    where no real token sees it, and `valid` is False there.

    >>> split = TextSplit(torch.arange(10), context=4, stride=4)
    >>> batch = split.batch([0, 2])
    >>> batch["inputs"][0].tolist(), batch["target"].tolist(), batch["valid"].sum(dim=1).tolist()
    ([[0, 1, 2, 3], [8, 8, 8, 8]], [[1, 2, 3, 4], [9, 9, 9, 9]], [4, 1])
    """

    def __init__(self, tokens: Tensor, context: int, stride: int):
        if context < 1 or stride < 1:
            raise ValueError(f"context and stride count tokens from 1: got {context} and {stride}.")
        self.tokens, self.context = tokens, context
        self.starts = torch.arange(0, max(len(tokens) - 1, 0), stride)
        if stride < context:  # leave out windows whose targets the one before already has
            self.starts = self.starts[: max(-(-(len(tokens) - 1 - context) // stride) + 1, 1)]

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, indices: Tensor) -> Batch:
        rows = self.starts[indices, None] + torch.arange(self.context)
        last = len(self.tokens) - 2  # the last token that has a successor
        valid = rows <= last
        rows = rows.clamp(max=last)
        target = self.tokens[rows + 1].long()
        return {"inputs": (self.tokens[rows].long(),), "target": target, "valid": valid}


def text_file(path: Path) -> Path | None:
    """The text at a path: the file itself, or input.txt in it.

    Args:
        path: a file or a folder.
    """
    file = path / "input.txt" if path.is_dir() else path
    return file if file.is_file() else None


def load_corpus(
    request: Request,
    *,
    tokens: str = "character",
    vocabulary: int = 1000,
    context: int = 256,
    stride: int | None = None,
    test_fraction: float = 0.1,
) -> Dataset:
    """Windows of text: train, validation and test follow each other in one piece each.

    The last `test_fraction` is test, the rest is divided by `train_fraction`. Text is not shuffled,
    so the seed changes nothing here. `limit` counts characters before the test split, taken from
    the end.

    Args:
        request: which file and which part of it.
        tokens: `"character"` (the alphabet of the whole text) or `"bpe"` (byte-level, learned from
            the training split).
        vocabulary: the size of the learned vocabulary.
        context: tokens in a window.
        stride: the step between training windows; by default the context, so that an epoch is one
            pass.
        test_fraction: the share of the characters to test on.
    """
    if tokens not in ("character", "bpe"):
        raise ValueError(f"tokens must be 'character' or 'bpe': got {tokens!r}.")
    shares = {"train_fraction": request.train_fraction, "test_fraction": test_fraction}
    for name, fraction in shares.items():
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"{name} must lie strictly between 0 and 1: got {fraction}.")
    spec = request.spec
    root = find(spec, request.data_dir, [spec.name], lambda path: text_file(path) is not None)
    path = text_file(root) or root
    text = _read(path)
    problems = []
    if spec.characters is not None and len(text) < spec.characters:
        problems.append(f"{len(text)} of {spec.characters} characters")
    departures = require_complete(problems, request.partial, spec.name)

    pool = round(len(text) * (1 - test_fraction))
    begin = max(pool - request.limit, 0) if request.limit is not None else 0
    if begin:
        departures.append(
            f"only {request.limit} of {pool} characters before the test split were used "
            f"(limit={request.limit})"
        )
    middle = begin + round((pool - begin) * request.train_fraction)
    parts = {"train": text[begin:middle], "valid": text[middle:pool], "test": text[pool:]}
    if min(len(part) for part in parts.values()) < 2:
        raise DamagedData(
            f"{path} is too short: its {len(text)} characters cannot be split into three parts."
        )
    if tokens == "character":
        ids, characters, extras = _by_character(text, parts)
    else:
        ids, characters, extras = _by_bpe(parts, vocabulary)
    steps = {"train": stride or context, "valid": context, "test": context}
    splits = {name: TextSplit(ids[name], context, step) for name, step in steps.items()}
    info = {
        "layout": "text file",
        "source": path.name,
        "sha256": {path.name: file_sha256(path)},
        "characters": {part: len(content) for part, content in parts.items()},
        "tokens": {part: len(content) for part, content in ids.items()},
        "partial": bool(problems),
        "departures": departures,
        "train_fraction": request.train_fraction,
        "limit": request.limit,
        "options": {
            "tokens": tokens,
            "vocabulary": len(characters),
            "context": context,
            "stride": stride or context,
            "test_fraction": test_fraction,
        },
    }
    return Dataset(
        spec.name,
        spec.task,
        train=splits["train"],
        valid=splits["valid"],
        test=splits["test"],
        classes=[],
        info=info,
        model_args={"vocab": len(characters), "context": context},
        root=root,
        extras=extras | {"characters": characters},
    )


def _read(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path} is not UTF-8 text: byte {error.start} of {path.stat().st_size} is "
            f"{error.object[error.start]:#04x}. Convert the file to UTF-8."
        ) from error


def _by_character(
    text: str, parts: dict[str, str]
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    alphabet = sorted(set(text))
    points = np.array([ord(c) for c in alphabet])
    ids = {}
    for name, content in parts.items():
        codes = np.array(list(content)).view(np.uint32)
        ids[name] = torch.from_numpy(np.searchsorted(points, codes).astype(np.int32))
    return ids, torch.ones(len(alphabet), dtype=torch.float64), {"alphabet": alphabet}


def _by_bpe(
    parts: dict[str, str], vocabulary: int
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    bpe = Bpe.train(parts["train"].splitlines(keepends=True), vocabulary)
    ids = {
        name: torch.tensor(bpe.encode([content])[0], dtype=torch.int32)
        for name, content in parts.items()
    }
    return ids, bpe.characters(), {"bpe": bpe}


def _is_shakespeare(path: Path) -> bool:
    """Whether a text is tinyshakespeare, by the name of its folder or its size."""
    file = text_file(path)
    if file is None:
        return False
    return file.parent.name == "tinyshakespeare" or file.stat().st_size == CHARACTERS


TEXT = DataSource(
    DataSpec(
        "text",
        "language",
        "any text file in UTF-8",
        "your own text",
        "a .txt file, given as data_dir, or input.txt in that folder",
    ),
    load_corpus,
    lambda path: text_file(path) is not None,
    general=True,
    steps=("nothing to fetch: pass --data-dir FILE.txt",),
)
SHAKESPEARE = DataSource(
    DataSpec(
        "tinyshakespeare",
        "language",
        "tinyshakespeare: 1,115,394 characters of plays",
        "the repository 'karpathy/char-rnn' on GitHub, data/tinyshakespeare/input.txt",
        "tinyshakespeare/input.txt",
        characters=CHARACTERS,
    ),
    load_corpus,
    _is_shakespeare,
    ["tinyshakespeare"],
    steps=(
        "mkdir tinyshakespeare && cd tinyshakespeare",
        "curl -LO "
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ),
)
