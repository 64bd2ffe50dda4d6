"""Text classification from a table of one's own: CSV, TSV or JSON lines with a text, perhaps a second one, a label."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.lab.data.dataset import Dataset, DataSpec, Request
from dampen.lab.data.errors import DamagedData, MissingData
from dampen.lab.data.labeled import TokenSplit, class_numbers, split_rows
from dampen.lab.records.fingerprint import file_hash
from dampen.lab.text import BEGIN, END, PAD, Bpe

TABLE = DataSpec(
    "table",
    "text",
    "your own CSV, TSV or JSONL file (or a folder with train.csv and test.csv): text, optional second text, label",
    "your own text",
    "a header with columns such as text and label; others: --set data.text=..., data.second=..., data.label=...",
)
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")
NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
TEXT = ("text", "sentence", "sentence1", "text1", "question1", "question", "premise", "review", "content", "message")
SECOND = ("text2", "sentence2", "question2", "second", "hypothesis")
LABEL = ("label", "labels", "class", "category", "target", "intent", "sentiment", "y")

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Texts:
    """The examples of one part."""

    first: list[str]
    second: list[str] | None
    labels: list[Any]


def table_files(path: Path) -> dict[str, Path]:
    """The file of each part: the one that was given, or train, valid and test of a folder."""
    if path.is_file():
        return {"train": path} if path.suffix.lower() in ENDINGS else {}
    if not path.is_dir():
        return {}
    there = {p.stem.lower(): p for p in sorted(path.iterdir()) if p.suffix.lower() in ENDINGS}
    found = {part: next((there[n] for n in names if n in there), None) for part, names in NAMES.items()}
    return {part: file for part, file in found.items() if file is not None} if found["train"] else {}


def load_table(
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
    """Texts with their classes. `tokenizer` is a folder of the model's; without one, BPE is learned from the training
    part. Texts are cut to `max_tokens`."""
    files = table_files(Path(ask.data_dir or "."))
    if not files:
        raise MissingData(f"{ask.data_dir} is no table of texts: expected a file that ends in {', '.join(ENDINGS)}.")
    parts = {part: texts_of(read_table(file), file, text, second, label) for part, file in files.items()}
    facts: dict[str, Any] = {"layout": "table", "source": Path(ask.data_dir or ".").name}
    facts |= {"sha256": {file.name: file_hash(file) for file in files.values()}}
    options = {"text": text, "second": second, "label": label, "max_tokens": max_tokens, "vocabulary": vocabulary}
    cuts = {"seed": ask.seed, "train_fraction": ask.train_fraction, "limit": ask.limit}
    cuts |= {"test_fraction": test_fraction, "test_limit": test_limit}
    return text_dataset(ask.spec, parts, facts | {"options": options}, cuts, tokenizer, vocabulary, max_tokens)


def read_table(file: Path) -> Columns:
    """The columns of a file, by name."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:
            if file.suffix.lower() in (".jsonl", ".ndjson"):
                rows = [json.loads(line) for line in handle if line.strip()]
            else:
                csv.field_size_limit(2**24)
                tabs = file.suffix.lower() == ".tsv"
                rows = list(csv.DictReader(handle, delimiter="\t" if tabs else ",", strict=not tabs))
    except (UnicodeDecodeError, ValueError, csv.Error) as error:
        raise DamagedData(f"{file} cannot be read as {file.suffix[1:]} in UTF-8: {error}.") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DamagedData(f"{file} has no rows with named columns; the first line of a table is its header.")
    names = list(rows[0])
    for number, row in enumerate(rows):
        odd = [n for n in names if row.get(n) is None] + [n for n in row if n not in names]
        if odd:
            raise DamagedData(
                f"{file}: row {number + 1} does not have the columns of the first, {names}: see {odd[0]!r}."
            )
    return {name: [row[name] for row in rows] for name in names}


def texts_of(columns: Columns, file: Path, text: str | None, second: str | None, label: str | None) -> Texts:
    """The columns that were said, or that are called as such columns usually are."""
    first = column_of(columns, text, TEXT, file, "text")
    other = second if second is not None else next((n for n in columns if n.lower() in SECOND and n != first), None)
    if other is not None and other not in columns:
        raise DamagedData(f"{file} has no column {other!r}; it has {', '.join(columns)}. Say --set data.second=NAME.")
    answer = column_of(columns, label, LABEL, file, "label")
    empty = [i for i, v in enumerate(columns[answer]) if str(v).strip() == ""]
    if empty:
        raise DamagedData(f"{file}: row {empty[0] + 1} has no {answer!r}.")
    return Texts([str(v) for v in columns[first]], [str(v) for v in columns[other]] if other else None, columns[answer])


def column_of(columns: Columns, said: str | None, usual: Sequence[str], file: Path, role: str) -> str:
    """The column that was said, or the first that is called as usual."""
    if said is not None:
        found = [said] if said in columns else []
    else:
        by_name = {n.lower(): n for n in reversed(columns)}
        found = [by_name[n] for n in usual if n in by_name]
    if not found:
        what = f"no column {said!r}" if said is not None else f"no column that is called like a {role}"
        raise DamagedData(f"{file} has {what}; it has {', '.join(columns)}. Say --set data.{role}=NAME.")
    return found[0]


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
    chosen = {part: _take(parts[where], index) for part, (where, index) in places.items()}
    encode: Any = _HubTokenizer(tokenizer) if tokenizer else _OwnTokenizer(chosen["train"], vocabulary)
    splits, cut = {}, {}
    for part, (where, index) in places.items():
        ids, types = encode(chosen[part], max_tokens)
        cut[part] = sum(len(i) >= max_tokens for i in ids)
        table, lengths = _padded(ids, encode.pad)
        kinds = _padded(types, 0)[0] if types is not None else None
        splits[part] = TokenSplit(table, lengths, labels[where][index], kinds)
    facts |= {"departures": rows.departures, "partial": False, "cut_to_max_tokens": cut, **cuts}
    model = {"vocab": len(encode), "classes": len(classes), "max_tokens": max_tokens, "pad": encode.pad}
    return Dataset(spec.name, spec.task, splits["train"], splits["valid"], splits["test"], classes, facts, model)


def _take(texts: Texts, index: Tensor) -> Texts:
    rows = index.tolist()
    second = [texts.second[i] for i in rows] if texts.second is not None else None
    return Texts([texts.first[i] for i in rows], second, [texts.labels[i] for i in rows])


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
        from dampen._torch import cure_torchvision

        cure_torchvision()
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
