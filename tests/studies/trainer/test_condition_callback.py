"""Condition numbers during training: in the log every k steps, not changing what is trained, through interruptions."""

import pytest

from dampen.studies.errors import ConfigError, Interrupted
from dampen.studies.store import RunStore
from dampen.studies.trainer.train import run_trial

METHODS = [{"name": "drop_key", "rate": 0.2}, {"name": "token_graying", "kind": "svd"}]


def conditions(folder):
    return [
        measured for line in RunStore(folder).lines() for measured in line.get("conditioning", [])
    ]


def test_measured_every_k_steps_and_training_does_not_notice(tmp_path, small, quick):
    plain = run_trial(small(METHODS), tmp_path / "plain", quick)
    watched = run_trial(small(METHODS, condition_every=4), tmp_path / "watched", quick)
    assert plain["last_weights"] == watched["last_weights"]
    found = conditions(tmp_path / "watched")
    assert [c["step"] for c in found] == [0, 4, 8, 12]  # 6 steps per epoch, 2 epochs
    assert [layer["name"] for layer in found[0]["layers"]] == ["blocks.0", "blocks.1"]
    assert found[0]["layers"][0]["attention"]["n"] == 16
    assert (
        found[0]["layers"][1]["ffn+skip"]["log_mean"]
        != found[-1]["layers"][1]["ffn+skip"]["log_mean"]
    )
    assert not conditions(tmp_path / "plain")


def test_measurements_survive_an_interruption(tmp_path, small, quick):
    trial = small(METHODS, condition_every=2)
    run_trial(trial, tmp_path / "whole", quick)
    seen = {"step": -1}
    with pytest.raises(Interrupted):
        run_trial(
            trial,
            tmp_path / "cut",
            quick,
            lambda e: seen.update(step=e.get("step", -1)),
            lambda: seen["step"] == 5,
        )
    run_trial(trial, tmp_path / "cut", quick)
    assert conditions(tmp_path / "cut") == conditions(tmp_path / "whole")


def test_a_wrong_interval_is_told(small):
    with pytest.raises(ConfigError, match="condition_every"):
        small(condition_every=0)
