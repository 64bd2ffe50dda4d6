"""Choosing one of several settings by validation, on seeds of their own: means, ties, edges.

The best mean over the tuning seeds wins. A setting that has no number on one of them cannot win unless all settings
lack one. Settings with the same mean tie, and the one in the middle of them is taken, so that no order of writing
decides. A choice at the end of its axis is reported, because a better one may lie beyond.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dampen.studies.config.design import Axis

SAME = 1e-9
"""Means that differ by less, in parts of the larger, are the same: sums in another order."""


@dataclass
class Tried:
    """A setting with what validation said of it, by tuning seed; None where a run gave no number."""

    values: dict[str, Any]
    by_seed: dict[str, float | None]
    ids: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    extension: bool = False

    @property
    def numbers(self) -> list[float]:
        return [v for v in self.by_seed.values() if v is not None and math.isfinite(v)]

    @property
    def complete(self) -> bool:
        return bool(self.by_seed) and len(self.numbers) == len(self.by_seed)

    @property
    def mean(self) -> float | None:
        """Over the tuning seeds that gave a number."""
        return statistics.fmean(self.numbers) if self.numbers else None


@dataclass
class Selection:
    """The chosen setting, which others tie with it, which cannot be told from it, and the axes at whose end it lies."""

    chosen: Tried
    tied: int  # settings with the best mean, the chosen one included
    alike: int  # settings within one standard error of the chosen one, over tuning seeds, itself included
    edges: list[tuple[str, bool]]  # axes, and whether the choice lies at their upper end


def select(tried: Sequence[Tried], axes: Sequence[Axis], mode: str) -> Selection | None:
    """The choice among settings; None where no run of any gave a number."""
    most = max((len(t.numbers) for t in tried), default=0)
    if not most:
        return None
    fit = [t for t in tried if t.complete] or [t for t in tried if len(t.numbers) == most]
    sign = 1 if mode == "max" else -1
    best = max(sign * t.mean for t in fit if t.mean is not None)
    tied = [t for t in fit if t.mean is not None and best - sign * t.mean <= SAME * max(1.0, abs(best))]
    chosen = _middle(tied, axes)
    alike = sum(t is chosen or _alike(t, chosen) for t in fit)
    return Selection(chosen, len(tied), alike, _edges(chosen, tried, axes))


def _middle(tied: Sequence[Tried], axes: Sequence[Axis]) -> Tried:
    """The setting nearest to the median of the tied ones on every axis; of two as near, that nearer to the middle of
    the range, then the one further up."""
    places = [[_place(a, t) for a in axes] for t in tied]
    median = [statistics.median(column) for column in zip(*places, strict=True)]

    def order(i: int) -> tuple[float, float, float]:
        away = sum((p - m) ** 2 for p, m in zip(places[i], median, strict=True))
        outside = sum((p - 0.5) ** 2 for p in places[i])
        return round(away, 9), round(outside, 9), -sum(places[i])

    return tied[min(range(len(tied)), key=order)]


def _place(axis: Axis, tried: Tried) -> float:
    return axis.place(tried.values[axis.key])


def _alike(one: Tried, other: Tried) -> bool:
    """Whether the difference over shared seeds is at most its standard error: too little to tell them apart."""
    pairs = [(one.by_seed.get(s), v) for s, v in other.by_seed.items()]
    gaps = [a - b for a, b in pairs if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)]
    if len(gaps) < 2:
        return bool(gaps) and not any(gaps)
    return abs(statistics.fmean(gaps)) <= statistics.stdev(gaps) / math.sqrt(len(gaps))


def _edges(chosen: Tried, tried: Sequence[Tried], axes: Sequence[Axis]) -> list[tuple[str, bool]]:
    found = []
    for axis in axes:
        if not axis.ordered:
            continue
        values = sorted({t.values[axis.key] for t in tried})
        if len(values) > 1 and chosen.values[axis.key] in (values[0], values[-1]):
            found.append((axis.key, chosen.values[axis.key] == values[-1]))
    return found


def remarks(row: Mapping[str, Any]) -> list[str]:
    """What a reader must know of a row's selection, from its record, in words."""
    told, count = [], row["tried"]
    if not row.get("axes"):
        told.append("nothing to tune")
    if row.get("chosen") is None:
        return [*told, "selection: no setting gave a number"] if row.get("axes") else told
    if row.get("tied", 1) > 1:
        told.append(f"selection: {row['tied']} of {count} settings tie; the middle one was taken")
    elif row.get("alike", 1) > 1:
        told.append(f"selection: {row['alike']} of {count} settings are within one standard error of the chosen one")
    for edge in row.get("edges", []):
        range_ = "range, which was extended once" if edge["extended"] else "range"
        told.append(
            f"{edge['axis'].rsplit('.', 1)[-1]} {edge['value']:g} lies at the {edge['end']} end of its {range_}"
        )
    left = [e for e in row.get("extended", []) if e["axis"] not in [edge["axis"] for edge in row.get("edges", [])]]
    for one in left:
        told.append(f"the range of {one['axis'].rsplit('.', 1)[-1]} was extended once to {one['to']:g}")
    return told
