"""Files that are there whole or as they were: JSON and others, written aside, synced and renamed; with checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dampen.studies.errors import DamagedRecord, clear_disk_errors

CHECKSUM = "checksum"
"""The key under which a result, a line of a log or a pack says what the rest of it was when it was written."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there whole, or as it was."""
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False, sort_keys=False).encode() + b"\n")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that becomes `path` when the block ends well, and vanishes when it does not."""
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut. Windows opens no folders and orders renames itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path, remedy: str = "Delete its folder to run the trial again.") -> Any:
    """Read JSON, or say which file is damaged and what to do."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord(f"{path} is damaged: {error}. {remedy}") from error


def _no_number(name: str) -> None:
    """NaN and Infinity are no JSON, though some write them: they mean that there is no number."""


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def checksum(value: Mapping[str, Any]) -> str:
    """Of plain data, however it is laid out; 64 bits are plenty against accidents.

    >>> checksum({"a": 1, "b": [0.5]}) == checksum({"b": [0.5], "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with its own checksum as last entry."""
    return {**value, CHECKSUM: checksum(value)}


def unsealed(value: Any, what: str, remedy: str) -> Any:
    """What `sealed` was given; raises DamagedRecord where it was changed since. What has no checksum is taken as it is:
    records were written without before."""
    if not isinstance(value, dict) or CHECKSUM not in value:
        return value
    content = {k: v for k, v in value.items() if k != CHECKSUM}
    found = checksum(content)
    if found != value[CHECKSUM]:
        raise DamagedRecord(f"{what} was changed: its checksum is {found}, it says {value[CHECKSUM]!r}. {remedy}")
    return content
