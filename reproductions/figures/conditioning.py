"""Condition numbers: by layer, from `dampen diagnose`; over training, from logs (`train.condition_every`)."""

from __future__ import annotations

import math
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
    diagnosed,
    finish,
    measured,
    note,
    some,
)

STAGES = {
    "tokens": "tokens entering the block",
    "attention": "attention output, without the skip",
    "attention+skip": "attention output, with the skip",
    "ffn": "feed-forward output, without the skip",
    "ffn+skip": "feed-forward output, with the skip",
}


def conditioning(table: ResultTable, palette: Palette) -> Figure | None:
    """Condition numbers by layer, one panel per place where `dampen diagnose` measured them.

    Args:
        table: the runs of a study.
        palette: the color and dash of each configuration.
    """
    import altair as alt

    entries, remark = diagnosed(table)
    records: list[dict[str, Any]] = []
    for entry in entries:
        runs = measured(entry, "conditioning")
        for stage in STAGES:
            by_layer: dict[int, list[float]] = {}
            for layers in runs:
                for i, layer in enumerate(layers):
                    if stage in layer:
                        by_layer.setdefault(i + 1, []).append(layer[stage]["log_mean"])
            for i, values in sorted(by_layer.items()):
                point = {"row": entry.name, "stage": STAGES[stage], "layer": i, "n": len(values)}
                records.append(point | {"value": math.exp(statistics.fmean(values))})
    if not records:
        return None
    domain = [
        min(r["value"] for r in records),
        max(r["value"] for r in records),
    ]  # one for all panels
    scale = alt.Scale(type="log", nice=False, domain=domain, padding=6)
    panels = []
    for stage in dict.fromkeys(r["stage"] for r in records):
        own = [r for r in records if r["stage"] == stage]
        names = [e.name for e in entries if e.name in {r["row"] for r in own}]
        y = alt.Y(
            "value:Q",
            scale=scale,
            title="condition number",
            axis=alt.Axis(format="~s"),
        )
        chart = (
            alt.Chart(alt.Data(values=own))
            .mark_line(point=True)
            .encode(
                x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0)),
                y=y,
                color=palette.color(names, legend=False),
                strokeDash=palette.dash(names, legend=False),
                tooltip=[
                    alt.Tooltip("row:N"),
                    alt.Tooltip("layer:O"),
                    alt.Tooltip("value:Q", format=".3~s"),
                ],
            )
        )
        panels.append(Panel(stage, finish(chart, 220)))
    caption = "Ratio of the largest to the smallest singular value of the token matrix, geometric mean over seeds, "
    caption += "on a logarithmic axis. Lower is better conditioned; the skip connection should bring it down."
    caption += remark
    columns = [
        ROW,
        Column("stage", "Where"),
        Column("layer", "Layer", 0),
        Column("value", "Condition number", 1),
    ]
    columns.append(Column("n", "n", 0))
    legend = [e.name for e in entries if e.name in {r["row"] for r in records}]
    title = "Conditioning by layer"
    return Figure(
        "conditioning", title, caption, panels, columns, records, wide=True, legend=legend
    )


def conditioning_over_training(table: ResultTable, palette: Palette) -> Figure | None:
    """ln kappa by step, one panel per place: the mean over layers in the chart, every layer in the numbers.

    Args:
        table: the runs of a study.
        palette: the color and dash of each configuration.
    """
    import altair as alt

    entries = [e for e in table.ranked() if over_training(e)]
    if not entries:
        return None
    reference = table.main_reference
    names = some([e.name for e in entries], [reference.name] if reference else [])
    points = [p for e in entries if e.name in names for p in over_training(e)]
    panels = []
    for stage, title in STAGES.items():
        own = _over_layers([p for p in points if p["stage"] == title])
        if own:
            x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
            chart = band_chart(
                own,
                x,
                "step",
                "mean ln condition number",
                names,
                palette,
                points=True,
                legend=False,
            )
            panels.append(Panel(STAGES[stage], finish(chart, 220)))
    caption = "ln of the largest over the smallest singular value of each image's tokens, on validation images: mean "
    caption += "over layers and seeds, with a band of one standard deviation over seeds. Lower is better conditioned. "
    caption += "The numbers below are by layer." + note(len(names), len(entries))
    columns = [
        ROW,
        Column("stage", "Where"),
        Column("layer", "Layer", 0),
        Column("step", "Step", 0),
    ]
    columns += [
        Column("mean", "Mean ln condition number", 2),
        Column("sd", "SD over seeds", 2),
        Column("n", "n", 0),
    ]
    records = _over_seeds(points)
    return Figure(
        "training",
        "Conditioning over training",
        caption,
        panels,
        columns,
        records,
        wide=True,
        legend=names,
    )


def over_training(entry: Entry) -> list[dict[str, Any]]:
    """One point per seed, step, layer and place."""
    points = []
    for seed, run in entry.setting.finished().items():
        for found in (m for line in run.lines() for m in line.measured("conditioning")):
            for i, layer in enumerate(found["layers"]):
                for stage in STAGES.keys() & layer.keys():
                    where = {
                        "row": entry.name,
                        "stage": STAGES[stage],
                        "layer": i + 1,
                        "step": found["step"],
                    }
                    points.append({**where, "seed": seed, "value": layer[stage]["log_mean"]})
    return points


def _over_layers(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over layers within each seed, then mean and spread over seeds, by row and step."""
    by_seed: dict[tuple[str, int], dict[str, list[float]]] = {}
    for p in points:
        by_seed.setdefault((p["row"], p["step"]), {}).setdefault(p["seed"], []).append(p["value"])
    records = []
    for (row, step), seeds in sorted(by_seed.items(), key=lambda item: item[0][1]):
        mean, sd = _mean_sd([statistics.fmean(values) for values in seeds.values()])
        records.append(
            {
                "row": row,
                "step": step,
                "mean": mean,
                "low": mean - sd,
                "high": mean + sd,
                "n": len(seeds),
            }
        )
    return records


def _over_seeds(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds, by row, place, layer and step."""
    order = list(STAGES.values())
    groups: dict[tuple[Any, ...], list[float]] = {}
    for p in points:
        groups.setdefault((p["row"], p["stage"], p["layer"], p["step"]), []).append(p["value"])
    records = []
    for (row, stage, layer, step), values in sorted(
        groups.items(), key=lambda g: (g[0][0], order.index(g[0][1]), *g[0][2:])
    ):
        mean, sd = _mean_sd(values)
        records.append(
            {
                "row": row,
                "stage": stage,
                "layer": layer,
                "step": step,
                "mean": mean,
                "sd": sd,
                "n": len(values),
            }
        )
    return records


def _mean_sd(values: list[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
