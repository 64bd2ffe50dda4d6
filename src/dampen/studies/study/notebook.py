"""A study inside a notebook: its table, and the differences from the reference as a plot, without scripts."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from dampen.studies.report.summary import counted
from dampen.studies.report.terminal import mean_sd

if TYPE_CHECKING:
    from dampen.studies.study.study import Study

WIDTH, LINE, NAMES = 640, 24, 240


def study_html(study: Study) -> str:
    """Table and forest plot."""
    failures = "".join(f"<p>{escape(name)} failed: {escape(why)}</p>" for name, why in study.failures.items())
    return f"<div>{table_html(study)}{forest_svg(study)}{failures}<p>Records: {escape(str(study.folder))}</p></div>"


def table_html(study: Study) -> str:
    """The table."""
    table = study.results
    head = ["row", f"test {table.metric.title}", "n", "cost", "verdict"]
    lines = []
    for row in table.entries:
        cost = f"{row.cost.ratio:.2f}x" if row.cost.ratio else "-"
        cells = [row.name, mean_sd(row, table.metric), counted(row, table), cost]
        lines.append([*cells, row.told(table.metric, numbers=True) or "-"])
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in line) + "</tr>" for line in lines)
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr></thead><tbody>{body}</tbody></table>"
    )


def forest_svg(study: Study) -> str:
    """Each row's difference from the reference with its corrected interval; the line at 0 is the reference."""
    table = study.results
    reference = table.main_reference
    compared = [(row.name, row.comparison) for row in table.entries if row.comparison is not None]
    found = [(name, c.difference, c.low, c.high) for name, c in compared if not math.isnan(c.low)]
    if reference is None or not found:
        return ""
    ends = [v for _, _, low, high in found for v in (low, high)] + [0.0]
    low, high = min(ends), max(ends)
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return round(NAMES + (value - low) / span * (WIDTH - NAMES - 20) + 5, 1)

    marks = [f'<line x1="{x(0)}" x2="{x(0)}" y1="0" y2="{LINE * len(found)}" stroke="currentColor" opacity="0.4"/>']
    for i, (name, difference, left, right) in enumerate(found):
        y = LINE * i + LINE / 2
        shown = name if len(name) <= 34 else name[:33] + "…"
        marks.append(f'<text x="0" y="{y + 4}" font-size="12" fill="currentColor">{escape(shown)}</text>')
        marks.append(f'<line x1="{x(left)}" x2="{x(right)}" y1="{y}" y2="{y}" stroke="#3b6fb6" stroke-width="2"/>')
        told = f"{difference:+.3g} [{left:+.3g}, {right:+.3g}]"
        marks.append(f'<circle cx="{x(difference)}" cy="{y}" r="4" fill="#3b6fb6"><title>{told}</title></circle>')
    title = f"Difference in test {escape(table.metric.title)} from {escape(reference.name)}, corrected interval"
    size = f'width="{WIDTH}" height="{LINE * len(found)}" viewBox="0 0 {WIDTH} {LINE * len(found)}"'
    return f'<p>{title}</p><svg role="img" aria-label="{title}" {size}>{"".join(marks)}</svg>'
