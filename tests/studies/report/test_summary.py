"""From records to rows: selection on validation, pairing by seed, cost, and what the terminal shows."""

import contextlib
import io
import math
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from dampen.cli import main
from dampen.studies.comparison import Comparison, Config, Setting
from dampen.studies.engines import Job, run_job
from dampen.studies.errors import DiskFull
from dampen.studies.report import make_report
from dampen.studies.report.summary import SAME_TIME, _cost
from dampen.studies.report.terminal import LiveView, published_text, results_table
from dampen.studies.result import parse_event, parse_result
from dampen.studies.run import Run
from dampen.studies.store import LoggedRun
from dampen.studies.table import best_setting, comparison_table
from tests.studies.synthetic_runs import ROWS, write_study

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


def table_of(plan, results):
    """The table of results by trial id, all on one machine."""
    config = Run.from_dict({"data": {"name": "digits"}, "model": {"name": "vit"}}).to_dict()
    runs = {
        i: LoggedRun(
            Path(i), i, config, parse_result({"id": i, **r}), [{"cpu": "x", "device": "cpu"}]
        )
        for i, r in results.items()
    }
    return comparison_table(plan, runs)


def plan_of(*rows, report="best"):
    return Comparison("p", "laptop", {**HEADER, "report": report}, [], [0, 1, 2], list(rows), {})


def row(name, *points, **more):
    return Config(
        name,
        [],
        [Setting(g, {str(i): f"{name}{j}{i}" for i in range(3)}) for j, g in enumerate(points)],
        **more,
    )


def test_the_grid_point_is_chosen_on_validation_whatever_the_test_says():
    grid = row("a", {"lr": 1}, {"lr": 2})
    results = {f"a0{i}": result(0.8, 0.99) for i in range(3)} | {
        f"a1{i}": result(0.9, 0.10) for i in range(3)
    }
    assert best_setting(grid, results).grid == {"lr": 2}
    del results["a12"]  # a point with fewer runs does not win by luck
    assert best_setting(grid, results).grid == {"lr": 1}


def test_rows_are_compared_seed_by_seed_and_cost_by_processor_time():
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}), row("b", {}), row("c", {}))
    results = {f"plain0{i}": result(0.8, 0.5 + 0.1 * i) for i in range(3)}
    results |= {
        f"a0{i}": result(0.8, 0.6 + 0.1 * i + 0.001 * i, seconds=0.015) for i in range(3)
    }  # better each time
    results |= {f"b0{i}": result(0.8, 0.7 - 0.1 * i) for i in range(3)}
    results["c00"] = result(0, 0, status="diverged")
    table = table_of(plan, results)
    plain, a, b, c = table.entries
    assert plain.verdict == "reference"
    assert plain.summary.mean == pytest.approx(60.0)  # percent, as papers have it
    assert a.told(table.metric, numbers=True).startswith("better: +10.10 points")
    assert a.cost.ratio == pytest.approx(1.5)
    assert b.verdict == "inconclusive"
    assert c.verdict == "failed"
    assert "NaN" in c.told(table.metric)
    assert [e.name for e in table.compared()] == ["a", "b"]  # what failed is no test


def test_a_model_in_several_depths_is_compared_within_each():
    names = ("2", "2 dropped", "8", "8 dropped")
    rows = [
        Config(n, [{"name": "drop_key"}] * n.endswith("dropped"), row(n, {}).settings)
        for n in names
    ]
    runs = {}
    for n in names:
        model = {"name": "vit", "depth": int(n.split()[0])}
        config = Run.from_dict({"data": {"name": "digits"}, "model": model}).to_dict()
        runs |= {
            f"{n}0{i}": LoggedRun(
                Path(n),
                f"{n}0{i}",
                config,
                parse_result({"id": f"{n}0{i}", **result(0.8, 0.5)}),
                [],
            )
            for i in range(3)
        }
    table = comparison_table(plan_of(*rows), runs)
    assert [e.reference for e in table.entries] == [None, "2", None, "8"]


def test_the_same_training_under_two_names_is_counted_once():
    plan = plan_of(row("plain", {}, baseline=True), row("q", {}), row("k", {}))
    results = {
        f"plain0{i}": result(0.8, 0.5 + 0.1 * i) | {"last_weights": f"p{i}"} for i in range(3)
    }
    for name in "qk":
        results |= {
            f"{name}0{i}": result(0.8, 0.6 + 0.11 * i) | {"last_weights": f"w{i}"} for i in range(3)
        }
    table = table_of(plan, results)
    assert [e.name for e in table.compared()] == ["q"]
    assert table.entry("k").told(table.metric) == "same as q"
    assert (
        table.entry("q").comparison.corrected == table.entry("q").comparison.p
    )  # one test, nothing to correct
    results["k02"]["last_weights"] = "another"
    assert len(table_of(plan, results).compared()) == 2


def test_every_metric_is_a_family_of_its_own():
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}), row("b", {}))
    noise = [0.0, 0.01, -0.02]

    def with_nll(value, i):
        return {"test": {"accuracy": 0.5 + noise[i] * (1 + i), "nll": value}}

    results = {f"plain0{i}": result(0.8, 0.5) | with_nll(1.0 + 0.1 * i, i) for i in range(3)}
    results |= {
        f"a0{i}": result(0.8, 0.5) | with_nll(0.8 + 0.1 * i + 0.001 * i, i) for i in range(3)
    }
    results |= {
        f"b0{i}": result(0.8, 0.5) | with_nll(1.0 + 0.1 * i + 0.05 * (-1) ** i, i) for i in range(3)
    }
    a, b = table_of(plan, results).entries[1:]
    assert a.verdict == "inconclusive"
    assert a.secondary["nll"].verdict == "better"  # lower is better
    assert b.secondary["nll"].verdict == "inconclusive"
    assert a.secondary["nll"].margin == pytest.approx(0.011)  # 1 % of the reference's mean


def test_costs_with_different_threads_are_not_compared():
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}))
    results = {f"plain0{i}": result(0.8, 0.5) | {"threads": 1} for i in range(3)}
    results |= {f"a0{i}": result(0.8, 0.6, seconds=0.03) | {"threads": 2} for i in range(3)}
    assert table_of(plan, results).entries[1].cost.ratio is None
    results["a01"] = result(0.8, 0.6, seconds=0.015) | {"threads": 1}
    assert table_of(plan, results).entries[1].cost.ratio == pytest.approx(1.5)


def test_every_point_is_a_row_where_the_recipe_reports_all():
    plan = plan_of(row("a", {"lr": 1}, {"lr": 2}), report="all")
    rows = table_of(plan, {"a00": result(0.5, 0.5)}).entries
    assert [(r.setting.grid["lr"], r.summary.n) for r in rows] == [(1, 1), (2, 0)]


def show(table, width=100):
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def test_the_table_shows_names_as_they_are_and_says_what_has_not_run():
    plan = plan_of(
        row("plain [red]x", {}, baseline=True), row("a", {}, published={"accuracy": [86.4, 0.4]})
    )
    text = show(results_table(table_of(plan, {"plain [red]x00": result(0.5, 0.5)})))
    assert "A [bold]title" in text
    assert "plain [red]x" in text
    assert "86.4 ± 0.4" in text
    assert "no run yet" in text
    assert "1/3" in text
    narrow = show(results_table(table_of(plan, {}), verdicts=False), width=60)
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
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}))

    def table():
        return results_table(
            table_of(plan, {"a00": result(0.5, 0.25), "plain00": result(0.5, 0.5)}), verdicts=False
        )

    with LiveView(console, {"a00": "a seed 0", "a01": "a seed 1"}, table=table) as view:
        for event in EVENTS:
            view("a00", parse_event(event))
            if terminal:
                view.live.refresh()
    shown = text.getvalue()
    assert "a seed 0 resumes at step 3" in shown
    assert "a [warning]" in shown
    if terminal:
        for part in (
            "task 0.5",
            "x.ffn 2",
            "4 s left",
            "1/2 runs",
            "25.00",
            "about ",
            "provisional",
        ):
            assert part in shown, part
    else:
        assert "[1/2] a seed 0: finished" in shown


def test_a_full_disk_is_an_outcome_of_its_own(tmp_path, small, quick, monkeypatch):
    def full(*args):
        raise DiskFull("No space left")

    monkeypatch.setattr("dampen.studies.trainer.train.run_trial", full)
    outcome = run_job(Job(small(), tmp_path), quick, print, lambda: False)
    assert (outcome.status, outcome.message) == ("disk full", "No space left")


def test_the_same_weights_tested_in_another_way_are_two_rows():
    """Monte Carlo at test: one training, other results."""
    plan = plan_of(row("plain", {}, baseline=True), row("once", {}), row("sampled", {}))
    results = {
        f"plain0{i}": result(0.8, 0.5 + 0.1 * i) | {"last_weights": f"p{i}"} for i in range(3)
    }
    for name, gain in (("once", 0.0), ("sampled", 0.01)):
        results |= {
            f"{name}0{i}": result(0.8, 0.6 + 0.11 * i + gain) | {"last_weights": f"w{i}"}
            for i in range(3)
        }
    assert [e.name for e in table_of(plan, results).compared()] == ["once", "sampled"]


EVIL = "\x1b]0;owned\x07\x1b[2Jrow\u202e"


def test_escape_codes_in_names_are_shown_and_not_obeyed(tmp_path, capsys):
    rows = {"plain": ROWS["plain"], EVIL: ROWS["Explicit v"]}
    write_study(tmp_path, rows, title=EVIL)
    (table,) = make_report([tmp_path]).tables
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    console.print(results_table(table))
    view = LiveView(console, {"x": EVIL})
    view._say(EVIL)
    shown = console.file.getvalue()
    for format in (["--format", "md"], ["--format", "csv"], ["-o", str(tmp_path / "r.html")]):
        with contextlib.suppress(SystemExit):
            main(["report", str(tmp_path), *format])
    shown += "".join(capsys.readouterr())
    assert not set("\x1b\x07\u202e") & set(shown)
    assert "\\x1b" in shown


@pytest.mark.parametrize(
    ("ratios", "headline", "first"),
    [
        ((0.88, 0.95, 1.02), SAME_TIME, "a: 0.95x, 95 % interval 0.79x to 1.14x. "),
        ((1.20, 1.30, 1.25), "1.25x the time of a step", "95 % interval 1.13x to 1.38x. "),
        ((1.2, 1.3), "1.25x the time of a step", "Over 2 seeds, too few for an interval. "),
    ],
)
def test_the_cost_answer_has_the_interval_of_the_table_and_claims_no_ratio_it_contradicts(
    ratios, headline, first
):
    plan = plan_of(row("plain", {}, baseline=True), row("a", {}))
    results = {f"plain0{i}": result(0.8, 0.5 + 0.1 * i) for i in range(len(ratios))}
    results |= {
        f"a0{i}": result(0.8, 0.6 + 0.101 * i, seconds=0.01 * ratio)
        for i, ratio in enumerate(ratios)
    }
    table = table_of(plan, results)
    pick = next(e for e in table.entries if e.name == "a")
    answer = _cost(table, pick)
    assert answer.headline == headline
    assert answer.details[0].startswith(first)
    logs = [math.log(ratio) for ratio in ratios]
    if len(ratios) > 2:  # Student's t for 2 degrees of freedom
        half = 4.3027 * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = (math.exp(statistics.mean(logs) + side * half) for side in (-1, 1))
        assert f"95 % interval {low:.2f}x to {high:.2f}x" in answer.details[0]
    without = _cost(table, None).headline
    assert without == (SAME_TIME if headline == SAME_TIME else "1.25x a step")
