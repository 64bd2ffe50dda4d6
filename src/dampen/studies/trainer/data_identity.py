"""Whether data is still what recorded trials were trained on: the hashes of an official set, cheap to ask for again.

A user's own data has a fingerprint in the identity of its trials: other data makes other trials. Official sets keep
their ids, so their recorded hashes are compared instead, when a trial resumes and when one is looked up. Sizes and
times of files are looked at first; what was read under them is kept in `~/.cache/dampen/identities.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dampen.studies.data import DATASETS
from dampen.studies.data.dataset import DamagedData, MissingData
from dampen.studies.data.sets import locate
from dampen.studies.files import cached, keep, sizes_and_times
from dampen.studies.run import Run
from dampen.studies.trainer.build import load_data

CACHE = "identities.json"
Recorded = Iterable[tuple[Run, Mapping[str, Any]]]
"""Trials that are done, each with its result."""


def check_recorded(recorded: Recorded, data_dir: str | None, folder: Path) -> None:
    """Refuse to add to results whose data has changed since; data that is not here cannot be asked."""
    seen: dict[str, tuple[Run, Mapping[str, str], int]] = {}
    for trial, result in recorded:
        hashes = result.get("data", {}).get("sha256")
        if hashes and trial.function is None and "fingerprint" not in trial.data and trial.data["name"] in DATASETS:
            key = json.dumps([trial.data, hashes], sort_keys=True)
            seen[key] = (trial, hashes, seen[key][2] + 1 if key in seen else 1)
    for trial, before, count in seen.values():
        now = hashes_now(trial, data_dir)
        changed = [k for k in before if now is not None and k in now and now[k] != before[k]]
        if now is not None and changed:
            told = ", ".join(f"{k} had sha256 {before[k][:12]} and has {now[k][:12]}" for k in changed)
            place = locate(trial.data["name"], data_dir)
            raise DamagedData(
                f"The data of {trial.data['name']}{f' at {place}' if place else ''} has changed since {count} "
                f"trial{'s' * (count != 1)} in {folder} {'were' if count != 1 else 'was'} recorded: {told}. "
                "Put the data back, or keep the results of the new data apart: say another --out (folder=)."
            )


def hashes_now(trial: Run, data_dir: str | None) -> dict[str, str] | None:
    """The hashes of a trial's official set as it lies here; None where it does not."""
    mark = _mark(trial.data["name"], data_dir)
    if mark == "":
        return None
    data = {k: v for k, v in trial.data.items() if k not in ("augment", "folds", "split_seed", "test_seed")}
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
    """What tells that nothing was touched: sizes and times. None where nothing does, '' where there is no such data."""
    if name == "digits":
        return f"scikit-learn {metadata.version('scikit-learn')}"
    if name not in DATASETS or DATASETS[name].holds is None:
        return None
    place = locate(name, data_dir)
    return "" if place is None else sizes_and_times(place)
