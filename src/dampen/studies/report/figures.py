"""What all charts share: figures with their numbers, and one color and shape per
method throughout a page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dampen.studies.metric import describe

if TYPE_CHECKING:
    from altair import Color, Legend, Shape, StrokeDash, Tooltip

MOST = 40
"""Rows whose lines and points a page carries along; its picker says which of them are drawn."""
CHOSEN = 6
"""How many lines a chart shows at first: more cannot be distinguished."""

# After Okabe and Ito, for readers with any color vision, darkened so that each has contrast 3:1 on
# white. The page exchanges them for lighter ones on a dark ground (DARK), entry by entry.
LIGHT = ("#005a9c", "#d55e00", "#008a63", "#b65c91", "#2e96cf", "#b87900")
DARK = ("#4c9be0", "#ff8a3d", "#2cc79a", "#e59cc5", "#a5dbf7", "#f5c04a")
REFERENCE_LIGHT, REFERENCE_DARK = "#5f6773", "#a9b1bd"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (10, 4), (4, 1))


@dataclass(frozen=True)
class Column:
    """A column of a figure's numbers: key in the records, heading, digits after the point."""

    key: str
    title: str
    digits: int | None = None


ROW = Column("row", "Method")


@dataclass(frozen=True)
class Panel:
    """One chart of a figure, as a Vega-Lite specification."""

    title: str
    spec: dict[str, Any]


@dataclass
class Figure:
    """One or more charts with a title, a sentence that says how to read them,
    and all their numbers."""

    key: str
    title: str
    caption: str
    panels: list[Panel]
    columns: list[Column]
    records: list[dict[str, Any]]
    wide: bool = False
    images: list[dict[str, str]] = field(
        default_factory=list
    )  # group, title, alt, png as a data address, width, height
    legend: list[str] = field(default_factory=list)  # names, where the panels share one legend
    smooth: bool = False  # lines over training, which the page can smooth
    markdown: list[str] = field(default_factory=list)  # lines that say the same as text
    fixed: bool = False  # shows its rows whatever the page's picker says
    seeds: bool = False  # has a layer "seeds" with single runs, which the page shows on demand


class Palette:
    """A color, shape and dash for each name, the same everywhere in the
    page; references are gray."""

    def __init__(self, names: Iterable[str], references: Iterable[str] = ()):
        gray = set(references)
        self.colors: dict[str, str] = {}
        self.shapes: dict[str, str] = {}
        self.dashes: dict[str, tuple[int, ...]] = {}
        count = 0
        for name in dict.fromkeys(names):
            if name in gray:
                self.colors[name], self.shapes[name], self.dashes[name] = (
                    REFERENCE_LIGHT,
                    "circle",
                    (1, 0),
                )
                continue
            # After six methods colors come again with another shape and dash.
            self.colors[name] = LIGHT[count % len(LIGHT)]
            self.shapes[name] = SHAPES[(count // len(LIGHT)) % len(SHAPES)]
            self.dashes[name] = DASHES[(count // len(LIGHT)) % len(DASHES)]
            count += 1

    def same(self, name: str, as_name: str) -> None:
        """Let `name` look like `as_name`: the grid points of a row are one method.

        Args:
            name: the name to use.
            as_name: the method whose look it takes.
        """
        self.colors[name], self.shapes[name] = self.colors[as_name], self.shapes[as_name]
        self.dashes[name] = self.dashes[as_name]

    def color(self, names: list[str], legend: bool = True, lines: bool = False) -> Color:
        """The encoding of the field `row` as color.

        Args:
            names: the names, in order.
            legend: draw a legend.
            lines: draw the symbols of the legend as lines.
        """
        import altair as alt

        scale = alt.Scale(domain=names, range=[self.colors[n] for n in names])
        return alt.Color("row:N", scale=scale, legend=_legend(names, lines) if legend else None)

    def shape(self, names: list[str], legend: bool = True) -> Shape:
        """The encoding of the field `row` as shape.

        Args:
            names: the names, in order.
            legend: draw a legend.
        """
        import altair as alt

        scale = alt.Scale(domain=names, range=[self.shapes[n] for n in names])
        return alt.Shape("row:N", scale=scale, legend=_legend(names) if legend else None)

    def dash(self, names: list[str], legend: bool = True) -> StrokeDash:
        """The encoding of the field `row` as dashes.

        Args:
            names: the names, in order.
            legend: draw a legend.
        """
        import altair as alt

        scale = alt.Scale(domain=names, range=[list(self.dashes[n]) for n in names])
        return alt.StrokeDash(
            "row:N", scale=scale, legend=_legend(names, lines=True) if legend else None
        )


def part_dash(parts: list[str]) -> StrokeDash:
    """The encoding of the field `part` as dashes: the first solid, the second dashed.
    The caption explains them.

    Args:
        parts: the values of the field.
    """
    import altair as alt

    scale = alt.Scale(domain=parts, range=[[1, 0], [5, 4]][: len(parts)])
    if parts == ["training"]:
        scale = alt.Scale(domain=parts, range=[[5, 4]])
    return alt.StrokeDash("part:N", scale=scale, legend=None)


def _legend(names: list[str], lines: bool = False) -> Legend:
    """Below the chart, whole names, never paler than the marks. Equal legends of
    one field become one."""
    import altair as alt

    options: dict[str, Any] = (
        {"symbolType": "stroke", "symbolStrokeWidth": 2.5, "symbolSize": 260} if lines else {}
    )
    longest = max(map(len, names), default=1)
    columns = max(1, min(4, int(500 / (7 * longest + 40))))  # as many as half a page has room for
    return alt.Legend(
        title=None,
        orient="bottom",
        columns=columns,
        labelLimit=320,
        symbolLimit=0,
        symbolOpacity=1,
        **options,
    )


def some(names: list[str], keep: Iterable[str] = (), most: int = MOST) -> list[str]:
    """At most `most` of the names, those in `keep` always among them, in the given order.

    Args:
        names: the names, in order.
        keep: names that are never left out.
        most: how many at most.
    """
    kept = [n for n in names if n in set(keep)]
    chosen = set([*kept, *(n for n in names if n not in set(kept))][: max(most, len(kept))])
    return [n for n in names if n in chosen]


def note(shown: int, total: int) -> str:
    """Says when a chart leaves rows out.

    Args:
        shown: how many are shown.
        total: how many there are.

    >>> note(12, 40)
    ' Shown are the 12 best of 40 methods; the table has all.'
    """
    return (
        f" Shown are the {shown} best of {total} methods; the table has all."
        if shown < total
        else ""
    )


def finish(chart: Any, height: int) -> dict[str, Any]:
    """The specification of a chart that fills the width of its place.

    Args:
        chart: an altair chart.
        height: in pixels.
    """
    out: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    return out


def known(value: float) -> float | None:
    """NaN is null in JSON.

    Args:
        value: the number.
    """
    return None if math.isnan(value) else value


def bounded(interval: tuple[float, float], metric: str) -> tuple[float | None, float | None]:
    """An interval as charts draw it: nothing where there is none, and no share beyond 0 to 100 %.

    Args:
        interval: its low and high end.
        metric: what is measured.
    """
    low, high = interval
    if math.isnan(low):
        return None, None
    return (max(0.0, low), min(100.0, high)) if describe(metric).percent else (low, high)


def tip(field: str, title: str) -> Tooltip:
    """A line of a tooltip; numbers with three digits.

    Args:
        field: the encoding of a field, as in "mean:Q".
        title: what to call it.
    """
    import altair as alt

    return (
        alt.Tooltip(field, title=title, format=".3f")
        if field.endswith(":Q")
        else alt.Tooltip(field, title=title)
    )


def band_chart(
    records: list[dict[str, Any]],
    x: Any,
    x_title: str,
    y_title: str,
    names: list[str],
    palette: Palette,
    points: bool = False,
    legend: bool = True,
    parts: list[str] | None = None,
) -> Any:
    """Lines with bands, one per row; a click on the legend singles one out. `x` encodes the axis.

    Args:
        records: the numbers to draw.
        x: the encoding of the x axis.
        x_title: the title of the x axis.
        y_title: the title of the y axis.
        names: the names, in order.
        palette: the color, shape and dash of each method.
        points: mark each point.
        legend: draw a legend.
        parts: values of the field `part`, which the dash of a line distinguishes.
    """
    import altair as alt

    chosen = alt.selection_point(fields=["row"], bind="legend")
    y_scale = alt.Scale(zero=False)
    base = alt.Chart(alt.Data(values=records))
    detail = ["part:N"] if parts else []
    dash = part_dash(parts) if parts else palette.dash(names, legend)
    band = base.mark_area().encode(
        x=x,
        detail=detail,
        y=alt.Y("low:Q", scale=y_scale, title=y_title),
        y2="high:Q",
        color=palette.color(names, legend, lines=True),
        opacity=alt.condition(chosen, alt.value(0.14), alt.value(0.0))
        if legend
        else alt.value(0.14),
    )
    line = base.mark_line(strokeWidth=2, point=points).encode(
        x=x,
        y=alt.Y("mean:Q", scale=y_scale, title=y_title),
        color=palette.color(names, legend, lines=True),
        strokeDash=dash,
        opacity=alt.condition(chosen, alt.value(1.0), alt.value(0.12))
        if legend
        else alt.value(1.0),
    )
    tooltip = [
        tip("row:N", "row"),
        alt.Tooltip(x.shorthand, title=x_title),
        tip("mean:Q", "mean"),
        "n:Q",
    ]
    hover = base.mark_point(size=60, opacity=0).encode(
        x=x, y=alt.Y("mean:Q", scale=y_scale), tooltip=tooltip
    )
    chart = alt.layer(band, line, hover)
    return chart.add_params(chosen) if legend else chart
