"""Limits on what a report reads: run folders and packs may come from anywhere.

A report of a thousand runs takes 2.3 MB as a pack. The limits are far above that, and low enough
that no file can take the memory of the machine, hang the reader, or exhaust Python's stack.
"""

from __future__ import annotations

import json
import lzma
import stat
from pathlib import Path
from typing import Any

import msgspec

from dampen.studies.errors import DamagedRecord

MOST_BYTES = 64 * 2**20
"""Of one file, after decompression."""
MOST_VALUES = 4_000_000
"""Numbers, texts, lists and tables in one JSON document: each takes about 60 bytes of memory."""
MOST_LEVELS = 64
"""Of lists and tables inside each other."""
MOST_MEMORY = 256 * 2**20
"""That decompression may use for its dictionary."""


def check_file(path: Path) -> None:
    """Refuse what is not an ordinary file of a reasonable size.

    Opening a pipe would wait for a writer forever, and a device may have no end.

    Args:
        path: of the file; a link counts as what it points to.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedRecord(f"{path} is not an ordinary file. Remove it from the folder.")
    if found.st_size > MOST_BYTES:
        raise DamagedRecord(
            f"{path} has {found.st_size / 2**20:,.0f} MB; a report reads at most "
            f"{MOST_BYTES / 2**20:.0f} MB per file. Report fewer runs at once."
        )


def read_limited(path: Path) -> bytes:
    """The content of a file, decompressed if its name ends in .xz, up to `MOST_BYTES`.

    Args:
        path: of the file.
    """
    check_file(path)
    content = path.read_bytes()
    if path.suffix != ".xz":
        return content
    try:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
        content = decoder.decompress(content, max_length=MOST_BYTES + 1)
    except lzma.LZMAError as error:
        raise DamagedRecord(f"{path} is damaged: {error}. Make or fetch the file again.") from error
    if len(content) > MOST_BYTES:
        raise DamagedRecord(
            f"{path} decompresses to more than {MOST_BYTES / 2**20:.0f} MB. Pack fewer runs, or "
            "pack them without curves."
        )
    if not decoder.eof:
        raise DamagedRecord(f"{path} is damaged: it is cut short. Make or fetch the file again.")
    return content


def parse_limited(text: str, name: str) -> Any:
    """Parse a JSON document that is not too large and not nested too deeply.

    Args:
        text: the document.
        name: what to call it in an error.
    """
    # Every value but the first follows one of these characters. Texts may hold them too, so
    # this counts too many values and never too few.
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise DamagedRecord(f"{name} holds more than {MOST_VALUES:,} values. Report fewer runs.")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise DamagedRecord(_too_deep(name)) from error
    except ValueError as error:
        raise DamagedRecord(f"{name} is damaged: {error}. Make or fetch it again.") from error
    check_levels(content, name)
    return content


def check_levels(content: Any, name: str) -> None:
    """Refuse plain data that is nested so deeply that working on it would exhaust the stack.

    Args:
        content: the data.
        name: what to call it in an error.
    """
    level = [content]
    for _ in range(MOST_LEVELS):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise DamagedRecord(_too_deep(name))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _too_deep(name: str) -> str:
    return f"{name} is nested deeper than {MOST_LEVELS} levels, far more than a result needs."


class _Axis(msgspec.Struct):
    key: str
    log: bool = False


class _Tried(msgspec.Struct):
    values: dict[str, Any]
    state: str
    valid: float | None = None


class _SearchedRow(msgspec.Struct):
    axes: list[_Axis] = []
    trials: list[_Tried] = []
    edges: list[dict[str, Any]] = []
    tied: int = 1


class _Search(msgspec.Struct):
    rows: dict[str, _SearchedRow] = {}
    seeds: list[int] = []
    metric: str = ""


def check_search(content: Any, name: str) -> None:
    """Refuse a record of a search in which the report would not find what it draws.

    Args:
        content: what the record holds.
        name: what to call it in an error.
    """
    check_levels(content, name)
    try:
        msgspec.convert(content, _Search)
    except msgspec.ValidationError as error:
        raise DamagedRecord(f"{name} is not a search result: {error}.") from error
