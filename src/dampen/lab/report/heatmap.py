"""The grid as heat maps: the result at every combination of two settings."""

from __future__ import annotations

from typing import Any

from dampen.lab.report.figure import ROW, Column, Figure, Panel, finish, known, tip
from dampen.lab.report.names import label
from dampen.lab.report.study import Cell
from dampen.lab.report.table import Table, axis_name, chosen_cell
from dampen.lab.stats import summarize
from dampen.lab.summary import unit


def grid(table: Table) -> Figure | None:
    """The result at every point of a grid of two axes, a panel per row; the outlined cell is what validation chose."""
    import altair as alt

    keys = table.study.grid_keys()
    axes = [k for k in keys if len({c.grid.get(k) for r in table.study.rows for c in r.cells if k in c.grid}) > 1]
    if len(axes) < 2:
        return None
    y_key, x_key = axes[0], axes[1]
    records: list[dict[str, Any]] = []
    for row in table.study.rows:
        if not all(k in c.grid for c in row.cells for k in (x_key, y_key)):
            continue
        chosen = chosen_cell(row)
        for cell in row.cells:
            values = [unit(table.study.metric) * v for v in _test_values(cell, table.study.metric)]
            if values:
                s = summarize(values)
                point = {"row": row.name, "x": _text(cell.grid[x_key]), "y": _text(cell.grid[y_key]), "mean": s.mean}
                paper = cell.published.get(table.study.metric)
                paper = paper[0] if isinstance(paper, list) else paper
                records.append(point | {"sd": known(s.sd), "n": s.n, "chosen": cell is chosen, "paper": paper})
    if not records:
        return None
    domain = [min(r["mean"] for r in records), max(r["mean"] for r in records)]
    middle = domain[0] + 0.62 * (domain[1] - domain[0])
    across, down = (_order(cells_of(table), key) for key in (x_key, y_key))
    panels = []
    for name in dict.fromkeys(r["row"] for r in records):
        own = [r | {"dark": r["mean"] < middle} for r in records if r["row"] == name]
        x = alt.X("x:N", title=axis_name(x_key), sort=across, axis=alt.Axis(labelAngle=0))
        y = alt.Y("y:N", title=axis_name(y_key), sort=down[::-1])
        base = alt.Chart(alt.Data(values=own)).encode(x=x, y=y)
        tooltip = [alt.Tooltip("y:N", title=axis_name(y_key)), alt.Tooltip("x:N", title=axis_name(x_key))]
        tooltip += [tip("mean:Q", "mean"), tip("sd:Q", "sd"), alt.Tooltip("n:Q")]
        color = alt.Color("mean:Q", scale=alt.Scale(scheme="viridis", domain=domain), legend=None)
        cells = base.mark_rect().encode(color=color, tooltip=tooltip)
        ink = alt.condition("datum.dark", alt.value("#ffffff"), alt.value("#111111"))
        text = base.mark_text(fontSize=12).encode(text=alt.Text("mean:Q", format=".1f"), color=ink)
        frame = base.transform_filter("datum.chosen").mark_rect(fill=None, stroke="#d55e00", strokeWidth=3)
        panels.append(Panel(name, finish(alt.layer(cells, text, frame), 46 * len(down))))
    columns = [ROW, Column("y", axis_name(y_key)), Column("x", axis_name(x_key)), Column("mean", "Mean", 2)]
    columns += [Column("sd", "SD", 2), Column("n", "n", 0), Column("paper", "Paper", 2)]
    caption = f"Test {label(table.study.metric, with_unit=True)} at every grid point, one color scale for all panels. "
    caption += "Outlined: the point that validation chooses."
    figure = Figure("grid", f"{axis_name(y_key)} x {axis_name(x_key)}", caption, panels, columns, records)
    figure.wide = len(panels) > 2
    return figure


def cells_of(table: Table) -> list[Cell]:
    """Every grid point of every row."""
    return [cell for row in table.study.rows for cell in row.cells]


def _test_values(cell: Cell, metric: str) -> list[float]:
    found = [run.final["test"].get(metric) for run in cell.finished().values() if run.final]
    return [v for v in found if v is not None]


def _order(cells: list[Cell], key: str) -> list[str]:
    """The values of an axis: numbers by size, then words as they come."""
    values = {_text(c.grid[key]): c.grid[key] for c in cells if key in c.grid}
    numbers = [t for t, v in values.items() if isinstance(v, int | float)]
    return sorted(numbers, key=lambda t: values[t]) + [t for t in values if t not in set(numbers)]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
