"""A diagnosis for people, one line per model and more where there is only one; and as kept in the folder of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.table import Table

from dampen.studies.diagnose.measure import SECTIONS, Settings
from dampen.studies.files import read_json, write_json
from dampen.studies.report.packs import MEASURED
from dampen.studies.result import parse_diagnosis
from dampen.studies.store import RunStore

FEW = 3


def diagnosis_table(results: Sequence[dict[str, Any]]) -> Table:
    """What the sections print: a few models side by side with everything, many
    models in a line each.

    Args:
        results: one diagnosis per model.
    """
    title = (
        f"{results[0]['data']['name']}: {results[0]['settings']['examples']} test examples at most"
    )
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    few = len(results) <= FEW
    shown = {
        title: (name, cell)
        for name, section in SECTIONS.items()
        for title, cell in section.columns.items()
        if (few or title in section.short) and any(r.get(name) for r in results)
    }
    cells = {
        title: [_cell(cell, r.get(name)) for r in results] for title, (name, cell) in shown.items()
    }
    table.add_column("")
    if few:
        for result in results:
            table.add_column(result["name"], justify="right", overflow="fold")
        for title, found in cells.items():
            table.add_row(title, *found)
        return table
    for title in cells:
        table.add_column(title, justify="right", no_wrap=True)
    for i, result in enumerate(results):
        table.add_row(result["name"], *(found[i] for found in cells.values()))
    return table


def layers_table(result: dict[str, Any]) -> Table | None:
    """Attention and conditioning by layer; None where neither was measured.

    Args:
        result: a diagnosis.
    """
    attention = {layer["name"]: layer for layer in result.get("attention", {}).get("layers", [])}
    conditions = {layer["name"]: layer for layer in result.get("conditioning", [])}
    if not attention and not conditions:
        return None
    kinds = list(dict.fromkeys(k for layer in conditions.values() for k in layer if k != "name"))
    table = Table(
        box=None,
        pad_edge=False,
        title="by layer; conditioning as mean ln kappa",
        title_justify="left",
    )
    for column in ("", "entropy", "of the largest", "head similarity", *kinds):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for name in dict.fromkeys([*attention, *conditions]):
        own, condition = attention.get(name, {}), conditions.get(name, {})
        cells = [_number(own.get(k)) for k in ("entropy_mean", "entropy_share", "head_similarity")]
        table.add_row(name, *cells, *(_number(condition.get(k, {}).get("log_mean")) for k in kinds))
    return table


def _cell(text: Callable[[Any], str], found: Any) -> str:
    """One cell of the table; a dash where a section was not measured, or not whole."""
    if not found:
        return "-"
    try:
        return text(found)
    except (KeyError, TypeError, ValueError):
        return "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def keep(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write the diagnosis where `dampen report` looks for it; sections of this trial that were measured before stay,
    with the settings they were measured with.

    Args:
        folder: the folder.
        result: a diagnosis.
    """
    import torch

    from dampen.studies.environment import describe

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
    """What was measured before, if it is of this trial, with these settings, and has all that is asked for.

    Args:
        folder: the folder.
        settings: how much to measure.
        only: names of sections; empty: all.
    """
    found = _read(folder)
    wanted = [name for name in SECTIONS if not only or name in only]
    if found.get("trial") != RunStore(folder).trial().id:
        return None
    used, now = _measured_with(found), _plain(settings.to_dict())
    for name in wanted:
        before = used.get(name) or {}
        if {
            key: before.get(key) for key in now
        } != now:  # a setting that exists no more decides nothing
            return None
    return found


def _measured_with(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of each section; records of the first kind had the same for all."""
    return found.get("measured_with") or dict.fromkeys(
        found.get("seconds", {}), found.get("settings")
    )


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
