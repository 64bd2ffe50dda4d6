"""Tables and live progress in the terminal, by rich. A notebook shows the same pace."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape as escape_markup
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dampen.names import printable
from dampen.studies.metric import Metric
from dampen.studies.report.settings import settings_text
from dampen.studies.report.summary import counted, shortened
from dampen.studies.result import Event
from dampen.studies.table import Entry, ResultTable, grid_text


def escape(text: str) -> str:
    """Text for a rich table: neither markup nor control characters in it have an effect.

    Args:
        text: a name, or anything else that comes from a file.
    """
    return escape_markup(printable(text))


def results_table(found: ResultTable, verdicts: bool = True, width: int = 0) -> Table:
    """The table: ours with spread and number, cost, the published figure, the verdict.

    Without verdicts, while runs are still coming in, a line per row with the difference so far,
    called provisional.

    Args:
        found: what was read.
        verdicts: show verdicts; without them the differences are provisional.
        width: columns of the terminal, where they are known: names break at words, and a narrow one
            leaves settings to the page.
    """
    study, metric, entries = found.study, found.metric, found.entries
    published = any(e.published for e in entries)
    grid = any(e.setting.grid for e in entries)
    compared = any(e.reference for e in entries)
    table = Table(title=escape(study.title), title_justify="left")
    whole = max((len(e.config.name) for e in entries), default=0) <= UNBROKEN
    longest = max((max(map(len, e.config.name.split())) for e in entries), default=0)
    table.add_column(
        "method",
        overflow="fold" if verdicts else "ellipsis",
        no_wrap=whole or not verdicts,
        width=min(longest, width // 3) if width >= MEDIUM and not whole else None,
    )
    if grid:
        table.add_column("grid", overflow="fold")
    reference = found.main_reference
    known = {e.name: settings_text(e, reference) for e in entries} if verdicts else {}
    settings = {
        e.name: known[e.name] for e in entries if known.get(e.name, "") not in e.config.name
    }
    told = bool(settings) and not 0 < width < NARROW
    if told:
        table.add_column("settings", overflow="fold")
    # a number is never cut
    table.add_column(f"test {metric.title}", justify="right", overflow="fold")
    table.add_column("n", justify="right")
    if compared:
        title = "difference" if verdicts else "so far (provisional)"
        table.add_column(title, justify="right", overflow="fold")
    table.add_column("cost", justify="right")
    if published:
        table.add_column("paper", justify="right")
    if verdicts:
        table.add_column("verdict", overflow="fold")
    for entry in entries:
        cells = [escape(entry.config.name)]
        if grid:
            cells.append(escape(grid_text(entry.setting.grid)))
        cells += [escape(settings.get(entry.name, ""))] if told else []
        cells += [mean_sd(entry, metric), counted(entry, found)]
        if compared:
            cells.append(_difference(entry, metric, verdicts))
        cells.append(f"{entry.cost.ratio:.2f}x" if entry.cost.ratio else "-")
        if published:
            cells.append(published_text(entry.config.published.get(study.metric)))
        if verdicts:
            words = "failed" if entry.verdict == "failed" else " ".join(entry.told(metric).split())
            cells.append(escape(shortened(words, LONGEST) or "-"))
        table.add_row(*cells, style=STYLES.get(entry.verdict, "") if verdicts else "")
    return table


NARROW, MEDIUM = 100, 70
"""Columns below which a terminal has no room for settings, and none for names
that break at words only."""
UNBROKEN = 30
"""Letters of a row's name that a narrow terminal does not break."""
LONGEST = 160
"""Letters of a verdict in a table: room for a caution."""
STYLES = {"better": "green", "worse": "red", "failed": "red", "reference": "bold"}


def mean_sd(entry: Entry, metric: Metric) -> str:
    """Mean, and standard deviation where there is one.

    Args:
        entry: the results of one configuration.
        metric: what is measured.
    """
    if not entry.summary.n:
        return "-"
    sd = "" if math.isnan(entry.summary.sd) else f" ± {entry.summary.sd:.{metric.digits}f}"
    return f"{entry.summary.mean:.{metric.digits}f}{sd}"


def _difference(entry: Entry, metric: Metric, interval: bool) -> str:
    c = entry.comparison
    if c is None or math.isnan(c.difference):
        return ""
    bounds = (
        f" ({c.low:+.1f} to {c.high:+.1f})"
        if metric.percent
        else f" ({c.low:+.3g} to {c.high:+.3g})"
    )
    return f"{c.difference:+.{metric.digits}f}" + (
        bounds if interval and not math.isnan(c.low) else ""
    )


def without_numbers(message: str) -> str:
    """A message with its numbers left out: what many runs say of themselves is one message.

    Args:
        message: what went wrong.

    >>> without_numbers("returned accuracy = 69.5") == without_numbers("returned accuracy = 7")
    True
    """
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", message)


def published_text(value: Any) -> str:
    """A published figure: a mean, or [mean, sd].

    Args:
        value: a mean, or [mean, sd]; None where there is none.
    """
    if value is None:
        return "-"
    return " ± ".join(f"{v:g}" for v in value) if isinstance(value, list) else f"{value:g}"


EVERY = 60.0
"""Seconds between two progress lines, where there is no terminal."""


def console_for(stderr: bool = False) -> Console:
    """Where tables and progress go. A file or a pipe has no width of its own, and 80
    letters break every name.

    Args:
        stderr: print to standard error.
    """
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120
    return console


class LiveView:
    """Shows a run in progress: a bar over all trials, a line per running trial with its loss terms
    and ETA, and the table so far. Without a terminal it prints one line per finished trial, and one
    per minute, instead.

    `table`, if given, makes the table anew after each trial.
    """

    def __init__(
        self,
        console: Console,
        labels: dict[str, str],
        done: int = 0,
        table: Callable[[], Table] | None = None,
    ):
        self.table = table
        self.console, self.labels = console, labels
        self.pace = Pace(labels, done)
        self.overall = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total} runs"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
        )
        self.bar = self.overall.add_task("all", total=self.pace.total, completed=done, eta="")
        self.each = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[told]}"),
            console=console,
        )
        self.tasks: dict[str, TaskID] = {}
        self.said: dict[str, str] = {}  # reasons of failures, each by its text without numbers
        self.said_at = self.pace.began
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.live = Live(self._content(), console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> LiveView:
        if self.console.is_terminal:
            self.live.start()
        else:
            threading.Thread(target=self._keep_talking, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.console.is_terminal:
            self.live.stop()

    def _content(self) -> Group:
        return Group(
            self.overall,
            self.each,
            *([self.table()] if self.table and self.console.is_terminal else []),
        )

    def __call__(self, trial: str, event: Event) -> None:
        """Take one event of one trial."""
        kind = event.kind
        with self.lock:
            self.pace.take(trial, event)
        if kind == "start":
            if trial in self.tasks:  # pretrained; now the training itself
                self.each.remove_task(self.tasks.pop(trial))
            self.tasks[trial] = self.each.add_task(
                escape(self.labels[trial]), total=event.steps, told=""
            )
            if event.resumed:
                self._say(f"  {self.labels[trial]} resumes at step {steps_of(event)}")
        elif kind == "progress" and trial in self.tasks:
            phase = f"{event.phase}, " if event.phase else ""
            left = f"{event.eta:.0f} s left" if event.eta is not None else ""
            told = f"{phase}{place_of(event)}  {losses_of(event)}  {left}"
            self.each.update(self.tasks[trial], completed=event.step, told=escape(told))
            self._minute()
            self.overall.update(self.bar, completed=self.pace.moved, eta=self.pace.left())
        elif kind == "warning":
            self._say(f"{self.labels[trial]}: {event.message}", "yellow")
        elif kind == "outcome":
            self._outcome(trial, event)

    def _keep_talking(self) -> None:
        """A training that reports nothing, or a step that takes minutes, must not
        look like one that hangs."""
        while not self.ended.wait(EVERY / 4):
            self._minute()

    def _minute(self) -> None:
        """Without a terminal, a line per minute: runs done, what the running
        ones are at, time left."""
        with self.lock:
            if self.console.is_terminal or time.monotonic() - self.said_at < EVERY:
                return
            self.said_at = time.monotonic()
            line = self.pace.line()
        self._say(line)

    def _reason(self, event: Event) -> str:
        """The message of an outcome: the first time in full, then as a reference to it."""
        kind = without_numbers(event.message)
        first = self.said.setdefault(kind, event.message)
        return first if first is event.message or not kind else "(same reason as above)"

    def _outcome(self, trial: str, event: Event) -> None:
        if trial in self.tasks:
            self.each.remove_task(self.tasks.pop(trial))
        self.overall.update(self.bar, completed=self.pace.moved, eta=self.pace.left())
        if self.console.is_terminal:
            self.live.update(self._content())
        if not self.console.is_terminal or event.status != "finished":
            self._say(
                f"[{self.pace.done}/{self.pace.total}] "
                f"{self.labels[trial]}: {event.status} {self._reason(event)}".rstrip()
            )

    def _say(self, line: str, style: str | None = None) -> None:
        self.console.print(
            printable(line), style=style, markup=False, highlight=False, soft_wrap=True
        )


@dataclass
class Pace:
    """Takes the events of a run. `labels` are its trials, for people; `done` of them were recorded
    before it began."""

    labels: dict[str, str]
    done: int = 0
    at_start: int = 0
    began: float = field(default_factory=lambda: time.monotonic())
    shares: dict[str, float] = field(default_factory=dict)  # how much of each running trial is done
    latest: dict[str, str] = field(default_factory=dict)  # what each running trial said last

    def __post_init__(self) -> None:
        self.at_start = self.done

    def take(self, trial: str, event: Event) -> None:
        """Note one event of one trial.

        Args:
            trial: the id of the run.
            event: what a worker reported.
        """
        if event.kind == "start":
            self.latest.setdefault(trial, "started")
        elif event.kind == "progress" and trial in self.latest:
            self.latest[trial] = f"{place_of(event)} {losses_of(event)}".rstrip()
            if event.steps:
                self.shares[trial] = event.step / event.steps
        elif event.kind == "outcome":
            self.done += 1
            self.shares.pop(trial, None)
            self.latest.pop(trial, None)

    @property
    def total(self) -> int:
        return len(self.labels)

    @property
    def moved(self) -> float:
        """Trials done, running ones counted by the part of them that is done."""
        return self.done + sum(self.shares.values())

    def left(self) -> str:
        """The time left at the pace so far; nothing while that is not known."""
        moved, open_ = self.moved - self.at_start, self.total - self.moved
        if moved < 0.2 or open_ <= 0:  # the first steps of a first trial are no pace yet
            return ""
        return f"about {spoken((time.monotonic() - self.began) / moved * open_)} left"

    def line(self) -> str:
        """All of it in one line."""
        running = "; ".join(f"{self.labels[trial]}: {told}" for trial, told in self.latest.items())
        left = f", {self.left() or 'time left not known yet'}" if self.done < self.total else ""
        return f"{self.done}/{self.total} runs done{left}" + (f"; {running}" if running else "")


def place_of(event: Event) -> str:
    """Where in its training a trial is.

    Args:
        event: what a worker reported.
    """
    return (
        f"epoch {event.epoch:g}/{event.epochs}"
        if event.epochs and event.epoch
        else f"step {steps_of(event)}"
    )


def steps_of(event: Event) -> int:
    """Steps taken; one's own training counts percent in `step`.

    Args:
        event: what a worker reported.
    """
    return event.step if event.count is None else event.count


def losses_of(event: Event) -> str:
    """The terms of the loss.

    Args:
        event: what a worker reported.
    """
    return "  ".join(
        f"{name} {value:.3g}" for name, value in event.terms.items() if value is not None
    )


def spoken(seconds: float) -> str:
    """A time as people say it.

    Args:
        seconds: a duration.

    >>> spoken(42.4), spoken(200), spoken(8000)
    ('42 s', '3 min 20 s', '2 h 13 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
