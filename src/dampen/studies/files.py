"""Files that are there whole or as they were: JSON and others, written aside, synced and renamed;
with checksums."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dampen.studies.errors import DamagedRecord, clear_disk_errors

CHECKSUM = "checksum"
"""The key under which a result, a line of a log or a pack says what the rest of it
was when it was written."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there whole, or as it was.

    Args:
        path: of the file.
        value: plain data without NaN or infinity.
    """
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False, sort_keys=False).encode() + b"\n")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that becomes `path` when the block ends well, and vanishes when it does not.

    Args:
        path: of the file; its folder is made where it is missing.
    """
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
    """Make renames inside `folder` survive a power cut. Windows opens no folders and
    orders renames itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path, remedy: str = "Delete its folder to run the trial again.") -> Any:
    """Read JSON, or say which file is damaged and what to do.

    Args:
        path: of the file.
        remedy: what to do about a damaged file, for the error message.
    """
    try:
        return json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_no_number, parse_float=_finite
        )
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
    """What `sealed` was given; raises DamagedRecord where it was changed since. What has no
    checksum is taken as it is: records were written without before.

    Args:
        value: what was read.
        what: names it in the error message.
        remedy: what to do, for the error message.
    """
    if not isinstance(value, dict) or CHECKSUM not in value:
        return value
    content = {k: v for k, v in value.items() if k != CHECKSUM}
    found = checksum(content)
    if found != value[CHECKSUM]:
        raise DamagedRecord(
            f"{what} was changed: its checksum is {found}, it says {value[CHECKSUM]!r}. {remedy}"
        )
    return content


# --------------------
# Plain data as JSON has it.


LARGEST = 1e100
"""No measurement is larger: a perplexity of 1e160 is that of a model that diverged, and
its square overflows."""


def finite(value: Any) -> Any:
    """The same with null for every number that is NaN, infinite or beyond `LARGEST`.

    >>> finite({"a": [1.0, float("nan")], "b": (float("inf"), "x", -1e160)})
    {'a': [1.0, None], 'b': [None, 'x', None]}
    """
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not abs(value) <= LARGEST else value


# --------------------
# The identity of data: a hash of the content of a file or folder, cheap to compute again.
# Sizes and times are looked at first: a file that has those of the last time is not read again.
# What was hashed is kept in `~/.cache/dampen/fingerprints.json` (or `$DAMPEN_CACHE`).


CACHE = "fingerprints.json"
FRESH_NS = 2_000_000_000
"""A file that changed less than two seconds ago is hashed anyway: clocks of
file systems are coarse."""


def fingerprint(path: Path | str) -> str:
    """The hash of a file, or of the names and contents of all files below a folder;
    hidden files do not count.

    Args:
        path: a file or a folder.
    """
    path = Path(path).resolve()
    known, fresh = cached(CACHE), dict[str, Any]()
    lines = []
    for file in files_of(path):
        stat = file.stat()
        key, mark = str(file), [stat.st_size, stat.st_mtime_ns]
        entry = known.get(key)
        if entry is None or entry[:2] != mark or time.time_ns() - stat.st_mtime_ns < FRESH_NS:
            entry = fresh[key] = [*mark, file_hash(file)]
        lines.append(
            f"{entry[2]}  {file.relative_to(path).as_posix() if path.is_dir() else file.name}"
        )
    if fresh:
        keep(CACHE, fresh)
    if path.is_file():
        lines = [
            line.split("  ", 1)[0] for line in lines
        ]  # a file is known by its content, whatever its name
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def files_of(path: Path) -> list[Path]:
    """The files that count, in a fixed order."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"There is no file or folder {path}.")
    below = (p for p in path.rglob("*") if p.is_file())
    return sorted(
        p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)
    )


def file_hash(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sizes_and_times(path: Path) -> str | None:
    """A mark that changes when a file does, without reading any; None where one changed
    too lately to be sure."""
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
        content = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep(name: str, more: Mapping[str, Any]) -> None:
    """Add to a file of the cache."""
    write_json(cache_folder() / name, cached(name) | dict(more))


def cache_folder() -> Path:
    """`$DAMPEN_CACHE`, or `~/.cache/dampen`."""
    root = os.environ.get("DAMPEN_CACHE")
    return Path(root) if root else Path.home() / ".cache" / "dampen"
