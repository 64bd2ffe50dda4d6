"""Checking the names in a trial before anything runs: data set and its options, model and its
arguments, methods."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from dampen.extensions import MOVED, hint
from dampen.names import nearest
from dampen.studies.methods_text import OBJECT, check_methods, unknown_keys
from dampen.studies.run import Run

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
)


def check_trial(trial: Run, path: str = "") -> list[str]:
    """Every problem with the names of a trial, each with the nearest known one."""
    if trial.function is not None:
        return check_methods([m for m in trial.methods if OBJECT not in m], f"{path}methods")
    problems = [
        *check_data(trial.data, f"{path}data."),
        *check_model(trial.model, f"{path}model."),
        *check_methods(trial.methods, f"{path}methods"),
    ]
    problems += _check_takes(trial.model["name"], trial.data["name"], path)
    if trial.train.test_samples is not None:
        problems += _check_samples(
            trial.data["name"], trial.model["name"], f"{path}train.test_samples"
        )
    first = trial.pretraining()
    return problems + (
        check_trial(first, f"{path}pretrain.") if first is not None and not problems else []
    )


def _check_takes(model: str, data: str, path: str) -> list[str]:
    """A model that brings its own task says which data it can take."""
    from dampen.studies.data import DATASETS

    kind = brings_task(model)
    if kind is None or data not in DATASETS or DATASETS[data].spec.task in kind.takes:
        return []
    needs = " or ".join(kind.takes)
    return [
        f"{path}model.name: {model!r} needs {needs} data; {data!r} is "
        f"a data set for {DATASETS[data].spec.task}"
    ]


def brings_task(model: str) -> Any:
    """The class of a model that brings its own task (a masked autoencoder), else None: see
    `dampen.studies.plugins`."""
    from dampen.models import MODELS

    kind = MODELS.get(model)
    return kind if kind is not None and hasattr(kind, "task") else None


def _check_samples(data: str, model: str, path: str) -> list[str]:
    """Probabilities of classes can be averaged over random forwards; boxes,
    translations and images cannot."""
    from dampen.studies.data import DATASETS
    from dampen.studies.metrics import TASKS

    if data not in DATASETS or TASKS[task_of(data, model)].classes:
        return []
    return [
        f"{path}: averages class probabilities of sets with one "
        f"class each; this is {task_of(data, model)}"
    ]


def check_data(data: dict[str, Any], path: str) -> list[str]:
    """Problems of the data section."""
    from dampen.studies.data import DATASETS, options
    from dampen.studies.data.sets import TRANSFORMS
    from dampen.studies.metrics import TASKS

    if data["name"] not in DATASETS:
        return [
            f"{path}name: unknown data set "
            f"{data['name']!r}{hint('dampen.data', data['name'], DATASETS)}"
        ]
    spec = DATASETS[data["name"]].spec
    moved = [key for key in MOVED["dampen.transforms"] if key in data and key not in TRANSFORMS]
    problems = [
        f"{path}{key}: unknown key{hint('dampen.transforms', key, TRANSFORMS)}" for key in moved
    ]
    problems += unknown_keys(
        data, [*COMMON_DATA, *TRANSFORMS, *moved, *options(data["name"])], path
    )
    folds = data.get("folds")
    for key in ("split_seed", "test_seed"):
        drawn = data.get(key, 0)
        if drawn != "seed" and (not isinstance(drawn, int) or isinstance(drawn, bool) or drawn < 0):
            problems.append(
                f"{path}{key}: a whole number from 0, or 'seed' "
                f"to draw anew for each seed, got {drawn!r}"
            )
    if folds is not None and (not isinstance(folds, int) or isinstance(folds, bool) or folds < 2):
        problems.append(f"{path}folds: a whole number from 2, got {folds!r}")
    elif folds is not None and (why := spec.no_folds):
        problems.append(f"{path}folds: {data['name']} cannot be cross-validated: {why}")
    if problem := TASKS[spec.task].missing():
        problems.append(f"{path}name: {data['name']}: {problem}")
    for key, transform in TRANSFORMS.items():
        value = data.get(key)
        if value not in (None, False) and (
            problem := transform.problem(value, TASKS[spec.task].classes)
        ):
            problems.append(f"{path}{key}: {problem} (dataset {data['name']}, task {spec.task})")
    return problems + _check_augment(data.get("augment"), spec.task, f"{path}augment")


def _check_augment(chosen: Any, task: str, path: str) -> list[str]:
    from dampen.studies.data.augmentation import AUGMENTATIONS, MIRRORS, missing_for
    from dampen.studies.metrics import TASKS

    items = [] if not chosen else chosen if isinstance(chosen, list) else [chosen]
    problems = []
    for item in items:
        name = item.get("name") if isinstance(item, dict) else item
        if not isinstance(name, str):
            problems.append(
                f'{path}: expected names or tables such as {{ name = "flip" }}, got {item!r}'
            )
            continue
        if name not in AUGMENTATIONS:
            problems.append(
                f"{path}: unknown augmentation "
                f"{name!r}{hint('dampen.augmentations', name, AUGMENTATIONS)}"
            )
            continue
        problems += [f"{path}: {problem}"] if (problem := missing_for(name)) else []
        kind = AUGMENTATIONS[name]
        if task not in kind.tasks and not (TASKS[task].mirrors and name in MIRRORS):
            problems.append(
                f"{path}: {name!r} is for {' and '.join(kind.tasks)} tasks, this set is {task}"
            )
        if isinstance(item, dict):
            problems += unknown_keys(
                item, ["name", *(f.name for f in fields(kind))], f"{path}.{name}."
            )
    return problems


def check_model(model: dict[str, Any], path: str) -> list[str]:
    """Problems of the model section. timm's own arguments are left to timm, which takes any."""
    from dampen.models import MODELS

    name = model["name"]
    if name.startswith("timm/"):
        return _check_timm(name.removeprefix("timm/"), path)
    if (
        name.startswith("hf/") or ".py:" in name
    ):  # the user's own: found and hashed when the comparison was planned
        known = "fingerprint" if name.startswith("hf/") else "code"
        return (
            []
            if known in model
            else [f"{path}{known}: missing; say --model {name} to dampen compare"]
        )
    if name not in MODELS:
        return [
            f"{path}name: unknown model "
            f"{name!r}{hint('dampen.models', name, [*MODELS, 'timm/<name>'])}"
        ]
    return unknown_keys(model, ["name", *inspect.signature(MODELS[name]).parameters], path)


def _check_timm(name: str, path: str) -> list[str]:
    from dampen._torch import declare_torchvision_operators

    declare_torchvision_operators()
    try:
        import timm
    except ImportError:
        return [f"{path}name: timm/{name} needs timm; run: pip install 'dampen[timm]'"]
    return (
        []
        if timm.is_model(name)
        else [f"{path}name: timm has no model {name!r}{nearest(name, timm.list_models())}"]
    )


def task_of(data: str, model: str) -> str:
    """What a model is trained for on a data set: the task of the set, or the
    one that the model brings.

    >>> task_of("digits", "vit")
    'image'
    """
    from dampen.studies.data import DATASETS

    kind = brings_task(model)
    return DATASETS[data].spec.task if kind is None else str(kind.task)


def preset(name: str) -> dict[str, Any]:
    """What `dampen compare` trains on a data set if nothing else is given: model,
    training options, limits.

    >>> preset("digits")["model"]["name"]
    'vit'
    """
    from dampen.studies.data import DATASETS
    from dampen.studies.metrics import TASKS

    return DATASETS[name].preset or TASKS[DATASETS[name].spec.task].preset
