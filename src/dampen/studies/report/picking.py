"""What lets a reader choose on the page: rows that charts draw, two rows side by side, the rows of a large table."""

from __future__ import annotations

import math
from typing import Any

from dampen.studies.config.written import describe as written
from dampen.studies.records.metric import describe
from dampen.studies.records.table import ResultTable, grid_text
from dampen.studies.report.figure import CHOSEN, MOST

MOST_PAIRED = 400
"""Rows that can be set side by side; a page with more of them would carry too many numbers."""


def chosen_rows(table: ResultTable, pick: str | None) -> dict[str, Any]:
    """The rows that charts can draw, best first, and those that they draw at first: the reference and the best."""
    ranked = [e.name for e in table.ranked()]
    reference = table.main_reference
    first = [n for n in dict.fromkeys([reference.name if reference else None, pick, *ranked]) if n]
    keep = {reference.name} if reference else set()
    known = [n for i, n in enumerate(ranked) if i < MOST or n in keep]
    first = [n for n in known if n in first[:CHOSEN]]
    return {"rows": known, "first": first, "reference": reference.name if reference else first[0] if first else ""}


def pairs_view(table: ResultTable) -> dict[str, Any]:
    """Every metric of every row by seed, and what the row is, so that two can be compared in the page."""
    metrics = [describe(m) for m in (table.study.metric, *table.other_metrics())]
    rows = {}
    for entry in table.ranked()[:MOST_PAIRED]:
        seeds = {
            seed: [entry.by_seed.get(m.name, {}).get(seed) for m in metrics]
            for seed in sorted(entry.values, key=_order)
        }
        what = written(entry.row.methods) + (f"; {grid_text(entry.cell.grid)}" if entry.cell.grid else "")
        rows[entry.name] = {"what": what, "seeds": seeds, "cost": entry.cost.ratio}
    return {"metrics": [{"title": m.title, "digits": m.digits} for m in metrics], "names": list(rows), "rows": rows}


def _order(seed: str) -> tuple[int, str]:
    return (int(seed) if seed.lstrip("-").isdigit() else 0, seed)


def rows_view(table: ResultTable) -> dict[str, Any]:
    """All rows of a large table as plain records, which the page shows a part at a time."""
    others = table.other_metrics()
    heads = [("Row", None), ("Verdict", None), ("Cost", 2), (table.metric.title, table.metric.digits), ("SD", 3)]
    heads += [("Difference", 3), ("From", 3), ("To", 3), ("n", 0), ("p", 3)]
    heads += [(describe(m).title, describe(m).digits) for m in others]
    records = []
    for e in table.listed():
        c = e.comparison
        shown = [c.difference, c.low, c.high] if c else [math.nan] * 3
        record = [e.name, e.told(table.metric), e.cost.ratio, e.summary.mean, e.summary.sd, *shown, e.summary.n]
        record += [c.corrected if c else None]
        records.append(record + [s.mean if (s := e.metrics.get(m)) else None for m in others])
    return {"columns": [{"title": t, "digits": d} for t, d in heads], "records": records}
