"""The long campaign of studies, in the order of their worth: resumable, one process, records packed as they finish.

    taskset -c 1 python -m benchmarks.campaign --data-dir DATA --out RUNS [--records records] [--only NAME ...]

Ctrl-C stops after a checkpoint; the same command goes on. Stop it while costs are measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dampen.lab.report import write_report

STUDIES = (
    "explicit_dropout/lambda_digits",
    "explicit_dropout/table_3",
    "explicit_dropout/lambda_cifar10",
    "explicit_dropout/table_1",
    "explicit_dropout/table_4",
    "explicit_dropout/table_2",
)


def run(name: str, data_dir: Path, out: Path, workers: int) -> int:
    """One study, in a process of its own."""
    place = ["--data-dir", str(data_dir), "--partial", "--out", str(out)]
    command = [sys.executable, "-m", "dampen", "run", name, "--scale", "study", "--workers", str(workers)]
    return subprocess.run([*command, "--no-weights", *place], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=Path, default=Path("records"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES)
    options = parser.parse_args(arguments)
    for name in options.only:
        code = run(name, options.data_dir, options.out, options.workers)
        if code in (0, 5):  # 5: some trials diverged, which is a result
            target = options.records / f"{name}-study.json.xz"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_report([options.out / f"{name.replace('/', '-')}-study"], target, "pack", curves=False)
            print(f"packed {target}", flush=True)
        elif code == 130:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
