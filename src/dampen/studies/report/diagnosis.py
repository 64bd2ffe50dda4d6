"""Charts of what `dampen diagnose` measured on the trained models; each appears
only where there is data.

A run's diagnose.json may hold, each optional:

    calibration  a dampen.diagnostics.Calibration as plain data (its `reliability` is drawn)
    attention    {"layers": [{"entropy_share", "head_similarity"}]}

Figures of other sections come from plug-ins, which use `diagnosed` and `measured`.
"""

from __future__ import annotations

import statistics
from typing import Any

from dampen.studies.report.figures import (
    ROW,
    Column,
    Figure,
    Palette,
    Panel,
    band_chart,
    finish,
    note,
    some,
)
from dampen.studies.table import Entry, ResultTable

PANELS = 12
"""Configurations that have panels of their own."""
Values = dict[float, list[float]]
"""The values of all seeds at each place of the x axis."""


def diagnosed(table: ResultTable) -> tuple[list[Entry], str]:
    """The configurations with diagnosed runs that are drawn, and a remark if some are left out.

    Args:
        table: the runs of a study.
    """
    found = [e for e in table.ranked() if any(r.measured for r in e.setting.finished().values())]
    reference = table.main_reference
    names = some([e.name for e in found], [reference.name] if reference else [], PANELS)
    shown = [e for e in found if e.name in names]
    return shown, note(len(shown), len(found))


def measured(entry: Entry, section: str) -> list[Any]:
    """What `dampen diagnose` found in one section, for every finished run that has it.

    Args:
        entry: the configuration.
        section: a key of diagnose.json.
    """
    runs = entry.setting.finished().values()
    return [found for run in runs if (found := run.measured.section(section))]


def measured_figures(table: ResultTable, palette: Palette) -> list[Figure]:
    """The figures for which some run was diagnosed.

    Args:
        table: the runs of a study.
        palette: the color, shape and dash of each configuration.
    """
    entries, remark = diagnosed(table)
    makers = (calibration, attention_by_layer)
    figures = [figure for make in makers if (figure := make(entries, palette)) is not None]
    for figure in figures:
        figure.caption += remark
    return figures


def calibration(entries: list[Entry], palette: Palette) -> Figure | None:
    """Reliability diagrams: accuracy against confidence, with the bins of all seeds pooled.

    Args:
        entries: the configurations to draw.
        palette: their colors.
    """
    import altair as alt

    panels, records = [], []
    for entry in entries:
        sections = measured(entry, "calibration")
        bins = _pooled([s["reliability"] for s in sections if s.get("reliability")])
        if not bins:
            continue
        records += [{"row": entry.name, **b} for b in bins]
        unit: dict[str, Any] = {"scale": alt.Scale(domain=[0, 1]), "axis": alt.Axis(format=".1f")}
        bars = (
            alt.Chart(alt.Data(values=bins))
            .mark_rect(opacity=0.8, color=palette.colors[entry.name])
            .encode(
                x=alt.X("low:Q", title="confidence", **unit),
                x2="high:Q",
                y=alt.Y("accuracy:Q", title="accuracy", **unit),
                y2=alt.datum(0),
                tooltip=[
                    alt.Tooltip(f"{key}:Q", format=".3f")
                    for key in ("confidence", "accuracy", "share")
                ],
            )
        )
        diagonal = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}]))
        line = diagonal.mark_line(strokeDash=[4, 4], opacity=0.7).encode(x="x:Q", y="y:Q")
        error = 100 * sum(b["share"] * abs(b["accuracy"] - b["confidence"]) for b in bins)
        panels.append(Panel(f"{entry.name}: ECE {error:.1f} %", finish(alt.layer(bars, line), 170)))
    if not panels:
        return None
    caption = (
        "A calibrated model has its bars on the dashed line. Bars below the line mean "
        "overconfidence. The predictions of all seeds are pooled."
    )
    columns = [
        ROW,
        Column("low", "From", 3),
        Column("high", "To", 3),
        Column("confidence", "Confidence", 3),
        Column("accuracy", "Accuracy", 3),
        Column("count", "Predictions", 0),
    ]
    wide = len(panels) > 2
    return Figure("calibration", "Calibration", caption, panels, columns, records, wide=wide)


def _pooled(diagrams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bins of several runs as one: counts add up and means are weighted by them."""
    bins: dict[tuple[float, float], list[tuple[int, float, float]]] = {}
    for d in diagrams:
        columns = (d[key] for key in ("low", "high", "count", "confidence", "accuracy"))
        for low, high, count, confidence, accuracy in zip(*columns, strict=True):
            if count:
                bins.setdefault((low, high), []).append((count, confidence, accuracy))
    total = sum(count for found in bins.values() for count, _, _ in found)
    pooled = []
    for (low, high), found in sorted(bins.items()):
        n = sum(count for count, _, _ in found)
        confidence, accuracy = (sum(f[0] * f[i] for f in found) / n for i in (1, 2))
        record = {"low": low, "high": high, "count": n, "share": n / total}
        pooled.append(record | {"confidence": confidence, "accuracy": accuracy})
    return pooled


MEASURES = {
    "entropy_share": "entropy, as a share of the largest",
    "head_similarity": "similarity of the heads",
}


def attention_by_layer(entries: list[Entry], palette: Palette) -> Figure | None:
    """Entropy of the attention weights and similarity of the heads, layer by layer.

    Args:
        entries: the configurations to draw.
        palette: their colors and dashes.
    """
    import altair as alt

    records: list[dict[str, Any]] = []
    for entry in entries:
        for key, title in MEASURES.items():
            by_layer: Values = {}
            for found in measured(entry, "attention"):
                for i, layer in enumerate(found["layers"]):
                    if layer.get(key) is not None:
                        by_layer.setdefault(i + 1, []).append(layer[key])
            records += over_seeds(entry, title, by_layer)
    if not records:
        return None
    caption = (
        "With a low entropy, attention rests on few tokens. With a high similarity, the heads "
        "attend to the same tokens. "
    )
    axis = alt.Axis(tickMinStep=1, format="d")
    x = alt.X("x:Q", title="layer", scale=alt.Scale(zero=False), axis=axis)
    return line_panels("heads", "Attention by layer", caption, records, ("layer", x), None, palette)


def over_seeds(entry: Entry, panel: str, values: Values) -> list[dict[str, Any]]:
    """Mean and one standard deviation over seeds at each x.

    Args:
        entry: the configuration.
        panel: the panel that shows them.
        values: the values of all seeds at each x.
    """
    records = []
    for x, found in sorted(values.items()):
        mean = statistics.fmean(found)
        sd = statistics.stdev(found) if len(found) > 1 else 0.0
        record = {"row": entry.name, "panel": panel, "x": x, "mean": mean}
        records.append(record | {"low": mean - sd, "high": mean + sd, "n": len(found)})
    return records


def line_panels(
    key: str,
    title: str,
    caption: str,
    records: list[dict[str, Any]],
    x: tuple[str, Any],
    y_title: str | None,
    palette: Palette,
    wide: bool = False,
) -> Figure:
    """One panel of lines with bands for each kind of record.

    Args:
        key: of the figure.
        title: of the figure.
        caption: its first sentences.
        records: from `over_seeds`.
        x: the title of the axis and its encoding.
        y_title: None takes the panel's name.
        palette: colors and dashes.
        wide: whether the figure takes the page's width.
    """
    legend = list(dict.fromkeys(r["row"] for r in records))
    kinds = list(dict.fromkeys(r["panel"] for r in records))
    panels = []
    for kind in kinds:
        here = [r for r in records if r["panel"] == kind]
        y = kind if y_title is None else y_title
        chart = band_chart(here, x[1], x[0], y, legend, palette, points=True, legend=False)
        panels.append(Panel(kind if len(kinds) > 1 else "", finish(chart, 220)))
    columns = [
        ROW,
        Column("panel", "Measure"),
        Column("x", x[0], 2),
        Column("mean", "Mean", 4),
        Column("low", "Mean - SD", 4),
        Column("high", "Mean + SD", 4),
        Column("n", "n", 0),
    ]
    caption += "Lines are means over seeds, with a band of one standard deviation."
    return Figure(key, title, caption, panels, columns, records, wide=wide, legend=legend)
