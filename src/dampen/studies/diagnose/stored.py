"""The diagnosis of a trial in its folder, beside what training recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from dampen.studies.diagnose.measure import SECTIONS, Settings
from dampen.studies.files import read_json, write_json
from dampen.studies.records.diagnosis import parse_diagnosis
from dampen.studies.records.record import RunStore
from dampen.studies.report.stored import MEASURED


def keep(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write the diagnosis where `dampen report` looks for it; sections of this trial that were measured before stay,
    with the settings they were measured with."""
    import torch

    from dampen.studies.records.environment import describe

    before = _read(folder)
    old = before if before.get("trial") == result["trial"] else {}
    merged = {k: v for k, v in {**old, **result}.items() if k not in result["skipped"]}
    skipped = {**old.get("skipped", {}), **result["skipped"]}
    merged["skipped"] = {name: why for name, why in skipped.items() if name not in merged}
    now = dict.fromkeys(result["seconds"], result["settings"])
    merged["measured_with"] = {**_measured_with(old), **now}
    merged["seconds"] = {**old.get("seconds", {}), **result["seconds"]}
    merged["environment"] = describe(torch.get_num_threads(), "cpu")
    plain: dict[str, Any] = _plain(merged)
    parse_diagnosis(plain)  # what the report reads
    write_json(folder / MEASURED, plain)
    return plain


def kept(folder: Path, settings: Settings, only: Sequence[str] = ()) -> dict[str, Any] | None:
    """What was measured before, if it is of this trial, with these settings, and has all that is asked for."""
    found = _read(folder)
    wanted = [name for name in SECTIONS if not only or name in only]
    if found.get("trial") != RunStore(folder).trial().id:
        return None
    used, asked = _measured_with(found), _plain(asdict(settings))
    return found if all(used.get(name) == asked for name in wanted) else None


def _measured_with(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of each section; records of the first kind had the same for all."""
    return found.get("measured_with") or dict.fromkeys(found.get("seconds", {}), found.get("settings"))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MEASURED
    if not path.exists():
        return {}
    found = read_json(path)
    parse_diagnosis(found)
    return cast(dict[str, Any], found)


def _plain(value: Any) -> Any:
    """As JSON has it: tuples are lists, and what is not a finite number is null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
