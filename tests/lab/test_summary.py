"""From records to rows: selection on validation, pairing by seed, cost, and what the terminal shows."""

import io

import pytest
from rich.console import Console

from dampen.lab.engine import Job, run_job
from dampen.lab.errors import DiskFull
from dampen.lab.plan import Plan, Point, Row
from dampen.lab.summary import best_point, summarize_plan
from dampen.lab.table import LiveView, published_text, results_table

HEADER = {
    "title": "A [bold]title",
    "metric": "accuracy",
    "report": "best",
    "cost": "",
    "paper": "",
    "table": "",
    "command": "",
}


def result(valid, test, seconds=0.01, status="finished"):
    return {
        "status": status,
        "reason": "task became NaN",
        "primary": ["accuracy", "max"],
        "selection": ["accuracy", "max"],
        "valid": {"accuracy": valid},
        "test": {"accuracy": test},
        "step_seconds": 1.0,
        "step_cpu_seconds": seconds,
        "device": "cpu",
    }


def plan_of(*rows, report="best"):
    return Plan("p", "laptop", {**HEADER, "report": report}, [], [0, 1, 2], list(rows), {})


def row(name, *points, **more):
    return Row(name, [], [Point(g, {str(i): f"{name}{j}{i}" for i in range(3)}) for j, g in enumerate(points)], **more)


def test_the_grid_point_is_chosen_on_validation_whatever_the_test_says():
    grid = row("a", {"lr": 1}, {"lr": 2})
    results = {f"a0{i}": result(0.8, 0.99) for i in range(3)} | {f"a1{i}": result(0.9, 0.10) for i in range(3)}
    assert best_point(grid, results).grid == {"lr": 2}
    del results["a12"]  # a point with fewer runs does not win by luck
    assert best_point(grid, results).grid == {"lr": 1}


def test_rows_are_compared_seed_by_seed_and_cost_by_processor_time():
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}), row("b", {}), row("c", {}))
    results = {f"plain0{i}": result(0.8, 0.5 + 0.1 * i) for i in range(3)}
    results |= {f"a0{i}": result(0.8, 0.6 + 0.1 * i + 0.001 * i, seconds=0.015) for i in range(3)}  # better each time
    results |= {f"b0{i}": result(0.8, 0.7 - 0.1 * i) for i in range(3)}
    results["c00"] = result(0, 0, status="diverged")
    plain, a, b, c = summarize_plan(plan, results)
    assert plain.verdict == "baseline"
    assert plain.summary.mean == pytest.approx(60.0)  # percent, as papers have it
    assert a.verdict.startswith("better: +10.10")
    assert a.cost == pytest.approx(1.5)
    assert b.verdict.startswith("no difference shown")
    assert c.verdict == "diverged"
    assert "NaN" in c.problems[0]


def test_costs_with_different_threads_are_not_compared():
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}))
    results = {f"plain0{i}": result(0.8, 0.5) | {"threads": 1} for i in range(3)}
    results |= {f"a0{i}": result(0.8, 0.6, seconds=0.03) | {"threads": 2} for i in range(3)}
    assert summarize_plan(plan, results)[1].cost is None
    results["a01"] = result(0.8, 0.6, seconds=0.015) | {"threads": 1}
    assert summarize_plan(plan, results)[1].cost == pytest.approx(1.5)


def test_every_point_is_a_row_where_the_recipe_reports_all():
    plan = plan_of(row("a", {"lr": 1}, {"lr": 2}), report="all")
    rows = summarize_plan(plan, {"a00": result(0.5, 0.5)})
    assert [(r.grid["lr"], r.summary.n) for r in rows] == [(1, 1), (2, 0)]


def show(table, width=100):
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def test_the_table_shows_names_as_they_are_and_says_what_has_not_run():
    plan = plan_of(row("plain [red]x", {}, baseline=True), row("a", {}, published={"accuracy": [86.4, 0.4]}))
    text = show(results_table(plan, summarize_plan(plan, {"plain [red]x00": result(0.5, 0.5)})))
    assert "A [bold]title" in text
    assert "plain [red]x" in text
    assert "86.4 ± 0.4" in text
    assert "no run yet" in text
    assert "1/3" in text
    narrow = show(results_table(plan, summarize_plan(plan, {}), verdicts=False), width=60)
    assert "verdict" not in narrow
    assert published_text(None) == "-"
    assert published_text(81.25) == "81.25"


EVENTS = [
    {"kind": "start", "step": 3, "steps": 10, "resumed": 1},
    {
        "kind": "progress",
        "epoch": 1,
        "epochs": 2,
        "step": 5,
        "steps": 10,
        "terms": {"task": 0.5, "x.ffn": 2.0},
        "eta": 4.0,
    },
    {"kind": "warning", "message": "a [warning]"},
    {"kind": "outcome", "status": "finished", "message": ""},
]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_names_the_loss_terms_and_what_is_left(terminal):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    plan = plan_of(row("a", {}))
    table = lambda: results_table(plan, summarize_plan(plan, {"a00": result(0.5, 0.25)}), verdicts=False)  # noqa: E731
    with LiveView(console, {"a00": "a seed 0", "a01": "a seed 1"}, table=table) as view:
        for event in EVENTS:
            view("a00", event)
            if terminal:
                view.live.refresh()
    shown = text.getvalue()
    assert "a seed 0 goes on at step 3" in shown
    assert "a [warning]" in shown
    if terminal:
        for part in ("task 0.5", "x.ffn 2", "4 s left", "1/2 trials", "25.00"):
            assert part in shown, part
    else:
        assert "[1/2] a seed 0: finished" in shown


def test_a_full_disk_is_an_outcome_of_its_own(tmp_path, small, quick, monkeypatch):
    def full(*args):
        raise DiskFull("No space left")

    monkeypatch.setattr("dampen.lab.train.run_trial", full)
    outcome = run_job(Job(small(), tmp_path), quick, print, lambda: False)
    assert (outcome.status, outcome.message) == ("disk full", "No space left")
