"""Checking the names in a trial before anything runs: data set and its options, model and its arguments, methods."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from dampen.names import nearest
from dampen.studies.config.methods_text import OBJECT, check_methods
from dampen.studies.config.schema import unknown_keys
from dampen.studies.config.trial import TrialSpec

COMMON_DATA = (
    "name",
    "partial",
    "split_seed",
    "test_seed",
    "train_fraction",
    "limit",
    "augment",
    "source",
    "fingerprint",
    "code",
    "folds",
    "noise",
)


def check_trial(trial: TrialSpec, path: str = "") -> list[str]:
    """Every problem with the names of a trial, each with the nearest known one."""
    if trial.function is not None:
        return check_methods([m for m in trial.methods if OBJECT not in m], f"{path}methods")
    problems = [
        *check_data(trial.data, f"{path}data."),
        *check_model(trial.model, f"{path}model."),
        *check_methods(trial.methods, f"{path}methods"),
    ]
    if trial.model["name"] == "mae":
        problems += _check_images(trial.data["name"], path)
    if trial.train.test_samples is not None:
        problems += _check_samples(trial.data["name"], trial.model["name"], f"{path}train.test_samples")
    first = trial.pretraining()
    return problems + (check_trial(first, f"{path}pretrain.") if first is not None and not problems else [])


def _check_images(name: str, path: str) -> list[str]:
    from dampen.studies.data import DATASETS

    if name not in DATASETS or DATASETS[name].task == "image":
        return []
    return [f"{path}model.name: 'mae' guesses images; {name!r} is a data set for {DATASETS[name].task}"]


def _check_samples(data: str, model: str, path: str) -> list[str]:
    """Probabilities of classes can be averaged over random forwards; boxes, translations and images cannot."""
    from dampen.studies.data import DATASETS
    from dampen.studies.data.label_noise import TASKS

    if data not in DATASETS or task_of(data, model) in TASKS:
        return []
    return [f"{path}: averages class probabilities ({', '.join(TASKS)}); this is {task_of(data, model)}"]


def check_data(data: dict[str, Any], path: str) -> list[str]:
    """Problems of the data section."""
    from dampen.studies.data import DATASETS, options
    from dampen.studies.metrics.objects import missing_packages

    if data["name"] not in DATASETS:
        return [f"{path}name: unknown data set {data['name']!r}{nearest(data['name'], DATASETS)}"]
    problems = unknown_keys(data, [*COMMON_DATA, *options(data["name"])], path)
    folds = data.get("folds")
    for key in ("split_seed", "test_seed"):
        drawn = data.get(key, 0)
        if drawn != "seed" and (not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0):
            problems.append(f"{path}{key}: a whole number from 0, or 'seed' to draw anew for each seed, got {drawn!r}")
    if folds is not None and (not isinstance(folds, int) or isinstance(folds, bool) or folds < 2):
        problems.append(f"{path}folds: a whole number from 2, got {folds!r}")
    elif folds is not None and (why := DATASETS[data["name"]].no_folds):
        problems.append(f"{path}folds: {data['name']} cannot be cross-validated: {why}")
    if DATASETS[data["name"]].task == "objects" and (problem := missing_packages()):
        problems.append(f"{path}name: {data['name']}: {problem}")
    problems += _check_noise(data.get("noise"), DATASETS[data["name"]].task, f"{path}noise")
    return problems + _check_augment(data.get("augment"), DATASETS[data["name"]].task, f"{path}augment")


def _check_noise(share: Any, task: str, path: str) -> list[str]:
    from dampen.studies.data.label_noise import TASKS

    if share is None or share is False:
        return []
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < 1:
        return [f"{path}: the share of wrong training labels, a number in [0, 1), got {share!r}"]
    if share and task not in TASKS:
        return [f"{path}: wrong labels are for sets with one class each ({', '.join(TASKS)}); this set is {task}"]
    return []


def _check_augment(chosen: Any, task: str, path: str) -> list[str]:
    from dampen.studies.data.augmentation import AUGMENTATIONS, missing_for

    items = [] if not chosen else chosen if isinstance(chosen, list) else [chosen]
    problems = []
    for item in items:
        name = item.get("name") if isinstance(item, dict) else item
        if not isinstance(name, str):
            problems.append(f'{path}: expected names or tables such as {{ name = "flip" }}, got {item!r}')
            continue
        if name not in AUGMENTATIONS:
            problems.append(f"{path}: unknown augmentation {name!r}{nearest(name, AUGMENTATIONS)}")
            continue
        problems += [f"{path}: {problem}"] if (problem := missing_for(name)) else []
        kind = AUGMENTATIONS[name]
        if task not in kind.tasks:
            problems.append(f"{path}: {name!r} is for {' and '.join(kind.tasks)} tasks, this set is {task}")
        if isinstance(item, dict):
            problems += unknown_keys(item, ["name", *(f.name for f in fields(kind))], f"{path}.{name}.")
    return problems


def check_model(model: dict[str, Any], path: str) -> list[str]:
    """Problems of the model section. timm's own arguments are left to timm, which takes any."""
    from dampen.models import MODELS

    name = model["name"]
    if name.startswith("timm/"):
        return _check_timm(name.removeprefix("timm/"), path)
    if name.startswith("hf/") or ".py:" in name:  # the user's own: found and hashed when the comparison was planned
        known = "fingerprint" if name.startswith("hf/") else "code"
        return [] if known in model else [f"{path}{known}: missing; say --model {name} to dampen compare"]
    if name not in MODELS:
        return [f"{path}name: unknown model {name!r}{nearest(name, [*MODELS, 'timm/<name>'])}"]
    return unknown_keys(model, ["name", *inspect.signature(MODELS[name]).parameters], path)


def _check_timm(name: str, path: str) -> list[str]:
    try:
        import timm
    except ImportError:
        return [f"{path}name: timm/{name} needs timm; run: pip install 'dampen[timm]'"]
    return [] if timm.is_model(name) else [f"{path}name: timm has no model {name!r}{nearest(name, timm.list_models())}"]


def task_of(data: str, model: str) -> str:
    """What a model is trained for on a data set: the set's own task, but a masked autoencoder reconstructs.

    >>> task_of("digits", "vit"), task_of("digits", "mae")
    ('image', 'reconstruction')
    """
    from dampen.studies.data import DATASETS

    return "reconstruction" if model == "mae" else DATASETS[data].task
