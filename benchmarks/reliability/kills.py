"""SIGKILL: of a trial's process and of the engines' workers; and many tiny trials, none of which may get lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.reliability.subject import (
    QUICK,
    Tally,
    judge,
    patience,
    result_of,
    trial,
    undisturbed,
)
from dampen.studies.engines import Job, make_engine
from dampen.studies.errors import LabError
from dampen.studies.processes import start
from dampen.studies.result import Event
from dampen.studies.run import Run
from dampen.studies.trainer.checkpoint import saved_states
from dampen.studies.trainer.train import run_trial


def _steps(pipe: Any, spec: Run, folder: Path) -> None:
    """The life of a process that gets killed: it says each step."""
    run_trial(spec, folder, QUICK, lambda event: pipe.send(event.get("step", 0)))


def _reached(pipe: Any, step: int) -> bool:
    """Whether a process gets to a step, or to its end, without being silent for minutes."""
    while pipe.poll(300):
        try:
            if pipe.recv() >= step:
                return True
        except EOFError:
            return True
    return False


def of_a_trial(count: int, where: Path, rng: random.Random) -> Tally:
    """At random moments after random steps, several times per trial; then it runs to its end."""
    tally, spec = Tally(), trial(epochs=6)
    whole = undisturbed(spec, where / "whole")
    for turn in patience.turns(count):
        if tally["repetitions"] >= count:
            break
        folder = where / f"killed-{turn}"
        for _ in range(min(rng.randint(2, 6), count - tally["repetitions"])):
            process, pipe = start(_steps, spec, folder)
            tally["hangs"] += not _reached(pipe, rng.randint(0, 50))
            time.sleep(rng.random() * 0.02)
            process.kill()
            process.join()
            if process.exitcode == -signal.SIGKILL:  # it was not over before
                tally["repetitions"] += 1
                tally["with a checkpoint to resume from"] += bool(
                    saved_states(folder, "checkpoint")
                )
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
        tally["trials"] += 1
    return tally


@contextmanager
def _cluster(engine: str) -> Iterator[None]:
    """Ray started once for all runs of its engine; a busy machine may need more than the half minute that Ray waits."""
    if engine != "ray":
        yield
        return
    from dampen.studies.engines.ray import _cluster as started

    for left in reversed(range(10)):
        with ExitStack() as stack:
            try:
                stack.enter_context(started(None, 1))
            except LabError as error:
                if not left:
                    raise
                print(error, flush=True)
                continue
            yield
            return


def of_workers(count: int, where: Path, rng: random.Random, engine: str) -> Tally:
    with _cluster(engine):
        return _of_workers(count, where, rng, engine)


def _of_workers(count: int, where: Path, rng: random.Random, engine: str) -> Tally:
    """Workers of an engine are killed while trials run; the engine replaces them by itself. Every trial is hit up to
    twice, at random steps: a third death would make it fail, as it should."""
    tally = Tally()
    most = max(1, min(4, count // 2))
    whole = {
        s.id: undisturbed(s, where / "whole" / s.id)
        for s in (trial(n, epochs=8) for n in range(most))
    }
    for turn in patience.turns(count):
        hits = min(count - tally["repetitions"], 2 * most)
        specs = [trial(seed, epochs=8) for seed in range((hits + 1) // 2)]
        folder, killed = where / f"{engine}-{turn}", set[int]()
        waits = {
            s.id: sorted(rng.sample(range(3, 45), 2 if hits >= 2 * i + 2 else 1))
            for i, s in enumerate(specs)
        }

        def report(
            id: str, event: Event, waits: Any = waits, killed: Any = killed, folder: Path = folder
        ) -> None:
            holder = folder / id / "lock.holder"
            if (
                event.kind != "progress"
                or not waits[id]
                or event.step < waits[id][0]
                or not holder.exists()
            ):
                return
            words = holder.read_text().split()
            if len(words) > 1 and int(words[1]) not in killed:
                killed.add(int(words[1]))
                waits[id].pop(0)
                tally["with a checkpoint to resume from"] += bool(
                    saved_states(folder / id, "checkpoint")
                )
                os.kill(int(words[1]), signal.SIGKILL)

        jobs = [Job(s, folder / s.id) for s in specs]
        outcomes = make_engine(engine, workers=1).run(jobs, QUICK, report)
        tally["repetitions"] += len(killed)
        tally["lost"] += sum(o.status != "finished" for o in outcomes.values())
        for s in specs:
            judge(tally, folder / s.id, whole[s.id])
        tally["trials"] += len(specs)
        tally["runs of the engine"] += 1
        tally[
            "runs in which nothing could be killed"
        ] += not killed  # the trials were over before a report came
        if tally["repetitions"] >= count:
            break
    return tally


BATCH = 250
"""Tiny trials that an engine gets at a time, so that a busy machine can end it with what was done."""


def many_trials(count: int, where: Path, rng: random.Random, engine: str) -> Tally:
    """Tiny trials (two steps each) through an engine: all of them come back, each in its own folder."""
    tally, first = Tally(), rng.randrange(10**6)  # others than those of an earlier call
    execution = replace(QUICK, checkpoint_steps=None, progress_seconds=10.0)
    with _cluster(engine):
        for turn in patience.turns(-(-count // BATCH)):
            seeds = range(turn * BATCH, min(count, (turn + 1) * BATCH))
            jobs = [
                Job(trial(first + seed, epochs=1, limit=80), where / f"seed-{seed}")
                for seed in seeds
            ]
            outcomes = make_engine(engine, workers=1).run(jobs, execution, lambda id, event: None)
            done = [
                j for j in jobs if outcomes[j.trial.id].status == "finished" and result_of(j.folder)
            ]
            tally.update(repetitions=len(jobs), lost=len(jobs) - len(done))
            tally["wrong"] += sum(result_of(j.folder)["id"] != j.trial.id for j in done)
            for job in rng.sample(done, min(len(done), 2)):  # a few again, by themselves
                tally["compared with one run alone"] += 1
                run_trial(job.trial, job.folder / "alone", execution)
                tally["wrong"] += result_of(job.folder / "alone") != result_of(job.folder)
    return tally
