"""The seeds and the dataset of a run, and whether the dataset is still the recorded one.

A user's own data has a fingerprint in the identity of its runs: other data makes other runs.
Official datasets keep their ids, so their recorded hashes are compared instead, when a run resumes
and when one is looked up. Sizes and times of files are compared first; what was read under them is
cached in `~/.cache/dampen/identities.json`."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dampen.studies.data import DATASETS
from dampen.studies.data.dataset import TEST_SEED, DamagedData, MissingData
from dampen.studies.data.sets import TRANSFORMS, locate
from dampen.studies.data.splits import fold_of
from dampen.studies.errors import ConfigError
from dampen.studies.files import cached, keep, sizes_and_times
from dampen.studies.run import Run
from dampen.studies.trainer.user_function import Parts

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


def load_data(
    data: dict[str, Any], data_dir: str | None, parts: Parts | None = None, seed: int = 0
) -> Any:
    """The data set of a trial; workers that stay alive load it once for each split.

    `split_seed = "seed"` draws train and validation by the trial's own seed, `test_seed` likewise a
    test split that is not official. Without them the draw is that of records from before they were
    written: seed 0 and the fixed test. Transforms are always drawn by the trial's seed, so that
    methods of one seed meet the same data."""
    from dampen.studies.data.sets import locate

    requested = {key: data[key] for key in TRANSFORMS if data.get(key)}
    if requested:
        loaded = load_data(
            {k: v for k, v in data.items() if k not in requested}, data_dir, parts, seed
        )
        for key, value in requested.items():
            loaded = TRANSFORMS[key].apply(loaded, value, derive(seed, key))
        return loaded
    known = ("augment", "source", "fingerprint", "code", "folds", *TRANSFORMS)
    options = {k: v for k, v in data.items() if k not in known}
    drawn = {"seed": options.pop("split_seed", 0), "test_seed": options.pop("test_seed", TEST_SEED)}
    if data.get("folds"):
        pooled = load_data(
            {k: v for k, v in data.items() if k not in ("folds", "split_seed", "test_seed")},
            data_dir,
            parts,
        )
        return fold_of(pooled, data["folds"], seed, data.get("train_fraction", 0.7))
    options |= {key: seed if chosen == "seed" else chosen for key, chosen in drawn.items()}
    parts = parts or Parts()
    if data["name"] == "function":
        return _load_function(data, parts, json.dumps(options, sort_keys=True))
    if options.get("tokenizer") == MODEL:
        options["tokenizer"] = parts.model
    place = parts.data if parts.data is not None else data_dir
    files = Path(parts.data) if parts.data is not None else locate(data["name"], data_dir)
    loaded = _load(json.dumps(options, sort_keys=True), place, _newest(files))
    if "fingerprint" in data:
        _check_fingerprint(data["fingerprint"], parts.data or loaded.root)
    return loaded


def _newest(path: Path | None) -> tuple[int, int]:
    """Sizes and times of the files of a set, added up: data that is changed between two trials is
    read again.
    """
    from dampen.studies.files import files_of

    stats = [file.stat() for file in files_of(path)] if path is not None and path.exists() else []
    return sum(s.st_size for s in stats), sum(s.st_mtime_ns for s in stats)


def _check_fingerprint(planned: str, place: Any) -> None:
    """The data must be what the trial was planned with; sizes and times are looked at, and hashes
    where they differ.
    """
    from dampen.studies.data.dataset import DamagedData
    from dampen.studies.files import fingerprint

    found = fingerprint(place)
    if found != planned:
        raise DamagedData(
            f"The data at {place} has changed: its fingerprint is {found}, the trial was planned "
            f"with {planned}. "
            "Other data makes other trials: start the comparison again, or put the data back."
        )


@lru_cache(maxsize=1)
def _cached_function(function: str) -> dict[str, Any]:
    return {}


def _load_function(data: dict[str, Any], parts: Parts, arguments: str) -> Any:
    """What the user's own function returns, read once per process."""
    from dampen.studies.data.arrays import content_hash, function_dataset, read_function
    from dampen.studies.data.dataset import DamagedData

    if parts.read is None:
        raise ConfigError(
            "The trial", [f"data.name: the function {data.get('source')} is not at hand"]
        )
    kept = _cached_function(parts.read.code.digest)
    if "parts" not in kept:
        kept["parts"] = read_function(parts.read.load(), parts.read.code.name)
        kept["hash"] = content_hash(kept["parts"])
    if kept["hash"] != data["fingerprint"]:
        raise DamagedData(
            f"{parts.read.code.name} returned other data than when the trial was planned "
            f"(fingerprint {kept['hash']}, "
            f"not {data['fingerprint']}). It must return the same each time; draw with a fixed "
            "seed."
        )
    options = {k: v for k, v in json.loads(arguments).items() if k != "name"}
    cuts = {"train_fraction": 0.7, "limit": None} | {
        k: v for k, v in options.items() if k != "partial"
    }
    return function_dataset(kept["parts"], parts.read.code.name, kept["hash"], **cuts)


def places(sites: str) -> dict[str, Any]:
    """Where a trial's methods sit, as `regularize` takes it: `cross:PATTERN` and `self:PATTERN`
    choose the attention.

    >>> places("*"), places("cross:*")
    ({'target_modules': '*'}, {'target_modules': '*', 'attention': 'cross'})
    """
    kind, colon, pattern = sites.partition(":")
    if colon and kind in ("self", "cross", "all"):
        return {"target_modules": pattern, "attention": kind}
    return {"target_modules": sites}


def make_augment(chosen: Any, data: Any) -> Any:
    """The augmentations of a trial as a function of a batch and a generator, or None."""
    from dampen.studies.data import augment

    return augment(chosen, data) if chosen else None


CACHE = "identities.json"
Recorded = Iterable[tuple[Run, Mapping[str, Any]]]
"""Trials that are done, each with its result."""


def check_recorded(recorded: Recorded, data_dir: str | None, folder: Path) -> None:
    """Raise where results would be added whose data has changed since; missing data passes."""
    seen: dict[str, tuple[Run, Mapping[str, str], int]] = {}
    for trial, result in recorded:
        hashes = result.get("data", {}).get("sha256")
        if (
            hashes
            and trial.function is None
            and "fingerprint" not in trial.data
            and trial.data["name"] in DATASETS
        ):
            key = json.dumps([trial.data, hashes], sort_keys=True)
            seen[key] = (trial, hashes, seen[key][2] + 1 if key in seen else 1)
    for trial, before, count in seen.values():
        now = hashes_now(trial, data_dir)
        changed = [k for k in before if now is not None and k in now and now[k] != before[k]]
        if now is not None and changed:
            changes = ", ".join(
                f"{k} had sha256 {before[k][:12]} and has {now[k][:12]}" for k in changed
            )
            place = locate(trial.data["name"], data_dir)
            raise DamagedData(
                f"The data of {trial.data['name']}{f' at {place}' if place else ''} has changed "
                f"since {count} "
                f"trial{'s' * (count != 1)} in {folder} {'were' if count != 1 else 'was'} "
                f"recorded: {changes}. "
                "Put the data back, or keep the results of the new data apart: say another --out "
                "(folder=)."
            )


def hashes_now(trial: Run, data_dir: str | None) -> dict[str, str] | None:
    """The hashes of a trial's official set as it lies here; None where it does not."""
    mark = _mark(trial.data["name"], data_dir)
    if mark == "":
        return None
    data = {
        k: v
        for k, v in trial.data.items()
        if k not in ("augment", "folds", "split_seed", "test_seed")
    }
    key = hashlib.sha256(json.dumps([data, mark], sort_keys=True).encode()).hexdigest()[:32]
    known = cached(CACHE).get(key)
    if mark is not None and isinstance(known, dict):
        return known
    try:
        found: dict[str, str] = load_data(data, data_dir).info.get("sha256", {})
    except MissingData:
        return None
    if mark is not None:
        keep(CACHE, {key: found})
    return found


def _mark(name: str, data_dir: str | None) -> str | None:
    """Evidence that nothing was touched: sizes and times. None where nothing does, '' where there
    is no such data.
    """
    if name == "digits":
        return f"scikit-learn {metadata.version('scikit-learn')}"
    if name not in DATASETS or DATASETS[name].holds is None:
        return None
    place = locate(name, data_dir)
    return "" if place is None else sizes_and_times(place)
