"""The lab's own time: how much of a demo trial is spent on batches, metrics, records and checks, not on training.

    python -m benchmarks.lab_time [-o benchmarks/records/lab_time.json] [--pairs 15]

A trial of the demo (plain, and DropKey) beside the same training by hand: the same model, optimizer, order of batches,
learning rates and number of steps, the images normalized once, and the forward passes of validation and test, but no
metrics, records, checks or progress. Processor time of one thread, in turns; the share is the median over pairs, with
its 95 % interval. DESIGN's target is 3 %.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import dampen
from dampen.studies.bench.timing import compare
from dampen.studies.catalog import catalog
from dampen.studies.comparison import make_comparison
from dampen.studies.environment import describe
from dampen.studies.files import write_json
from dampen.studies.methods_text import build_methods
from dampen.studies.processes import keep_freed_memory
from dampen.studies.recipe import demo_recipe
from dampen.studies.run import Run
from dampen.studies.trainer.data import derive, load_data, seed_all
from dampen.studies.trainer.models import make_model
from dampen.studies.trainer.optim import learning_rate, make_optimizer
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial

RECORD = Path(__file__).parent / "records" / "lab_time.json"
ROWS = ("plain", "drop_key (keys)")
TARGET = 0.03


def by_hand(trial: Run) -> None:
    """What the trial trains, with nothing around it."""
    options, data = trial.train, load_data(trial.data, None, None, trial.seed)
    seed_all(derive(trial.seed, "init"))
    model = make_model(trial.model, data.model_args).train()
    handle = dampen.regularize(model, build_methods(trial.methods)) if trial.methods else None
    optimizer = make_optimizer(model, [], options)
    seed_all(derive(trial.seed, "train", 0))
    everything = data.train.batch(torch.arange(len(data.train)))
    images, labels = everything["inputs"][0], everything["target"]
    per_epoch = len(labels) // options.batch_size
    total = per_epoch * options.epochs
    for step in range(total):
        if step % per_epoch == 0:
            generator = torch.Generator().manual_seed(
                derive(trial.seed, "order", step // per_epoch)
            )
            order = torch.randperm(len(labels), generator=generator)
        chosen = order[step % per_epoch * options.batch_size :][: options.batch_size]
        x, y = images[chosen], labels[chosen]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, per_epoch, options)
        if handle is None:
            loss = F.cross_entropy(model(x), y)
        else:
            handle.progress(step / total)
            loss, _ = handle.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        for part in (data.valid, data.test):
            for start in range(0, len(part), options.eval_batch_size):
                model(
                    *part.batch(
                        torch.arange(start, min(start + options.eval_batch_size, len(part)))
                    )["inputs"]
                )


def measure(row: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Both in every round, in a random order, each on its own next seed, which is the same for both."""
    execution = Execution(threads=1, accelerator="cpu")
    trials = make_comparison(demo_recipe(list(catalog()), pairs + 1)).chosen([row])
    hand, lab = iter(trials), iter(trials)

    def in_the_lab() -> None:
        trial = next(lab)
        run_trial(trial, folder / trial.id, execution)

    variants = {"hand": lambda: by_hand(next(hand)), "lab": in_the_lab}
    ratio = compare(variants, "hand", rounds=pairs, clock=time.process_time)["lab"]
    shares = (1 - 1 / r for r in (ratio.median, ratio.low, ratio.high))
    return dict(zip(("share", "low", "high"), (round(s, 4) for s in shares), strict=True)) | {
        "pairs": ratio.rounds
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=RECORD)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--before", type=Path, help="the record of an older version, whose rows are kept beside"
    )
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    keep_freed_memory()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = {row: measure(row, arguments.pairs, Path(folder)) for row in ROWS}
    told = {
        "command": "python -m benchmarks.lab_time",
        "target": TARGET,
        "load": load,
        "rows": rows,
    }
    if arguments.before:
        older = json.loads(arguments.before.read_text())
        told["before"] = {"rows": older["rows"], "commit": older["environment"]["commit"]}
    write_json(arguments.out, told | {"environment": describe(1, "cpu")})
    for row, found in rows.items():
        print(
            f"{row}: {found['share']:.1%} of a trial is the lab's own ({found['low']:.1%} to {found['high']:.1%})"
        )


if __name__ == "__main__":
    main()
