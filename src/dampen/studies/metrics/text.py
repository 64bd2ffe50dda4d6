"""Classifiers of texts: the metrics of all classifiers, and those that small or unbalanced classes call for."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.studies.metrics.classification import ClassificationMetrics


class TextMetrics(ClassificationMetrics):
    """The metrics of `ClassificationMetrics`, and `mcc` (Matthews correlation)."""

    def __init__(self, classes: int):
        super().__init__(classes)
        from torchmetrics.classification import MulticlassMatthewsCorrCoef

        self.mcc = MulticlassMatthewsCorrCoef(classes, sync_on_compute=False)

    def update(self, logits: Tensor, target: Tensor, valid: Tensor | None = None, index: Tensor | None = None) -> None:
        super().update(logits, target, valid, index)
        kept = torch.ones(len(target), dtype=torch.bool) if valid is None else valid.cpu()
        answer = (target.argmax(dim=-1) if target.is_floating_point() else target).cpu()[kept]
        guess = logits.detach().cpu().argmax(dim=-1)[kept]
        if len(answer):
            self.mcc.update(guess, answer)

    def compute(self) -> dict[str, float]:
        return super().compute() | {"mcc": float(self.mcc.compute())}
