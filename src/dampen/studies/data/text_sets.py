"""Texts with one class each, from any reader: split, tokenized, wrapped; the options that all such readers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.dataset import Dataset, DataSpec, Request
from dampen.studies.data.labeled import TokenSplit, class_numbers, split_rows
from dampen.studies.text import BEGIN, END, PAD, Bpe


@dataclass(frozen=True)
class Texts:
    """The examples of one part."""

    first: list[str]
    second: list[str] | None
    labels: list[Any]

    def take(self, index: Tensor) -> Texts:
        """Some of them."""
        rows = index.tolist()
        second = [self.second[i] for i in rows] if self.second is not None else None
        return Texts([self.first[i] for i in rows], second, [self.labels[i] for i in rows])

    def __add__(self, other: Texts) -> Texts:
        second = None if self.second is None or other.second is None else self.second + other.second
        return Texts(self.first + other.first, second, self.labels + other.labels)


@dataclass(frozen=True)
class Columns:
    """The columns that hold the text, the second text and the label; None for what they are usually called."""

    text: str | None = None
    second: str | None = None
    label: str | None = None


Read = Callable[[Path, Columns], tuple[dict[str, Texts], dict[str, Any]]]
"""Reads the parts of a set of texts, and the facts about it for the record."""


def text_reader(read: Read) -> Callable[..., Dataset]:
    """The loader of a set of texts: every such set takes these options."""

    def load(
        ask: Request,
        *,
        text: str | None = None,
        second: str | None = None,
        label: str | None = None,
        tokenizer: str | None = None,
        vocabulary: int = 4000,
        max_tokens: int = 128,
        test_fraction: float = 0.25,
        test_limit: int | None = None,
    ) -> Dataset:
        """Texts with their classes. `tokenizer` is a folder of the model's; without one, BPE is learned from the
        training part. Texts are cut to `max_tokens`."""
        parts, facts = read(Path(ask.data_dir or "."), Columns(text, second, label))
        options = {"text": text, "second": second, "label": label, "max_tokens": max_tokens, "vocabulary": vocabulary}
        cuts = ask.cuts | {"test_fraction": test_fraction, "test_limit": test_limit}
        return text_dataset(ask.spec, parts, facts | {"options": options}, cuts, tokenizer, vocabulary, max_tokens)

    return load


def text_dataset(
    spec: DataSpec,
    parts: dict[str, Texts],
    facts: dict[str, Any],
    cuts: dict[str, Any],
    tokenizer: str | None,
    vocabulary: int,
    max_tokens: int,
) -> Dataset:
    """Split, tokenize and wrap texts with their classes."""
    classes, labels = class_numbers({k: v.labels for k, v in parts.items()}, str(facts["source"]))
    rows = split_rows(labels, **cuts)
    places = {
        "train": ("train", rows.train),
        "valid": (rows.valid_from, rows.valid),
        "test": (rows.test_from, rows.test),
    }
    chosen = {part: parts[where].take(index) for part, (where, index) in places.items()}
    numbers = {part: labels[where][index] for part, (where, index) in places.items()}
    own = _HubTokenizer(tokenizer) if tokenizer else None
    encode = partial(encoded, tokenizer=own, vocabulary=vocabulary, max_tokens=max_tokens)
    splits, learned = encode(chosen, numbers)
    facts |= {
        "departures": rows.departures,
        "drawn": rows.drawn,
        "partial": False,
        "cut_to_max_tokens": learned.pop("cut"),
        **cuts,
    }
    model = {"classes": len(classes), "max_tokens": max_tokens, **learned}
    made = Dataset(spec.name, spec.task, splits["train"], splits["valid"], splits["test"], classes, facts, model)
    made.extras |= {"texts": chosen, "encode": encode}  # cross-validation cuts and tokenizes them anew
    return made


def encoded(
    texts: dict[str, Texts], labels: dict[str, Tensor], *, tokenizer: Any, vocabulary: int, max_tokens: int
) -> tuple[dict[str, TokenSplit], dict[str, Any]]:
    """The parts as token numbers, and what the tokenizer decides. Without one, it is learned from the training part."""
    encode: Any = tokenizer if tokenizer is not None else _OwnTokenizer(texts["train"], vocabulary)
    splits, cut = {}, {}
    for part, content in texts.items():
        ids, types = encode(content, max_tokens)
        cut[part] = sum(len(i) >= max_tokens for i in ids)
        table, lengths = _padded(ids, encode.pad)
        kinds = _padded(types, 0)[0] if types is not None else None
        splits[part] = TokenSplit(table, lengths, labels[part], kinds)
    return splits, {"vocab": len(encode), "pad": encode.pad, "cut": cut}


def _padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([max(1, len(r)) for r in rows])
    table = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table, lengths


class _OwnTokenizer:
    """Byte-level BPE learned from the training part: begin, text, end, and after a second text another end."""

    pad = PAD

    def __init__(self, train: Texts, vocabulary: int):
        self.bpe = Bpe.train([*train.first, *(train.second or [])], vocabulary)

    def __len__(self) -> int:
        return len(self.bpe)

    def __call__(self, texts: Texts, longest: int) -> tuple[list[list[int]], list[list[int]] | None]:
        first = self.bpe.encode(texts.first)
        if texts.second is None:
            return [[BEGIN, *ids[: longest - 2], END] for ids in first], None
        found = [[BEGIN, *a, END, *b, END] for a, b in zip(first, self.bpe.encode(texts.second), strict=True)]
        return [[*ids[: longest - 1], END] if len(ids) > longest else ids for ids in found], None


class _HubTokenizer:
    """The tokenizer of a model's folder, with its own special tokens and token types."""

    def __init__(self, folder: str):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad) if pad is not None else 0

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, texts: Texts, longest: int) -> tuple[list[list[int]], list[list[int]] | None]:
        own = self.tokenizer.model_max_length
        longest = min(longest, own) if isinstance(own, int) else longest
        pairs = (texts.first,) if texts.second is None else (texts.first, texts.second)
        made = self.tokenizer(*pairs, truncation=True, max_length=longest)
        return list(made["input_ids"]), list(made["token_type_ids"]) if "token_type_ids" in made else None
