"""Accuracy, likelihood and calibration of classifiers, by torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.studies.metrics.base import Metrics, require_batches

BINS = 15


class ClassificationMetrics(Metrics):
    """`accuracy`, `macro_f1`, `nll` (mean negative log-likelihood, nats), `brier`, and `ece` in 15 bins of equal width.

    `brier` is the mean over examples of the squared distance between the predicted and the one-hot distribution.
    `ece` is the expected calibration error (arXiv 1706.04599). torchmetrics gives a confidence of exactly 1.0 a bin of
    its own, so confidences are clamped just below 1. Soft targets (mixup) count as their largest class.
    """

    def __init__(self, classes: int):
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError, MulticlassF1Score

        self.classes = classes
        self.accuracy = MulticlassAccuracy(classes, average="micro", sync_on_compute=False)
        self.f1 = MulticlassF1Score(classes, average="macro", sync_on_compute=False)
        self.calibration = MulticlassCalibrationError(classes, n_bins=BINS, norm="l1", sync_on_compute=False)
        self.nll, self.brier = MeanMetric(sync_on_compute=False), MeanMetric(sync_on_compute=False)
        self._count = 0

    def update(self, logits: Tensor, target: Tensor, valid: Tensor | None = None, index: Tensor | None = None) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.classes:
            raise ValueError(f"Logits must be (batch, {self.classes}): got shape {tuple(logits.shape)}.")
        logits, target = logits.detach().double().cpu(), target.detach().cpu()
        target = target.argmax(dim=-1) if target.is_floating_point() else target
        if valid is not None:
            logits, target = logits[valid.cpu()], target[valid.cpu()]
        if not len(target):
            return
        self._count += len(target)
        logs = logits.log_softmax(dim=-1)
        probability = logs.exp()
        one_hot = torch.nn.functional.one_hot(target, self.classes)
        below_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()
        self.accuracy.update(logits, target)
        self.f1.update(logits, target)
        self.calibration.update(probability.float().clamp(max=below_one), target)
        self.nll.update(-logs.gather(1, target[:, None]).float())
        self.brier.update((probability - one_hot).square().sum(dim=-1).float())

    def compute(self) -> dict[str, float]:
        require_batches(self._count)
        return {
            "accuracy": float(self.accuracy.compute()),
            "macro_f1": float(self.f1.compute()),
            "nll": float(self.nll.compute()),
            "ece": float(self.calibration.compute()),
            "brier": float(self.brier.compute()),
        }
