"""The trainer against a bare hand-written loop on the same model, data and optimizer, interleaved in one process.

    python -m benchmarks.trainer_throughput --json benchmarks/trainer_throughput.json

Target: at least 0.97x the throughput of the bare loop. A few steps of each alternate and the median of the paired
ratios counts, so that a machine that slows down slows both. Processor time is compared as well as wall time:
other programs on the machine hardly count in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from dampen.studies import train as train_module
from dampen.studies.bench.timing import Ratio, summarize
from dampen.studies.environment import describe
from dampen.studies.run import Run
from dampen.studies.trainer.bookkeeping import Bookkeeping
from dampen.studies.trainer.data import derive, load_data, seed_all
from dampen.studies.trainer.models import make_model
from dampen.studies.trainer.optim import learning_rate, make_optimizer, set_learning_rate
from dampen.studies.trainer.state import Execution

MODELS = {
    "small": {"name": "vit", "patch_size": 2, "width": 48, "depth": 3, "heads": 4, "mlp": 96},
    "wide": {"name": "vit", "patch_size": 2, "width": 128, "depth": 4, "heads": 8, "mlp": 256},
}


def bare_loop(trial: Run) -> Any:
    """What one would write by hand: batches, forward, loss, backward, step. A generator of steps."""
    data = load_data(trial.data, None)
    seed_all(derive(trial.seed, "init"))
    model = make_model(trial.model, data.model_args).train()
    optimizer = make_optimizer(model, [], trial.train)
    size, step = trial.train.batch_size, 0
    while True:
        order = torch.randperm(len(data.train))
        per_epoch = len(order) // size
        for i in range(per_epoch):
            set_learning_rate(optimizer, learning_rate(step, 10**6, per_epoch, trial.train))
            batch = data.train.batch(order[i * size : (i + 1) * size])
            loss = F.cross_entropy(model(*batch["inputs"]), batch["target"])
            loss.item()  # a loop that never looks at its loss is no fair opponent
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            yield


class Enough(Exception):
    """Ends the trainer's loop when enough rounds are measured."""


def measure(name: str, rounds: int, steps: int, clock: Callable[[], float]) -> Ratio:
    """The cost of the trainer as a multiple of the bare loop's.

    The trainer's own loop runs, and after every `steps` of its steps the bare loop takes as many, in the same thread.
    Validation is left out of both.
    """
    options = {"epochs": 10**6, "batch_size": 64, "lr": 1e-3}
    trial = Run.from_dict({"data": {"name": "digits"}, "model": MODELS[name], "train": options})
    bare = bare_loop(trial)
    pairs: list[tuple[float, dict[str, float]]] = []

    class Interleaving(Bookkeeping):
        began = 0.0

        def after_step(self) -> None:
            super().after_step()
            if self.s.step % steps:
                return
            trainer = clock() - self.began
            begin = clock()
            for _ in range(steps):
                next(bare)
            if self.s.step > steps:  # the first round warms up
                pairs.append((trainer, {"bare": clock() - begin}))
            if len(pairs) >= rounds:
                raise Enough
            self.began = clock()

        def after_epoch(self) -> None:
            self.s.meter.means(self.s.per_epoch)
            self.s.meter.reset()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train_module, "Keeper", Interleaving),
    ):
        execution = Execution(threads=1, accelerator="cpu")
        with contextlib.suppress(Enough):
            train_module.train(trial, Path(folder), execution, lambda event: None, lambda: False)
    return summarize({"trainer": pairs, "bare": [(b["bare"], b) for _, b in pairs]}, ["bare"])[
        "trainer"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3, help="steps of each in a round")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name in MODELS:
        for kind, clock in (("wall", time.perf_counter), ("cpu", time.process_time)):
            cost = measure(name, arguments.rounds, arguments.steps, clock)
            ratio, low, high = 1 / cost.median, 1 / cost.high, 1 / cost.low
            milliseconds = 1000 * cost.seconds / arguments.steps
            results.append(
                {"model": name, "clock": kind, "throughput_ratio": ratio, "low": low, "high": high}
            )
            results[-1] |= {"rounds": cost.rounds, "trainer_ms_per_step": milliseconds}
            print(
                f"{name:6} {kind:5} throughput {ratio:.3f}x of a bare loop (95% {low:.3f} to {high:.3f}, "
                f"n={cost.rounds}), {milliseconds:.2f} ms per step",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"environment": describe(1, "cpu"), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
