"""The space that `--tune` searches, and what became of the search with Optuna."""

import pytest

from dampen.studies.recipe import Recipe
from dampen.studies.search_space import Axis
from dampen.studies.tuning import axis_of, make_searchable


def recipe(grid=None, rows=None, epochs=2):
    return Recipe(
        name="tiny",
        title="Tiny search on digits",
        paper="",
        table="",
        cost="",
        command="",
        departures=[],
        metric="accuracy",
        base={
            "data": {"name": "digits", "limit": 200},
            "model": {
                "name": "vit",
                "patch_size": 4,
                "width": 16,
                "depth": 1,
                "heads": 2,
                "mlp": 16,
            },
            "train": {"epochs": epochs, "batch_size": 32, "lr": 0.004},
            "seeds": [0, 1],
        },
        rows=rows
        or [
            {"name": "plain", "methods": [], "baseline": True},
            {"name": "drop_key", "methods": [{"name": "drop_key", "rate": 0.2}]},
        ],
        grid=grid or {},
        scales={"laptop": {}},
    )


def test_the_axes_span_the_grid_or_surround_the_values():
    grid = {"train.lr": [1e-4, 5e-3], "lambda": [0.01, 0.02], "unit": ["element", "column"]}
    rows = [
        {"name": "plain", "methods": []},
        {"name": "key", "methods": [{"name": "drop_key", "rate": "$lambda", "unit": "$unit"}]},
    ]
    opened, axes = make_searchable(recipe(grid, rows))
    assert [a.key for a in axes["plain"]] == ["train.lr"]
    assert axes["key"][1:] == [
        Axis("lambda", 0.01, 0.02),
        Axis("unit", choices=("element", "column")),
    ]
    assert opened.rows == rows
    opened, axes = make_searchable(recipe())
    assert [a.key for a in axes["plain"]] == ["train.lr", "train.weight_decay"]
    assert [(a.low, a.high, a.log) for a in axes["plain"]] == [
        (0.0008, 0.02, True),
        (0.01, 3.0, True),
    ]
    assert axes["drop_key"][2].key == "drop_key_rate"
    assert (axes["drop_key"][2].low, axes["drop_key"][2].high) == pytest.approx((0.04, 0.6))
    assert opened.rows[1]["methods"] == [{"name": "drop_key", "rate": "$drop_key_rate"}]
    assert axis_of("x", [3, 3]).choices == (3, 3)


def test_defaults_are_searched_and_schedules_are_left_alone():
    rows = [
        {"name": "a", "methods": ["drop_key", {"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}]}
    ]
    _, axes = make_searchable(recipe(rows=rows))
    assert [a.key for a in axes["a"]] == ["train.lr", "train.weight_decay", "drop_key_rate"]


def test_the_report_leaves_the_search_aside(tmp_path, quick):
    from dampen.studies.report import make_report
    from tests.studies.synthetic_runs import write_study

    plan = write_study(tmp_path)
    first = next(iter(plan.runs))
    (tmp_path / "search").mkdir()
    (tmp_path / first).rename(tmp_path / "search" / first)
    report = make_report([tmp_path])
    assert sum(e.summary.n for e in report.tables[0].entries) == len(plan.runs) - 1
    assert not report.skipped


def test_the_command_refuses_what_it_does_not_know():
    from dampen.cli.running import engine_options, refuse_search
    from dampen.studies.errors import ConfigError

    refuse_search(None)
    with pytest.raises(ConfigError, match="Optuna was removed: compare --tune N"):
        refuse_search("optuna")
    with pytest.raises(ConfigError, match="only --engine ray has an address"):
        engine_options("local", 2, "auto")
    assert engine_options("ray", 2, "auto") == {"engine": "ray", "workers": 2, "address": "auto"}
    assert engine_options("local", None, None) == {"engine": "local", "workers": None}
