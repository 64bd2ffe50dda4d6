"""Small models trained on 337 real digits, for pages that ask something of trained models: seconds a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dampen.studies import Execution, Run, Trained, describe_machine, run_trial, trained_model

DATA = {"name": "digits", "train_fraction": 0.25}
MODEL = {"name": "vit", "patch_size": 2, "width": 32, "depth": 4, "heads": 4, "mlp": 64}
TRAIN = {
    "epochs": 40,
    "batch_size": 32,
    "lr": 3e-3,
    "warmup": 1.0,
    "validate_every": 40,
    "select": "last",
}


def trial(methods: Sequence[Mapping[str, Any]], seed: int, **data: Any) -> Run:
    """The last weights are kept, so that the validation part has chosen nothing: it is unseen, as the test part is."""
    asked = {
        "data": DATA | data,
        "model": MODEL,
        "train": TRAIN,
        "methods": list(methods),
        "seed": seed,
    }
    return Run.from_dict(asked)


def trained(methods: Sequence[Mapping[str, Any]], seed: int, runs: Path, **data: Any) -> Trained:
    """Train in a folder below `runs`, or take what was trained there before."""
    asked = trial(methods, seed, **data)
    run_trial(
        asked, runs / asked.id, Execution(threads=1, accelerator="cpu", checkpoint_seconds=1e9)
    )
    return trained_model(runs / asked.id)


def about() -> dict[str, Any]:
    """What a record says of where it was made."""
    machine = describe_machine(torch.get_num_threads(), "cpu")
    kept = {k: machine[k] for k in ("cpu", "threads") if k in machine}
    load = os.getloadavg()[0]
    return {
        **kept,
        "torch": torch.__version__,
        "load": round(load, 1),
        "data": DATA,
        "model": MODEL,
        "train": TRAIN,
    }
