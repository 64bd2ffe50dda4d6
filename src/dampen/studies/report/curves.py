"""Learning curves, and lines with bands in general."""

from __future__ import annotations

import math
import statistics
from typing import Any

from dampen.studies.records.metric import describe
from dampen.studies.records.result import LogLine
from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.report.figure import ROW, Column, Figure, Palette, Panel, finish, note, some, tip
from dampen.studies.report.names import listed


def curves(table: ResultTable, palette: Palette) -> list[Figure]:
    """Validation metric and training loss by epoch, mean over seeds with a band of one standard deviation."""
    entries = table.selected()
    order = {e.name: i for i, e in enumerate(table.ranked())}
    names = sorted((e.name for e in entries), key=lambda n: order.get(n, 0))
    reference = table.main_reference
    names = some(names, [reference.name] if reference else [])
    logs, damaged = _logs([e for e in entries if e.name in names])
    metric = next((f.final.selection[0] for e in entries for f in e.cell.finished().values() if f.final), "accuracy")
    made = []
    valid = _curve_records(logs, "valid", metric)
    if len({r["epoch"] for r in valid}) > 1:  # validated once, there is no curve to draw
        title = f"validation {describe(metric).title}"
        caption = "Mean over seeds; the band is one standard deviation. The rows are those chosen above."
        caption += note(len(names), len(entries)) + damaged
        made.append(_curve_figure("curves", "Learning curves", caption, valid, title, names, palette))
    loss = _curve_records(logs, "train", "task")
    if loss:
        caption = (
            "The task's own loss, without penalties. A low training loss with a poor validation curve is overfitting."
        )
        made.append(_curve_figure("loss", "Training loss", caption, loss, "training loss (task)", names, palette))
    return made


def _logs(entries: list[Entry]) -> tuple[dict[str, list[list[LogLine]]], str]:
    """The logs of each row, and a remark if some cannot be read."""
    runs = {e.name: list(e.cell.finished().values()) for e in entries}
    damaged = [run.folder.name for found in runs.values() for run in found if run.log_damaged]
    remark = f" Damaged and left out: the log of {listed(damaged)}." if damaged else ""
    return {name: [run.lines() for run in found] for name, found in runs.items()}, remark


def _curve_records(logs: dict[str, list[list[LogLine]]], group: str, metric: str) -> list[dict[str, Any]]:
    records = []
    for name, runs in logs.items():
        by_epoch: dict[float, list[float]] = {}
        for lines in runs:
            for line in lines:
                value = getattr(line, group).get(metric)
                if value is not None:
                    by_epoch.setdefault(line.at, []).append(describe(metric).scale * value)
        for epoch, values in _thin(by_epoch):
            mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
            records.append(
                {"row": name, "epoch": epoch, "mean": mean, "low": mean - sd, "high": mean + sd, "n": len(values)}
            )
    return records


def _thin(by_epoch: dict[float, list[float]], most: int = 100) -> list[tuple[float, list[float]]]:
    """At most about `most` epochs, the last one always among them."""
    epochs = sorted(by_epoch)
    every = math.ceil(len(epochs) / most) or 1
    return [(e, by_epoch[e]) for i, e in enumerate(epochs) if i % every == 0 or i == len(epochs) - 1]


def _curve_figure(
    key: str, title: str, caption: str, records: list[dict[str, Any]], y_title: str, names: list[str], palette: Palette
) -> Figure:
    columns = [ROW, Column("epoch", "Epoch", 0), Column("mean", "Mean", 4), Column("low", "Mean - SD", 4)]
    columns += [Column("high", "Mean + SD", 4), Column("n", "n", 0)]
    import altair as alt

    x = alt.X("epoch:Q", title="epoch", scale=alt.Scale(zero=False, nice=False), axis=alt.Axis(tickMinStep=1))
    chart = band_chart(records, x, "epoch", y_title, names, palette)
    return Figure(key, title, caption, [Panel("", finish(chart, 300))], columns, records, smooth=True)


def band_chart(
    records: list[dict[str, Any]],
    x: Any,
    x_title: str,
    y_title: str,
    names: list[str],
    palette: Palette,
    points: bool = False,
    legend: bool = True,
) -> Any:
    """Lines with bands, one per row; a click on the legend singles one out. `x` encodes the axis."""
    import altair as alt

    chosen = alt.selection_point(fields=["row"], bind="legend")
    y_scale = alt.Scale(zero=False)
    base = alt.Chart(alt.Data(values=records))
    band = base.mark_area().encode(
        x=x,
        y=alt.Y("low:Q", scale=y_scale, title=y_title),
        y2="high:Q",
        color=palette.color(names, legend, lines=True),
        opacity=alt.condition(chosen, alt.value(0.14), alt.value(0.0)) if legend else alt.value(0.14),
    )
    line = base.mark_line(strokeWidth=2, point=points).encode(
        x=x,
        y=alt.Y("mean:Q", scale=y_scale, title=y_title),
        color=palette.color(names, legend, lines=True),
        strokeDash=palette.dash(names, legend),
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.12)) if legend else alt.value(1.0),
    )
    tooltip = [tip("row:N", "row"), alt.Tooltip(x.shorthand, title=x_title), tip("mean:Q", "mean"), "n:Q"]
    hover = base.mark_point(size=60, opacity=0).encode(x=x, y=alt.Y("mean:Q", scale=y_scale), tooltip=tooltip)
    chart = alt.layer(band, line, hover)
    return chart.add_params(chosen) if legend else chart
