"""Progress of a study: in a terminal as `dampen compare` shows it, in a notebook as a table that fills up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, cast

from dampen.studies.config.trial import Run
from dampen.studies.engines.engine import Report
from dampen.studies.records.events import Event
from dampen.studies.records.record import RunStore
from dampen.studies.report.terminal import Pace
from dampen.studies.study.notebook import table_html

if TYPE_CHECKING:
    from dampen.studies.study.study import Study


@contextmanager
def view_of(study: Study, trials: list[Run], progress: bool) -> Iterator[Report]:
    """Something that takes the events of a run and shows them, or does not."""
    if not progress:
        yield lambda trial, event: None
        return
    done = sum(RunStore(study.folder / t.id).done for t in trials)
    if in_notebook():
        yield NotebookView(study, study.plan.labels(trials), done)
        return
    from dampen.studies.report.terminal import LiveView, console_for

    with LiveView(console_for(stderr=True), study.plan.labels(trials), done) as view:
        yield view


def in_notebook() -> bool:
    """Whether this is Jupyter's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell: Any = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


EVERY = 1.0
"""Seconds between two looks of a notebook at the running trials."""


class NotebookView:
    """One output that is replaced while trials run: how many are done, what the others are at, the time left, and the
    table so far."""

    def __init__(self, study: Study, labels: dict[str, str], done: int):
        from IPython.display import HTML, display

        self.study, self.pace, self.html = study, Pace(labels, done), cast(Any, HTML)
        self.table = table_html(study) if done else ""
        self.shown_at = time.monotonic()
        self.output = display(HTML(self._content()), display_id=True)

    def __call__(self, trial: str, event: Event) -> None:
        self.pace.take(trial, event)
        now = time.monotonic()
        if event.kind == "outcome":
            self.table = table_html(self.study)
        if event.kind == "outcome" or now - self.shown_at >= EVERY:
            self.shown_at = now
            self.output.update(self.html(self._content()))

    def _content(self) -> str:
        return f"<p>{escape(self.pace.line())}</p>{self.table}"
