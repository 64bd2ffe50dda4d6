"""Monte Carlo at test (`train.test_samples`): the average of random forwards, repeatable, for classifiers alone."""

import pytest
import torch

from dampen.studies.checks import check_trial
from dampen.studies.errors import ConfigError
from dampen.studies.run import Run
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial

KEYS = [{"name": "drop_key", "rate": 0.4}]


def test_sampled_equals_a_loop(small, quick):
    s = TrialState(small(KEYS, test_samples=3), quick)
    s.model.eval()
    inputs = s.data.test.batch(torch.arange(8))["inputs"]
    with torch.no_grad():
        torch.manual_seed(0)
        found = s.sampled(inputs)
        torch.manual_seed(0)
        with s.handle.mc_mode():
            mean = sum(s.raw(*inputs).softmax(-1) for _ in range(3)) / 3
        once = s.raw(*inputs)
    torch.testing.assert_close(found.softmax(-1), mean)
    assert not torch.allclose(mean, once.softmax(-1))


def test_training_is_the_same_and_the_test_is_repeatable(tmp_path, small, quick):
    plain = run_trial(small(KEYS), tmp_path / "plain", quick)
    runs = [run_trial(small(KEYS, test_samples=8), tmp_path / str(i), quick) for i in range(2)]
    assert plain["last_weights"] == runs[0]["last_weights"]
    assert plain["valid"] == runs[0]["valid"]
    assert runs[0]["test"] == runs[1]["test"] != plain["test"]


def test_plain_rows_have_nothing_to_average(tmp_path, small, quick):
    assert (
        run_trial(small(test_samples=8), tmp_path / "a", quick)["test"]
        == run_trial(small(), tmp_path / "b", quick)["test"]
    )


def test_identity_and_refusals(small):
    assert small(KEYS, test_samples=None).id == small(KEYS).id != small(KEYS, test_samples=4).id
    with pytest.raises(ConfigError, match="test_samples: must be 1 or more, got 0"):
        small(test_samples=0)
    parts = {
        "data": {"name": "multi30k"},
        "model": {"name": "seq2seq"},
        "train": {"test_samples": 4},
    }
    assert any(
        "test_samples: averages class probabilities" in problem and "translation" in problem
        for problem in check_trial(Run.from_dict(parts))
    )
    first = Run.from_dict(
        {
            "data": {"name": "digits"},
            "model": {"name": "vit"},
            "pretrain": {},
            "train": {"test_samples": 4},
        }
        | {"pretrain": {"train": {"epochs": 1}}}
    ).pretraining()
    assert first.train.test_samples is None
