"""dampen.compare and the study it returns, with real workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dampen
from dampen import DropKey
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.report import make_report
from tests.studies.study.conftest import SCRIPT
from tests.studies.user_files import write_csv


class Halved(DropKey):
    """A method of the user's own, with no name in the registry."""

    def extra_repr(self):
        return "halved"


@pytest.mark.slow
def test_a_study_runs_prints_goes_on_and_opens_again(script, tmp_path):
    rows = ["drop_key(rate=0.2)", {"mine": Halved(0.3)}, {"faster": {"params": {"lr": 0.01}}}]
    options = {"folder": tmp_path / "study", "progress": False, "workers": 2, "threads": 1}
    study = dampen.compare(
        f"{script}:train", methods=rows, seeds=2, params={"epochs": 2}, **options
    )
    assert [row.name for row in study.rows] == ["plain", "drop_key(rate=0.2)", "mine", "faster"]
    assert all(row.summary.n == 2 for row in study.rows)
    assert study.metric == "accuracy"
    assert study.best.name in study.verdicts
    text = str(study)
    assert "test accuracy" in text
    assert "mine" in text
    frame = study.to_pandas()
    assert len(frame) == 8
    assert {"row", "seed", "accuracy", "nll", "valid_accuracy", "step_cpu_seconds"} <= set(
        frame.columns
    )
    html = study._repr_html_()
    assert "<table>" in html
    page = study.report(tmp_path / "report.html")
    assert "drop_key(rate=0.2)" in page.read_text()
    times = {p: p.stat().st_mtime_ns for p in study.folder.glob("*/final.json")}
    study.add(seeds=1, methods={"head": "drop_head"})
    assert {row.name: row.summary.n for row in study.rows} == dict.fromkeys(study.verdicts, 3)
    assert all(p.stat().st_mtime_ns == t for p, t in times.items())  # nothing was run twice
    again = dampen.load(tmp_path / "study")
    assert again.table() == study.table()
    again.add(seeds=[7], workers=2, threads=1, progress=False)
    assert "7" in again.rows[0].values
    same = dampen.compare(f"{script}:train", methods=rows, seeds=2, params={"epochs": 2}, **options)
    assert {row.name for row in same.rows} == {
        row.name for row in again.rows
    }  # what was recorded stays in the table
    (table,) = make_report([study.folder]).tables
    assert len(table.entries) == 5


@pytest.mark.slow
def test_a_function_of_a_script_without_a_guard_and_prints_that_go_to_a_file(tmp_path):
    script = tmp_path / "script.py"
    end = """
def noisy(trial):
    print("hello from", trial.row, trial.seed)
    return train(trial)

study = dampen.compare(noisy, methods="drop_key, drop_head", seeds=1, params={"epochs": 1}, folder="runs", workers=1)
print("best", study.best.name)
"""
    script.write_text(SCRIPT + end)
    source = Path(dampen.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best") == 1  # the script ran once: workers do not run it again
    assert "hello" not in done.stdout
    told = [p.read_text() for p in (tmp_path / "runs").glob("*/output.txt")]
    assert sorted(told) == [
        "hello from drop_head 0\n",
        "hello from drop_key 0\n",
        "hello from plain 0\n",
    ]
    assert {
        json.loads(p.read_text())["threads"] for p in (tmp_path / "runs").glob("*/final.json")
    } == {1}


@pytest.mark.slow
def test_a_row_that_fails_is_called_failed_with_its_reason_and_the_others_go_on(script, tmp_path):
    script.write_text(
        script.read_text().replace(
            "    draw =", "    assert trial.row != 'drop_path', 'not this one'\n    draw ="
        )
    )
    options = {
        "folder": tmp_path / "study",
        "progress": False,
        "workers": 1,
        "threads": 1,
        "params": {"epochs": 1},
    }
    study = dampen.compare(f"{script}:train", methods="drop_path, drop_head", seeds=1, **options)
    assert study.verdicts["drop_path"].startswith("failed: train.py, line ")
    assert "AssertionError: not this one" in study.verdicts["drop_path"]
    assert study.rows[2].summary.n == 1
    assert "drop_path seed 0 failed" in str(study)
    script.write_text(script.read_text().replace("trial.row != 'drop_path'", "False"))
    with pytest.raises(LabError, match="No trial of .* came to an end:\ntrain.py, line"):
        dampen.compare(f"{script}:train", methods="drop_path", seeds=1, **options)


def test_wrong_calls_are_told(script, tmp_path):
    with pytest.raises(ConfigError, match="either train="):
        dampen.compare(methods="drop_key")
    with pytest.raises(ConfigError, match="has no function 'trane'; it has train"):
        dampen.compare(f"{script}:trane", methods="drop_key")
    with pytest.raises(ConfigError, match="there is no file"):
        dampen.compare("nowhere.py:train", methods="drop_key")
    with pytest.raises(ConfigError, match="seeds: must be 1 or more"):
        dampen.compare(f"{script}:train", methods="drop_key", seeds=0)
    with pytest.raises(ConfigError, match="metric"):
        dampen.compare(f"{script}:train", methods="drop_key", metric="a:b")
    with pytest.raises(ConfigError, match="only numbers, strings"):
        dampen.compare(f"{script}:train", methods="drop_key", params={"x": object()})
    with pytest.raises(LabError, match="holds no study"):
        dampen.load(tmp_path)


@pytest.mark.slow
def test_a_study_of_the_labs_trainer_on_own_data_opens_again_and_goes_on(tmp_path):
    """Rows with methods, with parameters, and further seeds; data that changed since is refused."""
    data = write_csv(tmp_path / "t.csv", rows=40)
    few = {"params": {"epochs": 1, "batch_size": 8}, "workers": 1, "threads": 1, "progress": False}
    first = dampen.compare(data=data, methods="drop_key", seeds=1, folder=tmp_path / "study", **few)
    again = dampen.load(first.folder)
    again.add(
        seeds=1, methods={"decay": {"params": {"weight_decay": 0.3}}}, workers=1, progress=False
    )
    assert {row.name: row.summary.n for row in again.rows} == {
        "plain": 2,
        "drop_key": 2,
        "decay": 2,
    }
    assert "2 seeds" in again.plan.header["title"]
    decay = again.plan.runs[again.plan.configs[2].settings[0].ids["0"]]
    assert decay.train.weight_decay == 0.3
    with pytest.raises(ConfigError, match="unknown parameter 'weight_decoy'.*weight_decay"):
        again.add(methods={"typo": {"params": {"weight_decoy": 0.3}}})
    data.write_text(data.read_text() + "more of it,pos\n")
    with pytest.raises(LabError, match="has changed since this study was run"):
        dampen.load(first.folder).add(seeds=1)
    data.unlink()
    with pytest.raises(LabError, match="is no longer at"):
        dampen.load(first.folder).add(seeds=1)
