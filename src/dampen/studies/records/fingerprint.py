"""The identity of data: a hash of the content of a file or folder, cheap to ask for again.

Sizes and times are looked at first: a file that has those of the last time is not read again. What was hashed is kept
in `~/.cache/dampen/fingerprints.json` (or `$DAMPEN_CACHE`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dampen.studies.files import write_json

CACHE = "fingerprints.json"
FRESH_NS = 2_000_000_000
"""A file that changed less than two seconds ago is hashed anyway: clocks of file systems are coarse."""


def fingerprint(path: Path | str) -> str:
    """The hash of a file, or of the names and contents of all files below a folder; hidden files do not count."""
    path = Path(path).resolve()
    known, fresh = cached(CACHE), dict[str, Any]()
    lines = []
    for file in files_of(path):
        stat = file.stat()
        key, mark = str(file), [stat.st_size, stat.st_mtime_ns]
        entry = known.get(key)
        if entry is None or entry[:2] != mark or time.time_ns() - stat.st_mtime_ns < FRESH_NS:
            entry = fresh[key] = [*mark, file_hash(file)]
        lines.append(f"{entry[2]}  {file.relative_to(path).as_posix() if path.is_dir() else file.name}")
    if fresh:
        keep(CACHE, fresh)
    if path.is_file():
        lines = [line.split("  ", 1)[0] for line in lines]  # a file is known by its content, whatever its name
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def files_of(path: Path) -> list[Path]:
    """The files that count, in a fixed order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    below = (p for p in path.rglob("*") if p.is_file())
    return sorted(p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts))


def file_hash(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sizes_and_times(path: Path) -> str | None:
    """A mark that changes when a file does, without reading any; None where one changed too lately to be sure."""
    lines = []
    for file in files_of(path):
        stat = file.stat()
        if time.time_ns() - stat.st_mtime_ns < FRESH_NS:
            return None
        lines.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def cached(name: str) -> dict[str, Any]:
    """What a file of the cache holds; one that is not there or damaged is made anew."""
    try:
        content = json.loads((_folder() / name).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep(name: str, more: Mapping[str, Any]) -> None:
    """Add to a file of the cache."""
    write_json(_folder() / name, cached(name) | dict(more))


def _folder() -> Path:
    root = os.environ.get("DAMPEN_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "dampen"
