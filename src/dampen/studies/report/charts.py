"""The charts that answer first: results, and gain against cost."""

from __future__ import annotations

from typing import Any

from dampen.studies.records.stats import t_interval
from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.report.advice import small_model_note
from dampen.studies.report.figure import (
    REFERENCE_LIGHT,
    ROW,
    Column,
    Figure,
    Palette,
    Panel,
    bounded,
    finish,
    known,
    note,
    some,
    tip,
)
from dampen.studies.report.names import shortened

MOST_POINTS = 16
"""Names that find room beside their points."""


def results(table: ResultTable, palette: Palette) -> Figure | None:
    """Mean, 95 % interval and every single run, row by row."""
    import altair as alt

    ranked = table.ranked()
    if not ranked:
        return None
    reference = table.main_reference
    names = some([e.name for e in ranked], [reference.name] if reference else [], 24)
    records = []
    for entry in ranked:
        low, high = bounded(t_interval(list(entry.values.values())), table.study.metric)
        spread = {"low": low, "high": high, "n": entry.summary.n}
        records.append({"row": entry.name, "mean": entry.summary.mean, "sd": known(entry.summary.sd), **spread})
    shown = [r for r in records if r["row"] in names]
    seeds = [{"row": e.name, "value": v, "seed": s} for e in ranked if e.name in names for s, v in e.values.items()]
    y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=220))
    title = table.metric.title
    scale = alt.Scale(zero=False, nice=True)
    base = alt.Chart(alt.Data(values=shown)).encode(y=y, color=palette.color(names, legend=False))
    interval = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=title, scale=scale), x2="high:Q")
    dots = (
        alt.Chart(alt.Data(values=seeds))
        .mark_tick(thickness=1.5, height=9, opacity=0.55)
        .encode(x=alt.X("value:Q", title=title, scale=scale), y=y, color=palette.color(names, legend=False))
    )
    tooltip = [
        tip("row:N", "row"),
        tip("mean:Q", "mean"),
        tip("sd:Q", "sd"),
        tip("low:Q", "low"),
        tip("high:Q", "high"),
    ]
    mean = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("mean:Q", title=title, scale=scale), shape=palette.shape(names, legend=False), tooltip=[*tooltip, "n:Q"]
    )
    layers: list[Any] = [*([interval] if any(r["low"] is not None for r in shown) else []), dots, mean]
    if reference and reference.summary.n:
        rule = alt.Chart(alt.Data(values=[{"at": reference.summary.mean}]))
        layers.insert(0, rule.mark_rule(strokeDash=[4, 4], opacity=0.6).encode(x=alt.X("at:Q", title=title)))
    caption = "Mean (point), 95 % interval of the mean (line) and every run (tick)."
    caption += f" The dashed line is {reference.name}." if reference else ""
    columns = [ROW, Column("mean", "Mean", 2), Column("sd", "SD", 2), Column("low", "95 % low", 2)]
    columns += [Column("high", "95 % high", 2), Column("n", "n", 0)]
    spec = finish(alt.layer(*layers), max(320, 30 * len(names)))
    return Figure(
        "results", "Spread over seeds", caption + note(len(names), len(ranked)), [Panel("", spec)], columns, records
    )


def cost(table: ResultTable, palette: Palette) -> Figure | None:
    """What a method gains against what a step costs; the line joins what nothing beats on both."""
    import altair as alt

    entries = [e for e in table.ranked() if e.cost.ratio]
    if len(entries) < 2:
        return None
    reference = table.main_reference
    names = some([e.name for e in entries], [reference.name] if reference else [], MOST_POINTS)
    front = _front([e for e in entries if e.name in names], table.study.mode)
    records: list[dict[str, Any]] = []
    for e in entries:
        low, high = bounded(t_interval(list(e.values.values())), table.study.metric)
        record = {"row": e.name, "ratio": e.cost.ratio, "mean": e.summary.mean, "low": low, "high": high}
        records.append(record | {"fast": e.cost.low or e.cost.ratio, "slow": e.cost.high or e.cost.ratio})
    shown = [r for r in records if r["row"] in names]
    ratios = [r[k] for r in shown for k in ("fast", "slow")]
    axis = alt.Axis(format=".2f" if max(ratios) - min(ratios) > 0.1 else ".3f", labelOverlap=True, tickCount=8)
    x_scale, y_scale = alt.Scale(zero=False, padding=16), alt.Scale(zero=False, padding=12)
    x = alt.X("ratio:Q", title="time of a training step (reference = 1)", scale=x_scale, axis=axis)
    y = alt.Y("mean:Q", title=table.metric.title, scale=y_scale)
    base = alt.Chart(alt.Data(values=shown)).encode(color=palette.color(names, legend=False))
    tooltip = [tip("row:N", "row"), tip("ratio:Q", "cost"), tip("mean:Q", "mean"), tip("low:Q", "low")]
    marks = base.mark_point(filled=True, size=110, opacity=1).encode(
        x=x, y=y, shape=palette.shape(names, legend=False), tooltip=[*tooltip, tip("high:Q", "high")]
    )
    line = (
        alt.Chart(alt.Data(values=[{"ratio": e.cost.ratio, "mean": e.summary.mean} for e in front]))
        .mark_line(interpolate="step-after", strokeDash=[3, 3], opacity=0.5)
        .encode(x=x, y=y, color=alt.value(REFERENCE_LIGHT))
    )
    layers: list[Any] = [line, marks]
    for align, dx, names_there in _labels(shown):
        colored = {"color": palette.color(names, legend=False)}
        if far := [r for r in names_there if r["moved"]]:
            away = alt.Chart(alt.Data(values=far)).mark_rule(opacity=0.35)
            layers.append(away.encode(x=x, y=alt.Y("at:Q"), y2="mean:Q", **colored))
        text = alt.Chart(alt.Data(values=names_there)).mark_text(align=align, dx=dx, baseline="middle")
        layers.append(text.encode(x=x, y=alt.Y("at:Q"), text="text:N", **colored))
    better = "Up" if table.study.mode == "max" else "Down"
    caption = f"{better} and to the left is better; intervals are in the chart of differences and in the numbers. "
    caption += "The dashed line joins the rows that no other beats on both."
    note_here = small_model_note(table)
    caption += f" {note_here}" if note_here else ""
    columns = [ROW, Column("ratio", "Cost", 3), Column("fast", "lowest", 3), Column("slow", "highest", 3)]
    columns += [Column("mean", "Mean", 2), Column("low", "95 % low", 2), Column("high", "95 % high", 2)]
    panels = [Panel("", finish(alt.layer(*layers), 420))]
    told = caption + note(len(names), len(entries))
    return Figure("cost", "Gain against cost", told, panels, columns, records, wide=True)


def _labels(shown: list[dict[str, Any]]) -> list[tuple[Any, int, list[dict[str, Any]]]]:
    """The names of the points, on the side with more room, at heights where they do not overlap: (align, dx, data).

    From bottom to top each label takes the lowest free place at or above its point; those far above the top are moved
    down again, so that the chart keeps its height.
    """
    means = [r["mean"] for r in shown]
    row = 0.05 * ((max(means) - min(means)) or 1.0)
    middle = (min(r["ratio"] for r in shown) + max(r["ratio"] for r in shown)) / 2
    sides: dict[str, list[dict[str, Any]]] = {"left": [], "right": []}
    for record in sorted(shown, key=lambda r: r["mean"]):
        side = sides["left" if record["ratio"] <= middle else "right"]
        at = max(record["mean"], side[-1]["at"] + row) if side else record["mean"]
        side.append({**record, "at": at, "text": shortened(record["row"], 48)})
    for side in sides.values():
        ceiling = max(means) + row
        for record in reversed(side):  # push down what was pushed beyond the top
            record["at"] = min(record["at"], ceiling)
            ceiling = record["at"] - row
            record["moved"] = abs(record["at"] - record["mean"]) > 0.6 * row
    return [(name, 10 if name == "left" else -10, found) for name, found in sides.items() if found]


def _front(entries: list[Entry], mode: str) -> list[Entry]:
    """The rows that no other beats on both cost and result, cheapest first."""
    front: list[Entry] = []
    for entry in sorted(
        entries, key=lambda e: (e.cost.ratio or 0.0, -e.summary.mean if mode == "max" else e.summary.mean)
    ):
        better = not front or (entry.summary.mean > front[-1].summary.mean) == (mode == "max")
        if better and (not front or entry.summary.mean != front[-1].summary.mean):
            front.append(entry)
    return front
