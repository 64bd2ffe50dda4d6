"""The page: one HTML file that holds everything it needs and needs no network."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Any

from dampen.extensions import from_plugins
from dampen.studies.metric import describe
from dampen.studies.report import formats
from dampen.studies.report.charts import bench_figures, cost, curves, forest, results, searched
from dampen.studies.report.diagnosis import measured_figures
from dampen.studies.report.figures import (
    DARK,
    LIGHT,
    REFERENCE_DARK,
    REFERENCE_LIGHT,
    Figure,
    Palette,
)
from dampen.studies.report.read import Skipped
from dampen.studies.report.settings import regularize_line, settings_text, shorten
from dampen.studies.report.summary import Advice, advise, shared_seeds
from dampen.studies.report.view import (
    PAGED,
    bench_view,
    chosen_rows,
    figure_view,
    pairs_view,
    rows_view,
    runs_view,
    study_view,
)
from dampen.studies.table import Entry, ResultTable
from dampen.studies.verdict import Test, judge_pairs

# --- what a click shows
#
# What the page carries along for a click: each method's seeds, log and line of Python, all
# pairs, exports, a card.

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
            f'<text x="48" y="{y}" font-size="{size}" fill="{color}" '
            f'font-weight="{weight}">{escape(shown)}</text>'
        )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 '
        f'{width} 320" width="{width}" height="320" '
        'font-family="system-ui, sans-serif"><rect '
        'width="1000" height="320" rx="24" fill="#ffffff" '
        'stroke="#c5ccd6"/><rect width="12" height="320" fill="#005a9c"/>'
        + "".join(texts)
        + "</svg>"
    )


# --- the page

HERE = Path(__file__).parent
METHOD = (
    "Runs of one seed start from the same weights and see the same batches, "
    "so methods are compared with the baseline "
    "seed by seed. If the number of seeds was fixed in advance, the test is "
    "the paired t-test, or the exact sign-flip "
    "test where all differences are equal. If the study was analyzed while it "
    "grew, the test is an e-process, which is "
    "valid at every interim analysis. p values are Holm-corrected for the "
    "number of methods at level 0.05, separately "
    "for each metric. A method's interval has the level of its test; the "
    "intervals are not simultaneous. Equal means "
    "that the interval at 0.05 divided by the number of methods lies within "
    "the equivalence margin. With fewer than 3 "
    "shared seeds there is no test. Identical trainings under two names "
    "count once. Grid points are selected by the "
    "mean on validation, and the test set is evaluated once, at the end. "
    "Effects are Hedges' g with intervals from the "
    "noncentral t distribution."
)


ACROSS = "across"
"""The id of the figure over all tables."""


def make_page(
    tables: list[ResultTable],
    skipped: list[Skipped],
    live: str = "",
    benches: Sequence[dict[str, Any]] = (),
    title: str = "",
    across: Figure | None = None,
) -> str:
    """The whole page: tables of runs, then what a bench measured. `live` marks a page that a server
    shows, with the version of its content.

    Args:
        tables: the judged tables.
        skipped: what could not be read, with the reasons.
        live: the version of the content, for a page that a server shows.
        benches: the results of `dampen bench`.
        title: of the page; default: of its table.
        across: the answer over all tables.
    """
    whole = tables
    tables, shared = [], []
    for table in whole:  # the page says once what all names share
        short, said = shorten(table)
        tables.append(short)
        shared.append(said)
    palette = Palette([e.config.name for t in tables for e in t.entries], _references(tables))
    for entry in (e for t in tables for e in t.entries):
        palette.same(entry.name, entry.config.name)
    colors = [*zip(LIGHT, DARK, strict=True), (REFERENCE_LIGHT, REFERENCE_DARK)]
    studies = []
    data: dict[str, Any] = {
        "figures": {},
        "runs": {},
        "rows": {},
        "pairs": {},
        "chosen": {},
        "details": {},
        "exports": {},
        "colors": colors,
    }
    for i, table in enumerate(tables):
        key, figures, lead = f"t{i + 1}", table_figures(table, palette), forest(table, palette)
        studies.append(study_view(table, palette, figures, key, dict(colors), lead))
        for figure in [*figures, *([lead] if lead else [])]:
            data["figures"][f"{key}-{figure.key}"] = _figure_data(figure)
        advice = studies[-1]["advice"]
        studies[-1] |= {"matrix": matrix_view(table), "shared": shared[i]}
        data["runs"][key], data["pairs"][key] = runs_view(table), pairs_view(table)
        data["details"][key] = details_view(table)
        data["exports"][key] = exports_view(whole[i], advise(whole[i]))
        data["chosen"][key] = chosen_rows(table, advice.pick)
        if len(table.entries) > PAGED:
            data["rows"][key] = rows_view(table)
    costs = []
    for i, record in enumerate(benches):
        key, figures = f"b{i + 1}", bench_figures(record)
        costs.append(bench_view(record, figures, key, dict(colors)))
        for figure in figures:
            data["figures"][f"{key}-{figure.key}"] = _figure_data(figure)
    if across is not None:
        data["figures"][ACROSS] = _figure_data(across)
    if title and len(studies) == 1:
        studies[0]["title"] = title
    if not title:
        one = (*studies, *costs)[0]["title"]
        title = f"Report: {len(tables)} tables" if len(tables) > 1 else one
    scripts = {"early": asset("early.js"), "vega": vega_bundle(), "js": asset("report.js")}
    out: str = _template().render(
        title=title,
        studies=studies,
        benches=costs,
        across=figure_view(across, ACROSS, palette, dict(colors)) if across else None,
        skipped=skipped,
        data=_plain(data),
        css=asset("report.css"),
        **scripts,
        policy=content_policy(list(scripts.values()), live=bool(live)),
        live=live,
        method=METHOD,
        version=metadata.version("dampen"),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return out


def _references(tables: list[ResultTable]) -> list[str]:
    return [t.main_reference.config.name for t in tables if t.main_reference]


def table_figures(table: ResultTable, palette: Palette) -> list[Figure]:
    """Every figure for which the study has data.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
    """
    made = [
        cost(table, palette),
        results(table, palette) if not table.study.show_all else None,
        searched(table, palette),
        *curves(table, palette),
        *measured_figures(table, palette),
        *(make(table, palette) for make in from_plugins("dampen.figures").values()),
    ]
    figures = sorted(
        (figure for figure in made if figure is not None),
        key=lambda figure: (figure.key != "cost", figure.wide),
    )
    narrow = [figure for figure in figures if not figure.wide]
    if len(narrow) % 2:  # two stand side by side; the odd one takes the whole width
        narrow[-1].wide = True
    return figures


def _figure_data(figure: Figure) -> dict[str, Any]:
    return {
        "panels": [panel.spec for panel in figure.panels],
        "smooth": figure.smooth,
        "fixed": figure.fixed,
        "columns": [{"title": c.title, "digits": c.digits} for c in figure.columns],
        "records": [[record.get(c.key) for c in figure.columns] for record in figure.records],
    }


def content_policy(scripts: list[str], live: bool) -> str:
    """A policy that lets the page run its own scripts, known by their hashes, and nothing else: no
    network, no eval.

    Args:
        scripts: the scripts of the page.
        live: the version of the content, for a page that a server shows.
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts
    )
    network = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {network}; base-uri 'none'; form-action 'none'"
    )


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from vl-convert, which carries them along."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    if "</script" in bundle.lower():
        raise RuntimeError(
            "The chart library contains a closing script tag and cannot be put into a page."
        )
    return bundle


@cache
def asset(name: str) -> str:
    """A file of ours that goes into the page.

    Args:
        name: of a file in assets/.
    """
    return (HERE / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(HERE / "templates")
    return Environment(autoescape=True, undefined=StrictUndefined, loader=loader).get_template(
        "page.html"
    )


def _plain(value: Any) -> Any:
    """JSON has no NaN; numbers keep six digits, so that pages stay small."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return None if not math.isfinite(value) else float(f"{value:.7g}")
    return value
