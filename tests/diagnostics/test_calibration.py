"""Calibration against an independent numpy reference and cases worked out by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import log_loss
from torch import nn

from dampen.diagnostics import (
    adaptive_calibration_error,
    calibration_of,
    expected_calibration_error,
    measure_calibration,
    reliability,
    wilson_interval,
)


def numpy_probs(logits):
    z = np.asarray(logits, dtype=np.float64)
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def numpy_ece(logits, labels, bins):
    """Loop over predictions and put each into its bin by arithmetic, not by searching edges."""
    probs, labels = numpy_probs(logits), np.asarray(labels)
    gap = np.zeros(bins)
    for p, y in zip(probs, labels, strict=True):
        index = min(int(p.max() * bins), bins - 1)
        gap[index] += float(p.argmax() == y) - p.max()
    return np.abs(gap).sum() / len(labels)


def numpy_adaptive(logits, labels, bins):
    probs, labels = numpy_probs(logits), np.asarray(labels)
    top, right = probs.max(axis=1), (probs.argmax(axis=1) == labels).astype(float)
    order = np.argsort(top)
    parts = [p for p in np.array_split(order, bins) if len(p)]
    return sum(abs(right[p].sum() - top[p].sum()) for p in parts) / len(labels)


def from_confidences(confidences):
    """Two-class logits that call class 0 with the given confidences."""
    p = torch.tensor(confidences, dtype=torch.double)
    return torch.stack([p.log(), (1 - p).log()], dim=1)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 200),
    classes=st.integers(2, 6),
    bins=st.sampled_from([1, 5, 15]),
)
@settings(max_examples=60, deadline=None)
def test_all_numbers_match_numpy(seed, n, classes, bins):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    probs = numpy_probs(logits)
    result = calibration_of(logits, labels, bins)
    assert result.ece == pytest.approx(numpy_ece(logits, labels, bins), abs=2e-6)
    assert result.adaptive_ece == pytest.approx(numpy_adaptive(logits, labels, bins), abs=1e-9)
    assert result.nll == pytest.approx(log_loss(labels, probs, labels=range(classes)), rel=1e-6)
    assert result.brier == pytest.approx(
        np.mean(np.sum((probs - np.eye(classes)[labels]) ** 2, axis=1)), rel=1e-6
    )
    assert result.accuracy == np.mean(probs.argmax(axis=1) == labels.numpy())
    for diagram, error in (
        (result.reliability, result.ece),
        (result.adaptive_reliability, result.adaptive_ece),
    ):
        assert sum(diagram.count) == n
        assert diagram.error() == pytest.approx(error, abs=2e-6)
        for low, high, confidence in zip(
            diagram.low, diagram.high, diagram.confidence, strict=True
        ):
            assert confidence is None or low - 1e-6 <= confidence <= high + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confidence_of_exactly_one(dtype):
    """Ten predictions at confidence 1, six of them right, all in the last bin."""
    logits = torch.tensor([[200.0, 0.0]], dtype=dtype).repeat(10, 1)
    labels = torch.tensor([0] * 6 + [1] * 4)
    assert expected_calibration_error(logits, labels) == pytest.approx(0.4, abs=1e-6)
    assert adaptive_calibration_error(logits, labels) == pytest.approx(0.4, abs=1e-12)
    diagram = reliability(logits, labels)
    assert diagram.count == [0] * 14 + [10]
    assert diagram.accuracy[-1] == pytest.approx(0.6)
    assert diagram.accuracy[0] is None


@pytest.mark.parametrize(
    "gap", [27.0, 500.0]
)  # confidence 1 - 2e-12, which float32 rounds to 1, and exactly 1
def test_confidence_one_shares_the_last_bin_with_its_neighbors(gap):
    """Two right at 0.96, one of two right at 1: one bin gives |3/4 - 0.98| = 0.23, a bin apart for 1 gives 0.27."""
    logits = torch.cat(
        [from_confidences([0.96, 0.96]), torch.tensor([[gap, 0.0]] * 2, dtype=torch.double)]
    )
    labels = torch.tensor([0, 0, 1, 0])
    assert expected_calibration_error(logits, labels) == pytest.approx(0.23, abs=1e-6)
    assert reliability(logits, labels).error() == pytest.approx(0.23, abs=1e-6)


def test_hand_case():
    """Two bins: [0, .5) empty by nature, [.5, 1]: .6 right, .8 right, .9 wrong -> |2/3 - 2.3/3| = 0.1."""
    logits, labels = from_confidences([0.6, 0.8, 0.9]), torch.tensor([0, 0, 1])
    assert expected_calibration_error(logits, labels, bins=2) == pytest.approx(0.1, abs=1e-6)
    # Equal mass, three bins of one: (0.4 + 0.2 + 0.9) / 3 = 0.5
    assert adaptive_calibration_error(logits, labels, bins=3) == pytest.approx(0.5)
    result = calibration_of(logits, labels)
    assert result.nll == pytest.approx(-(math.log(0.6) + math.log(0.8) + math.log(0.1)) / 3)
    assert result.brier == pytest.approx(2 * (0.4**2 + 0.2**2 + 0.9**2) / 3)


def test_equal_confidences_do_not_depend_on_the_order():
    logits, labels = from_confidences([0.7] * 30), torch.tensor([0] * 21 + [1] * 9)
    for shuffled in (labels, labels.flip(0)):
        assert adaptive_calibration_error(logits, shuffled, bins=4) == pytest.approx(0.0, abs=1e-12)


def test_equal_mass_bins_hold_equal_mass():
    logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    diagram = reliability(logits, torch.zeros(100, dtype=torch.long), bins=15, equal_mass=True)
    assert set(diagram.count) == {6, 7}
    assert diagram.low == sorted(diagram.low)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (1, 1), (95, 100), (4987, 10000)])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_wilson_matches_scipy(k, n, level):
    expected = stats.binomtest(k, n).proportion_ci(level, method="wilson")
    assert wilson_interval(k, n, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_model_is_measured_in_eval_mode_and_the_record_is_json():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.9))
    data = [(torch.randn(20, 4), torch.randint(3, (20,))) for _ in range(2)]
    first, second = measure_calibration(model, data), measure_calibration(model, data)
    assert first == second
    assert first.n == 40
    assert model.training
    assert json.loads(json.dumps(dataclasses.asdict(first), allow_nan=False))["ece"] == first.ece


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wilson_interval(3, 2), "got 3 of 2"),
        (lambda: wilson_interval(0, 0), "n >= 1"),
        (lambda: wilson_interval(1, 2, level=1.0), "level"),
        (lambda: calibration_of(torch.zeros(2, 1), torch.tensor([0, 0])), "at least two classes"),
        (
            lambda: calibration_of(torch.zeros(2, 2), torch.tensor([0, 0]), bins=0),
            "bins must be at least 1",
        ),
        (
            lambda: calibration_of(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)),
            "nothing to measure",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
