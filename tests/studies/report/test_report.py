"""Rows are judged and advice is given; all runs here are synthetic."""

import json
import shutil

import pytest

from dampen.studies.report import make_report
from dampen.studies.report.summary import advise
from tests.studies.synthetic_runs import ROWS, edit, write, write_study


def test_rows_without_a_run_are_shown_as_such(tmp_path):
    plan = write_study(tmp_path)
    for trial in plan.configs[1].settings[0].ids.values():
        shutil.rmtree(tmp_path / trial)
    report = make_report([tmp_path])
    assert report.tables[0].entries[1].verdict == "no run yet"
    for name in ("html", "md", "csv", "json", "latex"):
        assert "no run yet" in report.render(name)


def test_one_seed_makes_a_page_without_intervals(tmp_path):
    write_study(tmp_path, seeds=1)
    report = make_report([tmp_path])
    assert {e.verdict for e in report.tables[0].entries} == {"reference", "inconclusive"}
    assert "Too few runs" in report.render("html")


def test_verdicts_costs_and_the_paper(table):
    by_name = {e.name: e for e in table.entries}
    assert {n: e.verdict for n, e in by_name.items()} == {
        "plain": "reference",
        "DropKey": "inconclusive",
        "DropPath": "better",
        "Explicit v": "better",
        "R-Drop": "better",
        "Blur": "worse",
    }
    assert by_name["R-Drop"].cost.ratio == pytest.approx(1.94, abs=0.03)
    assert by_name["plain"].cost.ratio == 1.0
    assert by_name["Explicit v"].against["accuracy"].word == "not comparable"
    assert by_name["Explicit v"].claim.endswith("same direction and size")
    assert by_name["DropKey"].claim.endswith("inconclusive here")
    assert by_name["plain"].summary.mean == pytest.approx(sum(by_name["plain"].values.values()) / 5)
    assert 80 < by_name["plain"].summary.mean < 90  # percent


def test_without_departures_the_paper_is_judged(tmp_path):
    write_study(tmp_path, departures=())
    (table,) = make_report([tmp_path]).tables
    words = {e.name: e.against["accuracy"].word for e in table.entries if e.against}
    assert words["plain"] == "reproduced"
    assert set(words.values()) <= {"reproduced", "not reproduced", "not comparable"}


def test_the_grid_point_is_chosen_on_validation(tmp_path):
    plan = write_study(tmp_path, grid={"lambda": [0.05, 0.1]})
    row = next(r for r in plan.configs if r.name == "Explicit v")
    first, second = row.settings
    for seed in first.ids:
        for point, valid, test in ((first, 0.9, 0.1), (second, 0.8, 0.99)):
            path = tmp_path / point.ids[seed] / "final.json"
            content = json.loads(path.read_text())
            content["valid"]["accuracy"], content["test"]["accuracy"] = valid, test
            write(path, content)
    (table,) = make_report([tmp_path]).tables
    assert table.entry("Explicit v").setting.grid == {"lambda": 0.05}
    assert table.entry("Explicit v").summary.mean == pytest.approx(10.0)


def test_costs_of_different_machines_are_not_compared(tmp_path):
    plan = write_study(tmp_path)
    for trial in plan.configs[1].settings[0].ids.values():
        path = tmp_path / trial / "environment.json"
        session = json.loads(path.read_text())["sessions"][0]
        write(path, {"sessions": [session | {"threads": 8}]})
    (table,) = make_report([tmp_path]).tables
    assert table.entries[1].cost.ratio is None
    assert table.entries[2].cost.ratio is not None
    assert "Runs come from 2 different machines or thread counts." in advise(table).trust.details


def test_advice_takes_the_cheapest_of_the_best(table):
    advice = advise(table)
    assert advice.pick == "Explicit v"  # R-Drop is not shown better and costs nearly twice as much
    assert advice.which.headline == "Use Explicit v"
    assert advice.trust.headline == "Good: 4 of 5 comparisons conclusive"
    assert "80 % power" in advice.trust.details[0]


@pytest.mark.parametrize(
    ("rows", "seeds", "headline", "trust"),
    [
        (
            {"plain": ROWS["plain"], "DropKey": ([{"name": "drop_key"}], 0.003, 1.0, None)},
            4,
            "Inconclusive",
            "Weak: 0 of 1 comparison conclusive",
        ),
        (ROWS, 2, "Too few runs", "Little: 2 shared seeds"),
        (
            {k: ROWS[k] for k in ("plain", "Blur")},
            4,
            "Stay with plain",
            "Well founded: 1 comparison conclusive",
        ),
    ],
)
def test_advice_when_nothing_is_better(tmp_path, rows, seeds, headline, trust):
    write_study(tmp_path, rows, seeds=seeds)
    advice = advise(make_report([tmp_path]).tables[0])
    assert (advice.which.headline, advice.trust.headline, advice.pick) == (headline, trust, None)


def test_lower_is_better_for_some_metrics(tmp_path):
    plan = write_study(tmp_path)
    edit(tmp_path / "plan.json", header=plan.header | {"metric": "nll"})
    (table,) = make_report([tmp_path]).tables
    assert table.study.mode == "min"
    assert table.ranked()[0].name == "R-Drop"
    # invented nll are the same for every seed, so that no spread exists: five equal differences are not significant
    assert table.entry("R-Drop").verdict == "inconclusive"
