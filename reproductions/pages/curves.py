"""Studies in which every row was trained over one axis (a rate, a lambda): curves, and each row at its chosen value.

Values are chosen on validation with a seed that the table does not use; each chosen row is then tested once, against
one or more references, on every seed of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.studies import (
    Entry,
    ResultTable,
    Verdict,
    describe_metric,
    judge_pairs,
    packed_text,
    sentence,
    summarize,
    t_quantile,
)
from reproductions.pages.publish import committed_report

METRICS = ("accuracy", "nll")


@dataclass(frozen=True)
class Curves:
    """One study: its table, and the grid value that validation chose for each row."""

    name: str
    table: ResultTable
    chosen: dict[str, float]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(e.config.name for e in self.table.entries))

    @property
    def seeds(self) -> int:
        """The most seeds of any point."""
        return max(e.summary.n for e in self.table.entries)

    def entry(self, row: str) -> Entry:
        """The row at its chosen value."""
        entries = [e for e in self.table.entries if e.config.name == row]
        return next(
            (e for e in entries if self.chosen.get(row) in e.setting.grid.values()), entries[0]
        )


def read(path: Path, name: str) -> Curves:
    """A packed study."""
    if (search := search_of(path)) is None:
        raise ValueError(
            f"{path.name} holds no search.json: its values were not chosen on seeds of their own."
        )
    return Curves(name, committed_report(path).tables[0], chosen(search))


def search_of(path: Path) -> Mapping[str, Any] | None:
    """What was tried on the tuning seeds of a packed study; None where nothing was."""
    packed = json.loads(packed_text(path))
    return next(
        (files["search.json"] for files in packed["folders"].values() if "search.json" in files),
        None,
    )


def chosen(search: Mapping[str, Any]) -> dict[str, float]:
    """The value of each row's only axis with the best validation."""
    best: dict[str, float] = {}
    for row, found in search["rows"].items():
        done = [t for t in found["trials"] if t["valid"] is not None]
        sign = 1 if search["mode"] == "max" else -1
        best[row] = next(iter(max(done, key=lambda t: sign * t["valid"])["values"].values()))
    return best


Family = dict[tuple[str, str, str], Verdict]
"""By study, reference and row."""
Tested = Mapping[str, Sequence[str]]
"""By reference, the rows that are compared with it."""


def family(studies: Sequence[tuple[Curves, Tested]], metric: str) -> Family:
    """Each row at its chosen value against each of its references: all of a page's studies are one family (Holm)."""
    keys = [
        (c.name, ref, row)
        for c, tested in studies
        for ref, rows in tested.items()
        for row in rows
        if row != ref
    ]
    values = {
        c.name: {row: c.entry(row).by_seed.get(metric, {}) for row in c.rows} for c, _ in studies
    }
    pairs = {"\n".join(k): (values[k[0]][k[2]], values[k[0]][k[1]]) for k in keys}
    found = judge_pairs(pairs, metric)
    return {k: found["\n".join(k)] for k in keys}


def verdicts(curves: Curves, references: Sequence[str], metric: str, found: Family) -> list[str]:
    """A table: each row at its chosen value against each reference."""
    described = describe_metric(metric)
    titles = [
        "row",
        "chosen",
        described.title,
        "n",
        *(f"against {reference}" for reference in references),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in curves.rows:
        value, summary = curves.chosen.get(row), curves.entry(row).metrics[metric]
        mean = f"{summary.mean:.{described.digits}f} ± {summary.sd:.{described.digits}f}"
        compared = [found.get((curves.name, reference, row)) for reference in references]
        told = [sentence(c, metric) if c else "" for c in compared]
        cells = [row, "" if value is None else f"{value:g}", mean, str(summary.n), *told]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def points(entry: Entry, **named: Any) -> list[dict[str, Any]]:
    """The means of one row at one value with their 95 % intervals, one for each metric, for a chart."""
    found = []
    for metric in METRICS:
        if values := list(entry.by_seed.get(metric, {}).values()):
            found.append(interval_points(values, metric=metric, **named))
    return found


def interval_points(values: Sequence[float], **named: Any) -> dict[str, Any]:
    """A mean with its 95 % interval, for a chart."""
    s = summarize(list(values))
    half = t_quantile(s.n - 1) * s.sd / s.n**0.5 if s.n > 1 else 0.0
    return {"mean": s.mean, "low": s.mean - half, "high": s.mean + half, **named}


def domain(points: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """The range of the middle nine tenths of the means: a few collapsed points would flatten everything else."""
    means = sorted(p["mean"] for p in points if p["metric"] == metric)
    cut = len(means) // 10
    inner = means[cut:] if describe_metric(metric).better == "max" else means[: len(means) - cut]
    room = 0.15 * (inner[-1] - inner[0])
    return [inner[0] - room, inner[-1] + room]
