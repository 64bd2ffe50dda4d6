"""A machine that is short of memory: no more addresses for a worker, or none of the memory it asks for."""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import (
    QUICK,
    CannotAttack,
    Tally,
    judge,
    patience,
    trial,
    undisturbed,
)
from dampen.studies.engines import Job, make_engine
from dampen.studies.result import Event
from dampen.studies.trainer.train import run_trial

CGROUPS = Path("/sys/fs/cgroup/memory")
"""Where version 1 of Linux's control groups keeps memory; who may make a folder there may let the kernel kill."""


def used(pid: int | str, field: int) -> int:
    """Bytes that a process has (field 0: addresses, 1: memory)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[field]) * resource.getpagesize()


def memory_refused(count: int, where: Path, rng: random.Random) -> Tally:
    """A worker of the engine may take no more addresses from a random step on (or from its first word on): the trial
    fails in words, and without the limit it then goes on to its end."""
    tally, spec = Tally(), trial(epochs=8)
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(3 * count):
        if tally["repetitions"] >= count:
            break
        folder, step = where / f"memory-{turn}", rng.choice((0, rng.randrange(50)))
        limited = set[int]()

        def report(
            id: str, event: Event, folder: Path = folder, step: int = step, limited: Any = limited
        ) -> None:
            if not limited and event.step >= step and (pid := holder(folder)) is not None:
                limited.add(pid)
                most = used(pid, 0) + rng.randrange(0, 4) * 2**20
                resource.prlimit(pid, resource.RLIMIT_AS, (most, most))

        outcome = make_engine("local", workers=1).run([Job(spec, folder)], QUICK, report)[spec.id]
        tally["was enough"] += outcome.status == "finished"
        tally["repetitions"] += outcome.status != "finished"
        tally["failed in words"] += outcome.status == "failed" and bool(outcome.message)
        tally["tracebacks"] += (
            outcome.status not in ("finished", "failed") or "Traceback" in outcome.message
        )
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
    return tally


def holder(folder: Path) -> int | None:
    """The process that works in a folder, if one does."""
    try:
        return int((folder / "lock.holder").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Group:
    """A control group in which the kernel kills whoever takes more than `margin` bytes after it was put there."""

    def __init__(self, name: str, margin: int):
        self.path = CGROUPS / name
        self.path.mkdir()
        self._write("memory.limit_in_bytes", margin)

    def _write(self, file: str, value: int) -> None:
        (self.path / file).write_text(str(value))

    def take(self, pid: int) -> None:
        """Put a process there; what it had before is not counted, and where it came from is forgotten."""
        self._write("cgroup.procs", pid)

    def deaths(self) -> int:
        """Kills by the kernel so far."""
        told = dict(
            line.split() for line in (self.path / "memory.oom_control").read_text().splitlines()
        )
        return int(told["oom_kill"])

    def close(self) -> None:
        for _ in range(500):
            try:
                self.path.rmdir()
                return
            except OSError:  # a process that was killed is still being buried
                time.sleep(0.01)
        raise TimeoutError(f"{self.path} cannot be removed: a process is left in it")


class Shortage(threading.Thread):
    """Whoever works in `folder` and takes `margin` bytes more than it had when it was first seen is killed by the
    kernel, `lives` times at most: each worker is put into the control group as soon as it holds the folder's lock."""

    def __init__(self, folder: Path, margin: int, lives: int):
        super().__init__(daemon=True)
        self.folder, self.lives = folder, lives
        self.group = Group(f"dampen-{os.getpid()}-{folder.name}", margin)
        self.seen: set[int] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002) and len(self.seen) < self.lives:
            pid = holder(self.folder)
            if pid is None or pid in self.seen:
                continue
            try:
                self.group.take(pid)
                self.seen.add(pid)
            except OSError:  # the worker is gone
                continue

    def end(self) -> int:
        """How many it has killed."""
        self.over.set()
        self.join()
        killed = self.group.deaths()
        self.group.close()
        return killed


def memory_kills(count: int, where: Path, rng: random.Random) -> Tally:
    """The kernel kills a worker that is short of memory. The engine replaces it; three deaths are a failure in words.
    Without the limit the trial then runs to its end."""
    tally, spec = Tally(), trial(epochs=8)
    if not os.access(CGROUPS, os.W_OK):
        raise CannotAttack(
            f"needs the right to make a control group in {CGROUPS} (root on a Linux machine)"
        )
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(3 * count):
        if tally["repetitions"] >= count:
            break
        folder = where / f"killed-{turn}"
        shortage = Shortage(folder, rng.randrange(1, 12) * 2**20, rng.randint(1, 3))
        shortage.start()
        try:
            outcome = make_engine("local", workers=1).run(
                [Job(spec, folder)], QUICK, lambda id, event: None
            )[spec.id]
        finally:
            killed = shortage.end()
        tally["failed in words after three deaths"] += (
            outcome.status == "failed" and "out of memory" in outcome.message
        )
        tally["tracebacks"] += (
            outcome.status not in ("finished", "failed") or "Traceback" in outcome.message
        )
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
        tally["trials"] += 1
        tally["was enough"] += not killed
        tally["repetitions"] += killed
    return tally
