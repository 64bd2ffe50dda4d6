"""Tables and live progress in the terminal, by rich."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dampen.lab.records.events import Event
from dampen.lab.records.metric import Metric
from dampen.lab.records.table import Entry, ResultTable, grid_text


def results_table(found: ResultTable, verdicts: bool = True) -> Table:
    """The table: ours with spread and number, cost, the published figure, the verdict.

    Without verdicts, while runs are still coming in, a line per row with the difference so far, called provisional.
    """
    study, metric, entries = found.study, found.metric, found.entries
    published = any(e.published for e in entries)
    grid = any(e.cell.grid for e in entries)
    compared = any(e.reference for e in entries)
    table = Table(title=escape(study.title), title_justify="left")
    table.add_column("row", overflow="fold" if verdicts else "ellipsis", no_wrap=not verdicts)
    if grid:
        table.add_column("grid", overflow="fold")
    table.add_column(f"test {metric.title}", justify="right")
    table.add_column("n", justify="right")
    if compared:
        table.add_column("difference" if verdicts else "so far (provisional)", justify="right")
    table.add_column("cost", justify="right")
    if published:
        table.add_column("paper", justify="right")
    if verdicts:
        table.add_column("verdict", overflow="fold")
    for entry in entries:
        cells = [escape(entry.row.name)]
        if grid:
            cells.append(escape(grid_text(entry.cell.grid)))
        cells += [mean_sd(entry, metric), f"{entry.summary.n}/{entry.cell.planned}"]
        if compared:
            cells.append(_difference(entry, metric, verdicts))
        cells.append(f"{entry.cost.ratio:.2f}x" if entry.cost.ratio else "-")
        if published:
            cells.append(published_text(entry.row.published.get(study.metric)))
        if verdicts:
            cells.append(escape(entry.told(metric) or "-"))
        table.add_row(*cells, style=STYLES.get(entry.verdict, "") if verdicts else "")
    return table


STYLES = {"better": "green", "worse": "red", "failed": "red", "reference": "bold"}


def mean_sd(entry: Entry, metric: Metric) -> str:
    """Mean, and standard deviation where there is one."""
    if not entry.summary.n:
        return "-"
    sd = "" if math.isnan(entry.summary.sd) else f" ± {entry.summary.sd:.{metric.digits}f}"
    return f"{entry.summary.mean:.{metric.digits}f}{sd}"


def _difference(entry: Entry, metric: Metric, interval: bool) -> str:
    c = entry.comparison
    if c is None or math.isnan(c.difference):
        return ""
    bounds = f" ({c.low:+.1f} to {c.high:+.1f})" if metric.percent else f" ({c.low:+.3g} to {c.high:+.3g})"
    return f"{c.difference:+.{metric.digits}f}" + (bounds if interval and not math.isnan(c.low) else "")


def published_text(value: Any) -> str:
    """A published figure: a mean, or [mean, sd]."""
    if value is None:
        return "-"
    return " ± ".join(f"{v:g}" for v in value) if isinstance(value, list) else f"{value:g}"


EVERY = 60.0
"""Seconds between two lines about what goes on, where there is no terminal."""


class LiveView:
    """Shows a run while it goes on: a bar over all trials, a line per running trial with its loss terms and ETA, and
    the table so far. Without a terminal it prints one line per finished trial, and one per minute, instead.

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
            TextColumn("{task.completed:.0f}/{task.total} trials"),
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
        self.latest: dict[str, str] = {}  # what each trial said last
        self.said_at = self.began
        self.shares: dict[str, float] = {}  # how much of each running trial is done
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

    def __call__(self, trial: str, event: Event) -> None:
        """Take one event of one trial."""
        kind = event.kind
        if kind == "start":
            if trial in self.tasks:  # pretrained; now the training itself
                self.each.remove_task(self.tasks.pop(trial))
            self.tasks[trial] = self.each.add_task(escape(self.labels[trial]), total=event.steps, told="")
            if event.resumed:
                self.console.print(f"  {escape(self.labels[trial])} goes on at step {event.step}", highlight=False)
        elif kind == "progress" and trial in self.tasks:
            terms = "  ".join(f"{name} {value:.3g}" for name, value in event.terms.items() if value is not None)
            phase = f"{event.phase}, " if event.phase else ""
            place = f"epoch {event.epoch:g}/{event.epochs}" if event.epochs and event.epoch else f"step {event.count}"
            left = f"{event.eta:.0f} s left" if event.eta is not None else ""
            told = f"{phase}{place}  {terms}  {left}"
            self.each.update(self.tasks[trial], completed=event.step, told=escape(told))
            self._minute(trial, f"{place} {terms}")
            if event.steps:
                self.shares[trial] = event.step / event.steps
                self.overall.update(self.bar, completed=self.finished + sum(self.shares.values()), eta=self._left())
        elif kind == "warning":
            self.console.print(f"[yellow]{escape(event.message)}", highlight=False)
        elif kind == "outcome":
            self._outcome(trial, event)

    def _minute(self, trial: str, told: str) -> None:
        """Without a terminal, a line per minute: trials done, what the running ones are at, time left."""
        self.latest[trial] = told
        if self.console.is_terminal or time.monotonic() - self.said_at < EVERY:
            return
        self.said_at = time.monotonic()
        running = "; ".join(f"{self.labels[t]}: {line}" for t, line in self.latest.items() if t in self.tasks)
        line = f"{self.finished}/{self.total} trials done, {self._left() or 'time left not known yet'}; {running}"
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def _outcome(self, trial: str, event: Event) -> None:
        if trial in self.tasks:
            self.each.remove_task(self.tasks.pop(trial))
        self.finished += 1
        self.shares.pop(trial, None)
        self.overall.update(self.bar, completed=self.finished + sum(self.shares.values()), eta=self._left())
        if self.console.is_terminal:
            self.live.update(self._content())
        if not self.console.is_terminal or event.status != "finished":
            line = f"[{self.finished}/{self.total}] {self.labels[trial]}: {event.status} {event.message}"
            self.console.print(escape(line.rstrip()), highlight=False, soft_wrap=True)

    def _left(self) -> str:
        """The time left at the pace so far, running trials counted by the part of them that is done."""
        running = sum(self.shares.values())
        done, open_ = self.finished - self.at_start + running, self.total - self.finished - running
        if done < 0.2 or open_ <= 0:  # the first steps of a first trial are no pace yet
            return ""
        return f"about {spoken((time.monotonic() - self.began) / done * open_)} left"


def spoken(seconds: float) -> str:
    """A time as people say it.

    >>> spoken(42.4), spoken(200), spoken(8000)
    ('42 s', '3 min 20 s', '2 h 13 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
