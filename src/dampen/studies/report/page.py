"""The page: one HTML file that holds everything it needs and asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dampen.extensions import from_plugins
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
from dampen.studies.report.interactive import details_view, exports_view, matrix_view
from dampen.studies.report.read import Skipped
from dampen.studies.report.settings import shorten
from dampen.studies.report.summary import advise
from dampen.studies.report.view import (
    PAGED,
    bench_view,
    chosen_rows,
    pairs_view,
    rows_view,
    runs_view,
    study_view,
)
from dampen.studies.table import ResultTable

HERE = Path(__file__).parent
METHOD = (
    "Runs of one seed start from the same weights and see the same batches, so methods are compared with the baseline "
    "seed by seed. If the number of seeds was fixed in advance, the test is the paired t-test, or the exact sign-flip "
    "test where all differences are equal. If the study was analyzed while it grew, the test is an e-process, which is "
    "valid at every interim analysis. p values are Holm-corrected for the number of methods at level 0.05, separately "
    "for each metric. A method's interval has the level of its test; the intervals are not simultaneous. Equal means "
    "that the interval at 0.05 divided by the number of methods lies within the equivalence margin. With fewer than 3 "
    "shared seeds there is no test. Identical trainings under two names count once. Grid points are selected by the "
    "mean on validation, and the test set is evaluated once, at the end. Effects are Hedges' g with intervals from the "
    "noncentral t distribution."
)


def make_page(
    tables: list[ResultTable],
    skipped: list[Skipped],
    live: str = "",
    benches: Sequence[dict[str, Any]] = (),
    title: str = "",
) -> str:
    """The whole page: tables of runs, then what a bench measured. `live` marks a page that a server shows, with the
    version of its content.

    Args:
        tables: the judged tables.
        skipped: what could not be read, with the reasons.
        live: the version of the content, for a page that a server shows.
        benches: the results of `dampen bench`.
        title: of the page; default: of its table.
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
    """A policy that lets the page run its own scripts, known by their hashes, and nothing else: no network, no eval.

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
