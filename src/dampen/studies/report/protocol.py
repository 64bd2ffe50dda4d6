"""Runs stand in one table only if they were trained and tested alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dampen.studies.errors import LabError
from dampen.studies.records.logged_run import LoggedRun

FREE = ("seed", "methods", "id", "sites")
"""What rows may differ in, beside the learning rate and the axes of the grid."""

DECLARED = ("model.", "train.", "data.augment", "pretrain", "function.params")
"""What the rows of a plan may differ in as well, because the plan says so."""

FACTS = ("examples.", "judged by", "content of the data")
"""What only a finished run knows."""


class ProtocolMismatch(LabError):
    """Runs that were trained or tested differently cannot stand in one table."""

    exit_code = 2


def protocol_of(run: LoggedRun, free: Iterable[str] = ()) -> dict[str, str]:
    """What must be equal for runs to be compared, flat, as text: data, model, training, size of the splits."""
    said = {k: v for k, v in run.config.items() if k not in FREE and v is not None}  # older runs know no pretraining
    flat = _flatten(said)
    if run.final:
        counts = run.final.data.get("examples", {})
        flat |= {f"examples.{k}": str(v) for k, v in counts.items()}
        if sums := run.final.data.get("sha256"):
            flat["content of the data"] = ", ".join(f"{k} {str(v)[:12]}" for k, v in sorted(sums.items()))
        flat["judged by"] = run.final.primary[0] or "unknown"
    for key in ("train.lr", *free):
        flat.pop(key, None)
    return flat


def check_protocol(name: str, runs: Sequence[LoggedRun], free: Iterable[str], planned: bool) -> dict[str, str]:
    """What all runs share; raises ProtocolMismatch, naming every setting and its values, if they may not be mixed."""
    flats = [protocol_of(run, free) for run in runs]
    lines = []
    for key in sorted({k for flat in flats for k in flat}):
        if planned and key.startswith(DECLARED):
            continue
        values = Counter(flat.get(key, "not set") for flat in flats if key in flat or not key.startswith(FACTS))
        if len(values) > 1:
            shown = ", ".join(f"{value} in {n} run{'s' * (n > 1)}" for value, n in values.most_common())
            lines.append(f"  - {key}: {shown}")
    if lines:
        raise ProtocolMismatch(
            f"{name} mixes incompatible protocols in one table:\n"
            + "\n".join(lines)
            + "\nReport them separately: keep each protocol in its own folder, or say --split for one table each."
        )
    first = flats[0] if flats else {}
    return {k: v for k, v in first.items() if all(flat.get(k, v) == v for flat in flats)}


def protocol_groups(runs: Iterable[LoggedRun]) -> list[list[LoggedRun]]:
    """The runs, sorted into groups of one protocol each."""
    groups: dict[str, list[LoggedRun]] = {}
    for run in runs:
        flat = {k: v for k, v in protocol_of(run).items() if not k.startswith(FACTS)}
        groups.setdefault(json.dumps(flat, sort_keys=True), []).append(run)
    return list(groups.values())


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} becomes {"a.b": "1"}."""
    if isinstance(value, Mapping):
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= _flatten(inner, f"{path}.{key}" if path else str(key))
        return flat
    return {path: value if isinstance(value, str) else json.dumps(value)}
