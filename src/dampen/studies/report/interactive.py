"""What the page carries along for a click: each method's seeds, log and line of Python, all pairs, exports, a card."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from dampen.studies.metric import describe
from dampen.studies.report import formats
from dampen.studies.report.settings import regularize_line, settings_text
from dampen.studies.report.summary import Advice, shared_seeds
from dampen.studies.table import Entry, ResultTable
from dampen.studies.verdict import Test, judge_pairs

MOST = 60
"""Methods whose details a page carries."""
MATRIX = 12
"""Methods in the table of all pairs."""
TAIL = 1000
"""Characters of what a run printed."""


def details_view(table: ResultTable) -> dict[str, Any]:
    """What a click on a method shows, by name.

    Args:
        table: the runs of a study, judged.
    """
    reference, metric = table.main_reference, table.metric
    command = str(table.study.header.get("command", "")).rpartition(" && ")[2]
    found = {}
    for entry in table.listed()[:MOST]:
        seeds = [
            [
                _number(seed),
                run.status,
                entry.by_seed.get(table.study.metric, {}).get(seed),
                str(run.folder),
                run.reason,
            ]
            for seed, run in entry.setting.logged.items()
        ]
        found[entry.name] = {
            "code": regularize_line(entry, reference),
            "settings": settings_text(entry, reference),
            "verdict": entry.told(metric, numbers=True),
            "command": command,
            "seeds": seeds,
            "log": _log(entry),
        }
    return found


def _number(seed: str) -> int | str:
    return int(seed) if seed.lstrip("-").isdigit() else seed


def _log(entry: Entry) -> str:
    """The end of what the first run printed."""
    for run in entry.setting.logged.values():
        path = run.folder / "output.txt"
        if path.is_file():
            with path.open("rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - TAIL))
                return file.read(TAIL).decode("utf-8", "replace")
    return ""


def matrix_view(table: ResultTable) -> dict[str, Any]:
    """Every method against every other one, corrected over all pairs; empty with fewer than three.

    Args:
        table: the runs of a study, judged.
    """
    entries = [e for e in table.ranked() if not e.same_as][:MATRIX]
    if len(entries) < 3 or table.main_reference is None:
        return {}
    test: Test = "sequential" if table.study.test == "sequential" else "fixed"
    pairs = {
        f"{i} {j}": (one.values, two.values)
        for i, one in enumerate(entries)
        for j, two in enumerate(entries)
        if i < j
    }
    judged = judge_pairs(pairs, table.metric, better=table.study.mode, test=test)
    digits = table.metric.digits
    rows = []
    for i, entry in enumerate(entries):
        cells = []
        for j in range(len(entries)):
            verdict = judged.get(f"{min(i, j)} {max(i, j)}")
            if verdict is None or math.isnan(verdict.difference):
                cells.append({"text": "", "tone": "", "mark": ""})
                continue
            difference = verdict.difference if i < j else -verdict.difference
            word = verdict.verdict
            if i > j:
                word = {"better": "worse", "worse": "better"}.get(word, word)  # type: ignore[assignment]
            tone = {"better": "up", "worse": "down"}.get(word, "")
            mark = {"better": "▲", "worse": "▼", "equal": "="}.get(word, "")
            cells.append({"text": f"{difference:+.{digits}f}", "tone": tone, "mark": mark})
        rows.append({"name": entry.name, "cells": cells})
    return {"names": [e.name for e in entries], "rows": rows, "pairs": len(pairs)}


def exports_view(table: ResultTable, advice: Advice) -> dict[str, Any]:
    """The table in other formats and the card, by the name of the file to save.

    Args:
        table: the runs of a study, judged.
        advice: the three answers.
    """
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in table.study.name) or "table"
    return {
        "CSV": [f"{name}.csv", formats.to_csv([table])],
        "Markdown": [f"{name}.md", formats.to_markdown([table], [])],
        "LaTeX": [f"{name}.tex", formats.to_latex([table])],
        "Card (SVG)": [f"{name}-card.svg", card_svg(table, advice)],
    }


def card_text(table: ResultTable, advice: Advice) -> str:
    """The answer in one line, such as "PatchDropout +4.9 (2.9 to 7.0), 8 seeds".

    Args:
        table: the runs of a study, judged.
        advice: the three answers.
    """
    if advice.pick is None:
        return advice.which.headline
    entry = table.entry(advice.pick)
    c, digits = entry.comparison, table.metric.digits
    if c is None:
        return advice.which.headline
    return (
        f"{entry.name} {c.difference:+.{digits}f} ({c.low:.{digits}f} to {c.high:.{digits}f}), "
        f"{shared_seeds(entry)} seeds"
    )


def card_svg(table: ResultTable, advice: Advice) -> str:
    """A picture of the answer to share.

    Args:
        table: the runs of a study, judged.
        advice: the three answers.
    """
    metric = describe(table.study.metric)
    lines = [
        (table.study.title, 64, 24, "#57606c", 400),
        (card_text(table, advice), 132, 38, "#15181d", 700),
        (f"difference in test {metric.label} from {table.reference_name}", 178, 22, "#57606c", 400),
        (advice.code or advice.trust.headline, 236, 20, "#005a9c", 400),
        ("dampen compare", 286, 18, "#57606c", 400),
    ]
    width = 1000
    texts = []
    for text, y, size, color, weight in lines:
        room = int((width - 96) / (0.56 * size))
        shown = text if len(text) <= room else text[: room - 1] + "…"
        texts.append(
            f'<text x="48" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}">{escape(shown)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 320" width="{width}" height="320" '
        'font-family="system-ui, sans-serif"><rect width="1000" height="320" rx="24" fill="#ffffff" '
        'stroke="#c5ccd6"/><rect width="12" height="320" fill="#005a9c"/>'
        + "".join(texts)
        + "</svg>"
    )
