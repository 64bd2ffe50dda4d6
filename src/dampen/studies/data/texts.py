"""Text classification from a table of one's own: CSV, TSV or JSON lines with a text, perhaps a second one, a label."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dampen.studies.data.dataset import DataSpec
from dampen.studies.data.errors import DamagedData, MissingData
from dampen.studies.data.limits import read_file, require_within
from dampen.studies.data.text_sets import Columns, Texts, text_reader
from dampen.studies.files import file_hash

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

Table = dict[str, list[Any]]


def table_files(path: Path) -> dict[str, Path]:
    """The file of each part: the one that was given, or train, valid and test of a folder."""
    if path.is_file():
        return {"train": path} if path.suffix.lower() in ENDINGS else {}
    if not path.is_dir():
        return {}
    there = {p.stem.lower(): p for p in sorted(path.iterdir()) if p.suffix.lower() in ENDINGS}
    found = {part: next((there[n] for n in names if n in there), None) for part, names in NAMES.items()}
    return {part: file for part, file in found.items() if file is not None} if found["train"] else {}


def _read(path: Path, columns: Columns) -> tuple[dict[str, Texts], dict[str, Any]]:
    files = table_files(path)
    if not files:
        raise MissingData(f"{path} is no table of texts: expected a file that ends in {', '.join(ENDINGS)}.")
    parts = {part: texts_of(read_table(file), file, columns) for part, file in files.items()}
    hashes = {file.name: file_hash(file) for file in files.values()}
    return parts, {"layout": "table", "source": path.name, "sha256": hashes}


load_table = text_reader(_read)


def read_table(file: Path) -> Table:
    """The columns of a file, by name."""
    content = read_file(file)
    try:
        handle = io.StringIO(content.decode("utf-8-sig"), newline="")
        if file.suffix.lower() in (".jsonl", ".ndjson"):
            lines = [line for line in handle if line.strip()]
            require_within("DAMPEN_MAX_LINE", max(map(len, lines), default=0), file, "characters in one line")
            rows = [json.loads(line) for line in lines]
        else:
            rows = _separated(handle, tabs=file.suffix.lower() == ".tsv")
    except DamagedData:
        raise
    except (ValueError, RecursionError, csv.Error) as error:
        raise DamagedData(f"{file} cannot be read as {file.suffix[1:]} in UTF-8: {error}.") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise DamagedData(f"{file} has no rows with named columns; the first line of a table is its header.")
    names = _names(rows)
    if found := _uneven(rows):
        number, odd = found
        if odd is None:
            raise DamagedData(f"{file}: row {number + 1} has more values than the header has names, {names}.")
        raise DamagedData(f"{file}: row {number + 1} does not have the columns of the first, {names}: see {odd!r}.")
    return {name: [row[name] for row in rows] for name in names}


def _separated(handle: io.StringIO, tabs: bool) -> list[dict[Any, Any]]:
    """The rows of a CSV or TSV file.

    In TSV files quotes are often letters like others (GLUE's are), and one that never closes swallows the rows after
    it. So where every line by itself has all columns, no line is joined to the next for the sake of a quote.
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
    """The columns of the first row; None is where csv puts the values for which the header has no name."""
    return [name for name in rows[0] if name is not None] if rows else []


def texts_of(table: Table, file: Path, said: Columns) -> Texts:
    """The columns that were said, or that are called as such columns usually are."""
    first = column_of(table, said.text, TEXT, file, "text")
    other = (
        said.second if said.second is not None else next((n for n in table if n.lower() in SECOND and n != first), None)
    )
    if other is not None and other not in table:
        raise DamagedData(f"{file} has no column {other!r}; it has {', '.join(table)}. Say --set data.second=NAME.")
    answer = column_of(table, said.label, LABEL, file, "label")
    empty = [i for i, v in enumerate(table[answer]) if str(v).strip() == ""]
    if empty:
        raise DamagedData(f"{file}: row {empty[0] + 1} has no {answer!r}.")
    return Texts([str(v) for v in table[first]], [str(v) for v in table[other]] if other else None, table[answer])


def column_of(table: Table, said: str | None, usual: Sequence[str], file: Path, role: str) -> str:
    """The column that was said, or the first that is called as usual."""
    if said is not None:
        found = [said] if said in table else []
    else:
        by_name = {n.lower(): n for n in reversed(table)}
        found = [by_name[n] for n in usual if n in by_name]
    if not found:
        what = f"no column {said!r}" if said is not None else f"no column that is called like a {role}"
        raise DamagedData(f"{file} has {what}; it has {', '.join(table)}. Say --set data.{role}=NAME.")
    return found[0]
