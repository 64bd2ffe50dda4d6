"""A machine that is shared or confused: two processes on one folder, a clock that jumps; and what attaching and
detaching leaves in memory."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability.memory import used
from benchmarks.reliability.subject import QUICK, Tally, judge, patience, trial, undisturbed
from dampen.studies.errors import Locked
from dampen.studies.processes import start
from dampen.studies.run import Run
from dampen.studies.trainer.train import run_trial


def _contend(pipe: Any, spec: Run, folder: Path) -> None:
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


def attach_and_detach(count: int, where: Path, rng: random.Random) -> Tally:
    """Attach, train a step, detach, for `count` seconds: bytes that a round leaves behind, by least squares."""
    import numpy as np
    import torch

    import dampen
    from dampen.models import build_model

    model = build_model(
        "vit", image_size=8, channels=1, classes=3, patch_size=4, width=16, depth=2, heads=2, mlp=16
    )
    x, began, rounds, taken = torch.randn(8, 1, 8, 8), time.monotonic(), 0, 0
    sizes = np.ones(
        (100 * (count + 10), 2)
    )  # written to beforehand, so that measuring takes no memory of its own
    while time.monotonic() - began < count:
        methods = [
            dampen.DropKey(0.2),
            dampen.ExplicitDropout(value=0.1, ffn=0.1),
            dampen.DropPath(0.2),
        ]
        reg = dampen.regularize(model, methods)
        loss, _ = reg.loss(lambda: model(x), lambda out: out.square().mean())
        loss.backward()
        model.zero_grad()
        reg.remove()
        rounds += 1
        if rounds % 10 == 0 and taken < len(sizes):
            sizes[taken] = rounds, used("self", 1)
            taken += 1
    later = sizes[taken // 4 : taken]  # caches fill first
    slope = float(np.polyfit(later[:, 0], later[:, 1], 1)[0]) if len(later) > 2 else 0.0
    grown = int(later[-1, 1] - later[0, 1]) if len(later) else 0
    told = {"bytes per round": round(slope), "kB grown in the last three quarters": grown // 1024}
    return Tally({"repetitions": rounds, **told})
