"""Classifiers of texts: the metrics of all classifiers, and those that small or unbalanced classes call for."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.lab.metrics.classification import ClassificationMetrics


class TextMetrics(ClassificationMetrics):
    """`accuracy`, `macro_f1` (the mean over classes), `mcc` (Matthews correlation), `nll`, `ece`, `brier`."""

    def __init__(self, classes: int):
        super().__init__(classes)
        from torchmetrics.classification import MulticlassF1Score, MulticlassMatthewsCorrCoef

        self.f1 = MulticlassF1Score(classes, average="macro", sync_on_compute=False)
        self.mcc = MulticlassMatthewsCorrCoef(classes, sync_on_compute=False)

    def update(self, logits: Tensor, target: Tensor, valid: Tensor | None = None, index: Tensor | None = None) -> None:
        super().update(logits, target, valid, index)
        kept = torch.ones(len(target), dtype=torch.bool) if valid is None else valid.cpu()
        answer = (target.argmax(dim=-1) if target.is_floating_point() else target).cpu()[kept]
        guess = logits.detach().cpu().argmax(dim=-1)[kept]
        if len(answer):
            self.f1.update(guess, answer)
            self.mcc.update(guess, answer)

    def compute(self) -> dict[str, float]:
        found = super().compute()
        return {**found, "macro_f1": float(self.f1.compute()), "mcc": float(self.mcc.compute())}
