"""The Ray engine: trials as Ray Core tasks, on a cluster or on a local one
that is started for the run.

Same jobs, same records as the local engine. A task whose worker or node dies is submitted again and
resumes from its checkpoint. The runs folder should lie on a file system that all nodes share; where
it does not, the small files of a finished record are sent back, and only checkpoints and weights
stay on the node.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dampen.studies.engines import FATAL, Job, Outcome, Report, after_death, run_job
from dampen.studies.environment import asked_threads, usable_cores
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.files import atomic_file
from dampen.studies.processes import keep_freed_memory
from dampen.studies.result import Event, parse_event
from dampen.studies.trainer.state import Execution

FILES = ("config.json", "environment.json", "log.jsonl", "final.json")
"""What is sent back from a node that does not share the folder; final.json last, because it says
that all is there."""


class Mailbox:
    """An actor between tasks and driver: events go one way, the wish to stop the other."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.stopping = False

    def put(self, trial: str, event: dict[str, Any]) -> None:
        self.events.append((trial, event))

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        events, self.events = self.events, []
        return events

    def stop(self) -> None:
        self.stopping = True

    def stopped(self) -> bool:
        return self.stopping


@dataclass
class _Running:
    job: Job
    tries: int


class RayEngine:
    """Tasks on a Ray cluster.

    Args:
        address: of a cluster (`auto` finds one on this machine); starts a local cluster if omitted.
        workers: how many trials at once; as many as the cluster has processors for if omitted.
        planned: taken for the sake of equal calls; a trial has one thread here unless
            `Execution.threads` says more.
    """

    def __init__(
        self, address: str | None = None, workers: int | None = None, planned: int | None = None
    ):
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be 1 or more, got {workers}.")
        try:
            import ray  # noqa: F401
        except ModuleNotFoundError as error:
            message = "'ray' is not installed here; run: pip install 'dampen[ray]'"
            raise ConfigError("--engine", [message]) from error
        self.address, self.workers = address, workers

    def run(self, jobs: Sequence[Job], execution: Execution, report: Report) -> dict[str, Outcome]:
        """Run the jobs; see `Engine.run`."""
        data_dir = str(Path(execution.data_dir).resolve()) if execution.data_dir else None
        execution = replace(
            execution, threads=execution.threads or asked_threads() or 1, data_dir=data_dir
        )
        with _cluster(self.address, self.workers):
            return _Run(jobs, execution, report, self.workers).loop()


class _Run:
    """One call of `run`: what waits, what runs, what came out."""

    def __init__(
        self, jobs: Sequence[Job], execution: Execution, report: Report, workers: int | None
    ):
        import ray

        self.ray, self.execution, self.report = ray, execution, report
        self.mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
        self.task: Any = ray.remote(max_retries=0, max_calls=1)(
            _task
        )  # a process of its own for each run
        self.waiting = deque(_Running(Job(j.trial, j.folder.resolve()), 0) for j in jobs)
        self.running: dict[Any, _Running] = {}
        self.outcomes = {j.trial.id: Outcome("waiting") for j in jobs}
        self.at_once = workers or len(jobs)
        self.stopping = False

    def loop(self) -> dict[str, Outcome]:
        """Until nothing runs and nothing waits."""
        while self.running or (self.waiting and not self.stopping):
            try:
                while self.waiting and len(self.running) < self.at_once and not self.stopping:
                    self._submit(self.waiting.popleft())
                done, _ = self.ray.wait(list(self.running), timeout=0.25)
                self._pass_on_events()
                for reference in done:
                    self._finish(reference, self.running.pop(reference))
                if any(o.status in FATAL for o in self.outcomes.values()) and not self.stopping:
                    self._stop()
            except KeyboardInterrupt:
                if self.stopping:
                    raise
                self._stop()
        not_started = Outcome("interrupted", None, "not started")
        return {i: not_started if o.status == "waiting" else o for i, o in self.outcomes.items()}

    def _submit(self, running: _Running) -> None:
        options: dict[str, Any] = {"num_cpus": self.execution.threads}
        may_use_gpus = self.execution.accelerator not in ("cpu", "mps")
        if may_use_gpus and self.ray.cluster_resources().get("GPU"):
            options["num_gpus"] = running.job.trial.train.devices
        reference = self.task.options(**options).remote(
            running.job, self.execution, self.mailbox, running.tries
        )
        self.running[reference] = running

    def _finish(self, reference: Any, running: _Running) -> None:
        """Take a task's outcome; submit again what died with its worker."""
        trial = running.job.trial.id
        errors = self.ray.exceptions
        try:
            outcome, files = self.ray.get(reference)
            bring_home(running.job.folder, files)
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as e:
            how = f"died ({type(e).__name__}: {str(e).splitlines()[0]})"
            message, dead = after_death(running.job, how, running.tries + 1)
            if dead is None and not self.stopping:
                self.report(trial, Event(kind="warning", message=message))
                self.waiting.appendleft(_Running(running.job, running.tries + 1))
                return
            outcome = dead or Outcome("interrupted", None, message)
        except errors.RayTaskError as e:
            message = f"Trial {trial} could not be run on the cluster: {e.cause or e}. Is the same dampen on every node?"
            outcome = Outcome("failed", None, message)
        self.outcomes[trial] = outcome
        self._pass_on_events()
        self.report(trial, Event(kind="outcome", status=outcome.status, message=outcome.message))

    def _pass_on_events(self) -> None:
        try:
            events = self.ray.get(self.mailbox.take.remote())
        except self.ray.exceptions.RayActorError as error:
            raise LabError(
                "The connection to the Ray cluster is lost "
                f"({type(error).__name__}). Records are whole; run the same "
                "command again to resume."
            ) from error
        for trial, event in events:
            if self.outcomes[trial].status == "waiting":
                self.report(trial, parse_event(event))

    def _stop(self) -> None:
        self.stopping = True
        self.ray.get(self.mailbox.stop.remote())


def _task(
    job: Job, execution: Execution, mailbox: Any, tries: int
) -> tuple[Outcome, dict[str, bytes]]:
    """One trial, in a worker somewhere in the cluster."""
    import ray

    looked_at, stopping = 0.0, False

    def stopped() -> bool:
        """Query twice a second at most: a question to another process costs as much as a step of a
        small model."""
        nonlocal looked_at, stopping
        if not stopping and time.monotonic() - looked_at > 0.5:
            looked_at, stopping = time.monotonic(), ray.get(mailbox.stopped.remote())
        return stopping

    if stopped():
        return Outcome("interrupted", None, "not started"), {}
    keep_freed_memory()
    outcome = run_job(
        job, execution, lambda event: mailbox.put.remote(job.trial.id, event), stopped
    )
    deadline = time.monotonic() + 30
    while tries and outcome.status == "locked" and time.monotonic() < deadline:
        time.sleep(1)  # the worker that died may not have let go of the folder yet
        outcome = run_job(
            job, execution, lambda event: mailbox.put.remote(job.trial.id, event), stopped
        )
    files = {
        name: (job.folder / name).read_bytes() for name in FILES if (job.folder / name).is_file()
    }
    return outcome, files if outcome.status in ("finished", "diverged") else {}


def bring_home(folder: Path, files: dict[str, bytes]) -> None:
    """Write a record that is only on the node that made it; where the folder is
    shared it is here already."""
    if not files or (folder / "final.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if name in files:
            with atomic_file(folder / name) as file:
                file.write(files[name])


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[None]:
    """Connected to a cluster; what was started here is shut down again."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports to anyone
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # and no warning about a change to come
    import ray

    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = (
        {"address": address}
        if address
        else {
            "num_cpus": max(usable_cores(), workers or 1),
            "include_dashboard": False,
            "object_store_memory": 128
            * 2**20,  # records are small; the default takes a third of the memory
        }
    )
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # a node that does not start in time raises Exception itself
        ray.shutdown()  # what had started already
        what = (
            f"There is no Ray cluster at {address}"
            if address
            else "Ray did not start on this machine"
        )
        raise LabError(f"{what}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
