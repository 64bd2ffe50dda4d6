"""All records of what methods cost, within a time that is said, and the pages made of them.

    python -m benchmarks.costs --minutes 12         on a quiet machine; interrupted, it goes on where it was
    python -m benchmarks.costs --again              measure anew what is there already
    python -m benchmarks.costs --pages              only the pages, from the committed records

Each size of `dampen bench` is measured twice, by torch alone (DAMPEN_NATIVE=0) and with native kernels, in a process of
its own: `benchmarks/records/bench_SIZE_PATH.json`. Of the minutes, mid gets half, because its steps are long. A size
ends before its time when all its intervals are narrow, and goes beyond it only for the five rounds that every row has
at least (mid: about two minutes a path, long: two). The load of the machine and the rounds of each row stand in the
record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
SHARES = {"tiny": 0.2, "small": 0.1, "mid": 0.5, "long": 0.2}
"""Of the minutes, by size."""
PATHS = {"torch": "0", "native": "1"}
"""What runs, and DAMPEN_NATIVE."""


def record_path(size: str, path: str) -> Path:
    return RECORDS / f"bench_{size}_{path}.json"


def measure(size: str, path: str, seconds: float) -> None:
    """One size on one path, in a process of its own."""
    target = record_path(size, path)
    command = [
        sys.executable,
        "-m",
        "dampen",
        "bench",
        "--size",
        size,
        "--seconds",
        f"{seconds:.0f}",
    ]
    command += ["--rounds", "1000", "-o", str(target), "--json"]
    before = os.getloadavg()[0]
    plugins = {
        "DAMPEN_PLUGINS": "benchmarks.formulations"
    }  # what one would write instead is timed too
    environment = {**os.environ, **plugins, "DAMPEN_NATIVE": PATHS[path], "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    record = json.loads(target.read_text())
    if record["native"] != (path == "native"):
        target.unlink()
        raise SystemExit(
            f"{target.name}: asked for the {path} path, but it did not run. dampen doctor --build says why."
        )
    from dampen.studies.files import write_json

    write_json(target, {**record, "load": before})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="for all that is measured")
    parser.add_argument("--sizes", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--again", action="store_true", help="also what is recorded already")
    parser.add_argument("--pages", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    if not options.pages:
        from dampen.native.library import BuildError, build

        try:
            build()
            paths = list(PATHS)
        except BuildError as error:
            print(
                f"native kernels were not built: {error}. Only the torch path is measured.",
                file=sys.stderr,
            )
            paths = ["torch"]
        jobs = [
            (s, p)
            for s in options.sizes
            for p in paths
            if options.again or not record_path(s, p).exists()
        ]
        whole = sum(SHARES[size] for size, _ in jobs) or 1.0
        for size, path in jobs:
            seconds = 60 * options.minutes * SHARES[size] / whole
            print(f"{size}, {path}: {seconds:.0f} s", flush=True)
            measure(size, path, seconds)
    from benchmarks import costs_page, method_cards

    return costs_page.main([]) or method_cards.main([])


if __name__ == "__main__":
    raise SystemExit(main())
