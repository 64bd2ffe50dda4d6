"""Engines run independent trials somewhere. Every engine takes the same jobs and
leaves the same records.

`local` (local.py) uses processes of this machine. Another engine is one more file with a class that
has `run`, and one more line in `ENGINES`; or a package's own, by the entry point `dampen.engines`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from dampen.extensions import from_plugins
from dampen.names import nearest
from dampen.studies.errors import (
    ConfigError,
    DiskFull,
    Diverged,
    Interrupted,
    Locked,
    Refused,
    portable,
)
from dampen.studies.files import write_json
from dampen.studies.processes import is_ctrl_c
from dampen.studies.result import Event, marked
from dampen.studies.run import Run
from dampen.studies.store import RunStore

if TYPE_CHECKING:
    from dampen.studies.trainer.state import Execution

ENGINES = {
    "local": "dampen.studies.engines.local:LocalEngine",
    "ray": "dampen.studies.engines.ray:RayEngine",
}
Status = Literal[
    "finished",
    "diverged",
    "failed",
    "no data",
    "refused",
    "locked",
    "disk full",
    "interrupted",
    "waiting",
]
RETRIES = 2
"""How often a trial is tried again after its worker died."""
FATAL = ("no data", "disk full", "refused")
"""What would stop every other trial too: an engine hands out no more of them."""
Report = Callable[[str, Event], None]
"""Receives (trial id, event) in the process that called `run`."""


@dataclass(frozen=True)
class Job:
    """A trial and the folder it belongs to."""

    trial: Run
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: Status
    result: dict[str, Any] | None = None
    message: str = ""


class Engine(Protocol):
    """What an engine must do."""

    def run(self, jobs: Sequence[Job], execution: Execution, report: Report) -> dict[str, Outcome]:
        """Run the jobs and return the outcome of each by trial id. KeyboardInterrupt stops at the
        next step of each running trial, after its checkpoint, and returns what there is."""
        ...


def check_engine(name: str) -> None:
    """Refuse an engine that nobody offers, with the nearest name."""
    known = [*ENGINES, *from_plugins("dampen.engines")]
    if name not in known:
        raise ConfigError("--engine", [f"unknown engine {name!r}{nearest(name, known)}"])


def make_engine(name: str, **options: Any) -> Engine:
    """An engine by name.

    Args:
        name: 'local', 'ray', or a plug-in's.
        options: arguments of the engine.
    """
    check_engine(name)
    offered = from_plugins("dampen.engines")
    if name in offered:
        return cast(Engine, offered[name](**options))
    module, cls = ENGINES[name].split(":")
    return cast(Engine, getattr(importlib.import_module(module), cls)(**options))


def run_job(
    job: Job,
    execution: Execution,
    report: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> Outcome:
    """Run one job in this process and turn whatever happens into an outcome; engines
    call it in their workers.

    Args:
        job: the run and its folder.
        execution: threads, devices, data, plug-ins.
        report: receives events as plain data.
        stop: called after every step; True stops after a checkpoint.
    """
    from dampen.studies.data.dataset import DamagedData, IncompleteData, MissingData
    from dampen.studies.trainer.train import run_trial

    def tell(event: dict[str, Any]) -> None:
        report(marked(event))

    (job.folder / "error.json").unlink(missing_ok=True)  # of an earlier attempt
    try:
        return Outcome("finished", run_trial(job.trial, job.folder, execution, tell, stop))
    except Diverged as error:
        return Outcome("diverged", RunStore(job.folder).final(), str(error))
    except Refused as error:  # the result is kept where there is one
        return Outcome("refused", RunStore(job.folder).final(), str(error))
    except Interrupted as error:
        return Outcome("interrupted", None, str(error))
    except Locked as error:
        return Outcome("locked", None, str(error))
    except (MissingData, IncompleteData, DamagedData) as error:
        return Outcome("no data", None, str(error))
    except DiskFull as error:
        return Outcome("disk full", None, str(error))
    except BaseException as error:  # whatever user code raises is an outcome of this run
        if is_ctrl_c(error):
            raise
        plain = portable(error)
        message = f"{type(plain).__name__}: {plain}" if not str(plain) else str(plain)
        return failed(job, message, "".join(getattr(plain, "__notes__", [])))


def failed(job: Job, message: str, traceback: str = "") -> Outcome:
    """A trial that failed, with the reason kept in its folder: the table, the page and
    `dampen.load` read it there."""
    try:
        if job.folder.is_dir():
            write_json(job.folder / "error.json", {"message": message, "traceback": traceback})
    except DiskFull as full:
        return Outcome("disk full", None, f"{full} Before that: {message}")
    return Outcome("failed", None, message)


def after_death(job: Job, how: str, deaths: int) -> tuple[str, Outcome | None]:
    """What to say of a job whose worker has died, `deaths` times by now, and its outcome once that
    is too often."""
    from dampen.studies.trainer.checkpoint import saved_states

    if deaths > RETRIES:
        message = f"Its worker died {deaths} times; the last one {how} (out of memory?)."
        return message, failed(job, message)
    kept = saved_states(job.folder, "checkpoint")
    return (
        f"Its worker {how}; {'it resumes from its last checkpoint' if kept else 'it starts again'}.",
        None,
    )
