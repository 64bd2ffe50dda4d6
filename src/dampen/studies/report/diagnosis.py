"""Charts of what `dampen diagnose` measured on the trained models; each appears only where there is data.

A trial's diagnose.json may hold, each optional:

    calibration     a dampen.diagnostics.Calibration as plain data (its `reliability` is drawn)
    robustness      a list of dampen.diagnostics.Robustness as plain data; PGD at several eps makes a curve
    corruptions     a dampen.diagnostics.Corruptions as plain data
    attention       {"layers": [{"entropy_share", "head_similarity"}]}
    conditioning    what Conditioning.to_json() gives: one entry per layer
    attention_maps  {"examples": [{"label", "image": rows of RGB pixels (0..255), "map": rows of numbers, "predicted"}]}
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from dampen.studies.records.table import Entry, ResultTable
from dampen.studies.report.charts import band_chart
from dampen.studies.report.figures import ROW, Column, Figure, Palette, Panel, finish, note, some

PANELS = 12
"""Rows that have pictures of their own."""

STAGES = {
    "tokens": "tokens entering the block",
    "attention": "attention output, without the skip",
    "attention+skip": "attention output, with the skip",
    "ffn": "feed-forward output, without the skip",
    "ffn+skip": "feed-forward output, with the skip",
}


def measured_figures(table: ResultTable, palette: Palette) -> list[Figure]:
    """The figures for which some run was diagnosed."""
    from dampen.studies.report.attention_images import attention_maps

    entries = [e for e in table.ranked() if any(run.measured for run in e.cell.finished().values())]
    reference = table.main_reference
    names = some([e.name for e in entries], [reference.name] if reference else [], PANELS)
    shown = [e for e in entries if e.name in names]
    made = [calibration(shown, palette), attacks(shown, palette), corruptions(shown, palette)]
    made += [attention_by_layer(shown, palette), conditioning(shown, palette), attention_maps(shown)]
    figures = [figure for figure in made if figure is not None]
    for figure in figures:
        figure.caption += note(len(shown), len(entries))
    return figures


def _measured(entry: Entry, key: str) -> list[Any]:
    return [found for run in entry.cell.finished().values() if (found := run.measured.section(key))]


def calibration(entries: list[Entry], palette: Palette) -> Figure | None:
    """Reliability diagrams: how often the model is right, where it says how sure it is. Bins pooled over seeds."""
    import altair as alt

    records = []
    for entry in entries:
        diagrams = [m["reliability"] for m in _measured(entry, "calibration") if m.get("reliability")]
        records += [{"row": entry.name, **r} for r in _pooled(diagrams)]
    if not records:
        return None
    panels = []
    for name in dict.fromkeys(r["row"] for r in records):
        own = [r for r in records if r["row"] == name]
        x = alt.X("low:Q", title="confidence", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".1f"))
        tooltip = [alt.Tooltip(f"{k}:Q", format=".3f") for k in ("confidence", "accuracy", "share")]
        y = alt.Y("accuracy:Q", title="accuracy", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".1f"))
        bars = (
            alt.Chart(alt.Data(values=own))
            .mark_rect(opacity=0.8, color=palette.colors[name])
            .encode(x=x, x2="high:Q", y=y, y2=alt.datum(0), tooltip=tooltip)
        )
        ideal = alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}]))
        line = ideal.mark_line(strokeDash=[4, 4], opacity=0.7).encode(x="x:Q", y="y:Q")
        panels.append(Panel(f"{name}: ECE {100 * _ece(own):.1f} %", finish(alt.layer(bars, line), 170)))
    caption = "Bars on the dashed line: as often right as the model says. Below it: overconfident. All seeds pooled."
    columns = [ROW, Column("low", "From", 3), Column("high", "To", 3), Column("confidence", "Confidence", 3)]
    columns += [Column("accuracy", "Accuracy", 3), Column("count", "Predictions", 0)]
    return Figure("calibration", "Calibration", caption, panels, columns, records, wide=len(panels) > 2)


def _pooled(diagrams: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bins of several runs as one: counts add up, means are weighted by them. Empty bins are left out."""
    bins: dict[tuple[float, float], list[tuple[int, float, float]]] = {}
    for d in diagrams:
        for low, high, count, sure, right in zip(
            d["low"], d["high"], d["count"], d["confidence"], d["accuracy"], strict=True
        ):
            if count:
                bins.setdefault((low, high), []).append((count, sure, right))
    total = sum(c for found in bins.values() for c, _, _ in found)
    pooled = []
    for (low, high), found in sorted(bins.items()):
        n = sum(c for c, _, _ in found)
        sure, right = (sum(f[0] * f[i] for f in found) / n for i in (1, 2))
        pooled.append({"low": low, "high": high, "count": n, "share": n / total, "confidence": sure, "accuracy": right})
    return pooled


def _ece(bins: list[dict[str, Any]]) -> float:
    out: float = sum(b["share"] * abs(b["accuracy"] - b["confidence"]) for b in bins)
    return out


def attacks(entries: list[Entry], palette: Palette) -> Figure | None:
    """Accuracy under PGD against the size of the perturbation."""
    import altair as alt

    records: list[dict[str, Any]] = []
    settings: set[str] = set()
    for entry in entries:
        by_eps: dict[float, list[float]] = {}
        for run in _measured(entry, "robustness"):
            own = [a for a in run if a["attack"] == "pgd"]
            for attack in own:
                by_eps.setdefault(round(255 * attack["eps"], 4), []).append(100 * attack["accuracy"])
                settings.add(f"{attack['steps']} steps")
            if own and own[0].get("clean_accuracy") is not None and all(a["eps"] for a in own):
                by_eps.setdefault(0.0, []).append(100 * own[0]["clean_accuracy"])  # without an attack
        records += _by_x(entry.name, by_eps, "eps")
    if len({r["eps"] for r in records}) < 2:
        return None
    names = [e.name for e in entries if e.name in {r["row"] for r in records}]
    sizes = sorted({r["eps"] for r in records})
    title = "size of the perturbation (1/255)"
    x = alt.X("eps:Q", title=title, scale=alt.Scale(nice=False), axis=alt.Axis(values=sizes))
    chart = band_chart(records, x, "eps x 255", "accuracy (%)", names, palette, points=True)
    caption = f"Accuracy under projected gradient descent in the maximum norm ({', '.join(sorted(settings))}), "
    caption += "mean over seeds with a band of one standard deviation. Higher is more robust."
    columns = [ROW, Column("eps", "eps x 255", 2), Column("mean", "Mean", 2), Column("low", "Mean - SD", 2)]
    columns += [Column("high", "Mean + SD", 2), Column("n", "n", 0)]
    return Figure("attacks", "Under attack (PGD)", caption, [Panel("", finish(chart, 300))], columns, records)


def corruptions(entries: list[Entry], palette: Palette) -> Figure | None:
    """Accuracy under noise, blur and lost contrast, by severity, one panel per kind."""
    import altair as alt

    records: list[dict[str, Any]] = []
    for entry in entries:
        by_kind: dict[str, dict[float, list[float]]] = {}
        for found in _measured(entry, "corruptions"):
            for kind, accuracies in found["accuracy"].items():
                for severity, accuracy in enumerate([found["clean_accuracy"], *accuracies]):
                    by_kind.setdefault(kind, {}).setdefault(severity, []).append(100 * accuracy)
        for kind, by_severity in by_kind.items():
            records += [{"kind": kind, **r} for r in _by_x(entry.name, by_severity, "severity")]
    if not records:
        return None
    legend = [e.name for e in entries if e.name in {r["row"] for r in records}]
    panels = []
    for kind in dict.fromkeys(r["kind"] for r in records):
        own = [r for r in records if r["kind"] == kind]
        x = alt.X("severity:Q", title="severity (0: none)", axis=alt.Axis(tickMinStep=1, format="d"))
        chart = band_chart(own, x, "severity", "accuracy (%)", legend, palette, points=True, legend=False)
        panels.append(Panel(kind, finish(chart, 220)))
    columns = [ROW, Column("kind", "Corruption"), Column("severity", "Severity", 0), Column("mean", "Mean", 2)]
    columns += [Column("low", "Mean - SD", 2), Column("high", "Mean + SD", 2), Column("n", "n", 0)]
    caption = "Accuracy on corrupted test images, mean over seeds with a band of one standard deviation."
    title = "Under corruption"
    return Figure("corruptions", title, caption, panels, columns, records, wide=True, legend=legend)


LOOKS = {"entropy_share": "entropy, as a share of the largest", "head_similarity": "similarity of the heads"}


def attention_by_layer(entries: list[Entry], palette: Palette) -> Figure | None:
    """How spread out attention is and how alike the heads are, layer by layer."""
    import altair as alt

    records: list[dict[str, Any]] = []
    for entry in entries:
        for key, title in LOOKS.items():
            by_layer: dict[float, list[float]] = {}
            for found in _measured(entry, "attention"):
                for i, layer in enumerate(found["layers"]):
                    if layer.get(key) is not None:
                        by_layer.setdefault(i + 1, []).append(layer[key])
            records += [{"what": title, **r} for r in _by_x(entry.name, by_layer, "layer")]
    if not records:
        return None
    legend = [e.name for e in entries if e.name in {r["row"] for r in records}]
    panels = []
    for title in dict.fromkeys(r["what"] for r in records):
        x = alt.X("layer:Q", title="layer", scale=alt.Scale(zero=False), axis=alt.Axis(tickMinStep=1, format="d"))
        own = [r for r in records if r["what"] == title]
        chart = band_chart(own, x, "layer", title, legend, palette, points=True, legend=False)
        panels.append(Panel(title, finish(chart, 220)))
    columns = [ROW, Column("what", "Measure"), Column("layer", "Layer", 0), Column("mean", "Mean", 4)]
    columns += [Column("low", "Mean - SD", 4), Column("high", "Mean + SD", 4), Column("n", "n", 0)]
    caption = "Low entropy: attention rests on few tokens. High similarity: heads look at the same tokens. "
    caption += "Mean over seeds with a band of one standard deviation."
    return Figure("heads", "Attention by layer", caption, panels, columns, records, legend=legend)


def conditioning(entries: list[Entry], palette: Palette) -> Figure | None:
    """Condition numbers by layer, one panel per place where they were measured."""
    import altair as alt

    records: list[dict[str, Any]] = []
    for entry in entries:
        runs = _measured(entry, "conditioning")
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
    domain = [min(r["value"] for r in records), max(r["value"] for r in records)]  # one for all panels
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
                tooltip=[alt.Tooltip("row:N"), alt.Tooltip("layer:O"), alt.Tooltip("value:Q", format=".3~s")],
            )
        )
        panels.append(Panel(stage, finish(chart, 220)))
    caption = "Ratio of the largest to the smallest singular value of the token matrix, geometric mean over seeds, "
    caption += "on a logarithmic axis. Lower is better conditioned; the skip connection should bring it down."
    columns = [ROW, Column("stage", "Where"), Column("layer", "Layer", 0), Column("value", "Condition number", 1)]
    columns.append(Column("n", "n", 0))
    legend = [e.name for e in entries if e.name in {r["row"] for r in records}]
    title = "Conditioning by layer"
    return Figure("conditioning", title, caption, panels, columns, records, wide=True, legend=legend)


def _by_x(name: str, by_x: dict[float, list[float]], key: str) -> Iterable[dict[str, Any]]:
    for x, values in sorted(by_x.items()):
        mean, sd = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        yield {"row": name, key: x, "mean": mean, "low": mean - sd, "high": mean + sd, "n": len(values)}
