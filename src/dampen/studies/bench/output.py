"""A record of the bench for people: a table and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

Record = dict[str, Any]
CHARTS = (".svg", ".png", ".html", ".json")


def results_table(record: Record) -> Table:
    """Every method beside its target and its paper's formulation. `ours / it` is what ours takes of the formulation's
    time; in the row of an alternative, what our attention dropout takes of its time.

    Args:
        record: what `dampen bench` measured.
    """
    papers = {entry["ours"]: entry for entry in record["papers"].values()}
    groups = [(n, record["plain"][n]) for n in record["plain"] if n != "best"]
    rows = []
    for name, entry in [*groups, *record["ratios"].items(), *record["alternatives"].items()]:
        goal = record["targets"].get(name)
        target = f"{goal['target']:.2f} {'met' if goal['met'] else 'not met'}" if goal else ""
        published = papers.get(name)
        over = (published or entry).get("ours_over_it")
        rows.append(
            {
                "": name,
                "step": Text(f"{entry['median']:.3f}x", style="dim" if entry["noisy"] else ""),
                "95 % interval": f"{entry['low']:.3f} to {entry['high']:.3f}",
                "target": Text(target, style="red" if goal and not goal["met"] else ""),
                "memory": f"{record['memory'][name]['ratio']:.2f}x"
                if name in record["memory"]
                else "",
                "as published": f"{published['median']:.2f}x" if published else "",
                "ours / it": f"{over['median']:.2f}" if over else "",
            }
        )
    title = f"{record['model']}; {record['what']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    # a model of the user's own has neither targets nor published forms
    columns = [c for c in rows[0] if any(str(row[c]) for row in rows)]
    for column in columns:
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def remarks(record: Record) -> list[str]:
    """What a reader of the table must know.

    Args:
        record: what `dampen bench` measured.
    """
    machine = record["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    where = f"{machine['cpu']}, {threads}, torch {machine['torch']}, {machine['clock']} time"
    said = [
        f"{where}. Memory: what a step allocates at its peak, without weights; as a multiple of the baseline's."
    ]
    total = sum(len(record[group]) for group in ("ratios", "papers", "alternatives")) + 1
    if record["noisy"]:
        said.append(
            f"Too noisy: {len(record['noisy'])} of {total} intervals are wider than 3 %. "
            "Run on a quieter machine, with more --rounds and --seconds, or with --threads 1 --clock cpu."
        )
    said += [f"Not benched: {name}: {reason}" for name, reason in record["skipped"].items()]
    return said


def scaling_table(record: Record) -> Table:
    """Time and memory of attention alone, by length.

    Args:
        record: what `dampen bench` measured.
    """
    scaling = record["scaling"]
    lengths = sorted({p["n"] for p in scaling["points"]})
    table = Table(
        title=f"time, memory relative to the baseline: {scaling['what']}",
        title_justify="left",
        box=None,
    )
    table.add_column("")
    for n in lengths:
        table.add_column(f"n = {n}", justify="right")
    for row in dict.fromkeys(p["row"] for p in scaling["points"]):
        own = {
            p["n"]: f"{p['median']:.2f}x, {p['memory_ratio']:.2f}x"
            for p in scaling["points"]
            if p["row"] == row
        }
        table.add_row(row, *(own.get(n, "-") for n in lengths))
    return table


def save_chart(record: Record, path: Path) -> None:
    """Write the chart as SVG, PNG, HTML or JSON, by the name of the file.

    Args:
        record: what `dampen bench` measured.
        path: the file.
    """
    from dampen.studies.report.charts import bench_chart

    path.parent.mkdir(parents=True, exist_ok=True)
    bench_chart(record).properties(width=520, title=record["model"], background="white").save(
        str(path)
    )
