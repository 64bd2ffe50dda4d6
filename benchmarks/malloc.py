"""What glibc's way of returning memory costs a plain training step: page faults and time, as it is and with freed
memory kept.

    python -m benchmarks.malloc [--processes 6] [--json benchmarks/records/malloc.json]

Where blocks lie on the heap is decided in the first steps of a process, so each measurement is a process of its own;
the two kinds alternate. The steps are those of `dampen bench --model "vit(depth=2)"`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dampen.studies.processes import AS_FOUND, keep_freed_memory

MODEL = "vit(depth=2)"
KINDS = (AS_FOUND, "freed memory kept")
WARM_UP, COUNTED = 3, 10


def inside(kind: str, batch: int) -> dict[str, float]:
    """Faults and seconds of a step in this process, the median of ten."""
    from dampen.studies.bench.run import plain_step
    from dampen.studies.bench.subject import make_subject

    if kind != AS_FOUND:
        keep_freed_memory()
    step = plain_step(make_subject(MODEL, batch))
    for _ in range(WARM_UP):
        step()
    faults, seconds = [], []
    for _ in range(COUNTED):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "faults": statistics.median(faults),
        "seconds": statistics.median(seconds),
        "peak_bytes": peak,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=6, help="of each kind")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--inside", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(inside(options.inside, options.batch)))
        return
    from dampen.studies.bench.timing import machine
    from dampen.studies.files import write_json

    if not keep_freed_memory():  # in this process, which measures nothing itself
        raise SystemExit(
            "malloc cannot be changed here: unset MALLOC_... and GLIBC_TUNABLES, and use glibc"
        )
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for i in range(options.processes):
        for kind in KINDS if i % 2 else reversed(KINDS):
            command = [
                sys.executable,
                "-m",
                "benchmarks.malloc",
                "--batch",
                str(options.batch),
                "--inside",
                kind,
            ]
            found[kind].append(json.loads(subprocess.check_output(command)))
            print(kind, found[kind][-1], flush=True)
    ratios = [
        kept["seconds"] / plain["seconds"] for plain, kept in zip(*found.values(), strict=True)
    ]
    print(
        f"kept / as found: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    if options.json:
        record = {
            "command": f"python -m benchmarks.malloc --processes {options.processes} --batch {options.batch}",
            "model": f"{MODEL}, batch {options.batch}, float32, synthetic data",
            "what": "a plain step, median of ten in each process; processes alternate",
            "machine": machine(),
            "processes": found,
            "ratios": ratios,
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
