"""What a user sees when something is wrong: said once, about what they wrote, with what to do."""

import pytest

from dampen.studies.errors import ConfigError, Diverged
from dampen.studies.request import request_own, request_parts
from dampen.studies.study import Study
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from dampen.studies.trainer.user_function import function_in_file

ODD = """
import dampen
from torch import nn


def model():
    return dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8, classes=3)


def differs(trial):
    reg = trial.regularize(model())
    return {"accuracy": 0.5} if trial.row == "plain" else {"f1": 0.25, "nll": 1.0}


def nan(trial):
    trial.regularize(model())
    trial.log(train={"task": 0.5})
    return {"accuracy": float("nan")}
"""


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(ODD)
    return path


def study_of(path, name, folder):
    asked = request_own(function_in_file(f"{path}:{name}"), "drop_key", 1, folder=folder)
    asked.plan.save(folder)
    return Study(folder, asked.plan, asked.function), asked.plan.chosen()


def run(study, trial):
    return run_trial(trial, study.folder / trial.id, Execution(threads=1, function=study.function))


@pytest.mark.parametrize(
    ("model", "methods", "told"),
    [
        ("vitt", "drop_key, drop_head", ["model.name: unknown model 'vitt'; did you mean 'vit'?"]),
        ("vit(dept=2)", "drop_key", ["model.dept: unknown key; did you mean 'depth'?"]),
        (
            "vit",
            "drop_kye, drop_key",
            ["row 'drop_kye': methods[0]: unknown method 'drop_kye'; did you mean 'drop_key'?"],
        ),
        ("vitt", "drop_kye", ["unknown model 'vitt'", "unknown method 'drop_kye'"]),
    ],
)
def test_a_mistake_is_told_once_and_not_as_one_of_a_recipe(model, methods, told):
    with pytest.raises(ConfigError) as error:
        request_parts(model, "digits", methods, 2)
    assert str(error.value).startswith("The comparison is not valid")
    assert len(error.value.problems) == len(told)
    for words, problem in zip(told, error.value.problems, strict=True):
        assert words in problem


def test_a_function_that_was_not_named_or_is_not_there(odd):
    with pytest.raises(
        ConfigError,
        match=r"say which function of odd.py; it has differs, model, nan. Write .*:FUNCTION",
    ):
        function_in_file(str(odd))
    with pytest.raises(
        ConfigError, match=r"--model is not valid.*\n.*odd.py has no function 'build'"
    ):
        request_parts(f"{odd}:build", "digits", "drop_key", 1)


def test_a_row_that_returns_other_metrics_failed_and_says_so(odd, tmp_path):
    study, trials = study_of(odd, "differs", tmp_path / "study")
    for trial in trials:
        run(study, trial)
    assert study.verdicts["drop_key"] == "failed: it returned no accuracy, only f1, nll"
    assert study.metric == "accuracy"


def test_a_metric_that_is_no_number_is_called_by_its_name(odd, tmp_path):
    study, trials = study_of(odd, "nan", tmp_path / "study")
    told = r"the function returned accuracy = nan, the metric of this study \(the last training loss: task 0.5\)"
    with pytest.raises(Diverged, match=told):
        run(study, trials[0])


def test_what_people_do_without_us_stands_beside_the_methods(tmp_path):
    """Weight decay, label smoothing, mixup and early stopping, alone and with a method, by the lab's trainer."""
    rows = "drop_key, params(weight_decay=0.5), params(label_smoothing=0.2), params(mixup=0.4), params(patience=1)"
    few = ["data.limit=200", "train.epochs=6", "train.lr=0.2", "train.batch_size=32"]
    asked = request_parts(
        "vit(depth=1, width=16, mlp=16)",
        "digits",
        f"{rows}, drop_head + params(weight_decay=0.5)",
        1,
        settings=few,
    )
    results = {}
    for row in asked.plan.configs:
        trial = asked.plan.runs[row.settings[0].ids["0"]]
        results[row.name] = run_trial(
            trial, tmp_path / trial.id, Execution(threads=1, accelerator="cpu")
        )
    names = list(results)
    assert names == [
        "plain",
        *(row.strip() for row in rows.split(", ")),
        "drop_head + params(weight_decay=0.5)",
    ]
    ends = {name: result["last_weights"] for name, result in results.items()}
    assert len(set(ends.values())) == len(ends)  # every row trained something else
    assert results["params(patience=1)"]["epochs"] < results["plain"]["epochs"] == 6
    decay = asked.plan.runs[asked.plan.configs[-1].settings[0].ids["0"]]
    assert (decay.train.weight_decay, [m["name"] for m in decay.methods]) == (0.5, ["drop_head"])
