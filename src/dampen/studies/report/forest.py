"""The differences to the reference with the intervals that belong to the verdicts; the margin is shaded."""

from __future__ import annotations

import math
from typing import Any

from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.report.figure import ROW, Column, Figure, Palette, Panel, finish, known, tip

MOST = 40
"""Rows that one chart shows; the table has them all."""


def forest(table: ResultTable, palette: Palette) -> Figure | None:
    """A row per method, best first: difference (point), its corrected interval (line), its verdict in words."""
    import altair as alt

    entries = [e for e in table.ranked() if e.comparison and e.comparison.n and not e.same_as]
    if table.main_reference is None or not entries:
        return None
    shown = entries[:MOST]
    records = [_record(e, table) for e in entries]
    names = [e.name for e in shown]
    drawn = records[: len(shown)]
    y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=360, domain=False, ticks=False))
    unit = f" ({table.metric.points.strip()})" if table.metric.points else ""
    title = f"difference to {table.reference_name} in {table.metric.label}{unit}"
    x = alt.X("difference:Q", title=title, scale=alt.Scale(zero=True, padding=12), axis=alt.Axis(tickCount=8))
    base = alt.Chart(alt.Data(values=drawn)).encode(y=y, color=palette.color(names, legend=False))
    layers: list[Any] = []
    if table.margin:
        band = alt.Chart(alt.Data(values=[{"from": -table.margin, "to": table.margin}]))
        layers.append(band.mark_rect(opacity=0.14, color="#8a94a3").encode(x=alt.X("from:Q", title=title), x2="to:Q"))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}]))
    layers.append(zero.mark_rule(strokeWidth=1.2).encode(x=alt.X("zero:Q", title=title)))
    tooltip = [tip("row:N", "row"), tip("difference:Q", "difference"), tip("low:Q", "from"), tip("high:Q", "to")]
    tooltip += [tip("verdict:N", "verdict"), alt.Tooltip("n:Q", title="shared seeds")]
    if any(r["low"] is not None for r in drawn):
        layers.append(base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", title=title), x2="high:Q"))
    points = base.mark_point(filled=True, size=95, opacity=1).encode(
        x=x, shape=palette.shape(names, legend=False), tooltip=tooltip
    )
    layers.append(points)
    caption = "Point: mean paired difference; line: its interval, corrected as the verdict is, so that a line across 0 "
    caption += "is a row that is not decided."
    if table.margin:
        caption += (
            f" Shaded: the margin, {table.margin:g}{table.metric.points}, below which a difference does not matter."
        )
    caption += f" Shown are the {len(shown)} best of {len(entries)} rows." if len(shown) < len(entries) else ""
    columns = [ROW, Column("difference", "Difference", 3), Column("low", "From", 3), Column("high", "To", 3)]
    columns += [Column("verdict", "Verdict"), Column("n", "Shared seeds", 0)]
    spec = finish(alt.layer(*layers), max(120, 30 * len(names)))
    return Figure("forest", "What was shown", caption, [Panel("", spec)], columns, records, wide=True, fixed=True)


def _record(entry: Entry, table: ResultTable) -> dict[str, Any]:
    c = entry.comparison
    if c is None:
        raise ValueError(f"{entry.name} was not compared.")
    bounds = {"low": known(c.low), "high": known(c.high)}
    difference = None if math.isnan(c.difference) else c.difference
    return {"row": entry.name, "difference": difference, **bounds, "verdict": entry.told(table.metric), "n": c.n}
