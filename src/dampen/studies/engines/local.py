"""The local engine: every trial runs in a worker process of its own on this machine.

A worker runs one trial and ends, so that nothing a trial changes in its process (autocast, threads,
patched functions, the environment) reaches the next one. On Linux workers are forked from a server
that has imported torch and Fabric. Cores are shared out: with as many workers as cores each uses
one thread. Where there are GPUs, one worker runs on each, and sees no other. A worker that dies is
replaced and its run resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dampen.studies.engines import FATAL, Job, Outcome, Report, after_death, run_job
from dampen.studies.environment import asked_threads, usable_cores
from dampen.studies.errors import Terminated
from dampen.studies.processes import start, stop_on_signals
from dampen.studies.result import Event, parse_event
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.user_trial import OUTPUT

# --- a GPU for each worker
#
# GPUs for the workers of one machine: each worker sees its own.

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What a process sees of the cards; ROCm heeds it too."""


def visible_gpus() -> list[str]:
    """The cards that this process may use, as `CUDA_VISIBLE_DEVICES` names them. Counting them does
    not initialize CUDA."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    named = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    if named is None:
        return [str(i) for i in range(count)]
    return [card.strip() for card in named.split(",") if card.strip()][:count]


def places(cards: Sequence[str], devices: int, per_gpu: int) -> list[str]:
    """Where workers run: for each the cards that it sees.

    Args:
        cards: of this machine.
        devices: how many a run trains on.
        per_gpu: workers that share a card; runs on several devices share none.

    >>> places(["0", "1"], 1, 2), places(["0", "1", "2"], 2, 1)
    (['0', '1', '0', '1'], ['0,1'])
    """
    if devices > 1:
        whole = len(cards) // devices * devices
        return [",".join(cards[i : i + devices]) for i in range(0, whole, devices)]
    return list(cards) * per_gpu


def least_used(places: Sequence[str], used: Iterable[str]) -> str:
    """The place with the fewest workers.

    Args:
        places: all of them.
        used: those of the workers that run now.

    >>> least_used(["0", "1"], ["0"])
    '1'
    """
    taken = Counter(used)
    return min(dict.fromkeys(places), key=lambda place: taken[place])


# --- the workers

STOP_SECONDS = 7.0
"""After SIGTERM, how long a worker may take to write its checkpoint. Then it is
killed; its run resumes."""
LEAVE_SECONDS = 5.0
"""How long a worker may take to end after its outcome, or once it is no longer needed. A user's
function may have left threads behind that never end."""
LOOK_SECONDS = 0.05
"""How often a worker looks whether it is to stop."""


@dataclass
class _Worker:
    process: Any
    # nothing else is shared: a lock held by a process that gets killed would stop all others
    pipe: Any
    job: Job
    card: str = ""  # the GPUs that it sees; "": whatever the machine has
    done: bool = False  # its outcome is here
    dead: bool = False

    def send(self, message: Any) -> None:
        """Say something, unless nobody listens any more; `_drain` notices that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message)


class LocalEngine:
    """Processes on this machine.

    Args:
        workers: how many at once; as many as there are cores, or GPUs (or
            runs, if fewer) if omitted.
        planned: how many trials the whole run has; threads are shared out by it, so that a resumed
            run, with fewer trials left, computes with as many threads as before.
        per_gpu: workers that share a GPU.
    """

    def __init__(
        self, workers: int | None = None, planned: int | None = None, per_gpu: int | None = None
    ):
        if per_gpu is not None and per_gpu < 1:
            raise ValueError(f"per_gpu must be 1 or more, got {per_gpu}.")
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be 1 or more, got {workers}.")
        self.workers, self.planned, self.per_gpu = workers, planned, per_gpu or 1

    def shares(self, jobs: int, gpus: int = 0) -> tuple[int, int]:
        """(workers, threads of each): together never more than the cores.

        Args:
            jobs: how many runs there are.
            gpus: places on GPUs; 0: runs use the CPU.
        """
        cores = usable_cores()
        workers = self.workers or max(1, min(gpus or cores, self.planned or jobs))
        return min(workers, max(1, jobs)), max(1, cores // workers)

    def run(self, jobs: Sequence[Job], execution: Execution, report: Report) -> dict[str, Outcome]:
        """Run the jobs; see `Engine.run`."""
        gpus = self._places(jobs, execution)
        count, threads = self.shares(len(jobs), len(gpus))
        execution = (
            execution
            if execution.threads
            else replace(execution, threads=asked_threads() or threads)
        )
        waiting, outcomes, tries = (
            deque(jobs),
            {j.trial.id: Outcome("waiting") for j in jobs},
            dict[str, int](),
        )
        workers: list[_Worker] = []
        ended: list[
            tuple[_Worker, float]
        ] = []  # workers that end while the next ones begin, and since when
        stopping = fatal = False
        deadline = math.inf
        try:
            while workers or (waiting and not stopping):
                try:
                    while waiting and len(workers) < count and not stopping:
                        card = least_used(gpus, (w.card for w in workers)) if gpus else ""
                        workers.append(_start(waiting.popleft(), execution, card))
                    of_pipe = {worker.pipe: worker for worker in workers}
                    for pipe in wait(list(of_pipe), timeout=0.5):
                        fatal = _drain(of_pipe[pipe], outcomes, report) or fatal
                    for worker in [w for w in workers if w.done or w.dead]:
                        workers.remove(worker)
                        ended.append((worker, time.monotonic()))
                        if not worker.done:
                            fatal = (
                                self._after_death(worker, waiting, outcomes, tries, report) or fatal
                            )
                    ended = [(w, since) for w, since in ended if not _gone(w, since)]
                    if time.monotonic() > deadline:
                        break
                    if fatal and not stopping:
                        raise KeyboardInterrupt
                except KeyboardInterrupt as signaled:
                    if isinstance(signaled, Terminated):
                        deadline = min(deadline, time.monotonic() + STOP_SECONDS)
                    elif stopping:
                        raise
                    stopping = True
                    for worker in workers:
                        worker.send("stop")
        finally:
            end = min(deadline, time.monotonic() + (LEAVE_SECONDS if stopping else 20.0))
            for worker in workers:
                _finish(worker, end)
            for worker, since in ended:
                _finish(worker, min(end, since + LEAVE_SECONDS))
        for worker in workers:
            outcomes[worker.job.trial.id] = Outcome(
                "interrupted", None, "stopped before its next step"
            )
        interrupted = Outcome("interrupted", None, "not started")
        return {
            i: interrupted if stopping and o.status == "waiting" else o for i, o in outcomes.items()
        }

    def _places(self, jobs: Sequence[Job], execution: Execution) -> list[str]:
        """The GPUs of each worker; none where runs use the CPU."""
        cards = [] if execution.accelerator in ("cpu", "mps") else visible_gpus()
        devices = max((job.trial.train.devices for job in jobs), default=1)
        return places(cards, devices, self.per_gpu)

    def _after_death(
        self,
        worker: _Worker,
        waiting: deque[Job],
        outcomes: dict[str, Outcome],
        tries: dict[str, int],
        report: Report,
    ) -> bool:
        """Try the run of a dead worker again, or give it up; whether that would stop all others."""
        job, code = worker.job, worker.process.exitcode
        killed = code is not None and code < 0
        how = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with code {code}"
        tries[job.trial.id] = tries.get(job.trial.id, 0) + 1
        message, outcome = after_death(job, how, tries[job.trial.id])
        if outcome is None:
            waiting.appendleft(job)
            report(job.trial.id, Event(kind="warning", message=message))
            return False
        outcomes[job.trial.id] = outcome
        report(job.trial.id, Event(kind="outcome", status=outcome.status, message=outcome.message))
        return outcome.status in FATAL


def _start(job: Job, execution: Execution, card: str) -> _Worker:
    return _Worker(*start(_work, job, execution, card), job, card)


def _drain(worker: _Worker, outcomes: dict[str, Outcome], report: Report) -> bool:
    """Forward all pending events of a worker; whether one of its runs ended in a way that would
    stop all others.

    Args:
        worker: the process to read from. Marked as dead when its pipe is closed; its
            run is then tried again.
        outcomes: updated in place as runs end.
        report: receives each event in the order in which the worker sent it.
    """
    fatal = False
    while not (worker.done or worker.dead) and worker.pipe.poll():
        # A killed worker leaves a half-written message behind, so EOF and unpickling
        # errors mean the same here.
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(10)
            worker.dead = True
            break
        if kind == "event":
            report(worker.job.trial.id, parse_event(value))
        else:
            outcomes[worker.job.trial.id] = value
            fatal = fatal or value.status in FATAL
            report(
                worker.job.trial.id,
                Event(kind="outcome", status=value.status, message=value.message),
            )
            worker.done = True
    return fatal


def _gone(worker: _Worker, since: float) -> bool:
    """Whether a worker with an outcome has ended; one that has not after
    `LEAVE_SECONDS` is killed."""
    if worker.process.is_alive() and time.monotonic() - since > LEAVE_SECONDS:
        _finish(worker, since)
    return not worker.process.is_alive()


def _finish(worker: _Worker, deadline: float) -> None:
    """End a worker: by closing its pipe, and by force if it has not ended at the deadline."""
    worker.pipe.close()
    worker.process.join(max(0.0, deadline - time.monotonic()))
    if worker.process.is_alive():  # SIGTERM would only request a stop, as the closed pipe did
        worker.process.kill()
        worker.process.join(5)


def _work(pipe: Any, job: Job, execution: Execution, card: str) -> None:
    """The life of a worker: run its job and report the outcome."""
    if card:  # before CUDA starts, which the server of the workers never does
        os.environ[VISIBLE] = card
    stopping, looked = False, 0.0

    def asked_to_stop(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    stop_on_signals(asked_to_stop)

    def stopped() -> bool:
        """While a trial runs, the parent says nothing but 'stop', or it is gone: both mean stop.
        Checked after every step and answered anew a few times a second, because looking at a pipe
        takes its part of a tiny step."""
        nonlocal stopping, looked
        if not stopping and time.monotonic() - looked >= LOOK_SECONDS:
            stopping, looked = pipe.poll(), time.monotonic()
        return stopping

    def tell(event: dict[str, Any]) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # `stopped` notices that the parent is gone
            pipe.send(("event", event))

    with output_to(job.folder / OUTPUT):
        outcome = run_job(job, execution, tell, stopped)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the record has everything
        pipe.send(("outcome", outcome))


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process prints to a file: Python's output, that of libraries in C and of child
    processes. A terminal that many workers share shows none of it. An empty file is removed.

    Args:
        path: the file; what it holds stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError:  # the run itself says what is wrong with its folder
        yield
        return
    with file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with contextlib.suppress(OSError):
            if not path.stat().st_size:
                path.unlink()
