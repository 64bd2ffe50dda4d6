"""Bits per character against slow sums."""

import math

import pytest
import torch

from dampen.studies.data import load
from dampen.studies.metrics import TASKS, make_metrics
from reproductions.metrics.language import LanguageMetrics
from tests.reproductions.data import writers


def test_bits_per_character_against_a_sum():
    torch.manual_seed(0)
    characters = torch.tensor([0.0, 1.0, 2.0, 5.0])
    metrics = LanguageMetrics(characters)
    bits = letters = tokens = right = 0.0
    for _ in range(3):
        logits, target, valid = (
            torch.randn(2, 5, 4),
            torch.randint(0, 4, (2, 5)),
            torch.rand(2, 5) < 0.7,
        )
        metrics.update(logits, target, valid)
        for i in range(2):
            for j in range(5):
                if valid[i, j]:
                    p = logits[i, j].double().softmax(dim=0)[target[i, j]].item()
                    bits -= math.log2(p)
                    letters += characters[target[i, j]].item()
                    tokens += 1
                    right += float(logits[i, j].argmax() == target[i, j])
    found = metrics.compute()
    assert found["bpc"] == pytest.approx(bits / letters, rel=1e-6)
    assert found["nll"] == pytest.approx(bits * math.log(2) / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(2 ** (bits / tokens), rel=1e-6)
    assert found["accuracy"] == right / tokens
    with pytest.raises(RuntimeError, match="call update"):
        LanguageMetrics(characters).compute()


def test_a_uniform_model_has_the_same_bits_in_any_tokens(tmp_path):
    """Uniform over V tokens costs log2(V) bits a token: bits per character divide by the token's characters."""
    writers.text(tmp_path)
    for tokens in ("character", "bpe"):
        dataset = load("text", tmp_path, tokens=tokens, vocabulary=300, context=32)
        metrics = make_metrics(dataset, dataset.test)
        for i in range(len(dataset.test)):
            batch = dataset.test.batch([i])
            metrics.update(
                torch.zeros(1, 32, dataset.model_args["vocab"]),
                batch["target"],
                batch["valid"],
                batch["index"],
            )
        predicted = dataset.test.tokens[1:].long()
        letters = dataset.extras["characters"][predicted].sum().item()
        expected = len(predicted) * math.log2(dataset.model_args["vocab"]) / letters
        assert metrics.compute()["bpc"] == pytest.approx(expected, rel=1e-6)


def test_the_task_gives_the_metrics_that_it_promises():
    language = LanguageMetrics(torch.ones(2))
    language.update(torch.zeros(1, 3, 2), torch.zeros(1, 3, dtype=torch.long))
    assert sorted(language.compute()) == sorted(TASKS["language"].gives)
