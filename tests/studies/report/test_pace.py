"""How far a run is, as the terminal, a file and a notebook show it."""

import io
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from dampen.studies import compare as progress
from dampen.studies.report import terminal
from dampen.studies.report.terminal import LiveView, Pace, console_for
from dampen.studies.result import Event

LABELS = {"a": "plain seed 0", "b": "drop_key seed 0", "c": "plain seed 1"}


def test_trials_that_were_recorded_before_are_done_and_no_pace():
    pace = Pace(LABELS, done=1, began=time.monotonic() - 30)
    assert pace.line() == "1/3 runs done, time left not known yet"
    pace.take("b", Event(kind="start", steps=100))
    pace.take("b", Event(kind="progress", step=50, steps=100, count=7, terms={"task": 0.25}))
    assert pace.line() == "1/3 runs done, about 1 min 30 s left; drop_key seed 0: step 7 task 0.25"
    pace.take("b", Event(kind="outcome", status="finished"))
    assert (pace.done, pace.left(), pace.latest) == (2, "about 30 s left", {})


def test_a_training_that_tells_nothing_still_has_its_line(monkeypatch):
    monkeypatch.setattr(terminal, "EVERY", 0.1)
    text = io.StringIO()
    with LiveView(Console(file=text, width=200), LABELS) as view:
        view("a", Event(kind="start", steps=100))
        deadline = time.monotonic() + 20
        while "runs done" not in text.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "0/3 runs done, time left not known yet; plain seed 0: started\n" in text.getvalue()


def test_warnings_name_their_trial_and_ones_own_training_its_steps():
    text = io.StringIO()
    with LiveView(Console(file=text, width=40), LABELS) as view:
        view(
            "a",
            Event(
                kind="warning",
                message="Its worker was killed by SIGKILL; it resumes from its last checkpoint.",
            ),
        )
        view("a", Event(kind="start", step=41, steps=100, count=6, resumed=1))
    assert text.getvalue().splitlines() == [
        "plain seed 0: Its worker was killed by SIGKILL; it resumes from its last checkpoint.",
        "  plain seed 0 resumes at step 6",
    ]


def test_what_goes_into_a_file_is_wide_enough_for_names(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert console_for().width == 120
    monkeypatch.setenv("COLUMNS", "50")
    assert console_for().width == 50


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would show, newest last; IPython itself is not needed."""
    outputs: list[str] = []
    output = SimpleNamespace(update=outputs.append)
    display = SimpleNamespace(
        HTML=str, display=lambda html, display_id: outputs.append(html) or output
    )
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress, "table_html", lambda study: "<table></table>")
    return outputs


def test_a_notebook_shows_what_runs_and_counts_the_trials_of_this_run_only(shown, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    view = progress.NotebookView(None, {"c": "plain <b> seed 1"}, 0)
    view("c", Event(kind="start", steps=10))
    now[0] += 2
    view("c", Event(kind="progress", step=5, steps=10, terms={"task": 0.5}))
    view(
        "c", Event(kind="progress", step=6, steps=10, terms={"task": 0.4})
    )  # not again within a second
    view("c", Event(kind="outcome", status="finished"))
    assert len(shown) == 3
    assert shown[0] == "<p>0/1 runs done, time left not known yet</p>"
    assert re.search(
        "0/1 runs done, about 2 s left; plain &lt;b&gt; seed 1: step 5 task 0.5", shown[1]
    )
    assert shown[2] == "<p>1/1 runs done</p><table></table>"
