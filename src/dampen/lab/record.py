"""A trial's folder: what was asked for, where it ran, what happened, what came out.

    config.json       the trial, with every default written out
    environment.json  versions, commit, threads, machine of each session that worked on it
    log.jsonl         one line per epoch
    final.json        the result; its presence says that the trial is done
    weights-*.pt      the selected state
    pretrain/         the same of the training that went before, where there was one
    checkpoint-*.pt   only while unfinished: the two newest states to resume from

JSON files are written to a temporary file, synced and renamed: a reader sees the old or the new one, never half.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dampen.lab.errors import LabError, Locked, clear_disk_errors
from dampen.lab.trial import Trial

PRETRAIN = "pretrain"
"""The folder, inside a trial's, of the training that went before it."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is there whole, or as it was."""
    with atomic_file(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False, sort_keys=False).encode() + b"\n")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that becomes `path` when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with clear_disk_errors(path):
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
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> Any:
    """Read JSON, or say which file is damaged."""
    try:
        return json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise LabError(f"{path} is damaged: {error}. Delete its folder to run the trial again.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise Locked naming who holds it. The kernel frees the lock of a process that died."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "an unknown process"
            os.close(handle)
            raise Locked(
                f"{folder} is in use by {holder}. Wait until it is done, or stop it; what it recorded can be resumed."
            ) from None
        if os.fstat(handle).st_ino == _inode(path):  # not a file that its last holder removed meanwhile
            break
        os.close(handle)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def clean_folder(folder: Path) -> None:
    """Remove temporary files that a killed process left behind. Only for the holder of the lock."""
    for path in folder.glob(".*.tmp"):
        if path.is_file():
            path.unlink(missing_ok=True)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return -1


class Record:
    """Reads and writes one trial's folder."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def start(self, trial: Trial, environment: Mapping[str, Any]) -> None:
        """Note what runs and where; refuse a folder that belongs to another trial."""
        path = self.folder / "config.json"
        if path.exists():
            known = read_json(path)["id"]
            if known != trial.id:
                raise LabError(f"{self.folder} holds trial {known}, not {trial.id}. Choose another folder.")
        else:
            write_json(path, {"id": trial.id, **trial.to_dict()})
        write_json(self.folder / "environment.json", {"sessions": [*self.sessions(), dict(environment)]})

    def sessions(self) -> list[dict[str, Any]]:
        """The environment of every session that worked on this trial, oldest first."""
        path = self.folder / "environment.json"
        return read_json(path)["sessions"] if path.exists() else []

    def trial(self) -> Trial:
        """The trial of this folder."""
        config = read_json(self.folder / "config.json")
        return Trial.from_dict({k: v for k, v in config.items() if k != "id"}, str(self.folder / "config.json"))

    def final(self) -> dict[str, Any] | None:
        """The result, or None while the trial is not done."""
        path = self.folder / "final.json"
        return read_json(path) if path.exists() else None

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result: from now on the trial is done."""
        write_json(self.folder / "final.json", dict(result))

    def reopen(self) -> None:
        """Forget that the trial diverged, or its pretraining, so that it runs again."""
        for path in (self.folder / "final.json", self.folder / PRETRAIN / "final.json"):
            if path.exists() and read_json(path)["status"] == "diverged":
                path.unlink()

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line and sync it."""
        path = self.folder / "log.jsonl"
        with clear_disk_errors(path), path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """The log; a last line that was cut off by a crash is left out."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return []
        text = path.read_text()
        complete = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in complete.splitlines()]

    def keep_lines(self, count: int) -> None:
        """Cut the log back to its first `count` lines: what came after will happen again."""
        path = self.folder / "log.jsonl"
        if path.exists():
            lines = self.lines()[:count]
            with atomic_file(path) as file:
                file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
