"""Metrics against slow, independent references."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from dampen.studies.data import load
from dampen.studies.metrics import (
    ClassificationMetrics,
    LanguageMetrics,
    make_metrics,
)
from tests.reproductions.data import writers


def numpy_classification(logits, target):
    """Accuracy, macro F1, mean negative log-likelihood, Brier score and 15-bin ECE by loops."""
    p = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == target
    ece = 0.0
    for i in range(15):
        lower, upper = i / 15, (i + 1) / 15
        inside = (confidence >= lower) & ((confidence < upper) | (i == 14))  # 1.0 belongs to the last bin
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    one_hot = np.eye(logits.shape[1])[target]
    nll = -np.log(np.maximum(p[np.arange(len(target)), target], 1e-300)).mean()
    brier = ((p - one_hot) ** 2).sum(axis=1).mean()
    f1 = f1_score(target, p.argmax(axis=1), average="macro", zero_division=0)
    return {"accuracy": right.mean(), "macro_f1": f1, "nll": nll, "ece": ece, "brier": brier}


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_classification_against_numpy(scale):
    rng = np.random.default_rng(0)
    logits, target = rng.normal(0, scale, (500, 10)), rng.integers(0, 10, 500)
    metrics = ClassificationMetrics(10)
    for rows in np.array_split(np.arange(500), 7):  # uneven batches
        metrics.update(torch.from_numpy(logits[rows]).float(), torch.from_numpy(target[rows]))
    found, expected = metrics.compute(), numpy_classification(logits, target)
    assert found == pytest.approx(expected, abs=1e-5)


def test_calibration_counts_a_confidence_of_one():
    """A saturated softmax is exactly 1.0 and shares the last bin with 0.95: over- and underconfidence cancel there."""
    logits = torch.zeros(20, 3)
    logits[:10, 0] = 200.0
    logits[10:, 0] = math.log(0.95 / 0.025)
    assert logits.softmax(dim=-1)[0, 0] == 1.0
    target = torch.zeros(20, dtype=torch.int64)
    target[0] = 1  # of the sure ones 9 in 10 are right, of those at 0.95 all
    metrics = ClassificationMetrics(3)
    metrics.update(logits, target)
    expected = numpy_classification(logits.numpy(), target.numpy())["ece"]
    assert metrics.compute()["ece"] == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.025)  # in two bins: (0.1 + 0.05) / 2 = 0.075


def test_logits_between_zero_and_one_are_still_logits():
    """torchmetrics would take such numbers for probabilities."""
    logits, target = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 0])
    metrics = ClassificationMetrics(2)
    metrics.update(logits, target)
    assert metrics.compute() == pytest.approx(numpy_classification(logits.numpy(), target.numpy()), abs=1e-6)


def test_padding_soft_targets_and_shapes():
    logits, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    valid = torch.tensor([True, True, False, True, False, True])
    one, two = ClassificationMetrics(4), ClassificationMetrics(4)
    one.update(logits, target, valid)
    soft = 0.8 * torch.nn.functional.one_hot(target, 4) + 0.05
    two.update(logits[valid], soft[valid])
    two.update(logits[:2], target[:2], torch.tensor([False, False]))
    assert one.compute() == two.compute()
    with pytest.raises(ValueError, match=r"\(batch, 4\): got shape \(6, 5\)"):
        one.update(torch.randn(6, 5), target)
    with pytest.raises(RuntimeError, match="call update"):
        ClassificationMetrics(4).compute()


def test_bits_per_character_against_a_sum():
    torch.manual_seed(0)
    characters = torch.tensor([0.0, 1.0, 2.0, 5.0])
    metrics = LanguageMetrics(characters)
    bits = letters = tokens = right = 0.0
    for _ in range(3):
        logits, target, valid = torch.randn(2, 5, 4), torch.randint(0, 4, (2, 5)), torch.rand(2, 5) < 0.7
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
                torch.zeros(1, 32, dataset.model_args["vocab"]), batch["target"], batch["valid"], batch["index"]
            )
        predicted = dataset.test.tokens[1:].long()
        letters = dataset.extras["characters"][predicted].sum().item()
        expected = len(predicted) * math.log2(dataset.model_args["vocab"]) / letters
        assert metrics.compute()["bpc"] == pytest.approx(expected, rel=1e-6)
