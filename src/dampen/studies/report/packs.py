"""Packs, the logged runs of folders in one small file, and limits on what a report reads: both may
come from anywhere."""

from __future__ import annotations

import json
import lzma
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from dampen.studies.errors import DamagedRecord, LabError
from dampen.studies.files import checksum
from dampen.studies.store import PRETRAIN

# --- limits
#
# Limits on what a report reads: run folders and packs may come from anywhere.
#
# A report of a thousand runs takes 2.3 MB as a pack. The limits are far above that, and low
# enough that no file can take the memory of the machine, hang the reader, or exhaust Python's
# stack.

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


# --- packs
#
# Packs: the records of run folders in one small file, without weights.

MEASURED = "diagnose.json"
"""What `dampen diagnose` leaves in a trial's folder; the report shows what it finds there."""

ASIDE = ("tensorboard", "search", PRETRAIN)
"""Folders inside a run that hold no trials of its table."""

KIND, BENCH = "dampen records", "dampen bench"
"""What a file says it is: packed records, or what `dampen bench` measured."""
VERSION = 1
RESULTS = ("final.json", "error.json", "log.jsonl", MEASURED)
KEPT = ("plan.json", "search.json", "config.json", "environment.json", *RESULTS)


def folders_below(root: Path) -> Iterator[Path]:
    """The folder and all below it that may hold records, in a fixed order.

    Args:
        root: the folder to start from.
    """
    for name, folders, _ in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ASIDE)
        yield Path(name)


def pack(paths: Sequence[Path | str], curves: bool = True) -> dict[str, Any]:
    """Every record below `paths` as one JSON document: by folder, by file; the logs only where
    `curves` are wanted.

    Args:
        paths: the folders.
        curves: keep the logs of the runs.
    """
    kept = KEPT if curves else tuple(name for name in KEPT if name != "log.jsonl")
    found: dict[str, dict[str, Any]] = {}
    tops: dict[str, int] = {}  # two folders of the same name stay apart
    for given in map(Path, paths):
        if given.is_file():
            raise LabError(f"{given} is a file; only the folders of runs can be packed.")
        if not given.is_dir():
            raise LabError(
                f"There is no folder {given}. Give the "
                "folder that dampen run, compare or demo wrote."
            )
        top = given.resolve().name
        tops[top] = tops.get(top, 0) + 1
        top = top if tops[top] == 1 else f"{top}-{tops[top]}"
        for folder in folders_below(given):
            files = {name: _read(folder / name) for name in kept if (folder / name).exists()}
            if files:
                found[PurePosixPath(top, *folder.relative_to(given).parts).as_posix()] = files
    if not found:
        raise LabError(f"There are no result files in {', '.join(map(str, paths))}.")
    sums = {name: checksum(files) for name, files in found.items()}
    return {"kind": KIND, "version": VERSION, "checksums": sums, "folders": found}


def to_text(packed: Mapping[str, Any]) -> str:
    """The document with one folder per line, so that a version control system
    shows which trials came.

    Args:
        packed: what `pack` returned.
    """
    folders = packed["folders"].items()
    lines = [
        f"{json.dumps(name)}:{json.dumps(files, separators=(',', ':'))}" for name, files in folders
    ]
    head = f'"kind":{json.dumps(packed["kind"])},"version":{packed["version"]}'
    if "checksums" in packed:
        head += f',"checksums":{json.dumps(packed["checksums"], separators=(",", ":"))}'
    return f'{{{head},"folders":{{\n' + ",\n".join(lines) + "\n}}\n"


def packed_bytes(text: str, path: Path) -> bytes:
    """The document as its file holds it: compressed where the name ends in .xz.

    Args:
        text: the text.
        path: the file.
    """
    return lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode()


def packed_text(path: Path) -> str:
    """What `packed_bytes` wrote.

    Args:
        path: the file.
    """
    try:
        return read_limited(path).decode()
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is damaged: {error}. Make or fetch the file again.") from error


def unpack(path: Path, content: Any, folder: Path) -> None:
    """Write the records of a packed file (its `path`, for messages, and its `content`) below
    `folder`, as they were.

    Args:
        path: the file.
        content: its parsed content.
        folder: where to write.
    """
    if (
        not isinstance(content, dict)
        or content.get("kind") != KIND
        or not isinstance(content.get("folders"), dict)
    ):
        raise LabError(
            f"{path} is not a pack; `dampen report RUNS -o FILE --format pack` writes one, "
            "and `dampen bench -o FILE` one of costs."
        )
    if content.get("version") != VERSION:
        raise LabError(
            f"{path} is a pack of version "
            f"{content.get('version')!r}, this dampen reads {VERSION}: update it."
        )
    _check_sums(path, content)
    for name, files in content["folders"].items():
        place = (folder / name).resolve()
        unknown = sorted(set(files) - set(KEPT)) if isinstance(files, dict) else [name]
        if not place.is_relative_to(folder.resolve()) or unknown:
            raise LabError(f"{path}: {', '.join(unknown) or name!r} does not belong in a pack.")
        place.mkdir(parents=True, exist_ok=True)
        for file, value in files.items():
            if not isinstance(value, str | list if file.endswith(".jsonl") else str | dict | list):
                raise LabError(
                    f"{path}: {name}/{file} has an unexpected type ({type(value).__name__})."
                )
            (place / file).write_text(
                value if isinstance(value, str) else _text(file, value), encoding="utf-8"
            )


def _check_sums(path: Path, content: Mapping[str, Any]) -> None:
    """Raise where a folder of a pack was changed, is missing or was added since; packs of before
    have no checksums."""
    sums, folders = content.get("checksums"), content["folders"]
    if sums is None:
        return
    names = {*(sums if isinstance(sums, dict) else {}), *folders}
    wrong = [n for n in sorted(names) if n not in folders or sums.get(n) != checksum(folders[n])]
    if wrong:
        some = ", ".join(map(repr, wrong[:3])) + (
            f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        )
        raise DamagedRecord(
            f"{path} was changed since it was written: {some}. Make or fetch the file again."
        )


def _read(path: Path) -> Any:
    """Parsed, so that the packed file can be read; a damaged file stays the text it is."""
    check_file(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return (
            [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
    except ValueError:
        return text


def _text(name: str, value: Any) -> str:
    if name.endswith(".jsonl"):
        return "".join(json.dumps(line) + "\n" for line in value)
    return json.dumps(value)
