"""A trial as it lies on disk, read: what was asked for, what came out, where it ran, what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.studies.allocator import AS_FOUND
from dampen.studies.config.trial import Run
from dampen.studies.files import read_json
from dampen.studies.records.diagnosis import Diagnosis
from dampen.studies.records.record import RunStore
from dampen.studies.records.result import LogLine, Result, parse_lines, parse_result


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
        """What two step times must share to be compared: machine, threads, device, malloc (as found, if not said)."""
        last = self.sessions[-1] if self.sessions else {}
        device, threads, malloc = (
            last.get(key) or getattr(self.final, key, None) for key in ("device", "threads", "malloc")
        )
        return last.get("cpu"), device, threads, malloc or AS_FOUND

    def lines(self) -> list[LogLine]:
        """The log, read when first asked for; a damaged one is empty, and `log_damaged` says so."""
        return self._read_log()[0]

    @property
    def log_damaged(self) -> bool:
        return self._read_log()[1]

    def _read_log(self) -> tuple[list[LogLine], bool]:
        if not self._log:
            try:
                self._log.append((parse_lines(RunStore(self.folder).lines()), False))
            except ValueError:
                self._log.append(([], True))
        return self._log[0]


def read_run(folder: Path, trial: Run) -> LoggedRun | None:
    """A planned trial from its folder; None while it has neither a result nor an error."""
    record = RunStore(folder)
    final = record.final()
    error = read_error(folder) if final is None else ""
    if final is None and not error:
        return None
    config = {"id": trial.id, **trial.to_dict()}
    return LoggedRun(folder, trial.id, config, parse_result(final) if final else None, record.sessions(), error=error)


def read_error(folder: Path) -> str:
    """The message that a failed trial left, or nothing."""
    path = folder / "error.json"
    return str(read_json(path).get("message", "")) if path.exists() else ""
