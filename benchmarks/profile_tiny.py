"""Why a tiny step costs what it costs: what each method adds to it in operations, graph nodes, Python and instructions.

    python -m benchmarks.profile_tiny [--json benchmarks/records/profile_tiny.json] [--no-instructions]

The steps are those of `dampen bench --size tiny`, with native kernels where they are built and with torch alone. Of
each: torch operations (those inside others not counted), nodes of the autograd graph, Python functions called,
instructions by valgrind in Python's interpreter, in torch, in dampen's kernels and in the rest, all as differences from
the plain step; and processor time, interleaved with the plain step in one process, the least of many rounds.
Instructions need valgrind, which has no AVX-512: the kernels are compiled without it there.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.alternatives import ALTERNATIVES
from dampen.hooks.block import STEADY
from dampen.studies.bench.rows import PRESETS, find_variants
from dampen.studies.bench.run import FUSED, UNFUSED, plain_step, regularized_step
from dampen.studies.bench.subject import Subject, make_subject

METHODS = (
    "drop_key(rate=0.2), hard_masking, explicit_dropout(value=0.06, ffn=0.06), feed_forward_dropout(rate=0.2), "
    "drop_path(rate=0.1), drop_head(rate=0.2), blurred_attention(width=3)"
)
BY_HAND = ("nn.Dropout before fc1 and fc2", "timm DropPath")
PATHS = {"torch": "0", "native": "1"}
PARTS = {"python": "Python", "libtorch": "torch", "libc10": "torch", "native-": "dampen's kernels"}
"""Beginning of a library's file name -> where its instructions are counted; elsewhere "other" (libc, OpenMP)."""
WITHOUT_AVX512 = "-march=x86-64-v3"


def steps(methods: str) -> tuple[Subject, dict[str, Callable[[], None]]]:
    """The two plain steps, one with each method, and what one would write instead."""
    subject = make_subject(PRESETS["tiny"].model, PRESETS["tiny"].batch)
    found: dict[str, Callable[[], None]] = {
        FUSED: plain_step(subject),
        UNFUSED: plain_step(subject, fused=False),
    }
    for variant in find_variants(methods):
        if variant.name in (variant.method, variant.text):
            found[variant.name] = regularized_step(subject, variant)
    return subject, found | {name: ALTERNATIVES[name].build(subject) for name in BY_HAND}


def operations(step: Callable[[], None]) -> int:
    """Torch operations of one step that are not part of another."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    events = [e for e in found.events() if e.name.startswith("aten::")]
    return sum(1 for e in events if not _inside_another(e))


def _inside_another(event: Any) -> bool:
    above = event.cpu_parent
    while above is not None:
        if above.name.startswith("aten::"):
            return True
        above = above.cpu_parent
    return False


def nodes(subject: Subject, step: Callable[[], None]) -> int:
    """Nodes of the graph that a step's backward runs through."""
    seen: set[Any] = set()
    backward = Tensor.backward

    def count(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        waiting = [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [below for below, _ in node.next_functions]
        backward(loss, *args, **kwargs)

    Tensor.backward = count  # type: ignore[method-assign]
    try:
        step()
    finally:
        Tensor.backward = backward  # type: ignore[method-assign]
    return len(seen)


def python_calls(step: Callable[[], None]) -> int:
    """Functions that Python calls in a step, those written in C too."""
    profiler = cProfile.Profile()
    profiler.enable()
    step()
    profiler.disable()
    return int(pstats.Stats(profiler).total_calls)  # type: ignore[attr-defined]


def milliseconds(found: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Processor time of a step, the least of many rounds in which all take turns."""
    least = dict.fromkeys(found, float("inf"))
    for _ in range(rounds):
        for name, step in found.items():
            begin = time.process_time()
            step()
            least[name] = min(least[name], time.process_time() - begin)
    return {name: 1000 * seconds for name, seconds in least.items()}


def inside(methods: str) -> None:
    """Under valgrind: each step until its streams are trusted, then one counted."""
    torch.set_num_threads(1)
    gc.disable()
    for name, step in steps(methods)[1].items():
        for _ in range(STEADY + 2 if name.startswith("drop_path") else 2):
            step()
        torch._C._valgrind_toggle()
        step()
        torch._C._valgrind_toggle_and_dump_stats()
        print(name, flush=True)


def by_library(text: str) -> dict[str, int]:
    """Millions of instructions, own ones, by what they belong to, from callgrind's output.

    >>> by_library("ob=(1) /lib/libtorch_cpu.so\\nfn=(1) f\\n1 2000000\\ncob=(2) /bin/python3\\ncalls=1 5\\n1 9\\n"
    ...            "ob=(2)\\nfn=(2) g\\n3 4000000\\n")
    {'torch': 2, 'Python': 4}
    """
    names: dict[str, str] = {}
    counted: dict[str, int] = {}
    part, skip = "other", False
    for line in text.splitlines():
        if line.startswith(("ob=", "cob=")):
            number, _, path = line.split("=", 1)[1].partition(" ")
            if path:
                file = Path(path).name
                names[number] = next(
                    (to for start, to in PARTS.items() if file.startswith(start)), "other"
                )
            part = names.get(number, "other") if line.startswith("ob=") else part
        elif line.startswith("calls="):
            skip = True  # the next line is what the callee took
        elif line[:1] in "0123456789+-*" and line:
            if not skip:
                counted[part] = counted.get(part, 0) + int(line.split()[1])
            skip = False
    return {name: round(number / 1e6) if number >= 1e6 else 0 for name, number in counted.items()}


def instructions(methods: str, path: str) -> dict[str, dict[str, int]]:
    """Of each step, by what they belong to."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        flags = {"DAMPEN_NATIVE_FLAGS": WITHOUT_AVX512} if path == "native" else {}
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "DAMPEN_NATIVE": PATHS[path],
            **flags,
        }
        if path == "native":
            subprocess.run(
                [sys.executable, "-m", "dampen.native"],
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            "--collect-atstart=no",
        ]
        command += [
            sys.executable,
            "-m",
            "benchmarks.profile_tiny",
            "--inside",
            "--methods",
            methods,
        ]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        names = done.stdout.splitlines()
        return {
            name: by_library(Path(f"{out}.{i + 1}").read_text()) for i, name in enumerate(names)
        }


def counts(methods: str, rounds: int) -> dict[str, dict[str, float]]:
    """Everything but the instructions, of each step, on the path that this process runs."""
    torch.set_num_threads(1)
    subject, found = steps(methods)
    for step in found.values():
        for _ in range(STEADY + 2):
            step()
    times = milliseconds(found, rounds)
    return {
        name: {
            "operations": operations(step),
            "nodes": nodes(subject, step),
            "python_calls": python_calls(step),
            "milliseconds": round(times[name], 3),
        }
        for name, step in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=METHODS, help="as for dampen bench")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument(
        "--no-instructions", action="store_true", help="without valgrind, a minute instead of five"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--counts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(options.methods)
        return 0
    if options.counts:
        print(json.dumps(counts(options.methods, options.rounds)))
        return 0
    record: dict[str, Any] = {}
    for path in options.paths:
        command = [
            sys.executable,
            "-m",
            "benchmarks.profile_tiny",
            "--counts",
            "--methods",
            options.methods,
        ]
        command += ["--rounds", str(options.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DAMPEN_NATIVE": PATHS[path]}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        record[path] = json.loads(done.stdout.splitlines()[-1])
        counting = not options.no_instructions
        if counting and shutil.which("valgrind") is None:
            print("instructions are not counted: valgrind is not installed (apt install valgrind)")
            counting = False
        for name, found in (instructions(options.methods, path) if counting else {}).items():
            record[path][name]["instructions"] = found
        for name, found in record[path].items():
            print(f"{path:<7} {name:<45} {found}", flush=True)
    if options.json:
        from dampen.studies.bench.timing import machine
        from dampen.studies.files import write_json

        told = {
            "command": "python -m benchmarks.profile_tiny"
            + " --no-instructions" * options.no_instructions,
            "what": "one training step without the optimizer; instructions in millions, by valgrind (no AVX-512)",
            "model": f"{PRESETS['tiny'].model}, batch {PRESETS['tiny'].batch}",
            "load": os.getloadavg()[0],
            "machine": machine(),
            "paths": record,
        }
        write_json(options.json, told)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
