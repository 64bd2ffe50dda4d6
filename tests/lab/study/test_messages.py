"""What a user sees when something is wrong: said once, about what they wrote, with what to do."""

import sys

import pytest
import torch

import dampen
from dampen.cli import main
from dampen.lab.config.methods_text import parse_rows
from dampen.lab.data import load
from dampen.lab.errors import ConfigError, Diverged, OwnCodeError
from dampen.lab.metrics import GIVES, LanguageMetrics, TextMetrics, make_metrics
from dampen.lab.metrics.translation import corpus_scores
from dampen.lab.study.asked import ask_own
from dampen.lab.study.parts import ask_parts
from dampen.lab.study.preflight import check_rows
from dampen.lab.study.study import Study
from dampen.lab.training.function import function_in_file
from dampen.lab.training.state import Execution
from dampen.lab.training.train import run_trial
from tests.lab.study.test_parts import write_csv

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
    asked = ask_own(function_in_file(f"{path}:{name}"), "drop_key", 1, folder=folder)
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
        ask_parts(model, "digits", methods, 2)
    assert str(error.value).startswith("The comparison is not valid")
    assert len(error.value.problems) == len(told)
    for words, problem in zip(told, error.value.problems, strict=True):
        assert words in problem


def test_a_function_that_was_not_named_or_is_not_there(odd):
    with pytest.raises(
        ConfigError, match=r"say which function of odd.py; it has differs, model, nan. Write .*:FUNCTION"
    ):
        function_in_file(str(odd))
    with pytest.raises(ConfigError, match=r"--model is not valid.*\n.*odd.py has no function 'build'"):
        ask_parts(f"{odd}:build", "digits", "drop_key", 1)


def test_a_row_that_returns_other_metrics_failed_and_says_so(odd, tmp_path):
    study, trials = study_of(odd, "differs", tmp_path / "study")
    for trial in trials:
        run(study, trial)
    assert study.verdicts["drop_key"] == "failed: it returned no accuracy, only f1, nll"
    assert study.metric == "accuracy"


def test_a_metric_that_is_no_number_is_called_by_its_name(odd, tmp_path):
    study, trials = study_of(odd, "nan", tmp_path / "study")
    told = r"the function returned accuracy = nan, by which this study is judged \(the last training loss: task 0.5\)"
    with pytest.raises(Diverged, match=told):
        run(study, trials[0])


def test_what_people_do_without_us_stands_beside_the_methods(tmp_path):
    """Weight decay, label smoothing, mixup and early stopping, alone and with a method, by the lab's trainer."""
    rows = "drop_key, params(weight_decay=0.5), params(label_smoothing=0.2), params(mixup=0.4), params(patience=1)"
    few = ["data.limit=200", "train.epochs=6", "train.lr=0.05", "train.batch_size=32"]
    asked = ask_parts(
        "vit(depth=1, width=16, mlp=16)", "digits", f"{rows}, drop_head + params(weight_decay=0.5)", 1, settings=few
    )
    results = {}
    for row in asked.plan.rows:
        trial = asked.plan.trials[row.points[0].trials["0"]]
        results[row.name] = run_trial(trial, tmp_path / trial.id, Execution(threads=1, accelerator="cpu"))
    names = list(results)
    assert names == ["plain", *(row.strip() for row in rows.split(", ")), "drop_head + params(weight_decay=0.5)"]
    ends = {name: result["last_weights"] for name, result in results.items()}
    assert len(set(ends.values())) == len(ends)  # every row trained something else
    assert results["params(patience=1)"]["epochs"] < results["plain"]["epochs"] == 6
    decay = asked.plan.trials[asked.plan.rows[-1].points[0].trials["0"]]
    assert (decay.train.weight_decay, [m["name"] for m in decay.methods]) == (0.5, ["drop_head"])


def told_by(capsys, *arguments):
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_metric_that_the_trainer_does_not_measure_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="metric: 'acuracy' is not measured here; did you mean 'accuracy'"):
        ask_parts("vit", "digits", "drop_key", 1, metric="acuracy")
    with pytest.raises(ConfigError, match="metric: 'bleu' is not measured here; known: accuracy, brier"):
        ask_parts("vit", "digits", "drop_key", 1, metric="bleu")
    with pytest.raises(ConfigError, match="of 'accuracy' more is better; leave out ':min'"):
        ask_parts("vit", "digits", "drop_key", 1, metric="accuracy:min")
    assert ask_parts("vit", "digits", "drop_key", 1, metric="nll").recipe.metric == "nll"


def test_a_task_gives_the_metrics_that_are_promised():
    digits = load("digits")
    metrics = make_metrics(digits, digits.test)
    metrics.update(torch.zeros(3, 10), digits.test.batch([0, 1, 2])["target"])
    assert sorted(metrics.compute()) == sorted(GIVES["image"])
    texts = TextMetrics(2)
    texts.update(torch.eye(2), torch.arange(2))
    assert sorted(texts.compute()) == sorted(GIVES["text"])
    language = LanguageMetrics(torch.ones(2))
    language.update(torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.long))
    assert sorted(language.compute()) == sorted(GIVES["language"])
    assert sorted(corpus_scores(["a b"], ["a b"])) == ["bleu", "chrf"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("drop_key(rate=0.2", "a bracket is not closed; write drop_key"),
        ("drop_key)", "a bracket is closed that was not opened"),
        ("drop_key(rate=[0.2)]", "its brackets do not belong together"),
        ("drop_key, drop_head, drop_key", "the row 'drop_key' is written more than once"),
    ],
)
def test_rows_that_cannot_be_read_are_told_in_their_own_words(text, told):
    with pytest.raises(ConfigError) as error:
        parse_rows(text)
    assert told in str(error.value)
    assert "']'" not in str(error.value)


def test_a_file_that_cannot_be_imported_names_its_line(tmp_path):
    path = tmp_path / "broken.py"
    (tmp_path / "beside.py").write_text("VALUE = 1\nassert VALUE == 2, 'not two'\n")
    for text, told in (
        ("\n\nimport no_such_package\n", "broken.py, line 3: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import beside\n", "beside.py, line 2: AssertionError: not two"),
        ("exit(3)\n", "broken.py, line 1: SystemExit: 3"),
    ):
        path.write_text(text)
        with pytest.raises(OwnCodeError) as error:
            function_in_file(f"{path}:train")
        assert str(error.value) == f"broken.py cannot be imported: {told}"
    assert not [name for name in sys.modules if name.startswith("dampen_own_broken")]


def test_options_that_would_be_passed_over_are_refused(odd, capsys):
    said = told_by(capsys, f"{odd}:nan", "--folds", "3", "--partial", "--accelerator", "cuda", "--data-dir", "x")
    for words in (
        "--folds: your own training splits its own data; it can take the fold from trial.seed",
        "--partial: your own training reads its own data",
        "--accelerator: your own training chooses its own device",
        "--data-dir: your own training finds its own data",
    ):
        assert words in said
    assert "only your own training" in told_by(capsys, "--data", "digits", "--same-code")
    assert "did you mean 'train.lr'?" in told_by(capsys, "--data", "digits", "--set", "lr=3")
    said = told_by(capsys, f"{odd}:nan", "--engine", "rya")
    assert said.strip().endswith("unknown engine 'rya'; did you mean 'ray'?")


def test_fewer_examples_than_a_batch_are_told_before_anything_starts(tmp_path, capsys):
    data = write_csv(tmp_path / "few.csv", rows=40)
    said = told_by(
        capsys, "--data", str(data), "--methods", "drop_key", "--seeds", "1", "--out", str(tmp_path / "runs")
    )
    assert "more than the" in said
    fitting = int(said.rpartition("--set train.batch_size=")[2])
    assert not (tmp_path / "runs").exists()
    asked = ask_parts(None, data, "drop_key", 1, settings=[f"train.batch_size={fitting}"])
    check_rows(asked.plan, tmp_path / "runs", Execution(threads=1, parts=asked.parts))


def test_a_search_of_ones_own_training_asks_for_its_metric_before_it_begins(odd, tmp_path):
    with pytest.raises(ConfigError, match="such as --metric accuracy or --metric nll:min"):
        dampen.compare(f"{odd}:nan", methods="drop_key", seeds=1, tune=2, folder=tmp_path / "s", progress=False)
    assert list(tmp_path.iterdir()) == [odd]
