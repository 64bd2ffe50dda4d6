"""Before anything starts, and when to stop: dry runs, rows that cannot run, races, recipes of one's own."""

import json

import pytest

import dampen
from dampen.cli import main
from dampen.studies.errors import ConfigError
from dampen.studies.recipe import load_recipe, parse_recipe
from tests.studies.user_files import write_csv


def test_a_row_that_cannot_run_on_the_model_is_refused_before_anything_starts(tmp_path, capsys):
    data = write_csv(tmp_path / "reviews.csv")
    out = tmp_path / "runs"
    with pytest.raises(SystemExit) as end:
        main(
            [
                "compare",
                "--data",
                str(data),
                "--methods",
                "drop_key, patch_dropout, token_graying",
                "--out",
                str(out),
            ]
        )
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert "row 'patch_dropout' cannot run on text: PatchDropout drops patches" in told
    assert "row 'token_graying' cannot run on text" in told  # all of them at once
    assert not out.exists()


def test_a_model_that_cannot_take_the_data_is_blamed_and_not_the_methods(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            [
                "compare",
                "--data",
                "digits",
                "--model",
                "vit(patch_size=3)",
                "--methods",
                "drop_key",
                "--out",
                str(tmp_path),
            ]
        )
    assert end.value.code in (1, 2)
    told = capsys.readouterr().err
    assert "patch" in told
    assert "--methods" not in told


def test_a_dry_run_says_the_plan_the_identities_and_the_time_and_leaves_nothing(
    script, tmp_path, capsys
):
    out = tmp_path / "runs"
    command = [
        "compare",
        f"{script}:train",
        "--methods",
        "drop_key, drop_head",
        "--seeds",
        "2",
        "--dry-run",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(out), "--threads", "1"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trials"] == told["left"] == 6
    assert "code " in told["identity"]["function"]
    assert [row["row"] for row in told["rows"]] == ["plain", "drop_key", "drop_head"]
    assert {row["steps"] for row in told["rows"]} == {12}
    assert told["seconds"] > 0
    assert not out.exists()
    data = write_csv(tmp_path / "reviews.csv")
    with pytest.raises(SystemExit) as end:
        main(
            [
                "compare",
                "--data",
                str(data),
                "--methods",
                "drop_key, patch_dropout",
                "--dry-run",
                "--out",
                str(out),
            ]
        )
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "fingerprint" in shown
    assert "patch_dropout: cannot run" in shown


@pytest.mark.slow
def test_a_race_ends_by_its_budget_or_when_all_is_decided_and_goes_on(script, tmp_path, capsys):
    text = script.read_text()
    script.write_text(
        text.replace(
            '{"accuracy": accuracy,',
            '{"accuracy": 0.5 + 0.2 * (trial.row != "plain") + 0.01 * (trial.seed % 3 - 1) * (trial.row == "plain"),',
        )
    )
    options = {"params": {"epochs": 1}, "workers": 1, "threads": 1, "progress": False}
    study = dampen.compare(
        f"{script}:train",
        methods="drop_key",
        seeds=1,
        until_decided=True,
        folder=tmp_path / "race",
        **options,
    )
    assert study.race.why == "all decided"
    assert study.verdicts["drop_key"].startswith("better")
    assert study.plan.header["test"] == "sequential"
    assert len(study.plan.seeds) >= 5
    with pytest.raises(ConfigError, match="budget"):
        dampen.compare(
            f"{script}:train", methods="drop_key", budget="soon", folder=tmp_path / "no", **options
        )
    with pytest.raises(SystemExit) as end:
        main(["compare", f"{script}:train", "--budget", "soon"])
    assert end.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        rows = [
            "--methods",
            "drop_key",
            "--until-decided",
            "--budget",
            "0.1s",
            "--json",
            "--set",
            "epochs=1",
        ]
        main(
            [
                "compare",
                f"{script}:train",
                *rows,
                "--out",
                str(tmp_path / "runs"),
                "--workers",
                "1",
                "--threads",
                "1",
            ]
        )
    told = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert told["race"]["why"] == "time used"


def test_a_recipe_of_ones_own_needs_no_paper_and_all_mistakes_come_at_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
[base]
data = { name = "digits" }
model = { name = "vit", patch_size = 4 }
seeds = [0, 1]

[[rows]]
name = "plain"
baseline = true

[[rows]]
name = "key"
methods = [{ name = "drop_key", rate = 0.2 }]
"""
    )
    recipe = load_recipe(str(path))
    assert recipe.title == "mine"
    assert recipe.paper == recipe.cost == ""
    _, problems = parse_recipe(
        "x", {"titel": "t", "base": {"sed": [0]}, "rows": [{"methods": []}], "grid": {"a": 1}}
    )
    assert len(problems) == 4, problems
