"""docs/always_skip.md says what the committed records say; the autoencoder script behind one of them runs."""

import json

import torch

from benchmarks import mae_laptop, skip_story


def test_page_is_up_to_date():
    assert skip_story.main(["--check"]) == 0, "run `python -m benchmarks.skip_story`"


def test_records_say_where_they_come_from():
    records = [json.loads(path.read_text()) for path in skip_story.RECORDS.glob("*.json")]
    assert records
    for record in records:
        assert record["command"]
        assert record["machine"]
        assert record["data"]["name"] == "cifar10"


def test_accuracy_table_says_n_spread_and_difference():
    rows = {
        "plain": [{"seed": 0, "accuracy": 0.5}, {"seed": 1, "accuracy": 0.6}, {"seed": 2, "accuracy": 0.55}],
        "other": [{"seed": 0, "accuracy": 0.4}, {"seed": 1, "accuracy": 0.52}, {"seed": 2, "accuracy": 0.46}],
    }
    lines = skip_story.accuracy_table({"rows": rows, "published": {"other": {"accuracy": 70.0}}}, "plain")
    assert lines[2].startswith("| plain |  | 55.0 ± 5.0 (3) | reference |")
    assert lines[3].startswith("| other | 70.0 | 46.0 ± 6.0 (3) | -9.0 [")


class Synthetic:
    """Images of noise with the interface of the lab's data."""

    def __init__(self):
        self.train = self.test = self

    def batch(self, indices):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(len(indices), 3, 32, 32, generator=generator)
        return {"inputs": (images,), "target": torch.arange(len(indices)) % 10}


def test_autoencoder_runs_and_repeats(monkeypatch):
    monkeypatch.setattr(mae_laptop, "PRETRAIN", {"images": 16, "epochs": 1, "batch": 8, "lr": 1e-3})
    monkeypatch.setattr(mae_laptop, "FINETUNE", {"images": 8, "epochs": 1, "batch": 8, "lr": 1e-3})
    monkeypatch.setattr(mae_laptop, "TEST", 10)
    found = mae_laptop.run(Synthetic(), {"kind": "svd", "eps": 0.7}, seed=0)
    again = mae_laptop.run(Synthetic(), {"kind": "svd", "eps": 0.7}, seed=0)
    assert found["reconstruction"] == again["reconstruction"] > 0
    assert found["accuracy"] == again["accuracy"]
    assert len(found["ln_condition"]) == 4
    assert "reconstruction" not in mae_laptop.run(Synthetic(), None, seed=0, pretrained=False)
