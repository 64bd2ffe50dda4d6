"""Wrong labels on purpose: how many, which, drawn from what, written where; identities of trials without them stay."""

import pytest
import torch

from dampen.studies.checks import check_data
from dampen.studies.data import load
from dampen.studies.data.sets import DATASETS
from dampen.studies.errors import ConfigError
from dampen.studies.metrics import TASKS
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.data import load_data
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from reproductions.data.label_noise import with_label_noise, wrong_labels
from tests.reproductions.data.readers import READERS, read


def labels(split):
    return split.batch(torch.arange(len(split)))["target"]


def trial(seed=0, **data):
    return Run.from_dict(
        {
            "data": {"name": "digits", "limit": 300, **data},
            "model": {
                "name": "vit",
                "patch_size": 4,
                "width": 16,
                "depth": 1,
                "heads": 2,
                "mlp": 16,
            },
            "train": {"epochs": 1, "batch_size": 32},
            "seed": seed,
        }
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_exactly_the_share_and_each_other_class_alike(share):
    right = torch.arange(9000) % 5
    wrong = wrong_labels(right, 5, share, seed=3)
    changed = wrong != right
    assert changed.sum() == round(share * 9000)
    shift = ((wrong - right) % 5)[changed]
    counts = torch.bincount(shift, minlength=5).double()
    assert counts[0] == 0
    expected = changed.sum().double() / 4
    assert (counts[1:] - expected).abs().max() < 5 * (
        expected * 0.75
    ).sqrt()  # binomial, five standard deviations
    assert 0 <= wrong.min() <= wrong.max() < 5


def test_reproducible_nested_and_different_by_seed():
    right = torch.arange(500) % 10
    once, again = (wrong_labels(right, 10, 0.3, seed=1) for _ in range(2))
    assert torch.equal(once, again)
    fewer = wrong_labels(right, 10, 0.1, seed=1)
    assert torch.equal(fewer[fewer != right], once[fewer != right])
    assert not torch.equal(once, wrong_labels(right, 10, 0.3, seed=2))


def test_only_training_labels_and_the_record_says_so():
    clean = load_data({"name": "digits"}, None)
    noisy = load_data({"name": "digits", "noise": 0.3}, None, seed=4)
    assert (labels(noisy.train) != labels(clean.train)).double().mean() == pytest.approx(
        0.3, abs=1e-3
    )
    assert torch.equal(noisy.train.batch([5])["inputs"][0], clean.train.batch([5])["inputs"][0])
    for part in ("valid", "test"):
        assert torch.equal(labels(getattr(noisy, part)), labels(getattr(clean, part)))
    facts = noisy.info["noise"]
    assert facts["changed"] == round(0.3 * len(clean.train))
    assert "wrong on purpose" in noisy.info["departures"][-1]
    assert "noise" not in clean.info  # the cached clean set is not touched
    assert not torch.equal(
        labels(load_data({"name": "digits", "noise": 0.3}, None, seed=5).train), labels(noisy.train)
    )


ONE_CLASS = {"cifar10 binary", "cifar100 binary", "folder of png", "fsdd", "gtzan mel"}


@pytest.mark.parametrize("case", [*sorted(ONE_CLASS), "thumos14", "voc", "parallel", "text"])
def test_an_option_of_every_set_with_one_class_for_each_example(case, tmp_path):
    """Each reader on a tiny set in its format; sets whose examples have no class of their own refuse."""
    name, write = READERS[case]
    write(tmp_path)
    clean = read(case, tmp_path)
    said = check_data({"name": name, "noise": 0.3}, "data.")
    if case not in ONE_CLASS:
        assert "one class each" in said[0]
        with pytest.raises(ValueError, match="one class each"):
            with_label_noise(clean, 0.3, 0)
        return
    assert not said
    noisy = with_label_noise(clean, 0.3, 0)
    assert (labels(noisy.train) != labels(clean.train)).sum() == round(0.3 * len(clean.train)) > 0
    for part in ("valid", "test"):
        assert getattr(noisy, part) is getattr(clean, part)


def test_every_built_in_set_is_one_or_the_other():
    for name, source in DATASETS.items():
        said = check_data({"name": name, "noise": 0.3}, "data.")
        assert any("one class each" in s for s in said) == (not TASKS[source.spec.task].classes), (
            name
        )


def test_with_folds():
    data = load_data({"name": "digits", "noise": 0.2, "folds": 3}, None, seed=1)
    assert data.info["noise"]["changed"] == round(0.2 * len(data.train))


def test_identity():
    before = {k: v for k, v in trial().to_dict().items() if k != "format"}
    del before["data"]["split_seed"], before["data"]["test_seed"]
    assert Run.from_stored(before).id == "ff2676f9cc36ede8"  # as in records of before
    assert trial(noise=0).id == trial(noise=None).id == trial().id
    assert len({trial().id, trial(noise=0.3).id, trial(noise=0.2).id}) == 3


def test_a_trial_trains_on_them_and_keeps_the_facts(tmp_path):
    quick = Execution(threads=1, accelerator="cpu", checkpoint_seconds=1e9)
    noisy = run_trial(trial(noise=0.5), tmp_path / "noisy", quick)
    clean = run_trial(trial(), tmp_path / "clean", quick)
    assert noisy["data"]["noise"]["share"] == 0.5
    assert (
        RunStore(tmp_path / "noisy").final()["data"]["noise"]["changed"]
        == noisy["data"]["noise"]["changed"]
    )
    assert noisy["last_weights"] != clean["last_weights"]
    assert "noise" not in clean["data"]


def test_what_is_refused():
    assert not check_data({"name": "digits", "noise": 0.3}, "data.")
    assert "a number in [0, 1), got 1.5" in check_data({"name": "digits", "noise": 1.5}, "data.")[0]
    assert "got True" in check_data({"name": "digits", "noise": True}, "data.")[0]
    assert "one class each" in check_data({"name": "thumos14", "noise": 0.1}, "data.")[0]
    data = load("digits")
    data.loss = "binary_cross_entropy"
    with pytest.raises(ValueError, match="one class each: digits is image"):
        with_label_noise(data, 0.1, 0)
    with pytest.raises(ConfigError):
        Run.from_dict({"data": {"name": "digits", "noise": object()}, "model": {"name": "vit"}})
