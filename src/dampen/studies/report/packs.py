"""Packs: the records of run folders in one small file, without weights."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dampen.studies.errors import DamagedRecord, LabError
from dampen.studies.files import checksum
from dampen.studies.report.limits import check_file, read_limited
from dampen.studies.store import PRETRAIN

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
    """Every record below `paths` as one JSON document: by folder, by file; the logs only where `curves` are wanted.

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
                f"There is no folder {given}. Give the folder that dampen run, compare or demo wrote."
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
    """The document with one folder per line, so that a version control system shows which trials came.

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
    """Write the records of a packed file (its `path`, for messages, and its `content`) below `folder`, as they were.

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
            f"{path} is a pack of version {content.get('version')!r}, this dampen reads {VERSION}: update it."
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
    """Raise where a folder of a pack was changed, is missing or was added since; packs of before have no checksums."""
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
