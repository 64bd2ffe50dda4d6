"""A trained model with its data: rebuilt from a trial's folder, or given as a function
or a file of weights."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dampen.studies.checks import brings_task
from dampen.studies.comparison import load_comparison
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.methods_text import build_methods
from dampen.studies.plugins import load_plugins
from dampen.studies.store import PRETRAIN, RunStore
from dampen.studies.trainer.checkpoint import load_newest, rng_state, set_rng_state
from dampen.studies.trainer.data import derive, load_data, places, seed_all
from dampen.studies.trainer.models import make_model
from dampen.studies.trust import approve, code_of_methods, code_of_plan, require_approval

PICTURE = "attention.png"


@dataclass
class Trained:
    """What is diagnosed. `initial` holds random weights that no data has touched, where they are
    known: those before training, also where a pretraining went before. Pictures go to `picture`,
    and beside it."""

    name: str
    model: nn.Module
    data: Any
    handle: Any = None
    initial: dict[str, Tensor] | None = None
    batch_size: int = 64
    label_smoothing: float = 0.0
    trial: str | None = None
    picture: Path | None = None

    def batches(self, split: str, examples: int, size: int | None = None) -> Batches:
        """Batches (inputs, labels) of the first `examples` of a split; labels
        that do not count are -100.

        Args:
            split: train, valid or test.
            examples: how many at most.
            size: examples per batch.
        """
        return Batches(getattr(self.data, split), examples, size or 256)


@dataclass
class Batches:
    """Batches of a split, as often as requested."""

    split: Any
    examples: int
    size: int

    def __len__(self) -> int:
        return math.ceil(min(self.examples, len(self.split)) / self.size)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        n = min(self.examples, len(self.split))
        for start in range(0, n, self.size):
            batch = self.split.batch(torch.arange(start, min(start + self.size, n)))
            target, valid = batch["target"], batch.get("valid")
            if target.is_floating_point():
                raise ValueError(
                    "needs one class per prediction; here several may be present at once"
                )
            yield inputs_of(batch), target if valid is None else target.masked_fill(~valid, -100)


def inputs_of(batch: dict[str, Any]) -> Any:
    """A lab batch's inputs: the tensor itself where there is only one.

    Args:
        batch: a batch of a data set.
    """
    inputs = batch["inputs"]
    return inputs[0] if len(inputs) == 1 else inputs


APPROVE = "dampen diagnose FOLDER --trust"


def find_trials(folder: Path, trust: bool = False) -> list[Path]:
    """The finished trials in `folder`: itself, or those below it. Plug-ins that their
    plans name are imported.

    Args:
        folder: of a study or of one run.
        trust: approve the plug-ins and the methods in files that the runs name.
    """
    if not folder.is_dir():
        raise LabError(
            f"There is no folder {folder}. Give the folder that dampen run, compare or demo wrote."
        )
    below = (p.parent for p in folder.rglob("config.json") if p.parent.name != PRETRAIN)
    found = [folder] if (folder / "config.json").exists() else sorted(below)
    finished = [
        p
        for p in found
        if (final := RunStore(p).final()) is not None and final["status"] == "finished"
    ]
    for plan in {path.parent / "plan.json" for path in finished}:
        if plan.is_file():
            study = load_comparison(plan.parent)
            if trust:
                approve(code_of_plan(study, plan.parent))
            require_approval(plan.parent, code_of_plan(study, plan.parent), APPROVE)
            load_plugins(study.header.get("plugins", ()), plan.parent)
    if trust:
        approve(code_of_methods(RunStore(path).trial() for path in finished))
    if not finished:
        what = f"{len(found)} runs, none of them finished" if found else "no trial"
        raise LabError(
            f"{folder} holds {what}. Run the command that "
            "wrote it again: it resumes, then diagnose."
        )
    return finished


def from_run(folder: Path, data_dir: str | None = None) -> Trained:
    """The model of a finished trial, with its data, its regularizers, and its
    weights before training.

    Args:
        folder: the folder.
        data_dir: where data sets are looked for.
    """
    record = RunStore(folder)
    trial = record.trial()
    require_approval(folder, code_of_methods([trial]), APPROVE)
    state, damage = load_newest(folder, "weights")
    if state is None:
        why = (
            damage[0]
            if damage
            else "it holds no weights: it is not finished, or they were not kept"
        )
        raise LabError(f"{folder} cannot be diagnosed: {why}. Repeat the run to have them.")
    if brings_task(trial.model["name"]) is not None:
        raise LabError(f"{folder} is a pretraining; diagnose the classifier above it.")
    data = load_data(trial.data, data_dir, seed=trial.seed)
    before = rng_state(torch.device("cpu"))
    seed_all(derive(trial.seed, "init"))  # as Session does: the same initial weights
    model = make_model(trial.model, data.model_args)
    set_rng_state(before, torch.device("cpu"))
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(state["model"])
    handle = None
    if trial.methods:
        from dampen import regularize

        handle = regularize(model, build_methods(trial.methods), **places(trial.sites))
        handle.progress(1.0)
    name = " + ".join(m["name"] for m in trial.methods) or "plain"
    smoothing = trial.train.label_smoothing
    size = min(trial.train.batch_size, len(data.train))
    return Trained(
        f"{name}, seed {trial.seed}",
        model,
        data,
        handle,
        initial,
        size,
        smoothing,
        trial.id,
        folder / PICTURE,
    )


def from_model(
    place: str,
    data: str | None,
    model: str | None = None,
    data_dir: str | None = None,
    partial: bool = False,
) -> Trained:
    """A model that no study trained: `package.module:function` that returns it, or a
    file with its state_dict.

    The file is read with `weights_only=True`, and `model` says what the weights belong to, as in
    `vit(width=48)`.

    Args:
        place: a function or a file of weights.
        data: the name of a data set.
        model: what the weights belong to.
        data_dir: where data sets are looked for.
        partial: accept an incomplete copy of the data.
    """
    path = Path(place)
    problems = []
    if not path.is_file() and ":" not in place:
        problems.append(
            f"{place!r} is neither a folder of runs, nor a file of weights, nor module:function"
        )
    if data is None:
        problems.append("--data: missing; pass the data set to measure on, as in --data digits")
    if data is None or problems:
        raise ConfigError("dampen diagnose", problems)
    loaded = load_data({"name": data, **({"partial": True} if partial else {})}, data_dir)
    built = _from_file(path, model, loaded) if path.is_file() else _from_function(place)
    return Trained(path.stem if path.is_file() else place, built, loaded)


def _from_file(path: Path, model: str | None, data: Any) -> nn.Module:
    from dampen.studies.bench.subject import parse_model

    if model is None:
        problem = f"--model: missing; pass the model that {path.name} belongs to, as in --model 'vit(width=48)'"
        raise ConfigError("dampen diagnose", [problem])
    built = make_model(parse_model(model), data.model_args)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a file that holds something else
        raise LabError(f"{path} is not a state_dict that can be read safely: {error}") from error
    state = (
        state["model"]
        if isinstance(state, dict) and isinstance(state.get("model"), dict)
        else state
    )
    try:
        built.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise LabError(f"the weights in {path} do not fit --model {model}: {error}") from error
    return built


def _from_function(place: str) -> nn.Module:
    module, _, name = place.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        problem = f"{place!r} cannot be imported: {error}. Is its folder in PYTHONPATH?"
        raise ConfigError("dampen diagnose", [problem]) from error
    built = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(built, nn.Module):
        raise ConfigError(
            "dampen diagnose", [f"{place} gave a {type(built).__name__}, expected an nn.Module"]
        )
    return built
