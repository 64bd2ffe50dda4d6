"""Am I overfitting? Curves whose answer is known by their formula, files of several loggers, and the suggestions."""

import json
import math
import random

import pytest

from dampen.auditing.overfitting import FEWEST, Curve, judge, read_curve
from dampen.studies import advice
from dampen.studies.errors import LabError
from dampen.studies.methods_text import parse_rows
from reproductions.pages import advice as generator


def curve(valid, train, n=60, noise=0.0, seed=0):
    draw = random.Random(seed)
    steps = range(1, n + 1)
    return Curve(
        tuple((t, train(t) + draw.gauss(0, noise)) for t in steps),
        tuple((t, valid(t) + draw.gauss(0, noise)) for t in steps),
    )


def falling(level, slope=0.0, tau=8.0):
    """level + 2 exp(-t / tau) + slope * t, which is lowest at tau * ln(2 / (tau * slope))."""
    return lambda t: level + 2 * math.exp(-t / tau) + slope * t


CASES = {
    "overfits": (falling(1.0, 0.01), falling(0.0)),
    "memorizes": (falling(1.0), falling(0.1)),
    "flat": (falling(1.0), falling(0.8)),
    "improves": (falling(1.0, tau=60.0), falling(0.8, tau=60.0)),
    "diverges": (falling(1.0, 0.01), falling(0.5, 0.01)),
}


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("answer", CASES)
def test_the_answer_is_the_one_of_the_formula(answer, noise):
    found = [judge(curve(*CASES[answer], noise=noise, seed=seed)).answer for seed in range(20)]
    assert found.count(answer) >= 19


def test_where_to_stop_and_how_the_gap_grows():
    valid, train = CASES["overfits"]
    lowest = 8.0 * math.log(2 / (8.0 * 0.01))  # the derivative is zero there
    fit = judge(curve(valid, train))
    assert abs(fit.best - lowest) <= 2
    assert fit.trend == pytest.approx(0.01, rel=1e-6)
    assert fit.trend_is_clear
    assert fit.gap == pytest.approx(1.0 + 0.01 * fit.last, abs=0.03)
    noisy = [judge(curve(valid, train, noise=0.02, seed=seed)) for seed in range(20)]
    assert sum(abs(f.best - lowest) <= 6 for f in noisy) >= 18
    assert sum(abs(f.trend - 0.01) < 0.004 for f in noisy) >= 19


@pytest.mark.parametrize("n", [10, 30, 300])
def test_noise_around_a_level_is_no_overfitting(n):
    flat = [judge(curve(lambda t: 1.0, lambda t: 0.8, n, 0.05, seed)) for seed in range(200)]
    wrong = sum(fit.answer != "flat" for fit in flat)
    assert wrong <= 20
    assert sum(fit.trend_is_clear for fit in flat) <= 20


def test_a_score_is_better_where_it_is_larger():
    found = curve(lambda t: 0.9 - 0.005 * abs(t - 20), falling(0.0))
    fit = judge(Curve(found.train, found.valid, score=True))
    assert (fit.answer, fit.gap) == ("overfits", None)
    assert abs(fit.best - 20) <= 3
    assert fit.valid_best > fit.valid_last > 0


def test_few_points_say_nothing():
    assert judge(curve(*CASES["overfits"], n=FEWEST - 1)) is None


def points(kind):
    """(epoch, training loss, validation loss) of an overfitting run."""
    valid, train = CASES[kind]
    return [(t, train(t), valid(t)) for t in range(1, 41)]


def write_keras(path, rows):
    path.write_text("epoch,loss,val_loss\n" + "".join(f"{t},{a},{b}\n" for t, a, b in rows))


def write_lightning(path, rows):
    """metrics.csv: each row has the values of one moment, and the step counts batches."""
    text = "epoch,step,train_loss_epoch,train_loss_step,val_loss\n"
    for t, a, b in rows:
        text += f"{t},{10 * t - 5},,{a + 1},\n{t},{10 * t},{a},,\n{t},{10 * t},,,{b}\n"
    path.write_text(text)


def write_hugging_face(path, rows):
    history = [{"epoch": float(t), "step": 10 * t, "loss": a, "grad_norm": 1.0} for t, a, _ in rows]
    history += [{"epoch": float(t), "step": 10 * t, "eval_loss": b} for t, _, b in rows]
    path.write_text(json.dumps({"log_history": history, "best_metric": None}))


def write_lines(path, rows):
    lines = [{"epoch": t, "train": {"task": a}, "valid": {"nll": b, "accuracy": 0.5}} for t, a, b in rows]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))


FILES = {
    "log.csv": (write_keras, ("loss", "val_loss")),
    "metrics.csv": (write_lightning, ("train_loss_epoch", "val_loss")),
    "trainer_state.json": (write_hugging_face, ("loss", "eval_loss")),
    "log.jsonl": (write_lines, ("train/task", "valid/nll")),
}


@pytest.mark.parametrize("name", FILES)
def test_losses_of_other_loggers_are_read(name, tmp_path):
    write, names = FILES[name]
    rows = points("overfits")
    write(tmp_path / name, rows)
    found = read_curve(tmp_path / name)
    assert found.names == names
    assert found.axis == "epoch"
    assert [(t, b) for t, _, b in rows] == list(found.valid)
    assert [(t, a) for t, a, _ in rows] == list(found.train)


def test_columns_can_be_named_and_what_is_missing_is_said(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("t,a,b\n" + "".join(f"{t},{a},{b}\n" for t, a, b in points("overfits")))
    with pytest.raises(ValueError, match="no column of the training and the validation loss.*t, a"):
        read_curve(path)
    with pytest.raises(ValueError, match="has no column 'c'"):
        read_curve(path, "a", "c")
    assert judge(read_curve(path, "a", "b")).answer == "overfits"


def test_a_file_is_answered_in_words_with_suggestions(tmp_path):
    write_keras(tmp_path / "log.csv", points("overfits"))
    found = advice.examine(tmp_path / "log.csv")
    text = str(found)
    assert "Yes, it overfits" in text
    assert f"Stop at epoch {found.judged.median('best'):g}" in text
    assert "dampen compare train.py:train --methods" in text
    assert json.loads(json.dumps(found.to_json()))["answer"] == "overfits"

    write_keras(tmp_path / "log.csv", points("improves"))
    assert "Train longer" in str(advice.examine(tmp_path / "log.csv"))
    write_keras(tmp_path / "log.csv", points("overfits")[:4])
    assert "No answer" in str(advice.examine(tmp_path / "log.csv"))
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(LabError, match="Name it: --train COLUMN"):
        advice.examine(tmp_path / "log.csv")


def test_suggestions_are_the_methods_that_were_significantly_better():
    studies = advice.load_table()
    for answer, over in (("overfits", True), ("flat", False)):
        fitting = [s for s in studies if s["overfits"] == over]
        better = {m["name"] for s in fitting for m in s["methods"] if m["verdict"] == "better"}
        lines = advice.suggestions(answer, studies)
        named = {line.split(":")[0].strip() for line in lines if line.startswith("    ")}
        assert named <= better
        assert named
        count = sum(m["verdict"] == "better" for s in fitting for m in s["methods"])
        assert any(f"in {count} of " in line for line in lines)
    assert advice.suggestions("diverges", studies) == []


def test_the_suggested_command_can_be_typed():
    line = advice.suggestions("overfits", advice.load_table())[-1]
    methods = line.split('"')[1]
    assert len(parse_rows(methods)) >= 3


def test_the_table_is_the_one_of_the_result_files():
    assert generator.main(["--check"]) == 0, "run `python -m reproductions.pages.advice`"
