"""Progress of a study: in a terminal as `dampen compare` shows it, in a notebook as a table that fills up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from dampen.lab.config.trial import TrialSpec
from dampen.lab.records.events import Event
from dampen.lab.records.record import Record
from dampen.lab.running.engine import Report

if TYPE_CHECKING:
    from dampen.lab.study.study import Study


@contextmanager
def view_of(study: Study, trials: list[TrialSpec], progress: bool) -> Iterator[Report]:
    """Something that takes the events of a run and shows them, or does not."""
    if not progress:
        yield lambda trial, event: None
        return
    if in_notebook():
        yield NotebookView(study, len(trials))
        return
    from rich.console import Console

    from dampen.lab.report.terminal import LiveView

    done = sum(Record(study.folder / t.id).done for t in trials)
    with LiveView(Console(stderr=True, highlight=False), labels(study, trials), done) as view:
        yield view


def labels(study: Study, trials: list[TrialSpec]) -> dict[str, str]:
    """Row and seed of each trial, for people."""
    wanted, named = {t.id for t in trials}, dict[str, str]()
    for row in study.plan.rows:
        for point in row.points:
            for seed, trial in point.trials.items():
                if trial in wanted:
                    named.setdefault(trial, f"{row.name} seed {seed}")
    return named


def in_notebook() -> bool:
    """Whether this is Jupyter's kernel."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell: Any = get_ipython()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


class NotebookView:
    """One output that is replaced when a trial ends: how many are done, and the table so far."""

    def __init__(self, study: Study, total: int):
        from IPython.display import HTML, display

        self.study, self.total, self.html = study, total, cast(Any, HTML)
        self.done = sum(Record(study.folder / i).done for i in study.plan.trials)
        self.output = display(HTML(self._content()), display_id=True)

    def __call__(self, trial: str, event: Event) -> None:
        if event.kind == "outcome":
            self.done += 1
            self.output.update(self.html(self._content()))

    def _content(self) -> str:
        from dampen.lab.study.notebook import table_html

        return f"<p>{self.done} of {self.total} trials</p>{table_html(self.study) if self.done else ''}"
