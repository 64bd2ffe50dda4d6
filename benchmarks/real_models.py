"""What methods cost on models that people train, beside what one would write by hand.

    python -m benchmarks.real_models --again --minutes 8   on a quiet machine, everything anew
    python -m benchmarks.real_models --minutes 8           only the models that are not recorded yet
    python -m benchmarks.real_models --only "nanoGPT, eager" --minutes 1 --print

One process per model. In it all variants take turns: the model as it is, the same changed by hand,
and dampen's methods with native kernels and by torch alone. Each is paired with a step of the
unchanged model in the same turn. The record has the median of the paired ratios with its
distribution-free 95 % interval, the ratio of the fastest steps, and the peak memory of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("records") / "real_models.json"
BASELINE = "baseline"
GOALS = {
    "DropKey": 1.04,
    "DropPath": 1.02,
    "Explicit": 1.05,
    "feed-forward dropout": 1.05,
    "DropKey + Explicit": 1.08,
    "DropKey + Explicit + DropPath": 1.10,
}
"""Ratios to the baseline that a step with native kernels should not exceed."""
ROOM = 0.03
"""By torch alone a step may take this much more than the form written by hand."""
BY_HAND = {
    "DropKey": ("DropKey by hand", "attention dropout by hand"),
    "DropPath": ("DropPath by hand",),
    "Explicit": ("Explicit by hand",),
    "feed-forward dropout": ("feed-forward dropout by hand",),
    "DropKey + Explicit": ("DropKey + Explicit by hand",),
    "DropKey + Explicit + DropPath": ("DropKey + Explicit + DropPath by hand",),
}
"""What one would write instead of each method. Of several the fastest counts."""
PATHS = ("native", "torch")
SHORTEST = 5.0
"""Seconds of measurement that a model gets at least, however long it took to make."""
REPLACED = "native, replace_attention"
"""The same for a model that computes its attention itself, `regularize(..., replace_attention=True)`."""


def methods() -> dict[str, list[Any]]:
    """The combinations of the table."""
    from dampen import DropKey, DropPath, ExplicitDropout, FeedForwardDropout

    key, path = DropKey(0.1), DropPath(0.1)
    explicit = ExplicitDropout(value=0.05, ffn=0.05)
    return {
        "DropKey": [key],
        "DropPath": [path],
        "Explicit": [explicit],
        "feed-forward dropout": [FeedForwardDropout(0.1)],
        "DropKey + Explicit": [key, explicit],
        "DropKey + Explicit + DropPath": [key, explicit, path],
    }


def variants(name: str) -> dict[str, Callable[[], None]]:
    """A step of everything that is compared on one model."""
    from benchmarks.by_hand import written_by_hand
    from benchmarks.real_subjects import make
    from dampen.native import available

    subject = make(name)
    model = subject.copy()
    found = {BASELINE: subject.step(lambda: subject.loss(subject.forward(model)))}
    found |= written_by_hand(subject)
    for path in PATHS:
        if path == "torch" or available():
            for method, regularizers in methods().items():
                found[f"{method}, {path}"] = regularized(subject, regularizers, path)
                if path == "native" and subject.dropped and name != "timm Swin":
                    found[f"{method}, {REPLACED}"] = regularized(subject, regularizers, REPLACED)
    return found


def regularized(subject: Any, regularizers: Sequence[Any], path: str) -> Callable[[], None]:
    """A step with methods of dampen, on one path."""
    import dampen
    from dampen.native.library import torch_only

    model = subject.copy()
    reg = dampen.regularize(model, list(regularizers), replace_attention=path == REPLACED)
    step = subject.step(lambda: reg.loss(lambda: subject.forward(model), subject.loss)[0])

    def run() -> None:
        with torch_only("measured by torch alone") if path == "torch" else nullcontext():
            step()

    return run


def measure(name: str, end: float) -> dict[str, Any]:
    """All variants of one model, in this process.

    Args:
        name: of the model.
        end: when to be done, as `time.time()` tells it.
    """
    import torch

    from dampen.studies.bench.subject import peak_memory
    from dampen.studies.bench.timing import machine, time_rounds
    from dampen.studies.processes import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    steps = variants(name)
    for step in steps.values():
        for _ in range(6):  # until the methods have learned the model
            step()
    memory = {variant: peak_memory(step) for variant, step in steps.items()}
    seconds = max(end - time.time(), SHORTEST)
    timings = time_rounds(
        steps, BASELINE, rounds=1000, seconds=seconds, every=6, warm=False, clock=time.process_time
    )
    ratios = timings.ratios()
    rows: dict[str, Any] = {}
    for variant, ratio in ratios.items():
        fastest = ratio.seconds / ratios[BASELINE].seconds
        used = memory[variant] / memory[BASELINE]
        rows[variant] = {**asdict(ratio), "fastest": fastest, "memory": used}
    for method, hands in BY_HAND.items():
        there = [hand for hand in hands if hand in rows]
        if there:
            best = min(there, key=lambda hand: rows[hand]["median"])
            over = timings.between(f"{method}, torch", best)
            rows[f"{method}, torch"]["over"] = {"hand": best, **asdict(over)}
    return {"rows": rows, "machine": machine(), "load": os.getloadavg()[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks.real_subjects import SUBJECTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all models together")
    parser.add_argument("--again", action="store_true", help="also models that are recorded")
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="some of the models")
    parser.add_argument("--print", action="store_true", help="write no record and no page")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        print("RECORD", json.dumps(measure(options.inside, options.end)))
        return 0
    record: dict[str, Any] = {"models": {}}
    if RECORD.exists() and not options.again and not options.print:
        record = json.loads(RECORD.read_text())
    build_kernels()
    wanted = [n for n in options.only or SUBJECTS if options.again or n not in record["models"]]
    end = time.time() + 60 * options.minutes
    for done, name in enumerate(wanted):
        share = (end - time.time()) / (len(wanted) - done)  # imports and warming up count as well
        print(f"{name}: {share:.0f} s", file=sys.stderr, flush=True)
        found = in_a_process(name, time.time() + share)
        record["models"][name] = found
        if options.print:
            print("\n".join(table({"models": {name: found}})), flush=True)
        else:
            write(record)
    if options.print:
        return 0
    from benchmarks import costs_page

    return costs_page.main([])


def build_kernels() -> None:
    """The native kernels of this code; where they cannot be built, only torch is measured."""
    from dampen.native.library import BuildError, build

    try:
        build()
    except BuildError as error:
        print(f"native kernels were not built: {error}", file=sys.stderr)


def in_a_process(name: str, end: float) -> dict[str, Any]:
    """One model, in a process of its own, so that no model inherits another's memory.

    Args:
        name: of the model.
        end: when it should be done, as `time.time()` tells it.
    """
    command = [sys.executable, "-m", "benchmarks.real_models", "--inside", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--end", str(end)],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    line = next(x for x in done.stdout.splitlines() if x.startswith("RECORD "))
    found: dict[str, Any] = json.loads(line.removeprefix("RECORD "))
    return found


def write(record: dict[str, Any]) -> None:
    """Keep what is measured, so that the next call resumes."""
    from benchmarks.real_subjects import SUBJECTS
    from dampen.studies.files import write_json

    record["command"] = "python -m benchmarks.real_models"
    record["models"] = {n: record["models"][n] for n in SUBJECTS if n in record["models"]}
    write_json(RECORD, record)


# --- the tables ---------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> list[str]:
    """A step with each method: native kernels, torch alone, and the form written by hand."""
    lines = ["| | " + " | ".join(GOALS) + " |", "|---" * (1 + len(GOALS)) + "|"]
    goals = " | ".join(f"{goal:.2f}" for goal in GOALS.values())
    lines.append(f"| **goal, native** | {goals} |")
    for name, found in record["models"].items():
        rows = found["rows"]
        for path in (*PATHS, REPLACED):
            if f"DropKey, {path}" not in rows:
                continue
            cells = [
                cell(rows.get(f"{m}, {path}"), GOALS[m] if path == "native" else None)
                for m in GOALS
            ]
            lines.append(f"| {name}, {path} | {' | '.join(cells)} |")
        cells = [cell(_fastest(rows, BY_HAND[m])) for m in GOALS]
        lines.append(f"| {name}, by hand | {' | '.join(cells)} |")
    return lines


def cell(entry: dict[str, Any] | None, goal: float | None = None) -> str:
    """A ratio with its interval, bold where it exceeds its goal."""
    if entry is None:
        return "-"
    ratio = f"{entry['median']:.2f}"
    if goal is not None and entry["median"] > goal:
        ratio = f"**{ratio}**"
    return f"{ratio} ({entry['low']:.2f} to {entry['high']:.2f})"


def _fastest(rows: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    found = [rows[n] for n in names if n in rows]
    return min(found, key=lambda entry: entry["median"], default=None)


def memory_table(record: dict[str, Any]) -> list[str]:
    """Peak memory of a step, as a ratio to the baseline: the larger of both paths."""
    lines = ["| | " + " | ".join(GOALS) + " |", "|---" * (1 + len(GOALS)) + "|"]
    for name, found in record["models"].items():
        for path in PATHS:
            entries = [found["rows"].get(f"{m}, {path}") for m in GOALS]
            cells = ["-" if e is None else f"{e['memory']:.2f}" for e in entries]
            lines.append(f"| {name}, {path} | {' | '.join(cells)} |")
    return lines


def verdicts(record: dict[str, Any]) -> list[str]:
    """How many goals are met, and which are not."""
    met, missed, beyond, total = 0, [], [], 0
    for name, found in record["models"].items():
        for method, goal in GOALS.items():
            native = found["rows"].get(f"{method}, native")
            alone = found["rows"].get(f"{method}, torch", {})
            if native is not None:
                total += 1
                met += round(native["median"], 2) <= goal
                if round(native["median"], 2) > goal:
                    missed.append(f"{name}: {method} {native['median']:.2f}")
            over = alone.get("over")
            if over is not None:
                hand = found["rows"][over["hand"]]["median"]
                if alone["median"] - hand > ROOM + 0.005:
                    beyond.append(f"{name}: {method} {alone['median']:.2f} against {hand:.2f}")
    lines = [f"With native kernels {met} of {total} goals are met."]
    if missed:
        lines.append(f"Not met: {'; '.join(missed)}.")
    if beyond:
        lines += [
            "",
            f"By torch alone more than {ROOM} above the form by hand: {'; '.join(beyond)}.",
        ]
    else:
        lines += ["", f"By torch alone no method takes more than {ROOM} above the form by hand."]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
