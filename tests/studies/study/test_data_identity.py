"""Data that changed since a trial was recorded or cut off is refused, with the reason."""

import os
from dataclasses import replace

import pytest

from dampen.studies.comparison import Comparison, Config, Setting
from dampen.studies.data.dataset import DamagedData
from dampen.studies.engines.runner import run_comparison
from dampen.studies.errors import Interrupted
from dampen.studies.request import request_parts
from dampen.studies.run import Run
from dampen.studies.trainer import data as data_identity
from dampen.studies.trainer.data import load_data
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial
from tests.reproductions.data.writers import cifar10_binary, cifar10_parts
from tests.studies.user_files import write_csv


def test_a_changed_official_set_is_refused_when_a_trial_resumes(
    tmp_path, small, quick, monkeypatch
):
    trial, steps = small(), []
    with pytest.raises(Interrupted):
        run_trial(
            trial,
            tmp_path / "t",
            replace(quick, checkpoint_steps=1),
            stop=lambda: bool(steps.append(1)) or len(steps) > 3,
        )
    monkeypatch.setattr(TrialState, "data_identity", lambda self: "other")
    with pytest.raises(DamagedData, match="has changed since the checkpoint"):
        run_trial(trial, tmp_path / "t", quick)


def test_a_changed_official_set_is_refused_when_a_trial_is_looked_up(tmp_path, quick, monkeypatch):
    """Sizes and times are looked at first: what was not touched is read once."""
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path / "cache"))
    parts = cifar10_parts()
    place = cifar10_binary(tmp_path / "data" / "cifar-10-batches-bin", parts)
    for file in place.iterdir():  # written long ago
        os.utime(file, (1e9, 1e9))
    model = {"name": "vit", "patch_size": 16, "width": 8, "depth": 1, "heads": 2, "mlp": 8}
    data = {"name": "cifar10", "partial": True}
    trial = Run.from_dict({"data": data, "model": model, "train": {"epochs": 1, "batch_size": 8}})
    header = {
        "title": "",
        "paper": "",
        "table": "",
        "metric": "",
        "report": "",
        "command": "",
        "cost": "",
    }
    rows = [Config("plain", [], [Setting({}, {str(trial.seed): trial.id})], baseline=True)]
    plan = Comparison("looked-up", "laptop", header, [], [trial.seed], rows, {trial.id: trial})
    execution = replace(quick, data_dir=str(tmp_path / "data"))
    run_trial(trial, tmp_path / "runs" / trial.id, execution)
    read = []
    loads = data_identity.load_data
    monkeypatch.setattr(data_identity, "load_data", lambda *given: read.append(1) or loads(*given))
    for _ in range(3):
        run = run_comparison(plan, tmp_path / "runs", [trial], execution)
        assert run.counts() == {"finished": 1}
    assert len(read) == 1
    elsewhere = replace(
        execution, data_dir=str(tmp_path / "nowhere")
    )  # results can be shown without their data
    assert run_comparison(plan, tmp_path / "runs", [trial], elsewhere).counts() == {"finished": 1}
    parts["data_batch_3"][5, 100] ^= 1
    cifar10_binary(place, parts)
    told = "data of cifar10 at .* has changed since 1 trial in .* was recorded: train had sha256 .*another --out"
    with pytest.raises(DamagedData, match=told):
        run_comparison(plan, tmp_path / "runs", [trial], execution)


def test_own_data_that_changes_between_two_trials_of_one_process_is_read_again(tmp_path):
    path = write_csv(tmp_path / "t.csv")
    before = request_parts(None, path, "drop_key", 1)
    old = load_data(next(iter(before.plan.runs.values())).data, None, before.parts)
    path.write_text(path.read_text().replace("good", "fine"))
    after = request_parts(None, path, "drop_key", 1)
    assert set(before.plan.runs).isdisjoint(after.plan.runs)
    new = load_data(next(iter(after.plan.runs.values())).data, None, after.parts)
    assert old.info["sha256"] != new.info["sha256"]
