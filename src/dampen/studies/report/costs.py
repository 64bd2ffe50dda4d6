"""What `dampen bench` measured, as figures: the cost of a step with each method, and of attention over its length."""

from __future__ import annotations

from typing import Any

from dampen.studies.report.figure import LIGHT, ROW, Column, Figure, Palette, Panel, finish, tip

KINDS = (("ratios", "dampen"), ("papers", "as published"), ("alternatives", "timm, torch.nn"))


def bench_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per mark: the row it stands in, who made it, its cost with its interval, memory and target."""
    return [
        {"row": entry.get("ours", name), "name": name, "kind": kind, "memory": record["memory"][name]["ratio"]}
        | {key: entry[key] for key in ("median", "low", "high")}
        | {"target": record["targets"].get(name, {}).get("target")}
        for group, kind in KINDS
        for name, entry in record[group].items()
    ]


def bench_figures(record: dict[str, Any]) -> list[Figure]:
    """Every figure for which the record has numbers."""
    return [_steps(record), *([_lengths(record)] if record.get("scaling", {}).get("points") else [])]


def bench_chart(record: dict[str, Any]) -> Any:
    """Costs with their intervals on one axis, the papers' formulations beside ours (an altair chart)."""
    import altair as alt

    rows = bench_rows(record)
    kinds = [kind for _, kind in KINDS]
    x = alt.X("median:Q", title="cost of a training step / best plain step", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=320))
    colors = alt.Scale(domain=kinds, range=list(LIGHT[: len(kinds)]))
    color = alt.Color("kind:N", title=None, scale=colors, legend=alt.Legend(orient="bottom"))
    shape = alt.Shape("kind:N", title=None, scale=alt.Scale(domain=kinds, range=["circle", "square", "diamond"]))
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, color=color)
    tooltip = [tip("name:N", "name"), tip("median:Q", "cost"), tip("low:Q", "low"), tip("high:Q", "high")]
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=x, shape=shape, tooltip=[*tooltip, tip("memory:Q", "memory")]
    )
    spans = base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=alt.X("low:Q"), x2="high:Q")
    one = alt.Chart(alt.Data(values=[{"x": 1.0}])).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(one, spans, points)


def _steps(record: dict[str, Any]) -> Figure:
    rows = bench_rows(record)
    caption = (
        "Point: median of paired ratios; line: its 95 % interval; 1 is the plain model with the faster of fused and "
        "unfused attention. Memory: what a step allocates at its peak, as a multiple of the plain step's."
    )
    if record["noisy"]:
        caption += f" The intervals of {len(record['noisy'])} rows are wider than 3 %: the machine was not quiet."
    columns = [Column("name", "Row"), Column("kind", "By"), Column("median", "Cost", 3), Column("low", "95 % low", 3)]
    columns += [Column("high", "95 % high", 3), Column("target", "Target", 2), Column("memory", "Memory", 2)]
    height = 24 * len({r["row"] for r in rows}) + 40
    spec = finish(bench_chart(record), height)
    return Figure("steps", "Cost of a training step", caption, [Panel("", spec)], columns, rows, wide=True)


def _lengths(record: dict[str, Any]) -> Figure:
    """Attention alone over the number of tokens: time and memory against the plain kernel."""
    import altair as alt

    points = record["scaling"]["points"]
    names = list(dict.fromkeys(p["row"] for p in points))
    palette = Palette(names)
    panels = []
    for key, title in (("median", "time / plain"), ("memory_ratio", "memory / plain")):
        x = alt.X("n:Q", title="tokens", scale=alt.Scale(type="log", base=2))
        y = alt.Y(f"{key}:Q", title=title, scale=alt.Scale(type="log", nice=False))
        look = {"color": palette.color(names, lines=True), "strokeDash": palette.dash(names)}
        chart = alt.Chart(alt.Data(values=points)).mark_line(point=True).encode(x=x, y=y, **look)
        panels.append(Panel(title, finish(chart.encode(tooltip=[tip("row:N", "row"), tip(f"{key}:Q", title)]), 300)))
    columns = [ROW, Column("n", "Tokens", 0), Column("median", "Time", 3), Column("memory_ratio", "Memory", 2)]
    caption = f"{record['scaling']['what']}. Both axes are logarithmic."
    return Figure("lengths", "Attention over its length", caption, panels, columns, points, wide=True)
