"""Run the experiments of PLAN.md in their order, on one core, and pack each result file as it ends.

    taskset -c 1 python -m reproductions.campaign --data-dir DATA --out RUNS [--only small_data/digits ...]

Ctrl-C and SIGTERM stop at a checkpoint; the same command resumes. Stop it while costs are measured.

Finished runs of an experiment that has not ended are kept with `--keep` in `results/unfinished`. Commit that file,
and the same command resumes from it on another machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = (
    "small_data/digits",
    "small_data/spoken",
    "always_skip_attention/skips",
    "language/epochs_1",
    "language/epochs_4",
    "language/epochs_16",
    "small_data/cifar10",
    "small_data/noisy_digits",
    "dropkey/structures",
    "attentiondrop/trends",
    "attentiondrop/variance",
    "explicit_dropout/coefficients",
    "explicit_dropout/cifar10",
)
"""In the order in which PLAN.md runs them."""
DIVERGED = 5
"""Exit code of `dampen run` when some runs diverged. That is a result, not a failure."""
INTERRUPTED = 130


def runs_of(name: str, out: Path) -> Path:
    """The folder in which `dampen run` keeps the runs of an experiment."""
    group, table = name.split("/")
    return out / group / f"{table}-study"


def result_of(name: str) -> Path:
    """The committed result file of an experiment."""
    group, table = name.split("/")
    return HERE / group / "results" / f"{table}.json.xz"


def unfinished(name: str) -> Path:
    """Where the finished runs of an experiment that has not ended are kept."""
    return HERE / "results" / "unfinished" / f"{name.replace('/', '-')}.tar.xz"


def run(name: str, data_dir: Path, out: Path) -> int:
    """Run one experiment in a process of its own and return its exit code."""
    command = [sys.executable, "-m", "dampen", "run", str(HERE / f"{name}.toml"), "--scale", "study"]
    # --partial: the copy of CIFAR-10 at hand may hold fewer than five batches; the result file says so.
    partial = ["--partial"] if "cifar" in name else []
    where = ["--data-dir", str(data_dir), "--out", str(out / name.split("/")[0]), "--workers", "1"]
    return subprocess.run([*command, *partial, "--no-weights", *where], check=False).returncode


def pack(name: str, out: Path) -> None:
    """Write the result file of an experiment: its plan, its tuning and every run."""
    from dampen.studies.report import write_report

    target = result_of(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_report([runs_of(name, out)], target, "pack", curves=False)
    unfinished(name).unlink(missing_ok=True)
    print(f"packed {target.relative_to(HERE)}", flush=True)


def keep(name: str, out: Path) -> None:
    """Write the finished runs of an experiment into one small file."""
    runs = runs_of(name, out)
    finished = [path for final in sorted(runs.rglob("final.json")) for path in sorted(final.parent.iterdir())]
    if not finished or result_of(name).exists():
        return
    plans = [*sorted(runs.rglob("plan.json")), *sorted(runs.glob("search.json"))]
    target = unfinished(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz") as archive:
        for path in [*plans, *finished]:
            if path.suffix in (".json", ".jsonl"):  # neither locks nor weights
                archive.add(path, path.relative_to(out))
    print(f"kept {len(finished)} files of finished runs in {target.relative_to(HERE)}", flush=True)


def restore(name: str, out: Path) -> None:
    """Unpack finished runs that were kept. A folder that exists is left alone."""
    if not unfinished(name).exists() or runs_of(name, out).exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(unfinished(name)) as archive:
        archive.extractall(out, filter="data")
    print(f"resuming from {unfinished(name).relative_to(HERE)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the unpacked data sets")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; used again to resume")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS, metavar="EXPERIMENT")
    parser.add_argument("--keep", action="store_true", help="run nothing: keep the finished runs of what has begun")
    options = parser.parse_args(arguments)
    for name in options.only:
        if options.keep:
            keep(name, options.out)
            continue
        if result_of(name).exists():
            continue
        restore(name, options.out)
        code = run(name, options.data_dir, options.out)
        if code in (0, DIVERGED):
            pack(name, options.out)
        elif code == INTERRUPTED:
            return code
        else:
            print(f"{name} ended with exit code {code}; going on with the next experiment", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
