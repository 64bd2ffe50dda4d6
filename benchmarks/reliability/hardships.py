"""A machine that is shared, small or confused: two processes on one folder, no memory, a clock that jumps; and what
attaching and detaching leaves in memory."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import QUICK, Tally, judge, patience, trial, undisturbed
from dampen.lab.config.trial import TrialSpec
from dampen.lab.errors import Locked
from dampen.lab.processes import start
from dampen.lab.records.events import Event
from dampen.lab.running.engine import Job, make_engine
from dampen.lab.training.train import run_trial


def _contend(pipe: Any, spec: TrialSpec, folder: Path) -> None:
    try:
        run_trial(spec, folder, QUICK)
        pipe.send("done")
    except Locked:
        pipe.send("locked")
    except Exception as error:
        pipe.send(repr(error))


def two_at_once(count: int, where: Path, rng: random.Random) -> Tally:
    """Two processes on one folder: one works, the other is told who does; or it finds the result."""
    tally, spec = Tally(), trial(epochs=2)
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(count):
        folder = where / f"both-{turn}"
        pair = [start(_contend, spec, folder) for _ in range(2)]
        told = [pipe.recv() if pipe.poll(300) else "hang" for _, pipe in pair]
        for process, _ in pair:
            process.join()
        tally["hangs"] += told.count("hang")
        tally["tracebacks"] += sum(t not in ("done", "locked", "hang") for t in told)
        tally["told that it is in use"] += told.count("locked")
        judge(tally, folder, whole)
        tally["repetitions"] += 1
    return tally


def clock_jumps(count: int, where: Path, rng: random.Random) -> Tally:
    """The wall clock jumps by up to ten years between the steps of a trial, in both directions."""
    tally, spec, real = Tally(), trial(), time.time
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(count):
        jump = [0.0]
        time.time = lambda jump=jump: real() + jump[0]

        def report(event: dict[str, Any], jump: list[float] = jump) -> None:
            jump[0] = rng.uniform(-3e8, 3e8)

        try:
            run_trial(spec, where / f"clock-{turn}", QUICK, report)
        except Exception as error:
            tally["tracebacks"] += 1
            print(repr(error), flush=True)
        finally:
            time.time = real
        judge(tally, where / f"clock-{turn}", whole)
        tally["repetitions"] += 1
    return tally


def _used(pid: int | str, field: int) -> int:
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

        def report(id: str, event: Event, folder: Path = folder, step: int = step, limited: Any = limited) -> None:
            if not limited and event.step >= step and (pid := holder(folder)) is not None:
                limited.add(pid)
                most = _used(pid, 0) + rng.randrange(0, 4) * 2**20
                resource.prlimit(pid, resource.RLIMIT_AS, (most, most))

        outcome = make_engine("local", workers=1).run([Job(spec, folder)], QUICK, report)[spec.id]
        tally["was enough"] += outcome.status == "finished"
        tally["repetitions"] += outcome.status != "finished"
        tally["failed in words"] += outcome.status == "failed" and bool(outcome.message)
        tally["tracebacks"] += outcome.status not in ("finished", "failed") or "Traceback" in outcome.message
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
    return tally


def holder(folder: Path) -> int | None:
    """The process that works in a folder, if one does."""
    try:
        return int((folder / "lock.holder").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Kernel(threading.Thread):
    """Plays the kernel that is short of memory: whoever works in `folder` and takes `margin` bytes more than it had
    when it was first seen is killed, `lives` times at most. (A cgroup of one's own would need rights that few have.)"""

    def __init__(self, folder: Path, margin: int, lives: int):
        super().__init__(daemon=True)
        self.folder, self.margin, self.lives = folder, margin, lives
        self.limits: dict[int, int] = {}
        self.killed: set[int] = set()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002) and len(self.killed) < self.lives:
            try:
                if (pid := holder(self.folder)) is None:
                    continue
                limit = self.limits.setdefault(pid, _used(pid, 1) + self.margin)
                if _used(pid, 1) > limit and pid not in self.killed:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)
            except (OSError, IndexError, ValueError):  # the worker is gone
                continue


def memory_kills(count: int, where: Path, rng: random.Random) -> Tally:
    """What the kernel does when memory is short. The engine replaces the worker; three deaths are a failure in words.
    Without the limit the trial then runs to its end."""
    tally, spec = Tally(), trial(epochs=8)
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(3 * count):
        if tally["repetitions"] >= count:
            break
        folder = where / f"killed-{turn}"
        kernel = Kernel(folder, rng.randrange(0, 12) * 2**20, rng.randint(1, 3))
        kernel.start()
        outcome = make_engine("local", workers=1).run([Job(spec, folder)], QUICK, lambda id, event: None)[spec.id]
        kernel.over.set()
        kernel.join()
        tally["failed in words after three deaths"] += outcome.status == "failed" and "out of memory" in outcome.message
        tally["tracebacks"] += outcome.status not in ("finished", "failed") or "Traceback" in outcome.message
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
        tally["trials"] += 1
        tally["repetitions"] += len(kernel.killed)
    return tally


def attach_and_detach(count: int, where: Path, rng: random.Random) -> Tally:
    """Attach, train a step, detach, for `count` seconds: bytes that a round leaves behind, by least squares."""
    import numpy as np
    import torch

    import dampen
    from dampen.models import build_model

    model = build_model("vit", image_size=8, channels=1, classes=3, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    x, began, rounds, taken = torch.randn(8, 1, 8, 8), time.monotonic(), 0, 0
    sizes = np.ones((100 * (count + 10), 2))  # written to beforehand, so that measuring takes no memory of its own
    while time.monotonic() - began < count:
        methods = [dampen.DropKey(0.2), dampen.ExplicitDropout(value=0.1, ffn=0.1), dampen.DropPath(0.2)]
        reg = dampen.regularize(model, methods)
        loss, _ = reg.loss(lambda: model(x), lambda out: out.square().mean())
        loss.backward()
        model.zero_grad()
        reg.remove()
        rounds += 1
        if rounds % 10 == 0 and taken < len(sizes):
            sizes[taken] = rounds, _used("self", 1)
            taken += 1
    later = sizes[taken // 4 : taken]  # caches fill first
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0]) if len(later) > 2 else 0.0
    grown = int(later[-1, 1] - later[0, 1]) if len(later) else 0
    told = {"bytes per round": round(slope), "kB grown in the last three quarters": grown // 1024}
    return Tally({"repetitions": rounds, **told})
