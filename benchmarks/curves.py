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

from dampen.studies.records.metric import describe
from dampen.studies.records.stats import t_quantile
from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.records.verdict import Comparison, judge, sentence
from dampen.studies.report import make_report
from dampen.studies.report.stored import packed_text

METRICS = ("accuracy", "nll")


@dataclass(frozen=True)
class Curves:
    """One study: its table, and the grid value that validation chose for each row."""

    name: str
    table: ResultTable
    chosen: dict[str, float]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(e.row.name for e in self.table.entries))

    @property
    def seeds(self) -> int:
        """The most seeds of any point."""
        return max(e.summary.n for e in self.table.entries)

    def entry(self, row: str) -> Entry:
        """The row at its chosen value."""
        entries = [e for e in self.table.entries if e.row.name == row]
        return next((e for e in entries if self.chosen.get(row) in e.cell.grid.values()), entries[0])


def read(path: Path, name: str) -> Curves:
    """A packed study."""
    if (search := search_of(path)) is None:
        raise ValueError(f"{path.name} holds no search.json: its values were not chosen on seeds of their own.")
    return Curves(name, make_report([path]).tables[0], chosen(search))


def search_of(path: Path) -> Mapping[str, Any] | None:
    """What was tried on the tuning seeds of a packed study; None where nothing was."""
    packed = json.loads(packed_text(path))
    return next((files["search.json"] for files in packed["folders"].values() if "search.json" in files), None)


def chosen(search: Mapping[str, Any]) -> dict[str, float]:
    """The value of each row's only axis with the best validation."""
    best: dict[str, float] = {}
    for row, found in search["rows"].items():
        done = [t for t in found["trials"] if t["valid"] is not None]
        sign = 1 if search["mode"] == "max" else -1
        best[row] = next(iter(max(done, key=lambda t: sign * t["valid"])["values"].values()))
    return best


def judged(curves: Curves, reference: str, rows: Sequence[str], metric: str) -> dict[str, Comparison]:
    """Each of the rows at its chosen value against the reference at its own, as one family."""
    taking_part = [row for row in curves.rows if row in (reference, *rows)]
    return judge({row: curves.entry(row).by_seed.get(metric, {}) for row in taking_part}, reference, metric)


def verdicts(curves: Curves, tested: Mapping[str, Sequence[str]], metric: str) -> list[str]:
    """A table: each row at its chosen value against each reference; `tested` names the rows that each is tested with,
    which are one family (Holm)."""
    described = describe(metric)
    against = {reference: judged(curves, reference, rows, metric) for reference, rows in tested.items()}
    titles = ["row", "chosen", described.title, "n", *(f"against {reference}" for reference in tested)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in curves.rows:
        value, summary = curves.chosen.get(row), curves.entry(row).metrics[metric]
        mean = f"{summary.mean:.{described.digits}f} ± {summary.sd:.{described.digits}f}"
        told = [sentence(found[row], metric) if row in found else "" for found in against.values()]
        cells = [row, "" if value is None else f"{value:g}", mean, str(summary.n), *told]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def points(entry: Entry, **named: Any) -> list[dict[str, Any]]:
    """The means of one row at one value with their 95 % intervals, one for each metric, for a chart."""
    found = []
    for metric in METRICS:
        if (s := entry.metrics.get(metric)) is not None and s.n:
            half = t_quantile(s.n - 1) * s.sd / s.n**0.5 if s.n > 1 else 0.0
            found.append({"metric": metric, "mean": s.mean, "low": s.mean - half, "high": s.mean + half, **named})
    return found


def domain(points: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """The range of the middle nine tenths of the means: a few collapsed points would flatten everything else."""
    means = sorted(p["mean"] for p in points if p["metric"] == metric)
    cut = len(means) // 10
    inner = means[cut:] if describe(metric).better == "max" else means[: len(means) - cut]
    room = 0.15 * (inner[-1] - inner[0])
    return [inner[0] - room, inner[-1] + room]
