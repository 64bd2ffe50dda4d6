"""The local engine: worker processes on this machine that stay alive between trials.

Importing torch and Fabric costs seconds, so a worker pays for it once. Cores are shared out: with as many workers as
cores each uses one thread. A worker that dies is replaced and its trial goes on from its checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

from dampen.lab.engine import FATAL, Job, Outcome, Report, run_job
from dampen.lab.environment import usable_cores
from dampen.lab.session import Execution

RETRIES = 2
"""How often a trial is tried again after its worker died."""


@dataclass
class _Worker:
    process: Any
    pipe: Any
    job: Job | None = None


class LocalEngine:
    """Processes on this machine.

    Args:
        workers: how many at once; as many as there are cores (or trials, if fewer) when not said.
        planned: how many trials the whole run has; threads are shared out by it, so that a resumed run, with fewer
            trials left, computes with as many threads as before.
    """

    def __init__(self, workers: int | None = None, planned: int | None = None):
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be 1 or more, got {workers}.")
        self.workers, self.planned = workers, planned

    def shares(self, jobs: int) -> tuple[int, int]:
        """(workers, threads of each): together never more than the cores."""
        cores = usable_cores()
        workers = self.workers or max(1, min(cores, self.planned or jobs))
        return min(workers, max(1, jobs)), max(1, cores // workers)

    def run(self, jobs: Sequence[Job], execution: Execution, report: Report) -> dict[str, Outcome]:
        """Run the jobs; see `Engine.run`."""
        count, threads = self.shares(len(jobs))
        execution = execution if execution.threads else replace(execution, threads=threads)
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        waiting, outcomes, tries = deque(jobs), {j.trial.id: Outcome("waiting") for j in jobs}, dict[str, int]()
        workers = [_start(context, stop, execution) for _ in range(min(count, len(jobs)))]
        told_to_stop = False
        try:
            while any(w.job for w in workers) or (waiting and not told_to_stop):
                try:
                    for worker in workers:
                        if worker.job is None and waiting and not told_to_stop:
                            worker.job = waiting.popleft()
                            worker.pipe.send(worker.job)
                    for pipe in wait([w.pipe for w in workers], timeout=0.5):
                        worker = next(w for w in workers if w.pipe is pipe)
                        self._listen(worker, outcomes, report)
                    for i, worker in enumerate(workers):
                        if not worker.process.is_alive() and not worker.pipe.poll():
                            job = worker.job
                            workers[i] = _start(context, stop, execution)
                            if job is not None:
                                self._after_death(worker, job, waiting, outcomes, tries, report)
                    if any(o.status in FATAL for o in outcomes.values()):
                        told_to_stop = True
                        stop.set()
                except KeyboardInterrupt:
                    if told_to_stop:
                        raise
                    told_to_stop = True
                    stop.set()
        finally:
            stop.set()
            for worker in workers:
                _finish(worker)
        interrupted = Outcome("interrupted", None, "not started")
        return {i: interrupted if told_to_stop and o.status == "waiting" else o for i, o in outcomes.items()}

    def _listen(self, worker: _Worker, outcomes: dict[str, Outcome], report: Report) -> None:
        """Pass on what a worker says; a closed pipe is left to the look at its process."""
        while worker.job is not None and worker.pipe.poll():
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join(5)
                return
            if kind == "event":
                report(worker.job.trial.id, value)
            else:
                outcomes[worker.job.trial.id] = value
                report(worker.job.trial.id, {"kind": "outcome", "status": value.status, "message": value.message})
                worker.job = None

    def _after_death(
        self,
        worker: _Worker,
        job: Job,
        waiting: deque[Job],
        outcomes: dict[str, Outcome],
        tries: dict[str, int],
        report: Report,
    ) -> None:
        code = worker.process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        tries[job.trial.id] = tries.get(job.trial.id, 0) + 1
        if tries[job.trial.id] <= RETRIES:
            waiting.appendleft(job)
            message = f"The worker of trial {job.trial.id} was {how}; the trial goes on from its last checkpoint."
            report(job.trial.id, {"kind": "warning", "message": message})
        else:
            message = f"The worker of trial {job.trial.id} died {RETRIES + 1} times, last {how} (out of memory?)."
            outcomes[job.trial.id] = Outcome("failed", None, message)
            report(job.trial.id, {"kind": "outcome", "status": "failed", "message": message})


def _start(context: Any, stop: Any, execution: Execution) -> _Worker:
    ours, theirs = context.Pipe()
    threads = str(execution.threads or 1)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = threads  # read by the child before it imports torch
    try:
        process = context.Process(target=_work, args=(theirs, stop, execution), name="dampen worker")
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    theirs.close()
    return _Worker(process, ours)


def _finish(worker: _Worker) -> None:
    """End a worker: by closing its pipe, and by force if it does not listen."""
    worker.pipe.close()
    worker.process.join(20)
    if worker.process.is_alive():
        worker.process.terminate()
        worker.process.join(5)


def _work(pipe: Any, stop: Any, execution: Execution) -> None:
    """The life of a worker: take a job, run it, say how it went, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    parent = os.getppid()

    def stopped() -> bool:
        return stop.is_set() or os.getppid() != parent

    def tell(event: dict[str, Any]) -> None:
        pipe.send(("event", event))

    while True:
        try:
            job = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        outcome = run_job(job, execution, tell, stopped)
        try:
            pipe.send(("outcome", outcome))
        except (BrokenPipeError, ConnectionResetError):  # the parent is gone; the record has everything
            return
