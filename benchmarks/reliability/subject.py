"""What is attacked: a real training of about a second, and how its result is compared with an undisturbed one."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial

QUICK = Execution(
    threads=1, accelerator="cpu", progress_seconds=0.0, checkpoint_steps=2, checkpoint_seconds=1e9
)
ASIDE = ("seconds", "step_seconds", "step_cpu_seconds", "resumed", "malloc")
"""What of a result may differ: times, how often it was resumed, and how its process took memory (workers keep it)."""
Tally = Counter[str]
"""What an attack counted: repetitions, lost, wrong, tracebacks, hangs, and whatever else it has to say."""


class CannotAttack(Exception):
    """What an attack needs is not here; the message says what."""


class Patience:
    """How long an attack may go on repeating: a busy machine ends it early, with what it counted until then."""

    def __init__(self) -> None:
        self.deadline = math.inf

    def allow(self, minutes: float | None) -> None:
        self.deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def turns(self, count: int) -> Iterator[int]:
        """0, 1, ... count - 1, as long as there is time; the first in any case."""
        for turn in range(count):
            if turn and time.monotonic() > self.deadline:
                return
            yield turn


patience = Patience()


def trial(seed: int = 0, epochs: int = 3, limit: int = 300) -> Run:
    """Digits, a one-layer ViT, DropKey."""
    return Run.from_dict(
        {
            "data": {"name": "digits", "limit": limit},
            "model": {
                "name": "vit",
                "patch_size": 4,
                "width": 16,
                "depth": 1,
                "heads": 2,
                "mlp": 16,
            },
            "methods": [{"name": "drop_key", "rate": 0.2}],
            "train": {"epochs": epochs, "batch_size": 32},
            "seed": seed,
        }
    )


def undisturbed(spec: Run, folder: Path) -> dict[str, Any]:
    """The result of a trial that is left alone, without its times."""
    run_trial(spec, folder, QUICK)
    return result_of(folder)


def result_of(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in (RunStore(folder).final() or {}).items() if k not in ASIDE}


def judge(tally: Tally, folder: Path, whole: dict[str, Any]) -> None:
    """Count a trial that should be done: is its result there, and the same to the last bit?"""
    found = result_of(folder)
    tally["lost"] += not found
    if found and found != whole:
        tally["wrong"] += 1
        differing = {k for k in found.keys() | whole.keys() if found.get(k) != whole.get(k)}
        print(folder, "differs in", ", ".join(sorted(differing)), file=sys.stderr, flush=True)
