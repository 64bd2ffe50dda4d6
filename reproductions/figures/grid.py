"""The grid as heat maps: the result at every combination of two settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dampen.studies import ResultTable, summarize
from dampen.studies.plugins import (
    ROW,
    Column,
    Figure,
    Palette,
    Panel,
    Setting,
    axis_name,
    chosen_setting,
    finish,
    known,
    markdown_text,
    tip,
)


@dataclass(frozen=True)
class Matrix:
    """Every grid point with results, as records (row, x, y, mean, sd, n, chosen, paper), and the axes in order."""

    x: str
    y: str
    across: list[str]
    down: list[str]
    records: list[dict[str, Any]]

    def rows(self) -> list[str]:
        """The names of the rows that have such a grid."""
        return list(dict.fromkeys(r["row"] for r in self.records))


def matrix(table: ResultTable) -> Matrix | None:
    """The results over the first two axes of the grid; None where there are fewer, or no results."""
    cells = [cell for row in table.study.configs for cell in row.settings]
    axes = [
        k
        for k in table.study.grid_keys()
        if len({_text(c.grid[k]) for c in cells if k in c.grid}) > 1
    ]
    if len(axes) < 2:
        return None
    y_key, x_key = axes[0], axes[1]
    records: list[dict[str, Any]] = []
    for row in table.study.configs:
        if not all(k in c.grid for c in row.settings for k in (x_key, y_key)):
            continue
        chosen = chosen_setting(row)
        for cell in row.settings:
            values = [table.metric.scale * v for v in _test_values(cell, table.study.metric)]
            if values:
                s = summarize(values)
                point = {
                    "row": row.name,
                    "x": _text(cell.grid[x_key]),
                    "y": _text(cell.grid[y_key]),
                    "mean": s.mean,
                }
                paper = cell.published.get(table.study.metric)
                paper = paper[0] if isinstance(paper, list) else paper
                records.append(
                    point | {"sd": known(s.sd), "n": s.n, "chosen": cell is chosen, "paper": paper}
                )
    if not records:
        return None
    return Matrix(
        axis_name(x_key), axis_name(y_key), _order(cells, x_key), _order(cells, y_key), records
    )


def grid(table: ResultTable, palette: Palette) -> Figure | None:
    """The matrix as heat maps, one panel per configuration; the outlined cell is the one selected on validation.

    Args:
        table: the runs of a study whose grid has two axes or more.
        palette: not used; the cells have a color scale of their own.
    """
    found = matrix(table)
    if found is None:
        return None
    means = [r["mean"] for r in found.records]
    domain = (min(means), max(means))
    digits = ".1f" if table.metric.percent else ".3f"
    panels = [Panel(name, _heat_map(found, name, domain, digits)) for name in found.rows()]
    columns = [ROW, Column("y", found.y), Column("x", found.x), Column("mean", "Mean", 2)]
    columns += [Column("sd", "SD", 2), Column("n", "n", 0), Column("paper", "Paper", 2)]
    caption = f"Test {table.metric.title} at every grid point, one color scale for all panels. "
    caption += "Outlined: the point selected on validation."
    title = f"{found.y} x {found.x}"
    figure = Figure("grid", title, caption, panels, columns, found.records, wide=len(panels) > 2)
    figure.markdown = as_markdown(found)
    return figure


def as_markdown(found: Matrix) -> list[str]:
    """The grid as papers print it: one table per configuration, the selected point in bold.

    Args:
        found: the results over two axes.
    """
    lines = []
    head = (
        f"| {markdown_text(found.y)} \\ {markdown_text(found.x)} | "
        + " | ".join(found.across)
        + " |"
    )
    for name in found.rows():
        cells = {(r["y"], r["x"]): r for r in found.records if r["row"] == name}
        lines += [
            "",
            f"**{markdown_text(name)}**",
            "",
            head,
            "|" + "---|" * (len(found.across) + 1),
        ]
        for y in found.down:
            points = " | ".join(_point(cells.get((y, x))) for x in found.across)
            lines.append(f"| {markdown_text(y)} | {points} |")
    return lines


def _point(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    text = f"{record['mean']:.2f}"
    if record["sd"] is not None:
        text += f" ± {record['sd']:.2f}"
    if record["chosen"]:
        text = f"**{text}**"
    if record["paper"] is not None:
        text += f" (paper {record['paper']:.2f})"
    return text


def _heat_map(found: Matrix, name: str, domain: tuple[float, float], digits: str) -> dict[str, Any]:
    import altair as alt

    middle = domain[0] + 0.62 * (domain[1] - domain[0])  # viridis is dark below
    own = [r | {"dark": r["mean"] < middle} for r in found.records if r["row"] == name]
    x = alt.X("x:N", title=found.x, sort=found.across, axis=alt.Axis(labelAngle=0))
    y = alt.Y("y:N", title=found.y, sort=found.down[::-1])
    base = alt.Chart(alt.Data(values=own)).encode(x=x, y=y)
    tooltip = [
        tip("y:N", found.y),
        tip("x:N", found.x),
        tip("mean:Q", "mean"),
        tip("sd:Q", "sd"),
        alt.Tooltip("n:Q"),
    ]
    color = alt.Color("mean:Q", scale=alt.Scale(scheme="viridis", domain=list(domain)), legend=None)
    cells = base.mark_rect().encode(color=color, tooltip=tooltip)
    ink = alt.condition("datum.dark", alt.value("#ffffff"), alt.value("#111111"))
    text = base.mark_text(fontSize=12).encode(text=alt.Text("mean:Q", format=digits), color=ink)
    frame = base.transform_filter("datum.chosen").mark_rect(
        fill=None, stroke="#d55e00", strokeWidth=3
    )
    return finish(alt.layer(cells, text, frame), 46 * len(found.down))


def _test_values(setting: Setting, metric: str) -> list[float]:
    found = [run.final.test.get(metric) for run in setting.finished().values() if run.final]
    return [v for v in found if v is not None]


def _order(cells: list[Setting], key: str) -> list[str]:
    """The values of an axis: numbers by size, then words as they come."""
    values = {_text(c.grid[key]): c.grid[key] for c in cells if key in c.grid}
    numbers = [t for t, v in values.items() if isinstance(v, int | float)]
    return sorted(numbers, key=lambda t: values[t]) + [t for t in values if t not in set(numbers)]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
