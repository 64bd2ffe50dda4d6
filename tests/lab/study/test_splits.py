"""Splits that are drawn anew for each seed, and cross-validation."""

import json

import pytest
import torch

from dampen.cli import main
from dampen.lab.config.names import check_data
from dampen.lab.study.parts import ask_parts
from dampen.lab.training.build import load_data
from tests.lab.study.test_parts import write_csv


def rows_of(split):
    return {tuple(x.flatten().tolist()) for x in split.images}


def test_split_seed_draws_train_and_validation_anew_and_keeps_the_test_part():
    one, two = (load_data({"name": "digits", "split_seed": "seed"}, None, None, seed) for seed in (0, 1))
    same = load_data({"name": "digits"}, None, None, 1)
    assert rows_of(one.train) != rows_of(two.train)
    assert rows_of(one.test) == rows_of(two.test)
    assert rows_of(same.train) == rows_of(load_data({"name": "digits"}, None, None, 0).train)
    assert check_data({"name": "digits", "split_seed": "seeds"}, "data.")
    assert check_data({"name": "digits", "folds": 1}, "data.")
    assert not check_data({"name": "digits", "split_seed": "seed", "folds": 3}, "data.")


@pytest.mark.parametrize("kind", ["digits", "table"])
def test_every_example_is_tested_once_in_a_round_of_folds(kind, tmp_path):
    if kind == "digits":
        data, parts = {"name": "digits", "folds": 4}, None
    else:
        asked = ask_parts(None, write_csv(tmp_path / "t.csv"), "drop_key", 1, folds=4)
        trial = next(iter(asked.plan.trials.values()))
        data, parts = trial.data, asked.parts
    folds = [load_data(data, None, parts, seed) for seed in range(8)]
    total = sum(len(getattr(folds[0], part)) for part in ("train", "valid", "test"))
    for first in (0, 4):
        assert sum(len(fold.test) for fold in folds[first : first + 4]) == total
    content = [fold.test.batch(torch.arange(len(fold.test)))["target"].tolist() for fold in folds]
    assert content[0] != content[4] or kind == "table"  # another round is another draw
    if kind == "digits":
        for first in (0, 4):
            tested = [rows_of(fold.test) for fold in folds[first : first + 4]]
            assert not tested[0] & tested[1]
            for fold in folds[first : first + 4]:
                assert not rows_of(fold.test) & rows_of(fold.train)
                assert not rows_of(fold.valid) & rows_of(fold.train)
    assert "fold 1 of 4 in round 2" in " ".join(folds[4].info["departures"])


@pytest.mark.slow
def test_the_command_averages_the_folds_of_a_seed(tmp_path, capsys):
    data = write_csv(tmp_path / "t.csv", rows=60)
    command = ["compare", "--data", str(data), "--methods", "drop_key", "--seeds", "2", "--folds", "2", "--json"]
    command += ["--set", "train.epochs=1", "--set", "train.batch_size=8", "--workers", "1", "--threads", "1"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path / "runs")])
    told = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert told["trials"] == {"finished": 8}
    assert [row["n"] for row in told["rows"]] == [2, 2]
    plan = json.loads(next((tmp_path / "runs").glob("*/plan.json")).read_text())
    assert "2 seeds of 2 folds each, averaged" in plan["header"]["title"]
    single = [json.loads(p.read_text())["test"]["accuracy"] for p in (tmp_path / "runs").glob("*/*/final.json")]
    both = [v for row in told["rows"] for v in row["values"].values()]
    assert sum(both) / 4 == pytest.approx(100 * sum(single) / 8)
