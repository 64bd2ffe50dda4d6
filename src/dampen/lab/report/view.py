"""What the page shows of a table, cell by cell, as plain data for the template."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dampen.lab.report.advice import advise
from dampen.lab.report.figure import Figure, Palette
from dampen.lab.report.names import MEASURED, PERCENT, label, points, unit
from dampen.lab.report.read import Run
from dampen.lab.report.study import Study
from dampen.lab.report.table import Entry, Table, grid_text, step_time
from dampen.lab.stats import LEVEL

MOST = 60
"""Rows of a table that are shown before one asks for all."""

QUESTIONS = ("Which method should I use here?", "What does it cost?", "Can I trust it?")
CHIPS = {"better": "up", "worse": "down", "too few runs": "few", "diverged": "down"}
PAPER_CHIPS = {"reproduced": "yes", "not reproduced": "no"}


@dataclass(frozen=True)
class Head:
    """A column's heading."""

    title: str
    kind: str = ""
    help: str = ""


def study_view(table: Table, palette: Palette, figures: list[Figure], key: str, dark: dict[str, str]) -> dict[str, Any]:
    """Everything the template needs for one study."""
    study, advice = table.study, advise(table)
    extra = [m for m in _metrics(table) if m != study.metric and m not in MEASURED]
    rows = [_row(entry, table, extra, advice.pick, palette, dark) for entry in table.ranked() + _without(table)]
    runs = study.runs()
    done = sum(run.status != "unfinished" for run in runs)
    reference = table.main_reference
    caption = f"Test {label(study.metric)}, {'higher' if study.mode == 'max' else 'lower'} is better"
    if reference:
        caption += f"; differences to {reference.name} over shared seeds, p corrected by Holm"
    return {
        "key": key,
        "title": study.title,
        "short": study.name,
        "header": {"paper": "", "table": "", "command": ""} | study.header,
        "advice": advice,
        "answers": list(zip(QUESTIONS, (advice.which, advice.cost, advice.trust), strict=True)),
        "facts": facts(study),
        "done": f"{done:,} of {study.planned():,}",
        "caption": caption,
        "columns": _columns(table, extra),
        "rows": rows,
        "show_all": study.show_all,
        "most": 12 if study.show_all else MOST,
        "figures": [figure_view(f, f"{key}-{f.key}", palette, dark) for f in figures],
        "measured": _measured(table, palette, dark),
        "paper": _paper(table),
        "departures": study.departures,
        "protocol": sorted((k, v) for k, v in study.protocol.items() if v not in ("null", "false")),
        "machines": _machines(runs),
    }


def bench_view(record: dict[str, Any], figures: list[Figure], key: str, dark: dict[str, str]) -> dict[str, Any]:
    """Everything the template needs for what `dampen bench` measured."""
    machine = record["machine"]
    where = f"{machine['cpu']}, {machine['threads']} thread(s), {machine['clock']} time, torch {machine['torch']}"
    targets = record["targets"].values()
    met = f"{sum(t['met'] for t in targets)} of {len(targets)} targets met" if targets else ""
    return {
        "key": key,
        "title": "What each method costs",
        "facts": [fact for fact in (record["model"], where, machine["date"], met) if fact],
        "figures": [figure_view(f, f"{key}-{f.key}", Palette([]), dark) for f in figures],
        "command": record["command"],
        "skipped": record["skipped"],
    }


def facts(study: Study) -> list[str]:
    """Data, model and budget in a few words."""
    p = study.protocol
    found = [p["data.name"]] if "data.name" in p else []
    counts = [f"{int(p[f'examples.{k}']):,} {k}" for k in ("train", "valid", "test") if f"examples.{k}" in p]
    found += [" / ".join(counts)] if counts else []
    found += [p["model.name"]] if "model.name" in p else []
    found += [f"{p['train.epochs']} epochs"] if "train.epochs" in p else []
    runs = study.runs()
    finished = sum(run.status == "finished" for run in runs)
    return [*found, f"{finished:,} of {study.planned():,} runs finished"]


def _metrics(table: Table) -> list[str]:
    """Test metrics of the table, the main one first, interval variants left to the details."""
    keys = dict.fromkeys(k for e in table.entries for k in e.metrics if "@" not in k)
    return [table.study.metric, *(k for k in keys if k != table.study.metric)]


def _columns(table: Table, extra: list[str]) -> list[Head]:
    heads = [
        Head("Row"),
        Head(label(table.study.metric, with_unit=True), "num", "mean ± standard deviation over seeds"),
    ]
    heads.append(Head("n", "num", "finished runs"))
    if table.main_reference:
        heads.append(Head("Difference", "num", "mean paired difference with its 95 % interval (Student's t)"))
        heads.append(Head("Interval", "mini", "the same as a drawing; the upright line is no difference"))
        heads.append(Head("Verdict", "", f"paired test at level {LEVEL}, corrected for the number of rows"))
        heads.append(Head("p", "num", "two-sided, after Holm's correction"))
        heads.append(Head("Effect", "num", "Hedges' g of the paired differences with its 95 % bootstrap interval"))
    heads.append(Head("Cost", "num", "time of a training step against the reference, or seconds"))
    return heads + [Head(label(m, with_unit=True), "num") for m in extra]


def _row(
    entry: Entry, table: Table, extra: list[str], pick: str | None, palette: Palette, dark: dict[str, str]
) -> dict[str, Any]:
    study = table.study
    cells = [_cell(entry.name, entry.name), number(entry.summary.mean, entry.summary.sd, study.metric)]
    count = str(entry.summary.n) if entry.summary.n == entry.cell.planned else f"{entry.summary.n}/{entry.cell.planned}"
    cells.append(_cell(count, entry.summary.n, "num"))
    if table.main_reference:
        cells += _comparison_cells(entry, table)
    cells.append(_cost_cell(entry))
    for metric in extra:
        s = entry.metrics.get(metric)
        cells.append(_narrow(number(s.mean, s.sd, metric)) if s else _cell("", "", "num"))
    notes = [grid_text(entry.cell.grid)] if len(entry.row.cells) > 1 and not study.show_all else []
    notes += [f"{entry.diverged} diverged"] if entry.diverged else []
    notes += [entry.row.note] if entry.row.note else []
    light = palette.colors[entry.name]
    view = {"cells": cells, "pick": entry.name == pick, "note": "; ".join(notes), "color": light}
    return view | {"dark": dark.get(light, light)}


def _comparison_cells(entry: Entry, table: Table) -> list[dict[str, Any]]:
    c = entry.comparison
    if c is None or not c.n:
        word = "reference" if entry.reference is None else entry.verdict
        return [_cell("", "", "num"), _cell("", ""), _cell(word, word), _cell("", "", "num"), _cell("", "", "num")]
    digits = 2 if table.study.metric in PERCENT else 3
    difference, drawing = _cell(f"{c.difference:+.{digits}f}", c.difference, "num"), _cell("", c.difference, "mini")
    if not math.isnan(c.low):
        difference["small"] = f"{c.low:+.{digits}f} to {c.high:+.{digits}f}"
        drawing["forest"] = _forest(c.difference, c.low, c.high, table, CHIPS.get(entry.verdict, ""))
    verdict = _cell(entry.verdict, entry.verdict)
    verdict |= {"chip": CHIPS.get(entry.verdict, "flat"), "help": f"against {entry.reference}, {c.n} shared seeds"}
    p = _cell("" if c.corrected is None else p_text(c.corrected), _sortable(c.corrected), "num")
    if c.p is not None:
        p["help"] = f"{c.test}: {p_text(c.p)} before correction"
        p["help"] += f"; Wilcoxon {p_text(c.wilcoxon_p)}" if c.wilcoxon_p is not None else ""
    effect = _cell("" if math.isnan(c.effect) else f"{c.effect:+.2f}", _sortable(c.effect), "num")
    if not math.isnan(c.effect_low):
        effect["small"] = f"{_capped(c.effect_low)} to {_capped(c.effect_high)}"
    return [difference, drawing, verdict, p, effect]


def _capped(effect: float) -> str:
    """Resamples with nearly equal differences have huge effects, which say nothing more."""
    return f"{effect:+.1f}" if abs(effect) < 20 else "> +20" if effect > 0 else "< -20"


def p_text(p: float) -> str:
    """A p value as people write it.

    >>> p_text(0.00004), p_text(0.0312)
    ('<0.001', '0.031')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _forest(mean: float, low: float, high: float, table: Table, tone: str) -> Any:
    """A small drawing of the interval around zero, on one scale for the whole table."""
    from markupsafe import Markup

    known = [e.comparison for e in table.entries if e.comparison and not math.isnan(e.comparison.low)]
    left = min(0.0, *(c.low for c in known)) if known else 0.0
    right = max(0.0, *(c.high for c in known)) if known else 0.0
    span = (right - left) or 1.0

    def x(value: float) -> str:
        return f"{2 + 88 * (value - left) / span:.1f}"

    return Markup(
        f'<svg class="forest {tone}" viewBox="0 0 92 16" aria-hidden="true">'
        f'<line class="zero" x1="{x(0)}" x2="{x(0)}" y1="0" y2="16"/>'
        f'<line class="range" x1="{x(low)}" x2="{x(high)}" y1="8" y2="8"/>'
        f'<circle class="mid" cx="{x(mean)}" cy="8" r="3.5"/></svg>'
    )


def _cost_cell(entry: Entry) -> dict[str, Any]:
    cost = entry.cost
    if cost.ratio is not None:
        cell = _cell(f"{cost.ratio:.2f}x", cost.ratio, "num")
        if cost.low is not None and cost.n > 1:
            cell["small"] = f"{cost.low:.2f} to {cost.high:.2f}"
        cell["help"] = f"{1000 * (cost.step_seconds or 0):.1f} ms per step"
        return cell
    if cost.train_seconds is not None:
        return _cell(f"{cost.train_seconds:.3g} s", cost.train_seconds, "num")
    return _cell("", "", "num")


def number(mean: float, sd: float, metric: str) -> dict[str, Any]:
    """Mean ± standard deviation in the digits of the metric."""
    if math.isnan(mean):
        return _cell("", "", "num")
    digits = 2 if metric in PERCENT or metric in ("bleu", "chrf") else 3
    spread = "" if math.isnan(sd) else f" ± {sd:.{digits}f}"
    return _cell(f"{mean:.{digits}f}{spread}", mean, "num")


def _narrow(cell: dict[str, Any]) -> dict[str, Any]:
    """The deviation below the mean, so that columns stay narrow."""
    mean, _, spread = cell["text"].partition(" ± ")
    return cell | {"text": mean, "small": f"± {spread}" if spread else ""}


def _cell(text: str, sort: Any, kind: str = "") -> dict[str, Any]:
    return {"text": text, "sort": sort, "kind": kind, "help": "", "chip": "", "small": "", "forest": ""}


def _sortable(value: float | None) -> Any:
    return "" if value is None or math.isnan(value) else value


def _without(table: Table) -> list[Entry]:
    return [e for e in table.entries if not e.summary.n]


def figure_view(figure: Figure, id: str, palette: Palette, dark: dict[str, str]) -> dict[str, Any]:
    """What the template needs for one figure."""
    groups: dict[str, list[dict[str, str]]] = {}
    for image in figure.images:
        groups.setdefault(image["group"], []).append(image)
    panels = [{"title": p.title, "height": p.spec.get("height", 200) + 60} for p in figure.panels]
    view = {"id": id, "title": figure.title, "caption": figure.caption, "wide": figure.wide, "panels": panels}
    legend = [{"name": n, "color": palette.colors[n], "dark": dark[palette.colors[n]]} for n in figure.legend]
    return view | {"images": list(groups.items()), "legend": legend}


def _measured(table: Table, palette: Palette, dark: dict[str, str]) -> dict[str, Any]:
    """The table of what dampen diagnose measured; empty where it did not."""
    shown = [m for m in MEASURED if any(m in e.metrics for e in table.entries) and m != table.study.metric]
    rows = []
    for entry in (e for e in table.ranked() if any(m in e.metrics for m in shown)):
        cells = [_cell(entry.name, entry.name)]
        for metric in shown:
            s = entry.metrics.get(metric)
            cells.append(number(s.mean, s.sd, metric) if s else _cell("", "", "num"))
        light = palette.colors[entry.name]
        rows.append({"cells": cells, "color": light, "dark": dark.get(light, light)})
    return {"columns": [Head("Row"), *(Head(label(m, with_unit=True), "num") for m in shown)], "rows": rows}


def _paper(table: Table) -> list[dict[str, Any]]:
    rows = []
    for entry in table.entries:
        for metric, against in entry.against.items():
            paper, ours = entry.published[metric], entry.measured(metric)
            here = number(ours.mean, ours.sd, metric) if ours else _cell("", "", "num")
            row: dict[str, Any] = {"row": entry.name, "metric": label(metric, with_unit=True), "paper": paper.text()}
            row |= {
                "paper_sort": paper.mean,
                "here": here["text"],
                "here_sort": here["sort"],
                "n": ours.n if ours else 0,
            }
            reason = "" if table.study.departures else against.reason
            row |= {"word": against.word, "reason": reason, "chip": PAPER_CHIPS.get(against.word, "flat")}
            rows.append(row | {"claim": entry.claim if metric == table.study.metric else ""})
    return rows


def _machines(runs: list[Run]) -> list[list[tuple[str, str]]]:
    """The different places of the last sessions, without the time."""
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for run in runs:
        if run.sessions:
            s = run.sessions[-1]
            flat = {k: v for k, v in s.items() if k not in ("time", "packages")} | s.get("packages", {})
            found[tuple((k, str(v)) for k, v in flat.items() if v is not None)] = None
    return [list(place) for place in found][:6]


def runs_view(table: Table) -> dict[str, Any]:
    """Every run of a study as a plain table."""
    study = table.study
    grid = [k for k in study.grid_keys() if len({str(c.grid.get(k)) for r in study.rows for c in r.cells}) > 1]
    heads = [("Row", None), *((k, None) for k in grid), ("Seed", 0), ("Status", None)]
    heads += [(f"Test {label(study.metric, with_unit=True)}", 3), ("Epochs", 0), ("ms per step", 2), ("Seconds", 1)]
    heads += [("Machine", None), ("Folder", None)]
    records = []
    for row in study.rows:
        for cell in row.cells:
            for seed, run in cell.runs.items():
                final = run.final or {}
                value = final.get("test", {}).get(study.metric)
                step, machine = step_time(final), run.sessions[-1].get("cpu", "") if run.sessions else ""
                records.append(
                    [
                        row.name,
                        *(str(cell.grid.get(k, "")) for k in grid),
                        int(seed) if seed.lstrip("-").isdigit() else seed,
                        run.status,
                        None if value is None else unit(study.metric) * value,
                        final.get("epochs"),
                        None if step is None else 1000 * step,
                        final.get("seconds", {}).get("train"),
                        machine,
                        run.folder.name,
                    ]
                )
    return {"columns": [{"title": t, "digits": d} for t, d in heads], "records": records}


def gain_text(entry: Entry, metric: str) -> str:
    """The difference to the reference in words, for formats without drawings."""
    c = entry.comparison
    if c is None or math.isnan(c.difference):
        return ""
    digits = 2 if metric in PERCENT else 3
    interval = "" if math.isnan(c.low) else f" ({c.low:+.{digits}f} to {c.high:+.{digits}f})"
    return f"{c.difference:+.{digits}f}{points(metric)}{interval}"
