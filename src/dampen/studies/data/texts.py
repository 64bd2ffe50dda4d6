"""Text classification: tables (CSV, TSV, JSON lines), tokenization, and the split that holds
tokens.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen._torch import declare_torchvision_operators
from dampen.studies.data.dataset import (
    Batch,
    ClassSplit,
    DamagedData,
    Dataset,
    DataSpec,
    MissingData,
    Refolded,
    Request,
)
from dampen.studies.data.files import read_file, require_within
from dampen.studies.data.splits import class_numbers, split_rows
from dampen.studies.files import file_hash
from dampen.studies.text import BEGIN, END, PAD, Bpe
from dampen.studies.trust import require_no_remote_code

TABLE = DataSpec(
    "table",
    "text",
    "your own CSV, TSV or JSONL file (or a folder with train.csv and test.csv): text, optional "
    "second text, label",
    "your own text",
    "a header with columns such as text and label; others: --set data.text=..., data.second=..., "
    "data.label=...",
)
ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson")
NAMES = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
TEXT = (
    *("text", "sentence", "sentence1", "text1", "question1", "question", "premise", "review"),
    *("content", "message"),
)
SECOND = ("text2", "sentence2", "question2", "second", "hypothesis")
LABEL = ("label", "labels", "class", "category", "target", "intent", "sentiment", "y")

Table = dict[str, list[Any]]


@dataclass(frozen=True)
class Texts:
    """The examples of one split: texts, optional second texts, labels."""

    first: list[str]
    second: list[str] | None
    labels: list[Any]

    def take(self, index: Tensor) -> Texts:
        """Some of the examples.

        Args:
            index: which ones.
        """
        rows = index.tolist()
        second = [self.second[i] for i in rows] if self.second is not None else None
        return Texts([self.first[i] for i in rows], second, [self.labels[i] for i in rows])

    def __add__(self, other: Texts) -> Texts:
        second = None
        if self.second is not None and other.second is not None:
            second = self.second + other.second
        return Texts(self.first + other.first, second, self.labels + other.labels)


@dataclass(frozen=True)
class Columns:
    """The columns that hold the text, the second text and the label; None for the usual names."""

    text: str | None = None
    second: str | None = None
    label: str | None = None


class TokenSplit(ClassSplit):
    """Texts as token ids with one class each: `inputs = (ids, padding)`, token types third.

    A batch is cut to its longest text, rounded up to a multiple of 8; `padding` is True where
    there is no token.

    Args:
        texts: the examples, kept for cross-validation.
        ids: token ids (n, longest).
        lengths: how many of them count.
        labels: class numbers.
        types: token types (n, longest), for tokenizers that mark the second text.
        encoder: how they were tokenized.
        multiple: what lengths are rounded up to.
    """

    def __init__(
        self,
        texts: Texts,
        ids: Tensor,
        lengths: Tensor,
        labels: Tensor,
        types: Tensor | None,
        encoder: Encoder,
        multiple: int = 8,
    ):
        self.texts, self.ids, self.lengths, self.labels = texts, ids, lengths, labels.long()
        self.types, self.encoder, self.multiple = types, encoder, multiple

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Tensor) -> Batch:
        lengths = self.lengths[indices]
        longest = -(-int(lengths.max()) // self.multiple) * self.multiple
        longest = min(longest, self.ids.shape[1])
        ids = self.ids[indices, :longest].long()
        padding = torch.arange(longest) >= lengths[:, None]
        types = () if self.types is None else (self.types[indices, :longest].long(),)
        return {"inputs": (ids, padding, *types), "target": self.labels[indices]}

    def refold(self, data: Dataset, rows: dict[str, Tensor]) -> Refolded:
        pooled: list[Any] = list(data.splits.values())
        texts = pooled[0].texts + pooled[1].texts + pooled[2].texts
        labels = torch.cat([split.labels for split in pooled])
        chosen = {name: (texts.take(index), labels[index]) for name, index in rows.items()}
        splits, learned, cut = self.encoder.splits(chosen)
        return Refolded({**splits}, None, {"cut_to_max_tokens": cut}, learned)


@dataclass(frozen=True)
class Encoder:
    """How texts become tokens.

    Attributes:
        tokenizer: a model's tokenizer; None learns byte-level BPE from the training split.
        vocabulary: the size of what is learned.
        max_tokens: texts are cut to this length.
    """

    tokenizer: _SavedTokenizer | None
    vocabulary: int
    max_tokens: int

    def splits(
        self, parts: dict[str, tuple[Texts, Tensor]]
    ) -> tuple[dict[str, TokenSplit], dict[str, Any], dict[str, int]]:
        """The splits as tokens, the model arguments that follow, and how many texts were cut.

        Args:
            parts: texts and class numbers of each split.
        """
        encode: Any = self.tokenizer
        if encode is None:
            encode = _LearnedTokenizer(parts["train"][0], self.vocabulary)
        splits, cut = {}, {}
        for name, (texts, labels) in parts.items():
            rows, kinds = encode(texts, self.max_tokens)
            cut[name] = sum(len(row) >= self.max_tokens for row in rows)
            ids, lengths = _padded(rows, encode.pad)
            types = _padded(kinds, 0)[0] if kinds is not None else None
            splits[name] = TokenSplit(texts, ids, lengths, labels, types, self)
        return splits, {"vocab": len(encode), "pad": encode.pad}, cut


def _padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([max(1, len(r)) for r in rows])
    table = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return table, lengths


class _LearnedTokenizer:
    """Byte-level BPE learned from the training split: begin, text, end; second text, end."""

    pad = PAD

    def __init__(self, train: Texts, vocabulary: int):
        self.bpe = Bpe.train([*train.first, *(train.second or [])], vocabulary)

    def __len__(self) -> int:
        return len(self.bpe)

    def __call__(self, texts: Texts, longest: int) -> tuple[list[list[int]], None]:
        first = self.bpe.encode(texts.first)
        if texts.second is None:
            return [[BEGIN, *ids[: longest - 2], END] for ids in first], None
        pairs = zip(first, self.bpe.encode(texts.second), strict=True)
        found = [[BEGIN, *a, END, *b, END] for a, b in pairs]
        return [[*ids[: longest - 1], END] if len(ids) > longest else ids for ids in found], None


class _SavedTokenizer:
    """The tokenizer of a model's folder, with its special tokens and token types."""

    def __init__(self, folder: str):
        declare_torchvision_operators()
        from transformers import AutoTokenizer

        require_no_remote_code(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad) if pad is not None else 0

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(
        self, texts: Texts, longest: int
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        most = self.tokenizer.model_max_length
        if isinstance(most, int):
            longest = min(longest, most)
        pairs = (texts.first,) if texts.second is None else (texts.first, texts.second)
        made = self.tokenizer(*pairs, truncation=True, max_length=longest)
        types = list(made["token_type_ids"]) if "token_type_ids" in made else None
        return list(made["input_ids"]), types


Read = Callable[[Path, Columns], tuple[dict[str, Texts], dict[str, Any]]]
"""Reads the given splits of a text dataset, and facts about them for the record."""


def text_reader(read: Read) -> Callable[..., Dataset]:
    """The loader of a text dataset: every such dataset takes the same options.

    Args:
        read: gets the texts and labels out of the files.
    """

    def load(
        request: Request,
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
        """Texts with their classes.

        Args:
            request: which files and which draw.
            text: the column of the text.
            second: the column of the second text.
            label: the column of the label.
            tokenizer: a model's folder; without one, BPE is learned from the training split.
            vocabulary: the size of the learned vocabulary.
            max_tokens: texts are cut to this length.
            test_fraction: the share to test on where no test split is given.
            test_limit: how many test examples are kept.
        """
        given, facts = read(Path(request.data_dir or "."), Columns(text, second, label))
        classes, labels = class_numbers({k: v.labels for k, v in given.items()}, facts["source"])
        cuts = request.cuts | {"test_fraction": test_fraction, "test_limit": test_limit}
        drawn = split_rows(labels, **cuts)
        saved = _SavedTokenizer(tokenizer) if tokenizer else None
        splits, learned, cut = Encoder(saved, vocabulary, max_tokens).splits(
            {
                split: (given[source].take(index), labels[source][index])
                for split, (source, index) in drawn.rows.items()
            }
        )
        options: dict[str, Any] = {"text": text, "second": second, "label": label}
        options |= {"max_tokens": max_tokens, "vocabulary": vocabulary}
        facts |= {"options": options, "departures": drawn.notes, "drawn": drawn.drawn}
        facts |= {"partial": False, "cut_to_max_tokens": cut, **cuts}
        return Dataset(
            request.spec.name,
            request.spec.task,
            train=splits["train"],
            valid=splits["valid"],
            test=splits["test"],
            classes=classes,
            info=facts,
            model_args={"classes": len(classes), "max_tokens": max_tokens, **learned},
        )

    return load


def table_files(path: Path) -> dict[str, Path]:
    """The file of each split: the given one, or train, valid and test of a folder.

    Args:
        path: a file or a folder.
    """
    if path.is_file():
        return {"train": path} if path.suffix.lower() in ENDINGS else {}
    if not path.is_dir():
        return {}
    there = {p.stem.lower(): p for p in sorted(path.iterdir()) if p.suffix.lower() in ENDINGS}
    found = {s: next((there[n] for n in names if n in there), None) for s, names in NAMES.items()}
    if found["train"] is None:
        return {}
    return {split: file for split, file in found.items() if file is not None}


def _read(path: Path, columns: Columns) -> tuple[dict[str, Texts], dict[str, Any]]:
    files = table_files(path)
    if not files:
        raise MissingData(
            f"{path} is no table of texts: expected a file that ends in {', '.join(ENDINGS)}."
        )
    given = {split: texts_of(read_table(file), file, columns) for split, file in files.items()}
    hashes = {file.name: file_hash(file) for file in files.values()}
    return given, {"layout": "table", "source": path.name, "sha256": hashes}


load_table = text_reader(_read)


def read_table(file: Path) -> Table:
    """The columns of a file by name.

    Args:
        file: CSV, TSV or JSON lines in UTF-8.
    """
    content = read_file(file)
    try:
        handle = io.StringIO(content.decode("utf-8-sig"), newline="")
        if file.suffix.lower() in (".jsonl", ".ndjson"):
            lines = [line for line in handle if line.strip()]
            longest = max(map(len, lines), default=0)
            require_within("DAMPEN_MAX_LINE", longest, file, "characters in one line")
            rows = [json.loads(line) for line in lines]
        else:
            rows = _separated(handle, tabs=file.suffix.lower() == ".tsv")
    except DamagedData:
        raise
    except (ValueError, RecursionError, csv.Error) as error:
        raise DamagedData(
            f"{file} cannot be read as {file.suffix[1:]} in UTF-8: {error}."
        ) from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DamagedData(
            f"{file} has no rows with named columns; the first line of a table is its header."
        )
    names = _names(rows)
    if found := _uneven(rows):
        number, odd = found
        if odd is None:
            raise DamagedData(
                f"{file}: row {number + 1} has more values than the header has names, {names}."
            )
        raise DamagedData(
            f"{file}: row {number + 1} does not have the columns of the first, {names}: see "
            f"{odd!r}."
        )
    return {name: [row[name] for row in rows] for name in names}


def _separated(handle: io.StringIO, tabs: bool) -> list[dict[Any, Any]]:
    """The rows of a CSV or TSV file.

    In TSV files quotes are often ordinary characters (GLUE's are), and one that never closes
    swallows the rows after it. So where every line by itself has all columns, no line is joined to
    the next because of a quote.
    """
    csv.field_size_limit(2**24)
    rows = list(csv.DictReader(handle, delimiter="\t" if tabs else ",", strict=not tabs))
    if not tabs:
        return rows
    handle.seek(0)
    literal = list(csv.DictReader(handle, delimiter="\t", quoting=csv.QUOTE_NONE))
    joined = len(literal) != len(rows) or _uneven(rows) is not None
    return literal if joined and _uneven(literal) is None else rows


def _uneven(rows: list[dict[Any, Any]]) -> tuple[int, Any] | None:
    """The first row that lacks a column of the first one, or has one too many, and which."""
    names = _names(rows)
    for number, row in enumerate(rows):
        odd = [n for n in names if row.get(n) is None] + [n for n in row if n not in names]
        if odd:
            return number, odd[0]
    return None


def _names(rows: list[dict[Any, Any]]) -> list[Any]:
    """The columns of the first row; csv puts values without a name in the header under None."""
    return [name for name in rows[0] if name is not None] if rows else []


def texts_of(table: Table, file: Path, columns: Columns) -> Texts:
    """The texts and labels of a table.

    Args:
        table: its columns.
        file: where they come from, for errors.
        columns: which columns to take; None for the usual names.
    """
    first = column_of(table, columns.text, TEXT, file, "text")
    second = columns.second
    if second is None:
        second = next((n for n in table if n.lower() in SECOND and n != first), None)
    if second is not None and second not in table:
        raise DamagedData(
            f"{file} has no column {second!r}; it has {', '.join(table)}. Pass --set "
            "data.second=NAME."
        )
    label = column_of(table, columns.label, LABEL, file, "label")
    empty = [i for i, v in enumerate(table[label]) if str(v).strip() == ""]
    if empty:
        raise DamagedData(f"{file}: row {empty[0] + 1} has no {label!r}.")
    return Texts(
        [str(v) for v in table[first]],
        [str(v) for v in table[second]] if second else None,
        table[label],
    )


def column_of(table: Table, name: str | None, usual: Sequence[str], file: Path, role: str) -> str:
    """The requested column, or the first that has one of the usual names.

    Args:
        table: the columns of a file.
        name: the requested column.
        usual: names that such columns usually have.
        file: for errors.
        role: what the column is for: text, second or label.
    """
    if name is not None:
        found = [name] if name in table else []
    else:
        by_name = {n.lower(): n for n in reversed(table)}
        found = [by_name[n] for n in usual if n in by_name]
    if not found:
        what = f"no column {name!r}" if name is not None else f"no column named like a {role}"
        raise DamagedData(
            f"{file} has {what}; it has {', '.join(table)}. Pass --set data.{role}=NAME."
        )
    return found[0]
