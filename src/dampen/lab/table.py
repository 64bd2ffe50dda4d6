"""Tables and live progress in the terminal, by rich."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dampen.lab.plan import Plan
from dampen.lab.summary import RowSummary


def results_table(plan: Plan, rows: Sequence[RowSummary], verdicts: bool = True) -> Table:
    """The table of a plan: ours with spread and number, cost, the published figure; without verdicts a line per row."""
    published = any(r.published for r in rows)
    grid = any(r.grid for r in rows)
    table = Table(title=escape(plan.header["title"]), title_justify="left")
    table.add_column("row", overflow="fold" if verdicts else "ellipsis", no_wrap=not verdicts)
    if grid:
        table.add_column("grid", overflow="fold")
    table.add_column(f"test {plan.header['metric']}", justify="right")
    table.add_column("n", justify="right")
    table.add_column("cost", justify="right")
    if published:
        table.add_column("paper", justify="right")
    if verdicts:
        table.add_column("verdict", overflow="fold")
    for row in rows:
        cells = [escape(row.name)]
        if grid:
            cells.append(escape(", ".join(f"{k.split('.')[-1]} {v:g}" for k, v in row.grid.items())))
        cells += [mean_sd(row), f"{row.summary.n}/{row.planned}", f"{row.cost:.2f}x" if row.cost else "-"]
        if published:
            cells.append(published_text(row.published.get(plan.header["metric"])))
        if verdicts:
            cells.append(escape(row.verdict or ("-" if row.summary.n else "no run yet")))
        table.add_row(*cells)
    return table


def mean_sd(row: RowSummary) -> str:
    """Mean, and standard deviation where there is one."""
    if not row.summary.n:
        return "-"
    sd = "" if math.isnan(row.summary.sd) else f" ± {row.summary.sd:.2f}"
    return f"{row.summary.mean:.2f}{sd}"


def published_text(value: Any) -> str:
    """A published figure: a mean, or [mean, sd]."""
    if value is None:
        return "-"
    return " ± ".join(f"{v:g}" for v in value) if isinstance(value, list) else f"{value:g}"


class LiveView:
    """Shows a run while it goes on: a bar over all trials, a line per running trial with its loss terms and ETA, and
    the table so far. Without a terminal it prints one line per finished trial instead.

    `table`, if given, makes the table anew after each trial.
    """

    def __init__(
        self, console: Console, labels: dict[str, str], done: int = 0, table: Callable[[], Table] | None = None
    ):
        self.table = table
        self.console, self.labels = console, labels
        self.finished, self.total, self.began = done, len(labels), time.monotonic()
        self.at_start = done
        self.overall = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} trials"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
        )
        self.bar = self.overall.add_task("all", total=self.total, completed=done, eta="")
        self.each = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}"),
            console=console,
        )
        self.tasks: dict[str, TaskID] = {}
        self.live = Live(self._content(), console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def _content(self) -> Group:
        return Group(self.overall, self.each, *([self.table()] if self.table and self.console.is_terminal else []))

    def __call__(self, trial: str, event: dict[str, Any]) -> None:
        """Take one event of one trial."""
        kind = event["kind"]
        if kind == "start":
            if trial in self.tasks:  # pretrained; now the training itself
                self.each.remove_task(self.tasks.pop(trial))
            self.tasks[trial] = self.each.add_task(escape(self.labels[trial]), total=event["steps"], told="")
            if event["resumed"]:
                self.console.print(f"  {escape(self.labels[trial])} goes on at step {event['step']}", highlight=False)
        elif kind == "progress" and trial in self.tasks:
            terms = "  ".join(f"{name} {value:.3g}" for name, value in event["terms"].items())
            phase = f"{event['phase']}, " if "phase" in event else ""
            told = f"{phase}epoch {event['epoch']}/{event['epochs']}  {terms}  {event['eta']:.0f} s left"
            self.each.update(self.tasks[trial], completed=event["step"], told=escape(told))
        elif kind == "warning":
            self.console.print(f"[yellow]{escape(event['message'])}", highlight=False)
        elif kind == "outcome":
            self._outcome(trial, event)

    def _outcome(self, trial: str, event: dict[str, Any]) -> None:
        if trial in self.tasks:
            self.each.remove_task(self.tasks.pop(trial))
        self.finished += 1
        pace = (time.monotonic() - self.began) / max(1, self.finished - self.at_start)
        left = f"about {pace * (self.total - self.finished):.0f} s left"
        self.overall.update(self.bar, completed=self.finished, eta=left if self.finished < self.total else "")
        if self.console.is_terminal:
            self.live.update(self._content())
        if not self.console.is_terminal or event["status"] != "finished":
            line = f"[{self.finished}/{self.total}] {self.labels[trial]}: {event['status']} {event['message']}"
            self.console.print(escape(line.rstrip()), highlight=False, soft_wrap=True)
