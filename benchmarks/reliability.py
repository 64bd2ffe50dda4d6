"""How hard dampen is to break, counted: `python -m benchmarks.reliability` (minutes; `--factor 10` takes hours).

Each attack is repeated at random points, with a fixed seed, and everything that came out is compared with an
undisturbed run: lost trials, wrong results, tracebacks, hangs. The record is benchmarks/records/reliability.json, and
`--page` writes docs/reliability.md from it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dampen.lab.config.trial import TrialSpec
from dampen.lab.errors import DiskFull, Interrupted, LabError, Locked
from dampen.lab.files import read_json, write_json
from dampen.lab.processes import start
from dampen.lab.records.environment import describe
from dampen.lab.records.events import Event
from dampen.lab.records.record import Record
from dampen.lab.running.engine import Job, make_engine
from dampen.lab.training.checkpoint import saved_states
from dampen.lab.training.state import Execution
from dampen.lab.training.train import run_trial

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks" / "records" / "reliability.json", ROOT / "docs" / "reliability.md"
QUICK = Execution(threads=1, accelerator="cpu", progress_seconds=0.0, checkpoint_steps=2, checkpoint_seconds=1e9)
TIMES = ("seconds", "step_seconds", "step_cpu_seconds", "resumed")
Tally = Counter[str]


def trial(seed: int = 0, epochs: int = 3) -> TrialSpec:
    """A real training of about a second: digits, a one-layer ViT, DropKey."""
    return TrialSpec.from_dict(
        {
            "data": {"name": "digits", "limit": 300},
            "model": {"name": "vit", "patch_size": 4, "width": 16, "depth": 1, "heads": 2, "mlp": 16},
            "methods": [{"name": "drop_key", "rate": 0.2}],
            "train": {"epochs": epochs, "batch_size": 32},
            "seed": seed,
        }
    )


def result_of(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in (Record(folder).final() or {}).items() if k not in TIMES}


def judge(tally: Tally, folder: Path, whole: dict[str, Any]) -> None:
    """Count a trial that should be done: is its result there, and the same to the last bit?"""
    found = result_of(folder)
    tally["lost"] += not found
    tally["wrong"] += bool(found) and found != whole


def _steps(pipe: Any, spec: TrialSpec, folder: Path) -> None:
    """The life of a process that gets killed: it says each step."""
    run_trial(spec, folder, QUICK, lambda event: pipe.send(event.get("step", 0)))


def kills(count: int, where: Path, rng: random.Random) -> Tally:
    """SIGKILL at random moments, several times per trial; then it runs to its end."""
    whole_folder, tally, spec = where / "whole", Tally(), trial(epochs=6)
    run_trial(spec, whole_folder, QUICK)
    whole = result_of(whole_folder)
    while tally["repetitions"] < count:
        folder = where / f"killed-{tally['trials']}"
        for _ in range(rng.randint(2, 6)):
            process, pipe = start(_steps, spec, folder)
            tally["hangs"] += not pipe.poll(120)
            tally["resumed from a checkpoint"] += bool(saved_states(folder, "checkpoint"))
            time.sleep(rng.random() * 0.25)
            process.kill()
            process.join()
            tally["repetitions"] += 1
        run_trial(spec, folder, QUICK)
        judge(tally, folder, whole)
        tally["trials"] += 1
    return tally


def engine_kills(count: int, where: Path, rng: random.Random, engine: str) -> Tally:
    """Workers of an engine are killed while trials run; the engine replaces them by itself."""
    tally = Tally()
    for turn in range(max(1, count // 2)):
        specs = [trial(seed, epochs=40) for seed in range(2)]
        killed: set[int] = set()
        waits = {s.id: rng.randint(3, 150) for s in specs}

        def report(id: str, event: Event, waits: Any = waits, killed: Any = killed, turn: int = turn) -> None:
            holder = where / f"{engine}-{turn}" / id / "lock.holder"
            if event.kind == "progress" and event.step >= waits.get(id, 10**9) and holder.exists():
                pid = int(holder.read_text().split()[1])
                if pid not in killed:
                    killed.add(pid)
                    del waits[id]
                    tally["resumed from a checkpoint"] += bool(saved_states(holder.parent, "checkpoint"))
                    os.kill(pid, signal.SIGKILL)

        jobs = [Job(s, where / f"{engine}-{turn}" / s.id) for s in specs]
        outcomes = make_engine(engine, workers=1).run(jobs, QUICK, report)
        tally["repetitions"] += len(killed)
        tally["lost"] += sum(o.status != "finished" for o in outcomes.values())
        if turn == 0:
            for s in specs:
                run_trial(s, where / "whole" / s.id, QUICK)
        for s in specs:
            judge(tally, where / f"{engine}-{turn}" / s.id, result_of(where / "whole" / s.id))
        tally["trials"] += len(specs)
    return tally


def interrupted(spec: TrialSpec, folder: Path, step: int) -> None:
    seen = [0]
    try:
        run_trial(spec, folder, QUICK, lambda e: seen.append(e.get("step", seen[-1])), lambda: seen[-1] >= step)
    except Interrupted:
        return


def power_cuts(count: int, where: Path, rng: random.Random) -> Tally:
    """What was not synced is cut or zeroed: the newest checkpoint, the end of the log, files that came last."""
    tally, spec = Tally(), trial()
    run_trial(spec, where / "whole", QUICK)
    whole = result_of(where / "whole")
    for turn in range(count):
        folder = where / f"cut-{turn}"
        interrupted(spec, folder, rng.randint(3, 17))
        (folder / ".final.json.1.tmp").write_bytes(b'{"id"')  # what a crash leaves beside
        victim = rng.choice([saved_states(folder, "checkpoint")[0], folder / "log.jsonl", folder / "environment.json"])
        if victim.exists():
            content = victim.read_bytes()
            keep = rng.randrange(len(content) + 1)
            victim.write_bytes(content[:keep] + (bytes(len(content) - keep) if rng.random() < 0.5 else b""))
        try:
            run_trial(spec, folder, QUICK)
        except LabError:
            tally["refused in words"] += 1
        except Exception:  # counted, that is what this is for
            tally["tracebacks"] += 1
        judge(tally, folder, whole)
        tally["repetitions"] += 1
    return tally


def full_disks(count: int, where: Path, rng: random.Random) -> Tally:
    """A real tmpfs that is full at a random point of a trial."""
    tally, spec = Tally(), trial()
    run_trial(spec, where / "whole", QUICK)
    whole, disk = result_of(where / "whole"), where / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        tally["not possible here: a tmpfs cannot be mounted"] = 1
        return tally
    try:
        for turn in range(count):
            folder, ballast = disk / f"trial-{turn}", disk / "ballast"
            space = os.statvfs(disk)
            with ballast.open("wb") as file:
                taken = space.f_bavail * space.f_frsize - rng.randrange(0, 120_000)
                os.posix_fallocate(file.fileno(), 0, max(taken, 1))
            try:
                run_trial(spec, folder, QUICK)
                tally["was enough"] += 1
            except DiskFull:
                tally["said to be full"] += 1
            except Exception:
                tally["tracebacks"] += 1
            ballast.unlink()
            run_trial(spec, folder, QUICK)
            judge(tally, folder, whole)
            shutil.rmtree(folder)
            tally["repetitions"] += 1
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return tally


def _fed(name: str, read: Callable[[Any], None], tally: Tally) -> Callable[[Any], None]:
    """A test of one input, which counts what became of it."""

    def one(value: Any) -> None:
        tally[f"inputs to {name}"] += 1
        try:
            read(value)
        except LabError:
            tally["refused in words"] += 1
        except Exception:
            tally["tracebacks"] += 1

    return one


def fuzz_parsers(count: int, where: Path, rng: random.Random) -> Tally:
    """Texts near the grammar of --methods, --model, --set and recipes: read, or refused with the place."""
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.lab import strategies, test_parsers

    tally = Tally()
    settled = settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    cases: dict[str, tuple[Any, Callable[[Any], None]]] = {
        "--methods": (strategies.METHOD_TEXT, test_parsers.parsed),
        "--set": (strategies.SETTING, test_parsers.planned_with),
        "recipes": (strategies.mutated(test_parsers.GOOD), test_parsers.planned),
    }
    for name, (strategy, read) in cases.items():
        settled(given(strategy)(_fed(name, read, tally)))()
    tally["repetitions"] = sum(n for what, n in tally.items() if what.startswith("inputs"))
    return tally


def fuzz_readers(count: int, where: Path, rng: random.Random) -> Tally:
    """Files of every format with bytes changed, cut or repeated: read, or refused as damaged."""
    from dampen.lab.data.errors import DamagedData, IncompleteData, MissingData
    from dampen.lab.data.unpickle import safe_unpickle
    from tests.lab.data.readers import READERS, files, read

    tally = Tally()
    for i, (case, (_, write)) in enumerate(READERS.items()):
        folder = where / f"reader-{i}"
        folder.mkdir()
        write(folder)
        for _ in range(count):
            path = rng.choice(files(folder))
            content = path.read_bytes()
            path.write_bytes(harmed(content, rng))
            try:
                read(case, folder)
            except (DamagedData, IncompleteData, MissingData):
                tally["refused in words"] += 1
            except Exception:
                tally["tracebacks"] += 1
            path.write_bytes(content)
            tally["repetitions"] += 1
    good = (where / "reader-1").rglob("data_batch_1")
    content = next(good).read_bytes()[:3000]
    for _ in range(count * 100):
        try:
            safe_unpickle(harmed(content, rng), "x")
        except DamagedData:
            tally["pickles refused in words"] += 1
        except Exception:
            tally["tracebacks"] += 1
        tally["pickles"] += 1
    return tally


def harmed(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((0, 1, 4, 40))):
        changed[rng.randrange(min(len(changed), rng.choice((80, 2000, 10**9))))] = rng.randrange(256)
    return bytes(changed[: rng.randrange(1, len(changed) + 1)] if rng.random() < 0.4 else changed)


def many_trials(count: int, where: Path, rng: random.Random) -> Tally:
    """Tiny trials through the local engine: all of them come back."""
    jobs = [Job(trial(seed, epochs=1), where / f"seed-{seed}") for seed in range(count)]
    outcomes = make_engine("local", workers=2).run(jobs, replace(QUICK, checkpoint_steps=None), lambda i, e: None)
    done = sum(bool(result_of(j.folder)) and outcomes[j.trial.id].status == "finished" for j in jobs)
    return Tally(repetitions=count, lost=count - done)


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
    run_trial(spec, where / "whole", QUICK)
    for turn in range(count):
        folder = where / f"both-{turn}"
        pair = [start(_contend, spec, folder) for _ in range(2)]
        told = [pipe.recv() if pipe.poll(120) else "hang" for _, pipe in pair]
        for process, _ in pair:
            process.join()
        tally["hangs"] += told.count("hang")
        tally["tracebacks"] += sum(t not in ("done", "locked", "hang") for t in told)
        tally["told that it is in use"] += told.count("locked")
        judge(tally, folder, result_of(where / "whole"))
        tally["repetitions"] += 1
    return tally


def clock_jumps(count: int, where: Path, rng: random.Random) -> Tally:
    """The wall clock jumps by up to ten years between the steps of a trial, in both directions."""
    tally, spec, real = Tally(), trial(), time.time
    run_trial(spec, where / "whole", QUICK)
    for turn in range(count):
        jump = [0.0]
        time.time = lambda jump=jump: real() + jump[0]

        def report(event: dict[str, Any], jump: list[float] = jump) -> None:
            jump[0] = rng.uniform(-3e8, 3e8)

        try:
            run_trial(spec, where / f"clock-{turn}", QUICK, report)
        finally:
            time.time = real
        judge(tally, where / f"clock-{turn}", result_of(where / "whole"))
        tally["repetitions"] += 1
    return tally


def _starving(pipe: Any, spec: TrialSpec, folder: Path, allowed: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed, used + allowed))
    _steps(pipe, spec, folder)


def out_of_memory(count: int, where: Path, rng: random.Random) -> Tally:
    """A limit of memory that a trial meets at some point; without it, it then runs to its end."""
    tally, spec = Tally(), trial()
    run_trial(spec, where / "whole", QUICK)
    for turn in range(count):
        folder = where / f"memory-{turn}"
        process, _ = start(_starving, spec, folder, rng.randrange(0, 60) * 2**20)
        process.join(120)
        tally["hangs"] += process.is_alive()
        tally["died"] += process.exitcode != 0
        process.kill()
        process.join()
        run_trial(spec, folder, QUICK)
        judge(tally, folder, result_of(where / "whole"))
        tally["repetitions"] += 1
    return tally


def attach_and_detach(count: int, where: Path, rng: random.Random) -> Tally:
    """Attach, train a step, detach, again and again: bytes that a round leaves behind, by least squares."""
    import numpy as np
    import torch

    import dampen
    from dampen.models import build_model

    model = build_model("vit", image_size=8, channels=1, classes=3, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    x, sizes = torch.randn(8, 1, 8, 8), []
    for turn in range(count):
        reg = dampen.regularize(model, [dampen.DropKey(0.2), dampen.ExplicitDropout(value=0.1, ffn=0.1)])
        loss, _ = reg.loss(lambda: model(x), lambda out: out.square().mean())
        loss.backward()
        reg.remove()
        if turn >= count // 4:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    slope = float(np.polyfit(np.arange(len(sizes)), sizes, 1)[0]) if len(sizes) > 2 else 0.0
    return Tally({"repetitions": count, "bytes per round": round(slope)})


ATTACKS: dict[str, tuple[Callable[..., Tally], int, str]] = {
    "kills of a trial": (kills, 40, "SIGKILL at a random moment"),
    "kills of local workers": (lambda n, w, r: engine_kills(n, w, r, "local"), 8, "SIGKILL of the engine's worker"),
    "kills of Ray workers": (lambda n, w, r: engine_kills(n, w, r, "ray"), 0, "SIGKILL of a Ray worker"),
    "power cuts": (power_cuts, 20, "unsynced files cut or zeroed"),
    "full disk": (full_disks, 15, "a real tmpfs, full at a random point"),
    "fuzzed command lines and recipes": (fuzz_parsers, 300, "near the grammar"),
    "fuzzed files": (fuzz_readers, 20, "each reader, and pickles"),
    "many tiny trials": (many_trials, 40, "through the local engine"),
    "two processes on one folder": (two_at_once, 6, "started together"),
    "clock jumps": (clock_jumps, 5, "by up to ten years"),
    "out of memory": (out_of_memory, 6, "an address-space limit"),
    "attach, train, detach": (attach_and_detach, 400, "memory left behind"),
}
"""Name -> (attack, repetitions at factor 1, what it does)."""


def run(factor: float, only: list[str]) -> None:
    """Attack after attack, each written to the record when it is done; with `only`, the others stay as they are."""
    rows: dict[str, Any] = read_json(RECORD)["attacks"] if RECORD.exists() and only else {}
    for name, (attack, count, what) in ATTACKS.items():
        times = round(count * factor) or (1 if name in only else 0)
        if (only and name not in only) or not times:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tally = attack(times, Path(folder), random.Random(0))
        rows[name] = {"what": what, **dict(tally), "seconds": round(time.monotonic() - began, 1)}
        print(name, rows[name], file=sys.stderr, flush=True)
        write_json(RECORD, {"environment": describe(1, "cpu"), "attacks": rows})


BAD = ("lost", "wrong", "tracebacks", "hangs")


def page(record: dict[str, Any]) -> str:
    """docs/reliability.md."""
    lines = [
        "# Hard to break",
        "",
        "What happened when dampen was attacked, counted by `python -m benchmarks.reliability` (minutes;",
        "`--factor 10` takes hours). Every attacked trial is run to its end and compared, to the last bit, with one",
        "that was left alone. The goal is 0 in each of the four columns. This page is written from",
        "`benchmarks/records/reliability.json` by `python -m benchmarks.reliability --page`.",
        "",
        "| attack | repetitions | lost | wrong | tracebacks | hangs | also counted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in record["attacks"].items():
        other = [f"{k}: {v}" for k, v in row.items() if k not in (*BAD, "what", "repetitions", "seconds")]
        bad = " | ".join(str(row.get(key, 0)) for key in BAD)
        lines.append(f"| {name} ({row['what']}) | {row.get('repetitions', 0)} | {bad} | {'; '.join(other)} |")
    missing = [name for name in ATTACKS if name not in record["attacks"]]
    environment = record["environment"]
    lines += [
        "",
        f"Measured on {environment['cpu']}, {environment['cores']} cores, torch {environment['packages']['torch']}",
    ]
    lines[-1] += f", {environment['time'][:10]}."
    if missing:
        lines += ["", f"Not in this record: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=1.0, help="how many times the usual number of repetitions")
    parser.add_argument("--only", action="append", default=[], choices=list(ATTACKS), help="this attack; repeatable")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    options = parser.parse_args()
    if not options.page:
        run(options.factor, options.only)
    PAGE.write_text(page(read_json(RECORD)), encoding="utf-8")


if __name__ == "__main__":
    from benchmarks import reliability  # by its name: processes that are started find its functions there

    reliability.main()
