"""Two gloo processes train as one process on the joined batch."""

from dataclasses import replace

import pytest

from dampen.studies.errors import ConfigError, Interrupted
from dampen.studies.store import RunStore
from dampen.studies.trainer.train import run_trial


def interrupted_and_resumed(trial, folder, quick):
    """The result of a trial that was stopped after its third step, saved, and started again."""
    seen = {"step": 0}

    def report(event):
        seen["step"] = event.get("step", seen["step"])

    with pytest.raises(Interrupted):
        run_trial(
            trial, folder, replace(quick, checkpoint_steps=4), report, lambda: seen["step"] >= 3
        )
    result = run_trial(trial, folder, quick)
    assert result["resumed"] == 1
    assert len(RunStore(folder).lines()) == trial.train.epochs
    return result


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_equal_one_and_resume(tmp_path, small, quick, strategy):
    options = {"epochs": 3, "ema": 0.9, "clip": 1.0}
    one = run_trial(small(**options), tmp_path / "one", quick)
    trial = small(**options, devices=2, strategy=strategy)
    two = run_trial(trial, tmp_path / "two", quick)
    assert two["train"]["task"] == pytest.approx(one["train"]["task"], rel=1e-3)
    assert two["test"]["nll"] == pytest.approx(one["test"]["nll"], rel=1e-3)
    assert two["valid"]["accuracy"] == pytest.approx(one["valid"]["accuracy"], abs=0.03)
    assert (
        interrupted_and_resumed(trial, tmp_path / "cut", quick)["last_weights"]
        == two["last_weights"]
    )


@pytest.mark.slow
def test_every_rank_gets_its_own_random_numbers_back(tmp_path, small, quick):
    trial = small([{"name": "drop_key", "rate": 0.3}], epochs=3, devices=2)
    whole = run_trial(trial, tmp_path / "whole", quick)
    assert (
        interrupted_and_resumed(trial, tmp_path / "cut", quick)["last_weights"]
        == whole["last_weights"]
    )


@pytest.mark.slow
def test_an_error_in_a_rank_reaches_the_caller(tmp_path, small, quick):
    with pytest.raises(ConfigError, match="more than the"):
        run_trial(small(batch_size=4096, devices=2), tmp_path, quick)


def test_a_batch_that_cannot_be_shared_is_refused(small):
    with pytest.raises(ConfigError, match="choose a multiple of 6"):
        small(batch_size=32, devices=2, accumulate=3)
