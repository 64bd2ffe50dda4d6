"""What a search tried: validation against each value that was varied, one panel per axis."""

from __future__ import annotations

from typing import Any

from dampen.studies.records.metric import describe
from dampen.studies.records.table import ResultTable, axis_name
from dampen.studies.report.figure import ROW, Column, Figure, Palette, Panel, finish, some, tip


def searched(table: ResultTable, palette: Palette) -> Figure | None:
    """Every completed trial of the search; pruned ones have no final value and are only counted."""
    import altair as alt

    search = table.study.search
    metric = search.get("metric", table.study.metric)
    records: list[dict[str, Any]] = []
    pruned, logarithmic = 0, set()
    for row, found in search.get("rows", {}).items():
        logarithmic |= {a["key"] for a in found["axes"] if a["log"]}
        for trial in found.get("trials", []):
            pruned += trial["state"] == "pruned"
            if trial["valid"] is not None and trial["state"] == "complete" and row in palette.colors:
                value = describe(metric).scale * trial["valid"]
                records += [{"row": row, "axis": k, "x": v, "valid": value} for k, v in trial["values"].items()]
    axes = [a for a in dict.fromkeys(r["axis"] for r in records) if _numeric(records, a)]
    if not axes:
        return None
    reference = table.main_reference
    names = some(list(dict.fromkeys(r["row"] for r in records)), [reference.row.name] if reference else [])
    title = f"validation {describe(metric).title}"
    panels = []
    for axis in axes:
        own = [r for r in records if r["axis"] == axis and r["row"] in names]
        scale = alt.Scale(type="log") if axis in logarithmic else alt.Scale(zero=False)
        chart = (
            alt.Chart(alt.Data(values=own))
            .mark_point(filled=True, size=55, opacity=0.75)
            .encode(
                x=alt.X("x:Q", title=axis_name(axis), scale=scale, axis=alt.Axis(format="~g", labelOverlap=True)),
                y=alt.Y("valid:Q", title=title, scale=alt.Scale(zero=False)),
                color=palette.color(names, legend=False),
                shape=palette.shape(names, legend=False),
                tooltip=[
                    tip("row:N", "row"),
                    alt.Tooltip("x:Q", title=axis_name(axis), format=".3~g"),
                    tip("valid:Q", "valid"),
                ],
            )
        )
        panels.append(Panel(axis_name(axis), finish(chart, 220)))
    if "settings" in search:
        caption = f"Each point is a setting, its mean on validation over {len(search['seeds'])} tuning seeds."
    else:
        caption = f"Each point is a trial of the search, {search.get('trials', '?')} per row, scored on validation"
        caption += f"; {pruned} hopeless ones were cut short." if pruned else "."
    columns = [ROW, Column("axis", "Setting"), Column("x", "Value", 6), Column("valid", title, 3)]
    return Figure("search", "Search", caption, panels, columns, records, wide=len(panels) > 2, legend=names)


def _numeric(records: list[dict[str, Any]], axis: str) -> bool:
    values = [r["x"] for r in records if r["axis"] == axis]
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
