"""The same tables as Markdown, CSV, JSON and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dampen.extensions import from_plugins
from dampen.studies.files import finite
from dampen.studies.metric import METRICS, describe
from dampen.studies.report.charts import bench_rows
from dampen.studies.report.figures import Palette
from dampen.studies.report.read import Skipped
from dampen.studies.report.summary import advise, smallest_difference
from dampen.studies.report.view import MARKS, about_test, facts, gain_text, number, p_text
from dampen.studies.table import Entry, ResultTable, grid_text

QUESTIONS = ("Which method?", "What does it cost?", "Can I trust it?")


def to_markdown(
    tables: list[ResultTable], skipped: list[Skipped], benches: Sequence[dict[str, Any]] = ()
) -> str:
    """Tables for a README: answers first, then the rows, then the paper,
    then what a bench measured.

    Args:
        tables: the judged tables.
        skipped: what could not be read, with the reasons.
        benches: the results of `dampen bench`.
    """
    parts = []
    for table in tables:
        advice = advise(table)
        parts += [
            f"## {markdown_text(table.study.title)}",
            "",
            markdown_text(" · ".join(facts(table.study))),
            "",
        ]
        for question, answer in zip(
            QUESTIONS, (advice.which, advice.cost, advice.trust), strict=True
        ):
            parts.append(
                f"- **{question}** {markdown_text(answer.headline)}. "
                f"{markdown_text(' '.join(answer.details))}"
            )
        texts = _texts_of_figures(table) if table.study.show_all else []
        if texts:
            parts += texts
        else:
            parts += ["", *_md_table(*_main_rows(table))]
            parts += ["", markdown_text(about_test(table))] if table.main_reference else []
        parts += _md_measured(table)
        paper = _paper_rows(table)
        if paper:
            parts += [
                "",
                f"Next to the paper ({markdown_text(str(table.study.header.get('paper', '')))}):",
                "",
            ]
            parts += _md_table(
                ["Method", "Metric", "Paper", "Here", "n", "Verdict", "Gain over the baseline"],
                paper,
            )
        if table.study.departures:
            said = (
                "Differences from the paper" if table.study.header.get("paper") else "Keep in mind"
            )
            parts += [
                "",
                f"{said}:",
                "",
                *(f"- {markdown_text(d)}" for d in table.study.departures),
            ]
        parts.append("")
    for record in benches:
        parts += [
            "## Cost of each method",
            "",
            f"{markdown_text(record['model'])}; {markdown_text(record['command'])}",
            "",
        ]
        rows = [
            [
                r["name"],
                r["kind"],
                f"{r['median']:.3f}x",
                f"{r['low']:.3f} to {r['high']:.3f}",
                "" if r["memory"] is None else f"{r['memory']:.2f}x",
            ]
            for r in bench_rows(record)
        ]
        parts += [
            *_md_table(["Method", "By", "Training step", "95 % interval", "Memory"], rows),
            "",
        ]
    if skipped:
        parts += [
            "## Not in this report",
            "",
            *(f"- `{s.path}`: {markdown_text(s.reason)}" for s in skipped),
            "",
        ]
    return "\n".join(parts)


def _texts_of_figures(table: ResultTable) -> list[str]:
    """What the figures of plug-ins say in Markdown, in place of a table of all grid points."""
    palette = Palette([entry.name for entry in table.entries])
    made = [make(table, palette) for make in from_plugins("dampen.figures").values()]
    return [line for figure in made if figure is not None for line in figure.markdown]


def to_csv(tables: list[ResultTable]) -> str:
    """One line per row of every table, plain numbers.

    Args:
        tables: the judged tables.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    metrics = list(dict.fromkeys(m for t in tables for e in t.entries for m in e.metrics))
    heads = [
        "table",
        "row",
        "grid",
        "metric",
        "mean",
        "sd",
        "n",
        "reference",
        "difference",
        "low",
        "high",
        "p",
        "p_holm",
    ]
    heads += [
        "effect",
        "verdict",
        "needed_seeds",
        "same_as",
        "cost_ratio",
        "step_seconds",
        "diverged",
        "unfinished",
        "paper",
        "paper_verdict",
    ]
    writer.writerow([*heads, *(f"{m}_{k}" for m in metrics for k in ("mean", "sd"))])
    for table in tables:
        for e in table.entries:
            c, paper = e.comparison, e.published.get(table.study.metric)
            against = e.against.get(table.study.metric)
            compared = (
                [c.difference, c.low, c.high, c.p, c.corrected, c.effect] if c else [None] * 6
            )
            needed = c.needed if c else None
            line: list[Any] = [
                table.study.name,
                e.name,
                grid_text(e.setting.grid),
                table.study.metric,
            ]
            line += [
                e.summary.mean,
                e.summary.sd,
                e.summary.n,
                e.reference,
                *compared,
                e.verdict,
                needed,
                e.same_as,
            ]
            line.append(e.cost.ratio)
            line += [e.cost.step_seconds, e.diverged, e.unfinished, paper.mean if paper else None]
            line.append(against.word if against else None)
            for metric in metrics:
                s = e.metrics.get(metric)
                line += [s.mean, s.sd] if s else [None, None]
            writer.writerow([_csv(v) for v in line])
    return out.getvalue()


def to_json(tables: list[ResultTable], skipped: list[Skipped]) -> str:
    """Everything, for programs.

    Args:
        tables: the judged tables.
        skipped: what could not be read, with the reasons.
    """
    content = {"tables": [_plain_table(t) for t in tables], "skipped": [asdict(s) for s in skipped]}
    return json.dumps(finite(content), indent=1, allow_nan=False) + "\n"


def to_latex(tables: list[ResultTable]) -> str:
    """Tables for a paper (booktabs), one per study; methods that are significantly better than the
    baseline in bold.

    Args:
        tables: the judged tables.
    """
    parts = ["% needs \\usepackage{booktabs}"]
    for table in tables:
        heads, rows = _main_rows(table)
        bold = {e.name for e in table.entries if e.verdict == "better"}
        parts += ["\\begin{table}[t]", "  \\centering", f"  \\caption{{{_tex(table.study.title)}}}"]
        parts += [f"  \\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", "    \\toprule"]
        parts += ["    " + " & ".join(map(_tex, heads)) + r" \\", "    \\midrule"]
        for row in rows:
            cells = [_tex(cell) for cell in row]
            if row[0] in bold:
                cells[:2] = [f"\\textbf{{{cell}}}" for cell in cells[:2]]
            parts.append("    " + " & ".join(cells) + r" \\")
        parts += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""]
    return "\n".join(parts)


def _main_rows(table: ResultTable) -> tuple[list[str], list[list[str]]]:
    extra = table.other_metrics()
    heads = ["Method", table.metric.title, "n"]
    compared = table.main_reference is not None
    if compared:
        heads += ["Verdict", "Difference (corrected interval)", "p (Holm)"]
    heads += ["Cost", *(describe(m).title for m in extra)]
    rows = []
    for e in table.listed():
        row = [e.name, number(e.summary.mean, e.summary.sd, table.metric)["text"], str(e.summary.n)]
        if compared:
            p = e.comparison.corrected if e.comparison else None
            row += [
                e.told(table.metric),
                gain_text(e, table.metric),
                "" if p is None else p_text(p),
            ]
        row.append("" if e.cost.ratio is None else f"{e.cost.ratio:.2f}x")
        row += [_secondary(e, m) for m in extra]
        rows.append(row)
    return heads, rows


def _paper_rows(table: ResultTable) -> list[list[str]]:
    rows = []
    for e in table.entries:
        for metric, against in e.against.items():
            ours = e.measured(metric)
            here = number(ours.mean, ours.sd, describe(metric))["text"] if ours else ""
            word = against.word if table.study.departures else f"{against.word} ({against.reason})"
            row = [
                e.name,
                describe(metric).title,
                e.published[metric].text(),
                here,
                str(ours.n if ours else 0),
            ]
            rows.append([*row, word, e.claim if metric == table.study.metric else ""])
    return rows


def _plain_table(table: ResultTable) -> dict[str, Any]:
    study, advice = table.study, advise(table)
    answers = {k: asdict(getattr(advice, k)) for k in ("which", "cost", "trust")}
    return {
        "name": study.name,
        "title": study.title,
        "metric": study.metric,
        "mode": study.mode,
        "reference": table.main_reference.name if table.main_reference else None,
        "advice": {**answers, "pick": advice.pick},
        "departures": study.departures,
        "protocol": study.protocol,
        "header": {k: v for k, v in study.header.items() if k != "search"},
        "search": study.search,
        "test": study.test,
        "margin": table.margin,
        "smallest_difference": smallest_difference(table),
        "rows": [e.to_dict() for e in table.entries],
    }


def _secondary(entry: Entry, name: str) -> str:
    """A metric beside the table's own, with the mark of its own verdict."""
    s, c, metric = entry.metrics.get(name), entry.secondary.get(name), describe(name)
    if s is None:
        return ""
    mark = f" {MARKS[c.verdict]}" if c is not None and c.verdict in MARKS else ""
    out: str = number(s.mean, s.sd, metric)["text"] + mark
    return out


def _md_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(map(markdown_text, heads)) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(map(markdown_text, row)) + " |" for row in rows]


def _md_measured(table: ResultTable) -> list[str]:
    shown = [
        m
        for m in METRICS.values()
        if m.diagnosed and any(m.name in e.metrics for e in table.entries)
    ]
    shown = [m for m in shown if m.name != table.study.metric]
    if not shown:
        return []
    rows = []
    for e in (e for e in table.ranked() if any(m.name in e.metrics for m in shown)):
        rows.append(
            [
                e.name,
                *(
                    number(s.mean, s.sd, m)["text"] if (s := e.metrics.get(m.name)) else ""
                    for m in shown
                ),
            ]
        )
    heads = ["Method", *(m.title for m in shown)]
    return ["", "Measured on the trained models:", "", *_md_table(heads, rows)]


def markdown_text(text: str) -> str:
    """Text that stays text in Markdown, also inside a table.

    Args:
        text: the text.

    >>> markdown_text("<b>a|b</b>")
    '&lt;b&gt;a\\\\|b&lt;/b&gt;'
    """
    text = " ".join(text.split())
    for old, new in (
        ("\\", "\\\\"),
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "\\`"),
    ):
        text = text.replace(old, new)
    for mark in "*_[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def _tex(text: str) -> str:
    r"""Text that stays text in LaTeX.

    >>> _tex("50 % & {x_1} ± 2")
    '50 \\% \\& \\{x\\_1\\} $\\pm$ 2'
    """
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
    }
    special |= {c: f"\\{c}" for c in "%&#_{}$"} | {
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "·": r"\textperiodcentered{}",
    }
    return "".join(special.get(c, c) for c in " ".join(text.split()))


def _csv(value: Any) -> Any:
    """Missing numbers are empty; text that a spreadsheet would run as a formula is quoted."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
