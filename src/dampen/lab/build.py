"""From the plain data of a trial to its parts: seeds, data set, augmentation, model."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn

from dampen.lab.check import nearest
from dampen.lab.errors import ConfigError


def derive(seed: int, *names: object) -> int:
    """A seed for one purpose: streams for different purposes never meet.

    >>> derive(0, "init") == derive(0, "init"), derive(0, "init") == derive(0, "order", 1)
    (True, False)
    """
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@lru_cache(maxsize=2)
def _load(arguments: str, data_dir: str | None) -> Any:
    from dampen.lab.data import load

    options = json.loads(arguments)
    return load(options.pop("name"), data_dir=data_dir, **options)


def load_data(data: dict[str, Any], data_dir: str | None) -> Any:
    """The data set of a trial; workers that stay alive load it once."""
    options = {k: v for k, v in data.items() if k != "augment"}
    options["seed"] = options.pop("split_seed", 0)
    return _load(json.dumps(options, sort_keys=True), data_dir)


def task_of(data: str, model: str) -> str:
    """What a model is trained for on a data set: the set's own task, but a masked autoencoder reconstructs.

    >>> task_of("digits", "vit"), task_of("digits", "mae")
    ('image', 'reconstruction')
    """
    from dampen.lab.data import DATASETS

    return "reconstruction" if model == "mae" else DATASETS[data].task


def make_augment(chosen: Any, data: Any) -> Any:
    """The augmentations of a trial as a function of a batch and a generator, or None."""
    from dampen.lab.data import augment

    return augment(chosen, data) if chosen else None


def make_model(model: dict[str, Any], from_data: dict[str, Any]) -> nn.Module:
    """The model of a trial; what the data decides (classes, sizes, vocabulary) need not be said again."""
    from dampen.models import MODELS, build_model

    name, own = model["name"], {k: v for k, v in model.items() if k != "name"}
    if name.startswith("timm/"):
        return _timm_model(name.removeprefix("timm/"), own, from_data)
    if name not in MODELS:
        raise ConfigError("The trial", [f"model.name: unknown model {name!r}{nearest(name, [*MODELS, 'timm/<name>'])}"])
    takes = inspect.signature(MODELS[name]).parameters
    return build_model(name, **{**{k: v for k, v in from_data.items() if k in takes}, **own})


def _timm_model(name: str, own: dict[str, Any], from_data: dict[str, Any]) -> nn.Module:
    from dampen.torchvision_cure import cure_torchvision

    cure_torchvision()
    import timm

    if not timm.is_model(name):
        raise ConfigError("The trial", [f"model.name: timm has no model {name!r}{nearest(name, timm.list_models())}"])
    arguments = {"num_classes": from_data.get("classes"), "in_chans": from_data.get("channels")}
    return timm.create_model(name, **{**{k: v for k, v in arguments.items() if v is not None}, **own})
