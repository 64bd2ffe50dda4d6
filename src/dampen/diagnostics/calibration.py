"""Accuracy and calibration: is the model as often right as it says?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.diagnostics.predictions import Data, flat, predict

# The largest float32 below 1. torchmetrics' bins are [a, b), so that a confidence of exactly 1
# would fall into a surplus bin behind the last one, and errors of opposite sign that share a bin
# would no longer cancel.
BELOW_ONE = 1 - 2**-24


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: one entry per bin; an empty bin has count 0 and None for the means."""

    # the bin's edges, or its smallest and largest confidence if bins have equal mass
    low: list[float]
    high: list[float]
    count: list[int]
    confidence: list[float | None]  # mean confidence in the bin
    accuracy: list[float | None]  # share of correct predictions in the bin

    def error(self) -> float:
        """Mean over predictions of |accuracy - confidence| of their bin."""
        n = sum(self.count)
        gaps = zip(self.count, self.accuracy, self.confidence, strict=True)
        return sum(c * abs(a - p) for c, a, p in gaps if a is not None and p is not None) / n


@dataclass(frozen=True)
class Calibration:
    """How often a classifier is right, and how well its probabilities say so."""

    n: int
    accuracy: float
    accuracy_low: float  # Wilson interval
    accuracy_high: float
    level: float  # of that interval
    nll: float  # mean negative log-likelihood, in nats
    brier: float  # mean squared distance between probabilities and the true class, in [0, 2]
    bins: int
    ece: float  # expected calibration error, bins of equal width
    adaptive_ece: float  # the same with bins of equal mass
    reliability: Reliability
    adaptive_reliability: Reliability


def wilson_interval(correct: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's confidence interval for a share of `correct` in `n`; sensible at 0, at 1 and for
    small n.

    Args:
        correct: how many were right.
        n: of how many.
        level: confidence level of the interval.

    >>> low, high = wilson_interval(95, 100)
    >>> f"{low:.4f} {high:.4f}"
    '0.8882 0.9785'
    """
    if not 0 <= correct <= n or n < 1:
        raise ValueError(f"The count must lie in 0..n with n >= 1: got {correct} of {n}.")
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1: got {level}.")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p, z2n = correct / n, z * z / n
    center = (p + z2n / 2) / (1 + z2n)
    half = z / (1 + z2n) * math.sqrt(p * (1 - p) / n + z2n / (4 * n))
    # At the ends the interval touches 0 or 1 exactly; rounding must not push it past.
    return (0.0 if correct == 0 else max(0.0, center - half)), (
        1.0 if correct == n else min(1.0, center + half)
    )


def expected_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the top class over bins of equal width, by torchmetrics.

    `sum_b n_b / n * |accuracy_b - confidence_b|` (Guo et al., arXiv 1706.04599) over `[0, 1/bins),
    ...`, the last bin closed. Averaged probabilities can be given as their logarithms.

    Args:
        logits: (n, C).
        labels: (n,), class indices.
        bins: how many bins of confidence.

    >>> sure = torch.tensor([[50.0, 0.0], [50.0, 0.0]])  # both are called class 0 with confidence 1
    >>> round(expected_calibration_error(sure, torch.tensor([0, 1])), 6)
    0.5
    """
    declare_torchvision_operators()
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels = _checked(logits, labels, bins)
    # float32 first: torchmetrics converts, and a float64 just below 1 would round up to 1.
    probs = logits.double().softmax(dim=1).float().clamp(max=BELOW_ONE)
    return float(
        multiclass_calibration_error(
            probs, labels, num_classes=logits.shape[1], n_bins=bins, norm="l1"
        )
    )


def adaptive_calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the top class over bins of equal mass (Nguyen and O'Connor,
    arXiv 1508.05154).

    Args:
        logits: (n, C).
        labels: (n,), class indices.
        bins: how many bins of confidence.
    """
    return reliability(logits, labels, bins, equal_mass=True).error()


def reliability(
    logits: Tensor, labels: Tensor, bins: int = 15, equal_mass: bool = False
) -> Reliability:
    """The reliability diagram of the top class, over bins of equal width or of equal mass.

    Bins of equal mass hold n / bins predictions in the order of confidence, sizes differing by at
    most one. Predictions of equal confidence may fall into two bins; each then counts as correct by
    the share of correct ones among its equals, so that the result does not depend on the order of
    the data.

    Args:
        logits: (n, C).
        labels: (n,), class indices.
        bins: how many bins of confidence.
        equal_mass: bins of equal mass instead of equal width.
    """
    logits, labels = _checked(logits, labels, bins)
    top, predicted = logits.double().softmax(dim=1).max(dim=1)
    correct = (predicted == labels).double()
    if equal_mass:
        confidence, order = top.sort()
        _, tie = torch.unique_consecutive(confidence, return_inverse=True)
        total = torch.zeros(int(tie[-1]) + 1, dtype=torch.double).index_add(0, tie, correct[order])
        shared = (total / tie.bincount())[tie]
        parts = list(zip(confidence.tensor_split(bins), shared.tensor_split(bins), strict=True))
        parts = [(c, a) for c, a in parts if len(c)]
        low, high = [float(c[0]) for c, _ in parts], [float(c[-1]) for c, _ in parts]
    else:
        edges = torch.linspace(0, 1, bins + 1)
        index = torch.bucketize(top.float().clamp(max=BELOW_ONE), edges, right=True) - 1
        parts = [(top[index == b], correct[index == b]) for b in range(bins)]
        low, high = edges[:-1].tolist(), edges[1:].tolist()
    return Reliability(
        low=low,
        high=high,
        count=[len(c) for c, _ in parts],
        confidence=[_mean(c) for c, _ in parts],
        accuracy=[_mean(a) for _, a in parts],
    )


def calibration_of(
    logits: Tensor, labels: Tensor, bins: int = 15, level: float = 0.95
) -> Calibration:
    """Everything `Calibration` holds, from logits (n, C) and labels (n,).

    Args:
        logits: (n, C).
        labels: (n,), class indices.
        bins: how many bins of confidence.
        level: confidence level of the interval.
    """
    logits, labels = _checked(logits, labels, bins)
    log_probs = logits.double().log_softmax(dim=1)
    probs, n = log_probs.exp(), len(labels)
    correct = int((logits.argmax(dim=1) == labels).sum())
    low, high = wilson_interval(correct, n, level)
    truth = torch.nn.functional.one_hot(labels, logits.shape[1])
    adaptive = reliability(logits, labels, bins, equal_mass=True)
    return Calibration(
        n=n,
        accuracy=correct / n,
        accuracy_low=low,
        accuracy_high=high,
        level=level,
        nll=float(-log_probs[torch.arange(n), labels].mean()),
        brier=float((probs - truth).square().sum(dim=1).mean()),
        bins=bins,
        ece=expected_calibration_error(logits, labels, bins),
        adaptive_ece=adaptive.error(),
        reliability=reliability(logits, labels, bins),
        adaptive_reliability=adaptive,
    )


def measure_calibration(
    model: nn.Module, data: Data, bins: int = 15, level: float = 0.95
) -> Calibration:
    """Accuracy, NLL, Brier score, calibration errors and reliability diagrams of a classifier on
    `data`.

    The model runs in eval mode and every module's mode is restored. `data` yields (inputs, labels);
    predictions per token are counted one by one, those with label -100 not at all.

    Args:
        model: any model that returns logits; left as it was.
        data: batches (inputs, labels), or mappings with "labels".
        bins: how many bins of confidence.
        level: confidence level of the interval.

    >>> _ = torch.manual_seed(0)
    >>> data = [(torch.randn(50, 4), torch.randint(3, (50,)))]  # synthetic
    >>> result = measure_calibration(nn.Linear(4, 3), data)
    >>> result.n, result.accuracy_low < result.accuracy < result.accuracy_high
    (50, True)
    """
    return calibration_of(*predict(model, data), bins=bins, level=level)


def _mean(x: Tensor) -> float | None:
    if len(x):
        return float(x.mean())
    return None


def _checked(logits: Tensor, labels: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    if bins < 1:
        raise ValueError(f"bins must be at least 1: got {bins}.")
    logits, labels = flat(logits.detach().cpu(), labels.cpu())
    if logits.shape[1] < 2:
        raise ValueError(
            f"Calibration needs the logits of at least two classes: got {logits.shape[1]}. "
            "For one sigmoid output z, give the pair (0, z)."
        )
    if not len(labels):
        raise ValueError("There is nothing to measure: no labeled prediction was given.")
    return logits, labels


@dataclass(frozen=True)
class GeneralizationGap:
    """What a model loses between the data it was trained on and data it has not seen."""

    train: Calibration
    test: Calibration
    accuracy_gap: float  # train minus test
    nll_gap: float  # test minus train


def generalization_gap(
    model: nn.Module, train: Data, test: Data, bins: int = 15
) -> GeneralizationGap:
    """Accuracy and calibration on training and on test data, and their differences.

    Args:
        model: any model that returns logits; left as it was.
        train: batches the model was trained on.
        test: batches it has not seen.
        bins: how many bins of confidence.
    """
    a, b = measure_calibration(model, train, bins), measure_calibration(model, test, bins)
    return GeneralizationGap(a, b, a.accuracy - b.accuracy, b.nll - a.nll)
