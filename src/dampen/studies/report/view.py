"""What the page shows of a table, cell by cell, as plain data for the template; and what a reader
can choose there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dampen.studies.ensembles import ensembles_in_words
from dampen.studies.methods_text import methods_as_text as written
from dampen.studies.metric import METRICS, Metric, describe
from dampen.studies.plugins import active
from dampen.studies.report.figures import CHOSEN, MOST, Figure, Palette
from dampen.studies.report.settings import all_settings, settings_text
from dampen.studies.report.summary import QUESTIONS, advise, counted, listed
from dampen.studies.store import LoggedRun
from dampen.studies.table import TRAINED, Entry, LoggedComparison, ResultTable, grid_text
from dampen.studies.verdict import KINDS, Test, Verdict, words

SHOWN = 60
"""Rows of a table that are shown at first."""
PAGED = 300
"""With more rows than these the page shows a part at a time and makes the rest only on demand."""

CHIPS = {
    "better": "up",
    TRAINED: "few",
    "worse": "down",
    "equal": "same",
    "no gain": "same",
    "inconclusive": "few",
    "failed": "down",
}
PAPER_CHIPS = {"reproduced": "yes", "not reproduced": "no"}


@dataclass(frozen=True)
class Head:
    """A column's heading."""

    title: str
    kind: str = ""
    help: str = ""


def study_view(
    table: ResultTable,
    palette: Palette,
    figures: list[Figure],
    key: str,
    dark: dict[str, str],
    lead: Figure | None = None,
) -> dict[str, Any]:
    """Everything the template needs for one study; `lead` is the figure before the table.

    Args:
        table: the runs of a study, judged.
        palette: the color, shape and dash of each method.
        figures: what is drawn below the table.
        key: a prefix for the ids of the figures.
        dark: the color of each light color on a dark ground.
        lead: the figure before the table.
    """
    study, advice = table.study, advise(table)
    extra = [m for m in table.other_metrics() if not describe(m).diagnosed]
    most = 12 if study.show_all else SHOWN
    entries = table.listed()
    here = entries if len(entries) <= PAGED else entries[:most]
    rows = [_row(entry, table, extra, advice.pick, palette, dark) for entry in here]
    runs = study.runs()
    done = sum(run.status != "unfinished" for run in runs)
    caption = f"Test {describe(study.metric).label}, {'higher' if study.mode == 'max' else 'lower'} is better"
    if table.main_reference:
        caption += f". {about_test(table)}"
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
        "most": most,
        "total": len(entries),
        "paged": len(entries) > PAGED,
        "picker": picker_view(table, advice.pick, palette, dark),
        "race": race_text(study),
        "ensembles": ensembles_in_words(table),
        "missing": missing_plugins(study),
        "lead": figure_view(lead, f"{key}-{lead.key}", palette, dark) if lead else None,
        "figures": [figure_view(f, f"{key}-{f.key}", palette, dark) for f in figures],
        "measured": _measured(table, palette, dark),
        "paper": _paper(table),
        "departures": study.departures,
        "protocol": sorted((k, v) for k, v in study.protocol.items() if v not in ("null", "false")),
        "machines": _machines(runs),
    }


def bench_view(
    record: dict[str, Any], figures: list[Figure], key: str, dark: dict[str, str]
) -> dict[str, Any]:
    """Everything the template needs for what `dampen bench` measured.

    Args:
        record: what `dampen bench` measured.
        figures: what is drawn below the table.
        key: a prefix for the ids of the figures.
        dark: the color of each light color on a dark ground.
    """
    machine = record["machine"]
    where = f"{machine['cpu']}, {machine['threads']} thread(s), {machine['clock']} time, torch {machine['torch']}"
    targets = record["targets"].values()
    met = f"{sum(t['met'] for t in targets)} of {len(targets)} targets met" if targets else ""
    return {
        "key": key,
        "title": "Cost of each method",
        "facts": [fact for fact in (record["model"], where, machine["date"], met) if fact],
        "figures": [figure_view(f, f"{key}-{f.key}", Palette([]), dark) for f in figures],
        "command": record["command"],
        "skipped": record["skipped"],
    }


def facts(study: LoggedComparison) -> list[str]:
    """Data, model and budget in a few words.

    Args:
        study: the runs of one table.
    """
    p = study.protocol
    found = [p["data.name"]] if "data.name" in p else []
    counts = [
        f"{int(p[f'examples.{k}']):,} {k}"
        for k in ("train", "valid", "test")
        if f"examples.{k}" in p
    ]
    found += [" / ".join(counts)] if counts else []
    found += [p["model.name"]] if "model.name" in p else []
    found += [f"{p['train.epochs']} epochs"] if "train.epochs" in p else []
    runs = study.runs()
    finished = sum(run.status == "finished" for run in runs)
    return [*found, f"{finished:,} of {study.planned():,} runs finished"]


def _mark(name: str, palette: Palette) -> str:
    """The row's marker in charts, as a letter."""
    return MARKERS.get(palette.shapes[name], "●")


def picker_view(
    table: ResultTable, pick: str | None, palette: Palette, dark: dict[str, str]
) -> list[dict[str, Any]]:
    """The rows that the charts can draw, with their colors and marks.

    Args:
        table: the runs of a study, judged.
        pick: the recommended method.
        palette: the color, shape and dash of each method.
        dark: the color of each light color on a dark ground.
    """
    from dampen.studies.report.view import chosen_rows

    found = chosen_rows(table, pick)
    made = []
    for name in found["rows"]:
        light = palette.colors[name]
        look = {"color": light, "dark": dark.get(light, light), "mark": _mark(name, palette)}
        made.append({"name": name, "on": name in found["first"], **look})
    return made


MARKERS = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "cross": "✚",
    "triangle-down": "▼",
}
"""The shapes of the charts as characters."""


def race_text(study: LoggedComparison) -> str:
    """How the seeds came about, where they were added in rounds.

    Args:
        study: the runs of one table.
    """
    race = study.header.get("race")
    if not race:
        return ""
    told = f"Seeds were added in rounds to the inconclusive comparisons: {race['runs']:,} runs in {race['rounds']} rounds"
    told += f", until {'every comparison was conclusive' if race['why'] == 'all decided' else race['why']}"
    if race.get("fixed"):
        told += f". A plan fixed before, with power 0.8 for the same differences, would have taken {race['fixed']:,} runs"
    return f"{told}."


def missing_plugins(study: LoggedComparison) -> str:
    """A sentence on the plug-ins of the recipe that are not loaded, whose figures are missing.

    A report imports no code that a folder names: only the user's own settings load a plug-in.

    Args:
        study: the runs of one table.
    """
    loaded = {name for name, _ in active()}
    missing = [name for name in study.header.get("plugins", []) if name not in loaded]
    if not missing:
        return ""
    return (
        f"The recipe names the plug-in {listed(missing)}, which is not loaded, so its figures are "
        f"missing here. Set DAMPEN_PLUGINS={','.join(missing)} to add them."
    )


def about_test(table: ResultTable) -> str:
    """How differences were judged, in two sentences.

    Args:
        table: the runs of a study, judged.
    """
    test: Test = "sequential" if table.study.test == "sequential" else "fixed"
    margin = f", margin {table.margin:g}{table.metric.points}" if table.margin else ""
    told = f"Differences to {table.reference_name}, seed by seed: {KINDS[test]}, Holm-corrected over the methods{margin}. "
    return told + "Each interval has the level of its test, so it always agrees with the verdict."


def _columns(table: ResultTable, extra: list[str]) -> list[Head]:
    """What decides comes first, so that a phone shows it beside the name."""
    heads = [Head("Method")]
    if table.main_reference:
        heads.append(
            Head("Verdict", "verdict", "against the baseline, in agreement with the interval")
        )
    heads.append(
        Head("Cost", "num", "time of a training step relative to the baseline, or seconds")
    )
    heads.append(Head("Settings", "settings", "the values it was run with, defaults too"))
    heads.append(Head(table.metric.title, "num", "mean ± standard deviation over seeds"))
    if table.main_reference:
        heads.append(
            Head("Difference", "num", "mean paired difference with its corrected interval")
        )
    heads.append(Head("n", "num", "finished runs"))
    if table.main_reference:
        heads.append(Head("p", "num", "two-sided, after Holm's correction"))
        heads.append(
            Head(
                "Effect", "num", "Hedges' g of the paired differences with its exact 95 % interval"
            )
        )
    return heads + [
        Head(describe(m).title, "num", "mean, marked with the verdict on this metric")
        for m in extra
    ]


def _row(
    entry: Entry,
    table: ResultTable,
    extra: list[str],
    pick: str | None,
    palette: Palette,
    dark: dict[str, str],
) -> dict[str, Any]:
    done, planned = counted(entry, table).split("/")
    count = done if done == planned else f"{done}/{planned}"
    compared = table.main_reference is not None
    cells = [
        _cell(entry.name, entry.name),
        *([_verdict_cell(entry, table)] if compared else []),
        _cost_cell(entry),
        _settings_cell(entry, table),
    ]
    cells.append(_narrow(number(entry.summary.mean, entry.summary.sd, table.metric)))
    cells += [_difference_cell(entry, table)] if compared else []
    cells.append(_cell(count, entry.summary.n, "num"))
    cells += _test_cells(entry) if compared else []
    cells += [_secondary_cell(entry, metric) for metric in extra]
    notes = (
        [grid_text(entry.setting.grid)]
        if len(entry.config.settings) > 1 and not table.study.show_all
        else []
    )
    notes += [f"{entry.diverged} diverged"] if entry.diverged else []
    notes += [f"same training as {entry.same_as}"] if entry.same_as else []
    notes += [entry.left_out] if entry.left_out else []
    notes += [entry.config.note] if entry.config.note else []
    light = palette.colors[entry.name]
    view = {"cells": cells, "pick": entry.name == pick, "note": "; ".join(notes), "color": light}
    return view | {"dark": dark.get(light, light), "mark": _mark(entry.name, palette)}


def _verdict_cell(entry: Entry, table: ResultTable) -> dict[str, Any]:
    """The verdict as a chip, with what belongs to it below: the margin, the seeds it needs, the
    reason of a failure."""
    c = entry.comparison
    if entry.verdict in ("reference", "", "no run yet") or (
        c is None and entry.verdict != "failed"
    ):
        return _cell(entry.verdict, entry.verdict, "verdict")
    cell = _cell(entry.verdict, entry.verdict, "verdict") | {
        "chip": CHIPS.get(entry.verdict, "flat")
    }
    told = entry.told(table.metric)
    cell["small"] = told.removeprefix(entry.verdict).lstrip(",:; ")
    cell["help"] = f"against {entry.reference}, {c.n} shared seeds" if c else told
    return cell


def _settings_cell(entry: Entry, table: ResultTable) -> dict[str, Any]:
    text = settings_text(entry, table.main_reference)
    return _cell(text, text, "settings")


def _difference_cell(entry: Entry, table: ResultTable) -> dict[str, Any]:
    c, digits = entry.comparison, table.metric.digits
    if c is None or not c.n:
        return _cell("", "", "num")
    cell = _cell(f"{c.difference:+.{digits}f}", c.difference, "num")
    if not math.isnan(c.low):
        cell["small"] = f"{c.low:+.{digits}f} to {c.high:+.{digits}f}"
        cell["help"] = f"interval at level {c.level:.4f}"
    return cell


def _test_cells(entry: Entry) -> list[dict[str, Any]]:
    c = entry.comparison
    if c is None or c.p is None:
        return [_cell("", "", "num"), _cell("", "", "num")]
    p = _cell("" if c.corrected is None else p_text(c.corrected), _sortable(c.corrected), "num")
    p["help"] = f"{c.test}: {p_text(c.p)} before correction"
    p["help"] += f"; Wilcoxon {p_text(c.wilcoxon_p)}" if c.wilcoxon_p is not None else ""
    effect = _cell("" if math.isnan(c.effect) else f"{c.effect:+.2f}", _sortable(c.effect), "num")
    if not math.isnan(c.effect_low):
        effect["small"] = f"{c.effect_low:+.1f} to {c.effect_high:+.1f}"
    return [p, effect]


def _secondary_cell(entry: Entry, metric: str) -> dict[str, Any]:
    """The mean, and below it the mark of its own verdict with the spread."""
    s, c = entry.metrics.get(metric), entry.secondary.get(metric)
    if s is None:
        return _cell("", "", "num")
    cell = _narrow(number(s.mean, s.sd, describe(metric)))
    if c is not None and c.verdict in MARKS:
        cell["mark"], cell["tone"] = MARKS[c.verdict], CHIPS[c.verdict]
        cell["help"] = f"{words(c, metric)}: {_signed(c, describe(metric))}"
    return cell


MARKS = {"better": "▲", "worse": "▼", "equal": "="}


def _signed(c: Verdict, metric: Metric) -> str:
    interval = (
        "" if math.isnan(c.low) else f" ({c.low:+.{metric.digits}f} to {c.high:+.{metric.digits}f})"
    )
    return f"{c.difference:+.{metric.digits}f}{metric.points}{interval}"


def p_text(p: float) -> str:
    """A p value as people write it.

    Args:
        p: a p value.

    >>> p_text(0.00004), p_text(0.0312)
    ('<0.001', '0.031')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _cost_cell(entry: Entry) -> dict[str, Any]:
    cost = entry.cost
    if cost.ratio is not None:
        cell = _cell(f"{cost.ratio:.2f}x", cost.ratio, "num")
        low, high = cost.interval
        if cost.n > 1 and not math.isnan(low):
            cell["small"] = f"{low:.2f} to {high:.2f}"
        cell["help"] = f"{1000 * (cost.step_seconds or 0):.1f} ms per step"
        return cell
    if cost.train_seconds is not None:
        return _cell(f"{cost.train_seconds:.3g} s", cost.train_seconds, "num")
    return _cell("", "", "num")


def number(mean: float, sd: float, metric: Metric) -> dict[str, Any]:
    """Mean ± standard deviation in the digits of the metric.

    Args:
        mean: the mean.
        sd: the standard deviation; NaN without one.
        metric: its digits are used.
    """
    if math.isnan(mean):
        return _cell("", "", "num")
    digits = metric.digits
    spread = "" if math.isnan(sd) else f" ± {sd:.{digits}f}"
    return _cell(f"{mean:.{digits}f}{spread}", mean, "num")


def _narrow(cell: dict[str, Any]) -> dict[str, Any]:
    """The deviation below the mean, so that columns stay narrow."""
    mean, _, spread = cell["text"].partition(" ± ")
    return cell | {"text": mean, "small": f"± {spread}" if spread else ""}


def _cell(text: str, sort: Any, kind: str = "") -> dict[str, Any]:
    return {
        "text": text,
        "sort": sort,
        "kind": kind,
        "help": "",
        "chip": "",
        "small": "",
        "mark": "",
        "tone": "",
    }


def _sortable(value: float | None) -> Any:
    return "" if value is None or math.isnan(value) else value


def figure_view(figure: Figure, id: str, palette: Palette, dark: dict[str, str]) -> dict[str, Any]:
    """What the template needs for one figure.

    Args:
        figure: a chart with its numbers.
        id: the id of the figure in the page.
        palette: the color, shape and dash of each method.
        dark: the color of each light color on a dark ground.
    """
    groups: dict[str, list[dict[str, str]]] = {}
    for image in figure.images:
        groups.setdefault(image["group"], []).append({"width": "", "height": "", **image})
    panels = [{"title": p.title, "height": p.spec.get("height", 200) + 60} for p in figure.panels]
    view = {
        "id": id,
        "title": figure.title,
        "caption": figure.caption,
        "wide": figure.wide,
        "panels": panels,
    }
    view["smooth"], view["seeds"] = figure.smooth, figure.seeds
    legend = [
        {"name": n, "color": palette.colors[n], "dark": dark[palette.colors[n]]}
        for n in figure.legend
    ]
    return view | {"images": list(groups.items()), "legend": legend}


def _measured(table: ResultTable, palette: Palette, dark: dict[str, str]) -> dict[str, Any]:
    """The table of what dampen diagnose measured; empty where it did not."""
    known = {name for e in table.entries for name in e.metrics if name != table.study.metric}
    shown = [m for m in METRICS.values() if m.diagnosed and not m.drawn and m.name in known]
    rows = []
    for entry in (e for e in table.ranked() if any(m.name in e.metrics for m in shown)):
        cells = [_cell(entry.name, entry.name)]
        for metric in shown:
            s = entry.metrics.get(metric.name)
            cells.append(number(s.mean, s.sd, metric) if s else _cell("", "", "num"))
        light = palette.colors[entry.name]
        rows.append(
            {
                "cells": cells,
                "color": light,
                "dark": dark.get(light, light),
                "mark": _mark(entry.name, palette),
            }
        )
    return {"columns": [Head("Method"), *(Head(m.title, "num") for m in shown)], "rows": rows}


def _paper(table: ResultTable) -> list[dict[str, Any]]:
    rows = []
    for entry in table.entries:
        for metric, against in entry.against.items():
            paper, ours = entry.published[metric], entry.measured(metric)
            here = number(ours.mean, ours.sd, describe(metric)) if ours else _cell("", "", "num")
            row: dict[str, Any] = {
                "row": entry.name,
                "metric": describe(metric).title,
                "paper": paper.text(),
            }
            row |= {
                "paper_sort": paper.mean,
                "here": here["text"],
                "here_sort": here["sort"],
                "n": ours.n if ours else 0,
            }
            reason = "" if table.study.departures else against.reason
            row |= {
                "word": against.word,
                "reason": reason,
                "chip": PAPER_CHIPS.get(against.word, "flat"),
            }
            rows.append(row | {"claim": entry.claim if metric == table.study.metric else ""})
    return rows


def _machines(runs: list[LoggedRun]) -> list[list[tuple[str, str]]]:
    """The different places of the last sessions, without the time."""
    found: dict[tuple[tuple[str, str], ...], None] = {}
    for run in runs:
        if run.sessions:
            s = run.sessions[-1]
            flat = {k: v for k, v in s.items() if k not in ("time", "packages")} | s.get(
                "packages", {}
            )
            found[tuple((k, str(v)) for k, v in flat.items() if v is not None)] = None
    return [list(place) for place in found][:6]


def runs_view(table: ResultTable) -> dict[str, Any]:
    """Every run of a study as a plain table.

    Args:
        table: the runs of a study, judged.
    """
    study = table.study
    grid = [
        k
        for k in study.grid_keys()
        if len({str(c.grid.get(k)) for r in study.configs for c in r.settings}) > 1
    ]
    heads = [("Method", None), *((k, None) for k in grid), ("Seed", 0), ("Status", None)]
    heads += [
        (f"Test {describe(study.metric).title}", 3),
        ("Epochs", 0),
        ("ms per step", 2),
        ("Seconds", 1),
    ]
    heads += [("Machine", None), ("Folder", None)]
    records = []
    for row in study.configs:
        for setting in row.settings:
            for seed, run in setting.logged.items():
                final = run.final
                value = final.test.get(study.metric) if final else None
                step, machine = (
                    final.step_time if final else None,
                    run.sessions[-1].get("cpu", "") if run.sessions else "",
                )
                records.append(
                    [
                        row.name,
                        *(str(setting.grid.get(k, "")) for k in grid),
                        int(seed) if seed.lstrip("-").isdigit() else seed,
                        run.status,
                        None if value is None else describe(study.metric).scale * value,
                        final.epochs if final else None,
                        None if step is None else 1000 * step,
                        final.seconds.get("train") if final else None,
                        machine,
                        run.folder.name,
                    ]
                )
    return {"columns": [{"title": t, "digits": d} for t, d in heads], "records": records}


def gain_text(entry: Entry, metric: Metric) -> str:
    """The difference to the reference in words, for formats without drawings.

    Args:
        entry: the results of one configuration.
        metric: what is measured.
    """
    c = entry.comparison
    return "" if c is None or math.isnan(c.difference) else _signed(c, metric)


MOST_PAIRED = 400
"""Rows that can be set side by side; a page with more of them would carry too many numbers."""


def chosen_rows(table: ResultTable, pick: str | None) -> dict[str, Any]:
    """The rows that charts can draw, best first, and those that they draw at first:
    the reference and the best.

    Args:
        table: the runs of a study, judged.
        pick: the recommended method.
    """
    ranked = [e.name for e in table.ranked()]
    reference = table.main_reference
    first = [n for n in dict.fromkeys([reference.name if reference else None, pick, *ranked]) if n]
    keep = {reference.name} if reference else set()
    known = [n for i, n in enumerate(ranked) if i < MOST or n in keep]
    first = [n for n in known if n in first[:CHOSEN]]
    return {
        "rows": known,
        "first": first,
        "reference": reference.name if reference else first[0] if first else "",
    }


def pairs_view(table: ResultTable) -> dict[str, Any]:
    """Every metric of every row by seed, and what the row is, so that two can
    be compared in the page.

    Args:
        table: the runs of a study, judged.
    """
    metrics = [describe(m) for m in (table.study.metric, *table.other_metrics())]
    rows: dict[str, dict[str, Any]] = {}
    for entry in table.ranked()[:MOST_PAIRED]:
        seeds = {
            seed: [entry.by_seed.get(m.name, {}).get(seed) for m in metrics]
            for seed in sorted(entry.values, key=_by_seed)
        }
        what = written(entry.config.methods) + (
            f"; {grid_text(entry.setting.grid)}" if entry.setting.grid else ""
        )
        rows[entry.name] = {"what": what, "seeds": seeds, "cost": entry.cost.ratio}
        rows[entry.name]["settings"] = all_settings(entry)
    return {
        "metrics": [{"title": m.title, "digits": m.digits} for m in metrics],
        "names": list(rows),
        "rows": rows,
    }


def _by_seed(seed: str) -> tuple[int, str]:
    return (int(seed) if seed.lstrip("-").isdigit() else 0, seed)


def rows_view(table: ResultTable) -> dict[str, Any]:
    """All rows of a large table as plain records, which the page shows a part at a time.

    Args:
        table: the runs of a study, judged.
    """
    others = table.other_metrics()
    heads = [
        ("Method", None),
        ("Verdict", None),
        ("Cost", 2),
        (table.metric.title, table.metric.digits),
        ("SD", 3),
    ]
    heads += [("Difference", 3), ("From", 3), ("To", 3), ("n", 0), ("p", 3)]
    heads += [(describe(m).title, describe(m).digits) for m in others]
    records = []
    for e in table.listed():
        c = e.comparison
        shown = [c.difference, c.low, c.high] if c else [math.nan] * 3
        record = [
            e.name,
            e.told(table.metric),
            e.cost.ratio,
            e.summary.mean,
            e.summary.sd,
            *shown,
            e.summary.n,
        ]
        record += [c.corrected if c else None]
        records.append(record + [s.mean if (s := e.metrics.get(m)) else None for m in others])
    return {"columns": [{"title": t, "digits": d} for t, d in heads], "records": records}
