"""The gradient's variance over training, from logs of trials that measured it (`train.variance_every`)."""

from __future__ import annotations

import statistics
from typing import Any

from dampen.studies import Entry, ResultTable
from dampen.studies.plugins import (
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


def gradient_variance(table: ResultTable, palette: Palette) -> Figure | None:
    """tr Cov of the mini-batch gradient by step; mean and one standard deviation over seeds.

    Args:
        table: the runs of a study.
        palette: the color and dash of each configuration.
    """
    import altair as alt

    entries = [e for e in table.ranked() if measured(e)]
    if not entries:
        return None
    reference = table.main_reference
    names = some([e.name for e in entries], [reference.name] if reference else [])
    records = [record for e in entries if e.name in names for record in measured(e)]
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
    chart = band_chart(
        records, x, "step", "trace of the gradient's covariance", names, palette, points=True
    )
    caption = "Trace of the covariance of the mini-batch gradient at the weights of that step, over a few batches of "
    caption += "the training part with the methods at work: mean over seeds, with a band of one standard deviation."
    columns = [
        ROW,
        Column("step", "Step", 0),
        Column("mean", "Mean", 5),
        Column("sd", "SD over seeds", 5),
    ]
    title = "Gradient variance over training"
    panels = [Panel("", finish(chart, 300))]
    columns.append(Column("n", "n", 0))
    return Figure(
        "variance", title, caption + note(len(names), len(entries)), panels, columns, records
    )


def measured(entry: Entry) -> list[dict[str, Any]]:
    """One record per step that every finished run measured or some did."""
    by_step: dict[float, list[float]] = {}
    for run in entry.setting.finished().values():
        for found in (m for line in run.lines() for m in line.measured("variance")):
            step, trace = found.get("step"), found.get("trace")
            if step is not None and trace is not None:
                by_step.setdefault(step, []).append(trace)
    records = []
    for step, values in sorted(by_step.items()):
        mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        where = {"row": entry.name, "step": step, "mean": mean, "sd": sd}
        records.append({**where, "low": mean - sd, "high": mean + sd, "n": len(values)})
    return records
