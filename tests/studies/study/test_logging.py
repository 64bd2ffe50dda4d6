"""What a training function logs is kept step by step, a lost loss ends the run, and a misfit is said once."""

import json
from itertools import pairwise

import pytest

import dampen
from dampen.studies.errors import ConfigError, Refused
from dampen.studies.report.charts import curves
from dampen.studies.report.figures import Palette
from dampen.studies.request import request_own
from dampen.studies.result import LogLine, on_one_axis
from dampen.studies.store import RunStore
from dampen.studies.table import comparison_table, read_runs
from dampen.studies.trainer.user_function import function_in_file
from dampen.studies.trainer.user_result import POINTS, UserLog

MODEL = "dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8, classes=2)"


@pytest.fixture
def made(tmp_path):
    """A request for a comparison of a function with this body; the model is regularized."""

    def request(body, **options):
        lines = ["import dampen", "", "", "def train(trial):", f"    model = {MODEL}"]
        lines += ["    trial.regularize(model)", *(f"    {line}" for line in body.splitlines())]
        file = tmp_path / "train.py"
        file.write_text("\n".join(lines) + "\n")
        options.setdefault("methods", "drop_key")
        options.setdefault("folder", tmp_path / "runs")
        return request_own(function_in_file(f"{file}:train"), seeds=1, **options)

    return request


def logged(asked):
    (first, *_) = asked.plan.runs
    return RunStore(asked.folder / first)


def test_every_step_that_is_logged_is_kept(made, run):
    asked = made(
        "for s in range(30):\n    trial.log(step=s + 1, train={'loss': 1 / (s + 1)})\n"
        "    if s % 10 == 9:\n        trial.log(step=s + 1, valid={'accuracy': s / 30})\n"
        "return {'accuracy': 0.5}"
    )
    run(asked)
    lines = logged(asked).lines()
    assert [line["step"] for line in lines if "train" in line] == list(range(1, 31))
    assert [line["train"]["loss"] for line in lines if "train" in line] == [
        1 / (s + 1) for s in range(30)
    ]
    assert [line["step"] for line in lines if "valid" in line] == [10, 20, 30]


def test_numbers_with_the_name_of_a_group_make_curves_too(made, run):
    """`valid_accuracy=` and `loss=`, as most people write it, are drawn as `valid=` and `train=` are."""
    asked = made(
        "for s in range(4):\n"
        "    trial.log(step=s + 1, loss=1 / (s + 1), val_loss=2.0, valid_accuracy=s / 4, lr=0.1)\n"
        "return {'accuracy': 0.5}"
    )
    run(asked)
    line = logged(asked).lines()[-1]
    assert line["valid"] == {"loss": 2.0, "accuracy": 0.75}
    assert line["train"] == {"loss": 0.25}
    assert line["lr"] == 0.1
    table = comparison_table(asked.plan, read_runs(asked.plan, asked.folder))
    figures = {f.key: f for f in curves(table, Palette([e.name for e in table.entries]))}
    assert {*figures} == {"curves", "loss"}
    assert {r["mean"] for r in figures["curves"].records} == {0.0, 25.0, 50.0, 75.0}
    assert {r["part"] for r in figures["loss"].records} == {"validation", "training"}


def test_a_long_log_is_thinned_and_keeps_its_validation(tmp_path):
    log = UserLog(RunStore(tmp_path))
    for s in range(1, 3 * POINTS):
        if log.add({"train": {"loss": float(s)}}, s, None):
            log.flush(0.0, s)
        if s % 1000 == 0 and log.add({"valid": {"accuracy": 0.5}}, s, None):
            log.flush(0.0, s)
    log.write()
    lines = log.record.lines()
    assert POINTS / 4 < len(lines) <= POINTS
    assert [line["step"] for line in lines if "valid" in line] == [1000, 2000, 3000, 4000, 5000]
    steps = [line["step"] for line in lines if "train" in line]
    assert steps == sorted(steps)
    assert steps[0] == 1
    assert max(b - a for a, b in pairwise(steps)) <= 4


def test_a_log_that_was_thinned_after_its_checkpoint_resumes_at_it(tmp_path):
    log = UserLog(RunStore(tmp_path))
    for s in range(1, POINTS + 200):
        log.add({"train": {"loss": float(s)}}, s, None)
        log.flush(0.0, s)
        if s == 1500:
            state = log.state()
    log.write()
    again = UserLog(RunStore(tmp_path))
    again.load_state(state)
    steps = [line["step"] for line in again.record.lines()]
    assert steps[-1] <= 1500
    assert len(steps) == again.lines >= 700


def test_curves_lie_on_one_axis():
    whole = [LogLine(step=10 * i, epoch=i) for i in range(3)]
    assert [line.at for line in on_one_axis(whole)] == [0, 1, 2]
    several = [LogLine(step=i, epoch=i // 5) for i in range(10)]
    assert [line.at for line in on_one_axis(several)] == list(range(10))


def test_a_logged_loss_that_is_nan_is_a_diverged_run(made, run, tmp_path):
    asked = made(
        "trial.log(step=1, train={'loss': 2.0})\n"
        "trial.log(step=2, train={'loss': float('nan'), 'auc': float('nan')})\n"
        "return {'accuracy': 0.5}"
    )
    with pytest.raises(dampen.studies.errors.Diverged, match=r"step 2: 'train.loss' became NaN"):
        run(asked)
    final = logged(asked).final()
    assert final["status"] == "diverged"
    assert final["terms"] == ["train.loss"]


def compare(made, tmp_path, body, **options):
    asked = made(body)
    file = tmp_path / "train.py"
    settings = {"methods": "drop_key", "seeds": 2, "workers": 1, "threads": 1, "progress": False}
    settings |= {"folder": asked.folder}
    return dampen.compare(f"{file}:train", **settings | options)


def finished(folder):
    finals = [json.loads(p.read_text()) for p in folder.rglob("final.json")]
    return [f for f in finals if f["status"] == "finished"]


def test_a_wrong_metric_is_said_once_after_the_first_run_which_is_kept(made, tmp_path):
    body = "return {'accuracy': 0.25 + trial.seed / 100, 'nll': 1.0 + trial.seed}"
    with pytest.raises(Refused) as error:
        compare(made, tmp_path, body, metric="f1")
    assert str(error.value).count("judged by 'f1', but train.py:train returned only accuracy") == 1
    assert "--metric accuracy" in str(error.value)
    assert len(finished(tmp_path / "runs")) == 1
    with pytest.raises(ConfigError, match="recorded runs have no 'f1', only accuracy, nll"):
        compare(made, tmp_path, body, metric="f1")
    study = compare(made, tmp_path, body, metric="nll:min")
    assert (study.metric, study.mode) == ("nll", "min")
    assert len(finished(tmp_path / "runs")) == 4


def test_what_every_run_would_return_in_vain_stops_the_study(made, tmp_path):
    with pytest.raises(Refused) as error:
        compare(made, tmp_path, "return {'accuracy': 93.0}")
    assert str(error.value).count("divide it by 100") == 1
    assert len(list((tmp_path / "runs").rglob("config.json"))) == 1


def test_methods_that_are_never_applied_stop_the_study_and_the_baseline_is_kept(made, tmp_path):
    (tmp_path / "bare.py").write_text(
        "def train(trial):\n    return {'accuracy': trial.seed / 9}\n"
    )
    with pytest.raises(Refused, match=r"never called trial.regularize\(model\)") as error:
        dampen.compare(
            f"{tmp_path}/bare.py:train",
            methods="drop_key",
            seeds=4,
            workers=1,
            threads=1,
            folder=tmp_path / "bare",
            progress=False,
        )
    assert str(error.value).count("never called") == 1
    assert len(finished(tmp_path / "bare")) == 1


def test_tuning_without_validation_stops_after_the_first_run_which_is_kept(made, tmp_path):
    body = "return {'accuracy': trial.params['lr']}"
    with pytest.raises(Refused, match="--tune chooses settings by 'accuracy' on validation") as e:
        compare(made, tmp_path, body, metric="accuracy", params={"lr": 0.1}, tune=3)
    assert str(e.value).count("--tune") == 1
    assert len(finished(tmp_path)) == 1


@pytest.mark.parametrize("arguments", ["", "trial, data", "*, trial"])
def test_a_function_that_cannot_take_a_trial_is_refused_before_anything_starts(tmp_path, arguments):
    file = tmp_path / "train.py"
    file.write_text(f"def train({arguments}):\n    return {{'accuracy': 0.5}}\n")
    with pytest.raises(ConfigError, match=r"must take one argument, the trial"):
        request_own(function_in_file(f"{file}:train"), "drop_key", folder=tmp_path / "runs")
    file.write_text("def train(trial, verbose=False):\n    return {'accuracy': 0.5}\n")
    request_own(function_in_file(f"{file}:train"), "drop_key", folder=tmp_path / "runs")
