"""Accuracy under attack and under corruption, from `dampen diagnose`."""

from __future__ import annotations

from typing import Any

from dampen.studies import ResultTable
from dampen.studies.plugins import Figure, Palette, diagnosed, line_panels, measured, over_seeds

Values = dict[float, list[float]]
"""The values of all seeds at each place of the x axis."""


def attacks(table: ResultTable, palette: Palette) -> Figure | None:
    """Accuracy under PGD against the size of the perturbation.

    Args:
        table: the runs of a study.
        palette: their colors and dashes.
    """
    import altair as alt

    entries, remark = diagnosed(table)
    records: list[dict[str, Any]] = []
    settings: set[str] = set()
    for entry in entries:
        by_eps: Values = {}
        for run in measured(entry, "robustness"):
            found = [a for a in run if a["attack"] == "pgd"]
            for attack in found:
                by_eps.setdefault(round(255 * attack["eps"], 4), []).append(
                    100 * attack["accuracy"]
                )
                settings.add(f"{attack['steps']} steps")
            # The accuracy without an attack is the point at eps = 0.
            if (
                found
                and found[0].get("clean_accuracy") is not None
                and all(a["eps"] for a in found)
            ):
                by_eps.setdefault(0.0, []).append(100 * found[0]["clean_accuracy"])
        records += over_seeds(entry, "PGD", by_eps)
    sizes = sorted({r["x"] for r in records})
    if len(sizes) < 2:
        return None
    caption = (
        f"Accuracy under projected gradient descent in the maximum norm "
        f"({', '.join(sorted(settings))}). Higher is more robust. "
    )
    title = "size of the perturbation (1/255)"
    x = alt.X("x:Q", title=title, scale=alt.Scale(nice=False), axis=alt.Axis(values=sizes))
    figure = line_panels(
        "attacks", "Under attack (PGD)", caption, records, (title, x), "accuracy (%)", palette
    )
    figure.caption += remark
    return figure


def corruptions(table: ResultTable, palette: Palette) -> Figure | None:
    """Accuracy under noise, blur and lost contrast, by severity, one panel per kind.

    Args:
        table: the runs of a study.
        palette: their colors and dashes.
    """
    import altair as alt

    entries, remark = diagnosed(table)
    records: list[dict[str, Any]] = []
    for entry in entries:
        by_kind: dict[str, Values] = {}
        for found in measured(entry, "corruptions"):
            for kind, accuracies in found["accuracy"].items():
                for severity, accuracy in enumerate([found["clean_accuracy"], *accuracies]):
                    by_kind.setdefault(kind, {}).setdefault(severity, []).append(100 * accuracy)
        for kind, by_severity in by_kind.items():
            records += over_seeds(entry, kind, by_severity)
    if not records:
        return None
    caption = "Accuracy on corrupted test images. "
    title = "severity (0: none)"
    x = alt.X("x:Q", title=title, axis=alt.Axis(tickMinStep=1, format="d"))
    name = "Under corruption"
    figure = line_panels(
        "corruptions", name, caption, records, (title, x), "accuracy (%)", palette, True
    )
    figure.caption += remark
    return figure
