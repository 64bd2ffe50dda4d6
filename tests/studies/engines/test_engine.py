"""The local engine with real processes."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dampen.studies.engines import Job, make_engine
from dampen.studies.engines.local import LocalEngine
from dampen.studies.environment import usable_cores
from dampen.studies.errors import ConfigError
from dampen.studies.run import Run
from dampen.studies.store import RunStore, locked
from dampen.studies.trainer.checkpoint import saved_states
from dampen.studies.trainer.train import run_trial


def jobs_of(tmp_path, trials):
    return [Job(t, tmp_path / t.id) for t in trials]


@pytest.mark.slow
def test_each_run_has_a_worker_of_its_own_and_records_equal_those_of_one_process(
    tmp_path, small, quick
):
    trials = [small(seed=s, epochs=1) for s in range(4)]
    events = []
    engine = make_engine("local", workers=2)
    outcomes = engine.run(
        jobs_of(tmp_path / "many", trials), quick, lambda i, e: events.append((i, e))
    )
    assert {o.status for o in outcomes.values()} == {"finished"}
    for trial in trials:
        alone = run_trial(trial, tmp_path / "one" / trial.id, quick)
        assert outcomes[trial.id].result["last_weights"] == alone["last_weights"]
    started = [i for i, e in events if e.kind == "start"]
    assert sorted(started) == sorted(t.id for t in trials)
    assert sum(e.kind == "outcome" for _, e in events) == 4


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_trial_resumed_and_a_failure_stays_alone(
    tmp_path, small, quick
):
    good = small(epochs=8)
    bad = Run.from_dict(
        {**good.to_dict(), "model": {"name": "vit", "patch_size": 3}}
    )  # 3 does not divide 8
    killed = []

    def report(trial, event):
        if trial == good.id and event.kind == "progress" and event.step >= 10 and not killed:
            holder = (tmp_path / trial / "lock.holder").read_text()
            killed.append(int(holder.split()[1]))
            os.kill(killed[0], signal.SIGKILL)
        if event.kind == "warning":
            warnings.append(event.message)

    warnings: list[str] = []
    execution = replace(quick, checkpoint_steps=3)
    outcomes = LocalEngine(workers=1).run(jobs_of(tmp_path, [good, bad]), execution, report)
    assert outcomes[good.id].status == "finished"
    assert outcomes[good.id].result["resumed"] == 1
    assert "killed by SIGKILL" in warnings[0]
    assert outcomes[bad.id].status == "failed"
    assert "patch" in outcomes[bad.id].message
    assert (tmp_path / bad.id / "error.json").exists()
    whole = run_trial(good, tmp_path / "whole", quick)
    assert outcomes[good.id].result["last_weights"] == whole["last_weights"]


@pytest.mark.slow
def test_interrupting_leaves_checkpoints_that_resume(tmp_path, small, quick):
    trials = [small(seed=s, epochs=400) for s in range(2)]  # far longer than the test
    seen: dict[str, int] = {}

    def report(trial, event):
        if event.kind == "progress":
            seen[trial] = event.step

    def press_ctrl_c():
        deadline = time.monotonic() + 120
        while not any(step > 5 for step in seen.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press_ctrl_c, daemon=True).start()
    outcomes = LocalEngine(workers=1).run(jobs_of(tmp_path, trials), quick, report)
    assert {o.status for o in outcomes.values()} == {"interrupted"}
    (state,) = saved_states(tmp_path / trials[0].id, "checkpoint")
    assert int(state.name.split("-")[1]) > 5
    assert not (tmp_path / trials[1].id).exists()  # never started
    assert not (tmp_path / trials[0].id / "lock.holder").exists()


@pytest.mark.slow
def test_data_that_is_missing_stops_the_run_and_a_folder_in_use_is_said(tmp_path, small, quick):
    there = small()
    busy = small(seed=7)
    missing = [
        Run.from_dict({**there.to_dict(), "data": {"name": "cifar10"}, "seed": s}) for s in range(3)
    ]
    plugins = (("reproductions", str(Path(__file__).resolve().parents[3])),)
    execution = replace(quick, data_dir=str(tmp_path / "nowhere"), plugins=plugins)
    with locked(tmp_path / busy.id):
        outcomes = LocalEngine(workers=1).run(
            jobs_of(tmp_path, [busy, *missing]), execution, lambda *_: None
        )
    assert outcomes[busy.id].status == "locked"
    assert "in use by process" in outcomes[busy.id].message
    assert [outcomes[t.id].status for t in missing] == ["no data", "interrupted", "interrupted"]
    assert "cifar" in outcomes[missing[0].id].message.lower()


def test_cores_are_shared_out_and_never_oversubscribed(monkeypatch):
    monkeypatch.setattr("dampen.studies.engines.local.usable_cores", lambda: 8)
    assert LocalEngine().shares(100) == (8, 1)
    assert LocalEngine().shares(3) == (3, 2)
    assert LocalEngine(workers=2).shares(100) == (2, 4)
    assert LocalEngine(workers=16).shares(100) == (16, 1)
    assert LocalEngine(planned=100).shares(2) == (
        2,
        1,
    )  # the rest of a resumed run keeps its threads
    assert usable_cores() >= 1


def test_engines_by_name():
    with pytest.raises(ConfigError, match="unknown engine 'locla'; did you mean 'local'"):
        make_engine("locla")
    with pytest.raises(ValueError, match="workers must be 1 or more"):
        make_engine("local", workers=0)


def test_records_can_be_read_while_others_write(tmp_path, small, quick):
    trial = small(epochs=1)
    run_trial(trial, tmp_path, quick)
    assert RunStore(tmp_path).final()["id"] == trial.id
