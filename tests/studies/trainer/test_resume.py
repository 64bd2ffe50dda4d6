"""A trial that was cut off goes on bit-exactly: same final weights, same log, same result."""

import os
import random
import signal
from dataclasses import replace

import pytest

from dampen.studies.errors import DiskFull, Interrupted
from dampen.studies.processes import start
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import saved_states
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial
from dampen.two_pass.doubled import BEGUN_APART
from tests.studies.interrupted import interrupt_at, log_without_times, same

DROP = {"name": "drop_key", "rate": {"linear": {"start": 0.3, "end": 0.0, "along": "progress"}}}


@pytest.mark.parametrize(
    "options",
    [
        {"methods": [DROP]},
        {"methods": [DROP], "ema": 0.9, "clip": 1.0, "warmup": 0.5, "accumulate": 2},
        {"methods": [DROP], "precision": "fp16", "optimizer": "sgd"},
        {"methods": [{"name": "weight_decay", "cautious": True}, {"name": "weight_average"}]},
        {"methods": [DROP], "precision": "bf16", "patience": 2, "select": "last"},
    ],
)
def test_an_interrupted_trial_ends_as_if_nothing_had_happened(tmp_path, small, quick, options):
    trial = small(epochs=3, **options)
    whole = run_trial(trial, tmp_path / "whole", quick)
    for stops in ([2, 9, 12], [6, 7]):  # 6 steps per epoch: inside and at the end of epochs
        folder = tmp_path / str(stops)
        for at in stops:
            report, stop = interrupt_at({at})
            with pytest.raises(Interrupted, match=f"Stopped at step {at} of 18; .* resumes it"):
                run_trial(trial, folder, quick, report, stop)
        result = run_trial(trial, folder, quick)
        assert same(result, whole)
        assert result["resumed"] == len(stops)
        assert log_without_times(folder) == log_without_times(tmp_path / "whole")
        assert len(RunStore(folder).sessions()) == result["resumed"] + 1


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path, small, quick
):
    trial = small([DROP], epochs=3)
    whole = run_trial(trial, tmp_path / "whole", quick)
    report, stop = interrupt_at({11})
    with pytest.raises(Interrupted):
        run_trial(trial, tmp_path / "cut", replace(quick, checkpoint_steps=3), report, stop)
    newest, older = saved_states(tmp_path / "cut", "checkpoint")
    newest.write_bytes(newest.read_bytes()[:-1000])
    events = []
    result = run_trial(trial, tmp_path / "cut", quick, events.append)
    assert same(result, whole)
    (warning,) = [e["message"] for e in events if e["kind"] == "warning"]
    assert newest.name in warning
    start = next(e for e in events if e["kind"] == "start")
    assert f"{start['step']:08d}" in older.name


def test_a_full_disk_while_saving_loses_nothing(tmp_path, small, quick, monkeypatch):
    trial = small([DROP], epochs=2)
    whole = run_trial(trial, tmp_path / "whole", quick)
    real, calls = os.fsync, []

    def full(handle):  # a real full disk is in test_full_disk.py, where one may be mounted
        calls.append(1)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="nothing was lost"):
        run_trial(trial, tmp_path / "full", replace(quick, checkpoint_steps=2))
    assert saved_states(tmp_path / "full", "checkpoint")
    monkeypatch.setattr(os, "fsync", real)
    assert same(run_trial(trial, tmp_path / "full", quick), whole)


def _train(pipe, trial, folder, execution):
    """The life of the process that gets killed: it says each step."""
    run_trial(
        trial, folder, execution, lambda event: pipe.send((event["kind"], event.get("step", 0)))
    )


@pytest.mark.slow
def test_a_process_killed_at_random_steps_resumes_to_the_same_weights(tmp_path, small, quick):
    trial = small([DROP], epochs=5, ema=0.9)
    whole = run_trial(trial, tmp_path / "whole", quick)
    steps = sorted(random.Random(0).sample(range(3, 30), 5))
    for target in steps:
        process, pipe = start(_train, trial, tmp_path / "cut", replace(quick, checkpoint_steps=2))
        while pipe.recv() != ("progress", target):
            assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (tmp_path / "cut" / "final.json").exists()
        assert saved_states(tmp_path / "cut", "checkpoint")
    result = run_trial(trial, tmp_path / "cut", quick)
    assert result["resumed"] == len(steps)
    assert same(result, whole)
    assert log_without_times(tmp_path / "cut") == log_without_times(tmp_path / "whole")


TWO_PASSES = [{"name": "drop_head", "rate": 0.3}, {"name": "consistency"}]


def test_a_doubled_batch_goes_on_bit_exactly(tmp_path, small, quick):
    trial = small(TWO_PASSES, epochs=2)
    whole = run_trial(trial, tmp_path / "whole", quick)
    report, stop = interrupt_at({3})
    with pytest.raises(Interrupted):
        run_trial(trial, tmp_path / "cut", replace(quick, progress_seconds=0.0), report, stop)
    assert same(run_trial(trial, tmp_path / "cut", quick), whole)


def test_a_trial_that_began_with_two_passes_goes_on_with_two(small, quick):
    """A checkpoint from before there were doubled batches does not say which it ran."""
    s = TrialState(small(TWO_PASSES), quick)
    state = s.state()
    assert state["handle"].pop("never_doubled") == ""
    s.load_state(state)
    s.losses(next(s.batches())[0][0])
    assert s.handle.prefix.doubled.note == BEGUN_APART
    fresh = TrialState(small(TWO_PASSES), quick)
    fresh.losses(next(fresh.batches())[0][0])
    assert fresh.handle.prefix.doubled.used
