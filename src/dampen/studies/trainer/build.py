"""From the plain data of a trial to its parts: seeds, data set, augmentation, model."""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dampen.extensions import hint
from dampen.names import nearest
from dampen.studies.data.dataset import TEST_SEED
from dampen.studies.data.sets import TRANSFORMS
from dampen.studies.data.splits import fold_of
from dampen.studies.errors import ConfigError
from dampen.studies.trainer.own_models import built_model, hub_model
from dampen.studies.trainer.parts import Parts

MODEL = "model"
"""Said for a data set's tokenizer: the one of the model's folder."""


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
def _load(arguments: str, data_dir: str | None, mark: Any = None) -> Any:
    """Loaded once; `mark` changes when the files do."""
    from dampen.studies.data import load

    options = json.loads(arguments)
    return load(options.pop("name"), data_dir=data_dir, **options)


def load_data(data: dict[str, Any], data_dir: str | None, parts: Parts | None = None, seed: int = 0) -> Any:
    """The data set of a trial; workers that stay alive load it once for each split.

    `split_seed = "seed"` draws train and validation by the trial's own seed, `test_seed` likewise a test split that is
    not official. Without them the draw is that of records from before they were written: seed 0 and the fixed test.
    Transforms are always drawn by the trial's seed, so that methods of one seed meet the same data.
    """
    from dampen.studies.data.sets import locate

    requested = {key: data[key] for key in TRANSFORMS if data.get(key)}
    if requested:
        loaded = load_data({k: v for k, v in data.items() if k not in requested}, data_dir, parts, seed)
        for key, value in requested.items():
            loaded = TRANSFORMS[key].apply(loaded, value, derive(seed, key))
        return loaded
    known = ("augment", "source", "fingerprint", "code", "folds", *TRANSFORMS)
    options = {k: v for k, v in data.items() if k not in known}
    drawn = {"seed": options.pop("split_seed", 0), "test_seed": options.pop("test_seed", TEST_SEED)}
    if data.get("folds"):
        pooled = load_data(
            {k: v for k, v in data.items() if k not in ("folds", "split_seed", "test_seed")}, data_dir, parts
        )
        return fold_of(pooled, data["folds"], seed, data.get("train_fraction", 0.7))
    options |= {key: seed if chosen == "seed" else chosen for key, chosen in drawn.items()}
    parts = parts or Parts()
    if data["name"] == "function":
        return _load_own(data, parts, json.dumps(options, sort_keys=True))
    if options.get("tokenizer") == MODEL:
        options["tokenizer"] = parts.model
    place = parts.data if parts.data is not None else data_dir
    files = Path(parts.data) if parts.data is not None else locate(data["name"], data_dir)
    loaded = _load(json.dumps(options, sort_keys=True), place, _newest(files))
    if "fingerprint" in data:
        _check_fingerprint(data["fingerprint"], parts.data or loaded.root)
    return loaded


def _newest(path: Path | None) -> tuple[int, int]:
    """Sizes and times of the files of a set, added up: data that is changed between two trials is read again."""
    from dampen.studies.files import files_of

    stats = [file.stat() for file in files_of(path)] if path is not None and path.exists() else []
    return sum(s.st_size for s in stats), sum(s.st_mtime_ns for s in stats)


def _check_fingerprint(planned: str, place: Any) -> None:
    """The data must be what the trial was planned with; sizes and times are looked at, and hashes where they differ."""
    from dampen.studies.data.dataset import DamagedData
    from dampen.studies.files import fingerprint

    found = fingerprint(place)
    if found != planned:
        raise DamagedData(
            f"The data at {place} has changed: its fingerprint is {found}, the trial was planned with {planned}. "
            "Other data makes other trials: start the comparison again, or put the data back."
        )


@lru_cache(maxsize=1)
def _own_parts(function: str) -> dict[str, Any]:
    return {}


def _load_own(data: dict[str, Any], parts: Parts, arguments: str) -> Any:
    """What the user's own function returns, read once per process."""
    from dampen.studies.data.arrays import content_hash, function_dataset, read_function
    from dampen.studies.data.dataset import DamagedData

    if parts.read is None:
        raise ConfigError("The trial", [f"data.name: the function {data.get('source')} is not at hand"])
    kept = _own_parts(parts.read.code.digest)
    if "parts" not in kept:
        kept["parts"] = read_function(parts.read.load(), parts.read.code.name)
        kept["hash"] = content_hash(kept["parts"])
    if kept["hash"] != data["fingerprint"]:
        raise DamagedData(
            f"{parts.read.code.name} returned other data than when the trial was planned (fingerprint {kept['hash']}, "
            f"not {data['fingerprint']}). It must return the same each time; draw with a fixed seed."
        )
    options = {k: v for k, v in json.loads(arguments).items() if k != "name"}
    cuts = {"train_fraction": 0.7, "limit": None} | {k: v for k, v in options.items() if k != "partial"}
    return function_dataset(kept["parts"], parts.read.code.name, kept["hash"], **cuts)


def places(sites: str) -> dict[str, Any]:
    """Where a trial's methods sit, as `regularize` takes it: `cross:PATTERN` and `self:PATTERN` choose the attention.

    >>> places("*"), places("cross:*")
    ({'sites': '*'}, {'sites': '*', 'attention': 'cross'})
    """
    kind, colon, pattern = sites.partition(":")
    return {"sites": pattern, "attention": kind} if colon and kind in ("self", "cross", "all") else {"sites": sites}


def make_augment(chosen: Any, data: Any) -> Any:
    """The augmentations of a trial as a function of a batch and a generator, or None."""
    from dampen.studies.data import augment

    return augment(chosen, data) if chosen else None


def make_model(model: dict[str, Any], from_data: dict[str, Any], parts: Parts | None = None) -> nn.Module:
    """The model of a trial; what the data decides (classes, sizes, vocabulary) need not be said again."""
    from dampen.models import MODELS, build_model

    name, own = model["name"], {k: v for k, v in model.items() if k not in ("name", "code", "fingerprint")}
    if name.startswith("hf/"):
        return hub_model((parts or Parts()).model, model, own, from_data)
    if ".py:" in name:
        return built_model((parts or Parts()).build, name, own, from_data)
    if name.startswith("timm/"):
        return _timm_model(name.removeprefix("timm/"), own, from_data)
    if name not in MODELS:
        raise ConfigError(
            "The trial", [f"model.name: unknown model {name!r}{hint('dampen.models', name, [*MODELS, 'timm/<name>'])}"]
        )
    takes = inspect.signature(MODELS[name]).parameters
    return build_model(name, **{**{k: v for k, v in from_data.items() if k in takes}, **own})


def _timm_model(name: str, own: dict[str, Any], from_data: dict[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise ConfigError("The trial", [f"model.name: timm has no model {name!r}{nearest(name, timm.list_models())}"])
    arguments = {"num_classes": from_data.get("classes"), "in_chans": from_data.get("channels")}
    given = {**{k: v for k, v in arguments.items() if v is not None}, **own}
    size = from_data.get("image_size")
    if size is None or "img_size" in given:
        return timm.create_model(name, **given)
    try:
        return timm.create_model(name, img_size=size, **given)
    except TypeError as error:
        if "img_size" not in str(error):  # a convolutional network takes images of any size
            raise
        return timm.create_model(name, **given)
