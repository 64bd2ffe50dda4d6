"""Metrics against slow, independent references."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from dampen.studies.metrics import (
    ClassificationMetrics,
)


def numpy_classification(logits, target):
    """Accuracy, macro F1, mean negative log-likelihood, Brier score and 15-bin ECE by loops."""
    p = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    confidence, right = p.max(axis=1), p.argmax(axis=1) == target
    ece = 0.0
    for i in range(15):
        lower, upper = i / 15, (i + 1) / 15
        inside = (confidence >= lower) & (
            (confidence < upper) | (i == 14)
        )  # 1.0 belongs to the last bin
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
    assert metrics.compute() == pytest.approx(
        numpy_classification(logits.numpy(), target.numpy()), abs=1e-6
    )


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
