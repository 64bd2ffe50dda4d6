"""The charts of a table: differences, results, gain against cost, curves, what a search tried, what
a bench took."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dampen.studies.metric import describe
from dampen.studies.report.figures import (
    LIGHT,
    REFERENCE_LIGHT,
    ROW,
    Column,
    Figure,
    Palette,
    Panel,
    band_chart,
    bounded,
    finish,
    known,
    note,
    part_dash,
    some,
    tip,
)
from dampen.studies.report.summary import dearer, listed, shortened, small_model_note
from dampen.studies.result import LogLine
from dampen.studies.stats import t_interval
from dampen.studies.table import TRAINED, Entry, ResultTable, axis_name

MOST_POINTS = 16
"""Names that find room beside their points."""


def results(table: ResultTable, palette: Palette) -> Figure | None:
    """Mean, 95 % interval and every single run, row by row.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
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
        records.append(
            {"row": entry.name, "mean": entry.summary.mean, "sd": known(entry.summary.sd), **spread}
        )
    shown = [r for r in records if r["row"] in names]
    seeds = [
        {"row": e.name, "value": v, "seed": s}
        for e in ranked
        if e.name in names
        for s, v in e.values.items()
    ]
    y = alt.Y("row:N", sort=names, title=None, axis=alt.Axis(labelLimit=220))
    title = table.metric.title
    scale = alt.Scale(zero=False, nice=True)
    base = alt.Chart(alt.Data(values=shown)).encode(y=y, color=palette.color(names, legend=False))
    interval = base.mark_rule(strokeWidth=2).encode(
        x=alt.X("low:Q", title=title, scale=scale), x2="high:Q"
    )
    dots = (
        alt.Chart(alt.Data(values=seeds))
        .mark_tick(thickness=1.5, height=9, opacity=0.55)
        .encode(
            x=alt.X("value:Q", title=title, scale=scale),
            y=y,
            color=palette.color(names, legend=False),
        )
    )
    tooltip = [
        tip("row:N", "row"),
        tip("mean:Q", "mean"),
        tip("sd:Q", "sd"),
        tip("low:Q", "low"),
        tip("high:Q", "high"),
    ]
    mean = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=alt.X("mean:Q", title=title, scale=scale),
        shape=palette.shape(names, legend=False),
        tooltip=[*tooltip, "n:Q"],
    )
    layers: list[Any] = [
        *([interval] if any(r["low"] is not None for r in shown) else []),
        dots,
        mean,
    ]
    if reference and reference.summary.n:
        rule = alt.Chart(alt.Data(values=[{"at": reference.summary.mean}]))
        layers.insert(
            0, rule.mark_rule(strokeDash=[4, 4], opacity=0.6).encode(x=alt.X("at:Q", title=title))
        )
    caption = "Mean (point), 95 % interval of the mean (line) and every run (tick)."
    caption += f" The dashed line is {reference.name}." if reference else ""
    columns = [ROW, Column("mean", "Mean", 2), Column("sd", "SD", 2), Column("low", "95 % low", 2)]
    columns += [Column("high", "95 % high", 2), Column("n", "n", 0)]
    spec = finish(alt.layer(*layers), max(320, 30 * len(names)))
    return Figure(
        "results",
        "Results by seed",
        caption + note(len(names), len(ranked)),
        [Panel("", spec)],
        columns,
        records,
    )


def cost(table: ResultTable, palette: Palette) -> Figure | None:
    """What a method gains against what a step costs; the line joins what nothing beats on both.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
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
        record = {
            "row": e.name,
            "ratio": e.cost.ratio,
            "mean": e.summary.mean,
            "low": low,
            "high": high,
        }
        fast, slow = e.cost.interval
        known_cost = not math.isnan(fast)
        records.append(
            record
            | {
                "fast": fast if known_cost else e.cost.ratio,
                "slow": slow if known_cost else e.cost.ratio,
            }
        )
    shown = [r for r in records if r["row"] in names]
    ratios = [r[k] for r in shown for k in ("fast", "slow")]
    axis = alt.Axis(
        format=".2f" if max(ratios) - min(ratios) > 0.1 else ".3f", labelOverlap=True, tickCount=8
    )
    x_scale, y_scale = alt.Scale(zero=False, padding=16), alt.Scale(zero=False, padding=12)
    x = alt.X("ratio:Q", title="time of a training step (baseline = 1)", scale=x_scale, axis=axis)
    y = alt.Y("mean:Q", title=table.metric.title, scale=y_scale)
    base = alt.Chart(alt.Data(values=shown)).encode(color=palette.color(names, legend=False))
    tooltip = [
        tip("row:N", "row"),
        tip("ratio:Q", "cost"),
        tip("mean:Q", "mean"),
        tip("low:Q", "low"),
    ]
    marks = base.mark_point(filled=True, size=110, opacity=1).encode(
        x=x,
        y=y,
        shape=palette.shape(names, legend=False),
        tooltip=[*tooltip, tip("high:Q", "high")],
    )
    line = (
        alt.Chart(alt.Data(values=[{"ratio": e.cost.ratio, "mean": e.summary.mean} for e in front]))
        .mark_line(interpolate="step-after", strokeDash=[3, 3], opacity=0.5)
        .encode(x=x, y=y, color=alt.value(REFERENCE_LIGHT))
    )
    span_x = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(
        x=alt.X("fast:Q", title="time of a training step (baseline = 1)", scale=x_scale, axis=axis),
        x2="slow:Q",
        y=y,
    )
    span_y = base.mark_rule(strokeWidth=1.5, opacity=0.55).encode(
        x=x, y=alt.Y("low:Q", title=table.metric.title, scale=y_scale), y2="high:Q"
    )
    layers: list[Any] = [*([line] if len(front) > 1 else []), span_x, marks]
    if any(r["low"] is not None for r in shown):
        layers.insert(-1, span_y)
    for align, dx, names_there in _labels(shown):
        colored = {"color": palette.color(names, legend=False)}
        if far := [r for r in names_there if r["moved"]]:
            away = alt.Chart(alt.Data(values=far)).mark_rule(opacity=0.35)
            layers.append(away.encode(x=x, y=alt.Y("at:Q"), y2="mean:Q", **colored))
        text = alt.Chart(alt.Data(values=names_there)).mark_text(
            align=align, dx=dx, dy=-3, baseline="bottom"
        )
        layers.append(text.encode(x=x, y=alt.Y("at:Q"), text="text:N", **colored))
    better = "Up" if table.study.mode == "max" else "Down"
    caption = (
        f"{better} and to the left is better. Lines are 95 % intervals of the mean and of the cost."
    )
    if len(front) > 1:
        caption += " The dashed line joins methods whose better mean takes a measurably more expensive step."
    note_here = small_model_note(table)
    caption += f" {note_here}" if note_here else ""
    columns = [
        ROW,
        Column("ratio", "Cost", 3),
        Column("fast", "Cost, 95 % low", 3),
        Column("slow", "Cost, 95 % high", 3),
    ]
    columns += [
        Column("mean", "Mean", 2),
        Column("low", "95 % low", 2),
        Column("high", "95 % high", 2),
    ]
    panels = [Panel("", finish(alt.layer(*layers), 420))]
    told = caption + note(len(names), len(entries))
    return Figure("cost", "Gain against cost", told, panels, columns, records, wide=True)


def _labels(shown: list[dict[str, Any]]) -> list[tuple[Any, int, list[dict[str, Any]]]]:
    """The names of the points, on the side with more room, each at a height of
    its own: (align, dx, data).

    From bottom to top each label takes the lowest free place at or above its point; those far above
    the top are moved down again, so that the chart keeps its height.
    """
    ends = [r[k] for r in shown for k in ("low", "high", "mean") if r[k] is not None]
    row = 0.05 * ((max(ends) - min(ends)) or 1.0)
    middle = (min(r["ratio"] for r in shown) + max(r["ratio"] for r in shown)) / 2
    placed: list[dict[str, Any]] = []
    for record in sorted(shown, key=lambda r: r["mean"]):
        at = max(record["mean"], placed[-1]["at"] + row) if placed else record["mean"]
        placed.append({**record, "at": at, "text": shortened(record["row"], 48)})
    ceiling = max(ends)
    for record in reversed(placed):  # push down what was pushed beyond the top
        record["at"] = min(record["at"], ceiling)
        ceiling = record["at"] - row
        record["moved"] = abs(record["at"] - record["mean"]) > 0.6 * row
    sides: dict[str, list[dict[str, Any]]] = {"left": [], "right": []}
    for record in placed:
        sides["left" if record["ratio"] <= middle else "right"].append(record)
    return [(name, 10 if name == "left" else -10, found) for name, found in sides.items() if found]


def _front(entries: list[Entry], mode: str) -> list[Entry]:
    """The methods that pay for a more expensive step with a better result, cheapest first. Costs
    that cannot be separated are equal, so a method is left out where a better one does not cost
    measurably more."""

    def beats(one: Entry, two: Entry) -> bool:
        return (one.summary.mean > two.summary.mean) == (mode == "max") and (
            one.summary.mean != two.summary.mean
        )

    front = [e for e in entries if not any(beats(o, e) and not dearer(o, e) for o in entries)]
    return sorted(front, key=lambda e: e.cost.ratio or 0.0)


MOST_DIFFERENCES = 40
"""Rows that one chart shows; the table has them all."""
VERDICTS = {
    "better": (LIGHT[0], "triangle-up"),
    "worse": (LIGHT[1], "triangle-down"),
    TRAINED: (LIGHT[0], "triangle-right"),
    "equal": (REFERENCE_LIGHT, "square"),
    "no gain": (REFERENCE_LIGHT, "diamond"),
    "inconclusive": (REFERENCE_LIGHT, "circle"),
    "failed": (LIGHT[1], "cross"),
}
"""Color and shape of each verdict: blue, orange, grey."""


def forest(table: ResultTable, palette: Palette) -> Figure | None:
    """A row per method, best first: difference (point), its corrected interval
    (line), its verdict in words.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
    import altair as alt

    entries = [e for e in table.ranked() if e.comparison and e.comparison.n and not e.same_as]
    if table.main_reference is None or not entries:
        return None
    shown = entries[:MOST_DIFFERENCES]
    records = [_difference_record(e, table) for e in entries]
    names = [e.name for e in shown]
    drawn = records[: len(shown)]
    # no name is left out on a narrow page, where names take two lines
    axis = alt.Axis(labelLimit=360, domain=False, ticks=False, labelOverlap=False)
    y = alt.Y("row:N", sort=names, title=None, axis=axis)
    unit = f" ({table.metric.points.strip()})" if table.metric.points else ""
    title = f"difference to {table.reference_name} in {table.metric.label}{unit}"
    x = alt.X(
        "difference:Q",
        title=title,
        scale=alt.Scale(zero=True, padding=12),
        axis=alt.Axis(tickCount=8),
    )
    kinds = [k for k in VERDICTS if any(r["kind"] == k for r in drawn)]
    legend = alt.Legend(title=None, orient="bottom", symbolSize=110)
    color = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[VERDICTS[k][0] for k in kinds]),
        legend=legend,
    )
    shape = alt.Shape(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=[VERDICTS[k][1] for k in kinds]),
        legend=legend,
    )
    base = alt.Chart(alt.Data(values=drawn)).encode(y=y, color=color)
    layers: list[Any] = []
    if table.margin:
        band = alt.Chart(alt.Data(values=[{"from": -table.margin, "to": table.margin}]))
        layers.append(
            band.mark_rect(opacity=0.14, color="#8a94a3").encode(
                x=alt.X("from:Q", title=title), x2="to:Q"
            )
        )
    zero = alt.Chart(alt.Data(values=[{"zero": 0}]))
    layers.append(zero.mark_rule(strokeWidth=1.2).encode(x=alt.X("zero:Q", title=title)))
    tooltip = [
        tip("row:N", "row"),
        tip("difference:Q", "difference"),
        tip("low:Q", "from"),
        tip("high:Q", "to"),
    ]
    tooltip += [tip("verdict:N", "verdict"), alt.Tooltip("n:Q", title="shared seeds")]
    if any(r["low"] is not None for r in drawn):
        layers.append(
            base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", title=title), x2="high:Q")
        )
    points = base.mark_point(filled=True, size=95, opacity=1).encode(
        x=x, shape=shape, tooltip=tooltip
    )
    layers.append(points)
    caption = (
        "Point: mean paired difference. Line: its interval, "
        "corrected as the verdict is. A line that "
        "crosses 0 is an inconclusive comparison."
    )
    if table.margin:
        caption += f" Shaded: the equivalence margin, {table.margin:g}{table.metric.points}."
    caption += (
        f" Shown are the {len(shown)} best of {len(entries)} methods."
        if len(shown) < len(entries)
        else ""
    )
    columns = [
        ROW,
        Column("difference", "Difference", 3),
        Column("low", "From", 3),
        Column("high", "To", 3),
    ]
    columns += [Column("verdict", "Verdict"), Column("n", "Shared seeds", 0)]
    spec = finish(alt.layer(*layers), max(120, 30 * len(names)))
    return Figure(
        "forest",
        "Difference from the baseline",
        caption,
        [Panel("", spec)],
        columns,
        records,
        wide=True,
        fixed=True,
    )


def _difference_record(entry: Entry, table: ResultTable) -> dict[str, Any]:
    c = entry.comparison
    if c is None:
        raise ValueError(f"{entry.name} was not compared.")
    bounds = {"low": known(c.low), "high": known(c.high)}
    difference = None if math.isnan(c.difference) else c.difference
    return {
        "row": entry.name,
        "difference": difference,
        **bounds,
        "verdict": entry.told(table.metric),
        "kind": entry.verdict,
        "n": c.n,
    }


def curves(table: ResultTable, palette: Palette) -> list[Figure]:
    """Training and validation in one chart over steps: the metric that selects, and the loss. Means
    over seeds with a band of one standard deviation; single seeds on demand.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
    entries = table.selected()
    order = {e.name: i for i, e in enumerate(table.ranked())}
    names = sorted((e.name for e in entries), key=lambda n: order.get(n, 0))
    reference = table.main_reference
    names = some(names, [reference.name] if reference else [])
    logs, damaged = _logs([e for e in entries if e.name in names])
    metric = next(
        (f.final.selection[0] for e in entries for f in e.setting.finished().values() if f.final),
        "accuracy",
    )
    every = [line for runs in logs.values() for lines in runs for line in lines]
    over = "step" if every and all(line.step for line in every) else "epoch"
    rest = note(len(names), len(entries)) + damaged
    logged = dict.fromkeys(key for line in every for key in line.valid)
    trained = {key for line in every for key in line.train}
    if metric not in logged:  # under another name than the test metric's, such as acc
        metric = next((key for key in logged if key not in LOSSES), metric)
    loss = next((key for key in LOSSES if key in logged and key != metric), "")
    fitted = next((key for key in ("task", *LOSSES) if key in trained and key != metric), "")
    without = (
        "the task's own loss without penalties" if fitted == "task" else "the loss that was logged"
    )
    title = describe(metric).title
    told = "Solid: validation. Dashed: training, where it was logged. The band is one standard deviation over seeds. "
    made = [
        _curves("curves", "Learning curves", told + "The methods are those chosen above." + rest,
                logs, over, (("validation", "valid", metric), ("training", "train", metric)), title, names, palette),
        _curves("loss", "Loss", f"Solid: validation. Dashed: training, {without}. A low "
                "training loss with a rising validation loss is overfitting.",
                logs, over, (("validation", "valid", loss), ("training", "train", fitted)), "loss", names, palette),
    ]  # fmt: skip
    return [figure for figure in made if figure is not None]


LOSSES = ("nll", "loss", "task")
"""Names under which a validation loss is logged."""
SEED_POINTS, SEED_ROWS = 40, 12
"""Points of a single seed's curve, and methods whose single seeds a page carries."""


def _logs(entries: list[Entry]) -> tuple[dict[str, list[list[LogLine]]], str]:
    """The logs of each row, and a remark if some cannot be read."""
    runs = {e.name: list(e.setting.finished().values()) for e in entries}
    damaged = [run.folder.name for found in runs.values() for run in found if run.log_damaged]
    remark = f" Damaged and left out: the log of {listed(damaged)}." if damaged else ""
    return {name: [run.lines() for run in found] for name, found in runs.items()}, remark


def _place(line: LogLine, over: str) -> float:
    return line.step if over == "step" else line.at


def _curve_records(
    logs: dict[str, list[list[LogLine]]], over: str, part: str, group: str, metric: str
) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds at each place where something was logged."""
    records = []
    for name, runs in logs.items():
        by_place: dict[float, list[float]] = {}
        for lines in runs:
            for line in lines:
                value = getattr(line, group).get(metric)
                if value is not None:
                    at = _place(line, over)
                    by_place.setdefault(at, []).append(describe(metric).scale * value)
        for place, values in _thin(by_place):
            mean = statistics.fmean(values)
            sd = statistics.stdev(values) if len(values) > 1 else 0.0
            bounds = {"low": mean - sd, "high": mean + sd, "n": len(values)}
            records.append({"row": name, "part": part, "at": place, "mean": mean, **bounds})
    return records


def _seed_records(
    logs: dict[str, list[list[LogLine]]], over: str, part: str, group: str, metric: str
) -> list[dict[str, Any]]:
    """The curve of each seed, thinned."""
    records = []
    for name, runs in list(logs.items())[:SEED_ROWS]:
        for i, lines in enumerate(runs):
            found = {
                _place(line, over): [describe(metric).scale * value]
                for line in lines
                if (value := getattr(line, group).get(metric)) is not None
            }
            records += [
                {"row": name, "part": part, "at": at, "value": values[0], "seed": i}
                for at, values in _thin(found, SEED_POINTS)
            ]
    return records


def _thin(by_place: dict[float, list[float]], most: int = 100) -> list[tuple[float, list[float]]]:
    """At most about `most` places, the last one always among them."""
    places = sorted(by_place)
    every = math.ceil(len(places) / most) or 1
    return [
        (at, by_place[at]) for i, at in enumerate(places) if i % every == 0 or i == len(places) - 1
    ]


def _curves(
    key: str,
    title: str,
    caption: str,
    logs: dict[str, list[list[LogLine]]],
    over: str,
    parts: tuple[tuple[str, str, str], ...],
    y_title: str,
    names: list[str],
    palette: Palette,
) -> Figure | None:
    """One chart with the parts (label, group of the log, name), or None where
    nothing makes a curve."""
    records = [r for part in parts if part[2] for r in _curve_records(logs, over, *part)]
    if len({r["at"] for r in records}) < 2:  # logged once, there is no curve to draw
        return None
    seeds = [r for part in parts if part[2] for r in _seed_records(logs, over, *part)]
    import altair as alt

    label = "training step" if over == "step" else "epoch"
    axis = alt.Axis(tickMinStep=1, labelOverlap=True, format="~s" if over == "step" else "")
    x = alt.X("at:Q", title=label, scale=alt.Scale(zero=False, nice=False), axis=axis)
    drawn = [part[0] for part in parts if any(r["part"] == part[0] for r in records)]
    chart = band_chart(records, x, label, y_title, names, palette, parts=drawn)
    single = (
        alt.Chart(alt.Data(values=seeds), name="seeds")
        .mark_line(strokeWidth=1, opacity=0.5)
        .encode(
            x=x,
            y=alt.Y("value:Q", scale=alt.Scale(zero=False), title=y_title),
            color=palette.color(names, lines=True),
            detail=["seed:N", "part:N"],
            strokeDash=part_dash(drawn),
        )
    )
    columns = [ROW, Column("part", "Part"), Column("at", label.capitalize(), 0)]
    columns += [Column("mean", "Mean", 4), Column("low", "Mean - SD", 4)]
    columns += [Column("high", "Mean + SD", 4), Column("n", "n", 0)]
    panel = Panel("", finish(alt.layer(chart, single), 300))
    return Figure(key, title, caption, [panel], columns, records, smooth=True, seeds=bool(seeds))


def searched(table: ResultTable, palette: Palette) -> Figure | None:
    """Every completed trial of the search; pruned ones have no final value and are only counted.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
    import altair as alt

    search = table.study.search
    metric = search.get("metric", table.study.metric)
    records: list[dict[str, Any]] = []
    pruned, logarithmic = 0, set()
    for row, found in search.get("rows", {}).items():
        logarithmic |= {a["key"] for a in found["axes"] if a["log"]}
        for trial in found.get("trials", []):
            pruned += trial["state"] == "pruned"
            if (
                trial["valid"] is not None
                and trial["state"] == "complete"
                and row in palette.colors
            ):
                value = describe(metric).scale * trial["valid"]
                records += [
                    {"row": row, "axis": k, "x": v, "valid": value}
                    for k, v in trial["values"].items()
                ]
    axes = [a for a in dict.fromkeys(r["axis"] for r in records) if _numeric(records, a)]
    if not axes:
        return None
    reference = table.main_reference
    names = some(
        list(dict.fromkeys(r["row"] for r in records)), [reference.config.name] if reference else []
    )
    title = f"validation {describe(metric).title}"
    panels = []
    for axis in axes:
        own = [r for r in records if r["axis"] == axis and r["row"] in names]
        scale = alt.Scale(type="log") if axis in logarithmic else alt.Scale(zero=False)
        chart = (
            alt.Chart(alt.Data(values=own))
            .mark_point(filled=True, size=55, opacity=0.75)
            .encode(
                x=alt.X(
                    "x:Q",
                    title=axis_name(axis),
                    scale=scale,
                    axis=alt.Axis(format="~g", labelOverlap=True),
                ),
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
        caption = f"Each point is a run of the search, {search.get('trials', '?')} per method, scored on validation"
        caption += f"; {pruned} unpromising ones were stopped early." if pruned else "."
    columns = [ROW, Column("axis", "Setting"), Column("x", "Value", 6), Column("valid", title, 3)]
    return Figure(
        "search", "Search", caption, panels, columns, records, wide=len(panels) > 2, legend=names
    )


def _numeric(records: list[dict[str, Any]], axis: str) -> bool:
    values = [r["x"] for r in records if r["axis"] == axis]
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


KINDS = (("ratios", "dampen"), ("papers", "as published"), ("alternatives", "timm, torch.nn"))


def bench_rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per mark: its row, who made it, its cost with its interval, memory and target.

    Args:
        record: what `dampen bench` measured.
    """
    return [
        {
            "row": entry.get("ours", name),
            "name": name,
            "kind": kind,
            "memory": record["memory"].get(name, {}).get("ratio"),
        }
        | {key: entry[key] for key in ("median", "low", "high")}
        | {"target": record["targets"].get(name, {}).get("target")}
        for group, kind in KINDS
        for name, entry in record[group].items()
    ]


def bench_figures(record: dict[str, Any]) -> list[Figure]:
    """Every figure for which the record has numbers.

    Args:
        record: what `dampen bench` measured.
    """
    return [
        _steps(record),
        *([_lengths(record)] if record.get("scaling", {}).get("points") else []),
    ]


def bench_chart(record: dict[str, Any]) -> Any:
    """Costs with their intervals on one axis, the papers' formulations
    beside ours (an altair chart).

    Args:
        record: what `dampen bench` measured.
    """
    import altair as alt

    rows = bench_rows(record)
    kinds = [kind for _, kind in KINDS]
    x = alt.X(
        "median:Q",
        title="cost of a training step / best baseline step",
        scale=alt.Scale(type="log", nice=False),
    )
    y = alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelLimit=320))
    colors = alt.Scale(domain=kinds, range=list(LIGHT[: len(kinds)]))
    color = alt.Color("kind:N", title=None, scale=colors, legend=alt.Legend(orient="bottom"))
    shape = alt.Shape(
        "kind:N", title=None, scale=alt.Scale(domain=kinds, range=["circle", "square", "diamond"])
    )
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, color=color)
    tooltip = [
        tip("name:N", "name"),
        tip("median:Q", "cost"),
        tip("low:Q", "low"),
        tip("high:Q", "high"),
    ]
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=x, shape=shape, tooltip=[*tooltip, tip("memory:Q", "memory")]
    )
    spans = base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=alt.X("low:Q"), x2="high:Q")
    one = alt.Chart(alt.Data(values=[{"x": 1.0}])).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    return alt.layer(one, spans, points)


def _steps(record: dict[str, Any]) -> Figure:
    rows = bench_rows(record)
    caption = (
        "Point: median of paired ratios; line: its 95 % interval; 1 is "
        "the baseline with the faster of fused and "
        "unfused attention. Memory: what a step allocates at "
        "its peak, as a multiple of the baseline's."
    )
    if record["noisy"]:
        caption += f" The intervals of {len(record['noisy'])} methods are wider than 3 %: the machine was not quiet."
    columns = [
        Column("name", "Row"),
        Column("kind", "By"),
        Column("median", "Cost", 3),
        Column("low", "95 % low", 3),
    ]
    columns += [
        Column("high", "95 % high", 3),
        Column("target", "Target", 2),
        Column("memory", "Memory", 2),
    ]
    height = 24 * len({r["row"] for r in rows}) + 40
    spec = finish(bench_chart(record), height)
    return Figure(
        "steps", "Cost of a training step", caption, [Panel("", spec)], columns, rows, wide=True
    )


def _lengths(record: dict[str, Any]) -> Figure:
    """Attention alone over the number of tokens: time and memory against the plain kernel."""
    import altair as alt

    points = record["scaling"]["points"]
    names = list(dict.fromkeys(p["row"] for p in points))
    palette = Palette(names)
    panels = []
    for key, title in (("median", "time / baseline"), ("memory_ratio", "memory / baseline")):
        x = alt.X("n:Q", title="tokens", scale=alt.Scale(type="log", base=2))
        y = alt.Y(f"{key}:Q", title=title, scale=alt.Scale(type="log", nice=False))
        look = {"color": palette.color(names, lines=True), "strokeDash": palette.dash(names)}
        chart = alt.Chart(alt.Data(values=points)).mark_line(point=True).encode(x=x, y=y, **look)
        panels.append(
            Panel(
                title,
                finish(chart.encode(tooltip=[tip("row:N", "row"), tip(f"{key}:Q", title)]), 300),
            )
        )
    columns = [
        ROW,
        Column("n", "Tokens", 0),
        Column("median", "Time", 3),
        Column("memory_ratio", "Memory", 2),
    ]
    caption = f"{record['scaling']['what']}. Both axes are logarithmic."
    return Figure(
        "lengths", "Attention over its length", caption, panels, columns, points, wide=True
    )
