"""Mistakes of a newcomer: each is refused before anything starts, in words of what was typed, with what to type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dampen
from dampen.cli import main
from dampen.studies.compare import check_rows
from dampen.studies.data import load
from dampen.studies.errors import ConfigError, OwnCodeError
from dampen.studies.methods_text import parse_rows
from dampen.studies.metrics import TASKS, TextMetrics, make_metrics
from dampen.studies.request import request_parts
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.user_function import function_in_file
from reproductions.metrics.translation import corpus_scores
from tests.studies.user_files import write_csv


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text('def nan(trial):\n    return {"accuracy": float("nan")}\n')
    return path


def told_by(capsys, *arguments):
    """What a command that is refused says."""
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_metric_that_the_trainer_does_not_measure_is_refused_before_anything_starts():
    with pytest.raises(
        ConfigError, match="metric: 'acuracy' is not measured here; did you mean 'accuracy'"
    ):
        request_parts("vit", "digits", "drop_key", 1, metric="acuracy")
    with pytest.raises(
        ConfigError, match="metric: 'bleu' is not measured here; known: accuracy, brier"
    ):
        request_parts("vit", "digits", "drop_key", 1, metric="bleu")
    with pytest.raises(ConfigError, match="of 'accuracy' more is better; leave out ':min'"):
        request_parts("vit", "digits", "drop_key", 1, metric="accuracy:min")
    assert request_parts("vit", "digits", "drop_key", 1, metric="nll").recipe.metric == "nll"


def test_a_task_gives_the_metrics_that_are_promised():
    digits = load("digits")
    metrics = make_metrics(digits, digits.test)
    metrics.update(torch.zeros(3, 10), digits.test.batch([0, 1, 2])["target"])
    assert sorted(metrics.compute()) == sorted(TASKS["image"].gives)
    texts = TextMetrics(2)
    texts.update(torch.eye(2), torch.arange(2))
    assert sorted(texts.compute()) == sorted(TASKS["text"].gives)
    assert sorted(corpus_scores(["a b"], ["a b"])) == ["bleu", "chrf"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("drop_key(rate=0.2", "a bracket is not closed; write drop_key"),
        ("drop_key)", "a bracket is closed that was not opened"),
        ("drop_key(rate=[0.2)]", "its brackets do not belong together"),
        ("drop_key, drop_head, drop_key", "'drop_key' is written more than once"),
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
        (
            "\n\nimport no_such_package\n",
            "broken.py, line 3: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("import beside\n", "beside.py, line 2: AssertionError: not two"),
        ("exit(3)\n", "broken.py, line 1: SystemExit: 3"),
    ):
        path.write_text(text)
        with pytest.raises(OwnCodeError) as error:
            function_in_file(f"{path}:train")
        assert str(error.value) == f"broken.py cannot be imported: {told}"
    assert not [name for name in sys.modules if name.startswith("dampen_own_broken")]


def test_options_that_would_be_passed_over_are_refused(odd, capsys):
    said = told_by(
        capsys,
        f"{odd}:nan",
        "--folds",
        "3",
        "--allow-incomplete",
        "--accelerator",
        "cuda",
        "--data-dir",
        "x",
    )
    for words in (
        "--folds: a training function splits its own data; it can take the fold from trial.seed",
        "--allow-incomplete: a training function reads its own data",
        "--accelerator: a training function chooses its own device",
        "--data-dir: a training function finds its own data",
    ):
        assert words in said
    assert "only a training function" in told_by(capsys, "--data", "digits", "--ignore-code-change")
    assert "did you mean 'train.lr'?" in told_by(capsys, "--data", "digits", "--set", "lr=3")
    said = told_by(capsys, f"{odd}:nan", "--engine", "rya")
    assert said.strip().endswith("unknown engine 'rya'; did you mean 'ray'?")


def test_fewer_examples_than_a_batch_are_told_before_anything_starts(tmp_path, capsys):
    data = write_csv(tmp_path / "few.csv", rows=40)
    said = told_by(
        capsys,
        "--data",
        str(data),
        "--methods",
        "drop_key",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "runs"),
    )
    assert "more than the" in said
    fitting = int(said.rpartition("--set train.batch_size=")[2])
    assert not (tmp_path / "runs").exists()
    asked = request_parts(None, data, "drop_key", 1, settings=[f"train.batch_size={fitting}"])
    check_rows(asked.plan, tmp_path / "runs", Execution(threads=1, parts=asked.parts))


def test_a_search_of_ones_own_training_asks_for_its_metric_before_it_begins(odd, tmp_path):
    with pytest.raises(ConfigError, match="such as --metric accuracy or --metric nll:min"):
        dampen.compare(
            f"{odd}:nan", methods="drop_key", seeds=1, tune=2, folder=tmp_path / "s", progress=False
        )
    assert list(tmp_path.iterdir()) == [odd]


def test_a_script_may_import_torchvision_where_its_wheel_is_the_wrong_one(tmp_path):
    """Lightning, timm and transformers import it; the command reads the script in a process that has not."""
    pytest.importorskip("torchvision")
    (tmp_path / "vision.py").write_text(
        "import torchvision\n\n\ndef train(trial):\n    return {}\n"
    )
    code = "from dampen.studies.trainer.user_function import function_in_file as f\n"
    code += "print(f('vision.py:train').code.name)"
    source = Path(dampen.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "vision.py:train\n", done.stderr


def test_set_never_overrides_what_a_row_says(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text("def train(trial):\n    return {'accuracy': 0.5}\n")
    rows = "drop_key, params(lr=0.2)"
    told = told_by(capsys, f"{file}:train", "--methods", rows, "--set", "lr=0.1")
    assert "--set lr=0.1 and params(lr=0.2) of row 'params(lr=0.2)': say one of them" in told
    rows = "drop_key, params(weight_decay=0.2)"
    told = told_by(capsys, "--data", "digits", "--methods", rows, "--set", "train.weight_decay=0.1")
    assert "--set train.weight_decay=0.1 and params(weight_decay=0.2)" in told
    request_parts(None, "digits", rows, 1, settings=["train.lr=0.1"], out=tmp_path)
