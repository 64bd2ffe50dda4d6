"""The search with Optuna: its space, its pruning, its memory, and one real search on digits."""

import json
from pathlib import Path

import pytest

from dampen.studies.errors import LabError
from dampen.studies.optuna_search import Search, _release_dead, _study, run_one, search
from dampen.studies.recipe import Recipe
from dampen.studies.report.summary import tuned
from dampen.studies.search_space import Axis
from dampen.studies.store import RunStore
from dampen.studies.table import comparison_table
from dampen.studies.tuning import axis_of, make_searchable, plan_at


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


def plan_of(tmp_path, execution, mode="max", **options):
    opened, axes = make_searchable(recipe(**options))
    url = f"sqlite:///{tmp_path / 'search.db'}"
    return Search(opened, tmp_path, axes, url, 4, execution, ("accuracy", mode), rows=list(axes))


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


def test_a_plan_at_chosen_values():
    opened, _ = make_searchable(recipe())
    plan = plan_at(opened, None, [], "drop_key", {"train.lr": 0.02, "drop_key_rate": 0.5}, [0, 1])
    assert [r.name for r in plan.configs] == ["drop_key"]
    assert len(plan.runs) == 2
    trial = next(iter(plan.runs.values()))
    assert trial.train.lr == 0.02
    assert trial.methods == ({"name": "drop_key", "rate": 0.5},)


def test_a_hopeless_trial_is_pruned_and_a_good_one_told(tmp_path, quick):
    import optuna

    what = plan_of(tmp_path, quick, epochs=30)
    study = _study(what, "plain")
    for _ in range(
        3
    ):  # what the pruner compares with: invented trials that were very good from the start
        distributions = {"train.lr": optuna.distributions.FloatDistribution(0.0008, 0.02, log=True)}
        values = dict.fromkeys(range(1, 31), 0.999)
        study.add_trial(
            optuna.trial.create_trial(
                params={"train.lr": 0.004},
                distributions=distributions,
                value=0.999,
                intermediate_values=values,
            )
        )
    told = run_one(what, "plain", study, study.ask())
    assert told == "pruned"
    last = study.trials[-1]
    assert last.state == optuna.trial.TrialState.PRUNED
    assert 2 <= last.last_step < 30
    folder = tmp_path / "search" / last.user_attrs["id"]
    assert RunStore(folder).final() is None
    assert not list(folder.glob("checkpoint*"))
    assert len(RunStore(folder).lines()) == last.last_step
    short = plan_of(tmp_path / "short", quick, epochs=1)
    (tmp_path / "short").mkdir()
    study = _study(short, "plain")
    assert run_one(short, "plain", study, study.ask()).startswith("validation 0.")
    assert (
        study.best_value
        == RunStore(tmp_path / "short" / "search" / study.best_trial.user_attrs["id"]).final()[
            "valid"
        ]["accuracy"]
    )


def test_stopping_and_dying_leave_trials_that_are_tried_again(tmp_path, quick):
    import optuna

    states = optuna.trial.TrialState
    what = plan_of(tmp_path, quick, epochs=1)
    study = _study(what, "plain")
    assert run_one(what, "plain", study, study.ask(), lambda: True) == "stopped"
    stopped = study.trials[0]
    again = study.ask()
    again.suggest_float("train.lr", 0.0008, 0.02, log=True)
    again.suggest_float("train.weight_decay", 0.01, 3.0, log=True)
    assert again.params == stopped.params  # its checkpoint lies in the same folder
    again.set_user_attr("holder", "another-machine:1")
    dead = study.ask()
    dead.suggest_float("train.lr", 0.0008, 0.02, log=True)
    import socket

    dead.set_user_attr(
        "holder", f"{socket.gethostname()}:{2**22 + 1}"
    )  # beyond the largest process number
    _release_dead(study)
    by_state = {t.number: t.state for t in study.trials}
    assert by_state[again.number] == states.RUNNING
    assert by_state[dead.number] == states.FAIL
    assert study.trials[-1].state == states.WAITING


def test_an_unusable_storage_is_told(tmp_path, quick):
    with pytest.raises(LabError, match="storage for the search cannot be used"):
        search(recipe(), tmp_path / "a", quick, 1, storage="sqlite:////nowhere/at/all/x.db")
    with pytest.raises(ValueError, match="trials must be 1 or more"):
        search(recipe(), tmp_path / "b", quick, 0)


@pytest.mark.slow
def test_a_real_search_gives_each_row_its_best_point_on_all_seeds(tmp_path, quick):
    lines = []
    url = f"sqlite:///{tmp_path / 'team.db'}"
    plan = search(
        recipe(epochs=1),
        tmp_path / "run",
        quick,
        trials=2,
        storage=url,
        workers=1,
        report=lines.append,
    )
    assert len(lines) == 4
    assert [r.name for r in plan.configs] == ["plain", "drop_key"]
    record = json.loads((tmp_path / "run" / "search.json").read_text())
    for row in plan.configs:
        (point,) = row.settings
        assert set(point.ids) == {"0", "1"}
        tried = record["rows"][row.name]["trials"]
        assert len(tried) == 2
        best = max((t for t in tried if t["state"] == "complete"), key=lambda t: t["valid"])
        assert point.grid == best["values"]
        assert best["id"] not in point.ids.values()  # tuned on a seed that the table does not use
        assert (
            RunStore(tmp_path / "run" / "search" / best["id"]).final()["valid"]["accuracy"]
            == best["valid"]
        )
    told = tuned(comparison_table(plan, {}))
    assert told.startswith("Settings were tuned: 2 runs for every method on tuning seeds ")
    assert Path(tmp_path / "team.db").exists()
    again = []
    search(
        recipe(epochs=1),
        tmp_path / "run",
        quick,
        trials=2,
        storage=url,
        workers=1,
        report=again.append,
    )
    assert not again  # all done already


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
    from dampen.cli.running import check_search, engine_options
    from dampen.studies.errors import ConfigError

    check_search("optuna")
    check_search(None)
    with pytest.raises(ConfigError, match="unknown search 'grid'; known: optuna"):
        check_search("grid")
    with pytest.raises(ConfigError, match="only --engine ray has an address"):
        engine_options("local", 2, "auto")
    assert engine_options("ray", 2, "auto") == {"engine": "ray", "workers": 2, "address": "auto"}
    assert engine_options("local", None, None) == {"engine": "local", "workers": None}
