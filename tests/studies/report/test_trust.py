"""What a page says of its own worth: which weights were tested, what chose them, and what the seeds varied."""

import json

import pytest

from dampen.studies.report import make_report
from dampen.studies.report.summary import counted, noise, trust, tuned, what_was_tested
from tests.studies.synthetic_runs import write, write_study


@pytest.fixture
def of(tmp_path):
    """The table of a study whose trials say this of their data and training."""

    def table_of(header=None, **config):
        plan = write_study(tmp_path, seeds=4)
        plan.header |= header or {}
        plan.save(tmp_path)
        for trial in plan.runs:
            path = tmp_path / trial / "config.json"
            content = json.loads(path.read_text())
            for section, values in config.items():
                content[section] = content.get(section, {}) | values
            write(path, content)
        (table,) = make_report([tmp_path]).tables
        return table

    return table_of


def test_nothing_was_tuned_and_the_epoch_was_chosen_are_two_sentences_that_agree(of):
    table = of()
    told = trust(table).details
    assert (
        tuned(table) == "Hyperparameters were not tuned: each method was run at the setting listed."
    )
    assert (
        what_was_tested(table)
        == "The tested epoch was selected on validation. The test set was used once."
    )
    assert {tuned(table), what_was_tested(table)} <= set(told)
    assert not any(line.startswith("Settings and epoch") for line in told)


def test_the_last_epoch_was_not_chosen_by_anything(of):
    table = of(train={"select": "last"})
    assert what_was_tested(table) == "Every run was tested once, after its last epoch."


def test_of_ones_own_function_only_what_is_known_is_said(of):
    table = of(function={"name": "train.py:train", "code": "0", "params": {}})
    assert what_was_tested(table).startswith("Your function measured the test metrics itself")
    assert noise(table) == [
        "Seeds vary what your function draws, which may include the splits of the data."
    ]


def test_the_page_says_which_parts_were_drawn_anew(of):
    (same,) = noise(of(data={"split_seed": 0, "test_seed": 0}))
    assert same.startswith(
        "Seeds vary initial weights and order of batches; every run trains on the same split"
    )
    assert "leave a standard error of" in same
    (anew,) = noise(of())
    assert (
        "the split into training and validation, which is drawn anew for each; the test set is the same"
        in anew
    )
    table = of({"folds": 2}, data={"folds": 2})
    (folds,) = noise(table)
    assert folds.endswith(
        "every example is tested once per seed, so intervals cover the draw of the splits too."
    )
    assert "standard error" not in folds


def test_a_page_tells_given_splits_from_drawn_ones(of, tmp_path):
    def noise_of(drawn):
        of()
        for path in tmp_path.glob("*/final.json"):
            content = json.loads(path.read_text())
            content["data"]["drawn"] = drawn
            write(path, content)
        (table,) = make_report([tmp_path]).tables
        (told,) = noise(table)
        return told

    assert (
        "training and validation are given, and the test set is the same in every run"
        in noise_of([])
    )
    told = noise_of(["valid", "test"])
    assert told.endswith(
        "which is drawn anew for each, so that intervals cover the draw of the test set too."
    )
    assert "standard error" not in told


def test_the_folds_of_a_round_make_one_value(of):
    table = of({"folds": 2}, data={"folds": 2})
    assert {counted(entry, table) for entry in table.entries} == {"2/2"}
    assert table.study.planned() == 4 * len(table.entries)
