"""A run's folder: the request, the environment, the log and the result.

    config.json       the trial, with every default written out
    environment.json  versions, commit, threads, machine of each session that worked on it
    log.jsonl         one line per epoch
    final.json        the result; its presence says that the trial is done
    weights-*         the selected state, as safetensors
    pretrain/         the same of the training that went before, where there was one
    checkpoint-*.pt   only while unfinished: the two newest states to resume from

JSON files are written to a temporary file, synced and renamed: a reader sees the old or the new
one, never half. The result and each line of the log carry a checksum of their content; those of
older records have none.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.errors import ConfigError, DamagedRecord, LabError, Locked, clear_disk_errors
from dampen.studies.files import CHECKSUM, atomic_file, read_json, sealed, unsealed, write_json
from dampen.studies.processes import AS_FOUND
from dampen.studies.result import Diagnosis, LogLine, Result, on_one_axis, parse_lines, parse_result
from dampen.studies.run import Run

PRETRAIN = "pretrain"
"""The folder, inside a trial's, of the training that went before it."""
RUN_AGAIN = "Delete this file and run the same command: the trial runs again."


NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise Locked naming who holds it. The system frees the lock of a
    process that died.

    The lock file stays when the lock is let go: removing it would let two processes hold locks on
    two files of one name. Who holds it is written in a file beside, because Windows lets nobody
    read a locked file.

    Args:
        folder: of a run.
    """
    from filelock import FileLock, Timeout

    lock, holder = FileLock(folder / "lock", timeout=0), folder / "lock.holder"
    with clear_disk_errors(holder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            name = holder.read_text(encoding="utf-8").strip() if holder.exists() else ""
            raise Locked(
                f"{folder} is in use by {name or 'an unknown process'}. "
                "Wait until it is done, or stop it; what it recorded can be resumed."
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise LabError(
                f"The file system of {folder} has no file locks "
                f"({error.strerror}), so two processes could write one "
                "record. Choose a folder on another disk "
                "with --out or folder=, and copy the result."
            ) from error
    try:
        with clear_disk_errors(holder):
            holder.write_text(
                f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8"
            )
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def clean_folder(folder: Path) -> None:
    """Remove temporary files that a killed process left behind. Only for the holder of the lock."""
    for path in folder.glob(".*.tmp"):
        if path.is_file():
            path.unlink(missing_ok=True)


class RunStore:
    """Reads and writes one trial's folder."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def start(self, trial: Run, environment: Mapping[str, Any]) -> None:
        """Note what runs and where; refuse a folder that belongs to another trial.

        Args:
            trial: the run that the folder is for.
            environment: where it runs, as `environment.describe` says.
        """
        path = self.folder / "config.json"
        try:
            known = self.trial().id if path.exists() else None
        except (
            DamagedRecord,
            ConfigError,
        ):  # the request is known all the same; a checkpoint says whose it is
            _set_aside(path)
            known = None
        if known is None:
            write_json(path, {"id": trial.id, **trial.to_dict()})
        elif known != trial.id:
            raise LabError(
                f"{self.folder} holds trial {known}, not {trial.id}. Choose another folder."
            )
        try:
            sessions = self.sessions()
        except DamagedRecord:
            _set_aside(self.folder / "environment.json")
            sessions = []
        write_json(self.folder / "environment.json", {"sessions": [*sessions, dict(environment)]})

    def sessions(self) -> list[dict[str, Any]]:
        """The environment of every session that worked on this trial, oldest first."""
        path = self.folder / "environment.json"
        if not path.exists():
            return []
        content = read_json(path)
        sessions = content.get("sessions") if isinstance(content, dict) else None
        if not isinstance(sessions, list) or not all(isinstance(s, dict) for s in sessions):
            raise DamagedRecord(
                f"{path} is damaged: it has no list of sessions. Delete it; results do not need it."
            )
        return sessions

    def trial(self) -> Run:
        """The trial of this folder."""
        path = self.folder / "config.json"
        config = read_json(path)
        if not isinstance(config, dict):
            raise DamagedRecord(
                f"{path} is damaged: it holds no trial. Delete its folder to run the trial again."
            )
        return Run.from_stored(
            {k: v for k, v in config.items() if k != "id"}, str(self.folder / "config.json")
        )

    @property
    def done(self) -> bool:
        """Whether there is a result, whole or not."""
        return (self.folder / "final.json").exists()

    def final(self) -> dict[str, Any] | None:
        """The result, or None while the trial is not done."""
        path = self.folder / "final.json"
        if not path.exists():
            return None
        result = unsealed(read_json(path, RUN_AGAIN), str(path), RUN_AGAIN)
        if not isinstance(result, dict) or not isinstance(result.get("status"), str):
            raise DamagedRecord(f"{path} is damaged: it is no result. {RUN_AGAIN}")
        return result

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result: from now on the trial is done. Its log is on the disk before.

        Args:
            result: plain data, as `result.Result` describes it.
        """
        self._sync_log()
        write_json(self.folder / "final.json", sealed(result))

    def reopen(self) -> None:
        """Forget that the trial diverged, or its pretraining, so that it runs again."""
        for path in (self.folder / "final.json", self.folder / PRETRAIN / "final.json"):
            found = RunStore(path.parent).final()
            if found is not None and found["status"] == "diverged":
                path.unlink()

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line. A process that is killed loses nothing; what a power cut takes is in the
        checkpoint, or happens again. So nobody waits for the disk here: 60 epochs of a tiny model
        would wait longer than they train.

        Args:
            line: plain data, as `result.LogLine` describes it.
        """
        self.log_lines([line])

    def log_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append several lines at once.

        Args:
            lines: plain data, as `result.LogLine` describes them.
        """
        path = self.folder / "log.jsonl"
        with clear_disk_errors(path), path.open("ab") as file:
            file.write(b"".join(map(_written, lines)))

    def _sync_log(self) -> None:
        path = self.folder / "log.jsonl"
        if path.exists():
            with clear_disk_errors(path), path.open("ab") as file:
                os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """The log; a last line that a crash cut short is left out. Raises DamagedRecord where a
        line was changed, or where the result says that there were more."""
        path = self.folder / "log.jsonl"
        content = path.read_bytes() if path.exists() else b""
        whole = content.split(b"\n")[:-1]
        marked = CHECKSUM.encode() in content  # all lines of a log have checksums, or none
        lines = [
            _read_line(line, marked, f"Line {i + 1} of {path}") for i, line in enumerate(whole)
        ]
        final = self.final() or {}
        if len(lines) != final.get("log_lines", len(lines)):
            raise DamagedRecord(
                f"{path} is damaged: it has {len(lines)} lines, the result "
                f"was written after {final['log_lines']}. "
                "Delete its folder to run the trial again."
            )
        return lines

    def write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Put these lines in place of the log."""
        with atomic_file(self.folder / "log.jsonl") as file:
            file.write(b"".join(_written(line) for line in lines))

    def keep_lines(self, count: int) -> None:
        """Cut the log back to its first `count` lines: what came after will happen again."""
        if (self.folder / "log.jsonl").exists():
            self.write_lines(self.lines()[:count] if count else [])


def _written(line: Mapping[str, Any]) -> bytes:
    return json.dumps(sealed(line), allow_nan=False).encode() + b"\n"


def _read_line(line: bytes, marked: bool, what: str) -> dict[str, Any]:
    remedy = "A run that is not finished is repaired when it resumes; else delete its folder to run the trial again."
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedRecord(f"{what} is damaged: {error}. {remedy}") from error
    if not isinstance(value, dict) or (marked and CHECKSUM not in value):
        raise DamagedRecord(
            f"{what} is damaged: it is no table of values with a checksum. {remedy}"
        )
    return dict(unsealed(value, what, remedy))


def _set_aside(path: Path) -> None:
    """Keep a damaged file under another name."""
    os.replace(path, path.with_name(f"{path.stem}.damaged{path.suffix}"))


# --------------------
# A trial as it lies on disk, read: the request, the result, the environment, what was
# measured on it.


@dataclass(frozen=True)
class LoggedRun:
    """One trial's folder, read."""

    folder: Path
    id: str
    config: dict[str, Any]
    final: Result | None
    sessions: list[dict[str, Any]]
    measured: Diagnosis = field(default_factory=Diagnosis)
    error: str = ""  # what stopped it, where that was no divergence
    _log: list[tuple[list[LogLine], bool]] = field(default_factory=list, repr=False, compare=False)

    @property
    def status(self) -> str:
        """'finished', 'diverged', 'failed' or 'unfinished'."""
        return self.final.status if self.final else "failed" if self.error else "unfinished"

    @property
    def reason(self) -> str:
        """Why there is no result; empty where there is one, or none yet."""
        return self.final.reason if self.final else self.error

    @property
    def seed(self) -> str:
        return str(self.config.get("seed", 0))

    @property
    def place(self) -> tuple[Any, ...]:
        """What two step times must share to be compared: machine, threads, device, malloc (as
        found, if not said)."""
        last = self.sessions[-1] if self.sessions else {}
        device, threads, malloc = (
            last.get(key) or getattr(self.final, key, None)
            for key in ("device", "threads", "malloc")
        )
        return last.get("cpu"), device, threads, malloc or AS_FOUND

    def lines(self) -> list[LogLine]:
        """The log, read on first use; a damaged one is empty, and `log_damaged` says so."""
        return self._read_log()[0]

    @property
    def log_damaged(self) -> bool:
        return self._read_log()[1]

    def _read_log(self) -> tuple[list[LogLine], bool]:
        if not self._log:
            try:
                lines = on_one_axis(parse_lines(RunStore(self.folder).lines()))
                self._log.append((lines, False))
            except ValueError:
                self._log.append(([], True))
        return self._log[0]


def read_run(folder: Path, trial: Run) -> LoggedRun | None:
    """A planned trial from its folder; None while it has neither a result nor an error.

    Args:
        folder: of the run.
        trial: the run as it was requested.
    """
    record = RunStore(folder)
    final = record.final()
    error = read_error(folder) if final is None else ""
    if final is None and not error:
        return None
    config = {"id": trial.id, **trial.to_dict()}
    return LoggedRun(
        folder,
        trial.id,
        config,
        parse_result(final) if final else None,
        record.sessions(),
        error=error,
    )


def read_error(folder: Path) -> str:
    """The message that a failed trial left, or nothing."""
    path = folder / "error.json"
    return str(read_json(path).get("message", "")) if path.exists() else ""
