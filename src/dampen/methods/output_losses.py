"""Penalties on a model's logits and on the task loss: z-loss, confidence penalty, flooding."""

from __future__ import annotations

import math

from torch import Tensor

from dampen.functional.explicit.reductions import as_wide, wide
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class ZLoss(Regularizer):
    """Keep the logits near a normalized distribution: the z-loss of PaLM (arXiv 2204.02311), which
    makes training in low precision stable.

    weight * mean log^2 Z, Z = sum_j exp(z_j), over the predictions that `reg.loss(..., valid=...)`
    marks. Needs `reg.loss`, which knows the logits.

    Args:
        weight: factor of the penalty. PaLM takes 1e-4.
        axis: the axis of the classes in the model's output.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.ZLoss(1e-4))
    >>> forward = lambda: model(torch.randn(4, 3, 8, 8))
    >>> sorted(reg.loss(forward, lambda out: out.square().mean())[1])
    ['task', 'z_loss']
    """

    stochastic = False
    weight: Tensor

    def __init__(self, weight: Value = 1e-4, axis: int = -1) -> None:
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)
        self.axis = axis

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        for z in outputs:
            value = mean_over(wide(z).logsumexp(self.axis).square(), valid)
            self.penalize(as_wide(self.current("weight"), value) * value / len(outputs))


class ConfidencePenalty(Regularizer):
    """Penalize predictions of low entropy (Pereyra et al., arXiv 1701.06548): a cousin of label
    smoothing, with the KL in the other direction.

    weight * mean (log C - H(p)), p = softmax(z) over C classes: the paper's -H(p), moved so that
    the least value is 0. The mean is over the predictions that `reg.loss(..., valid=...)` marks.
    Needs `reg.loss`, which knows the logits.

    Args:
        weight: factor of the penalty. The paper takes 0.1 for images and up to 2 for text.
        axis: the axis of the classes in the model's output.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.ConfidencePenalty(0.1))
    >>> forward = lambda: model(torch.randn(4, 3, 8, 8))
    >>> reg.loss(forward, lambda out: out.square().mean())[1]["confidence_penalty"].item() >= 0
    True
    """

    stochastic = False
    weight: Tensor

    def __init__(self, weight: Value = 0.1, axis: int = -1) -> None:
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)
        self.axis = axis

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        for z in outputs:
            log_p = wide(z).log_softmax(self.axis)
            # a class that a mask forbids has p log p = 0
            terms = log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)
            value = mean_over(math.log(z.shape[self.axis]) + terms.sum(self.axis), valid)
            self.penalize(as_wide(self.current("weight"), value) * value / len(outputs))


class Flooding(Regularizer):
    """Keep the training loss from falling below a level (arXiv 2002.08709): where it does, the
    gradient turns around.

    L becomes |L - b| + b, L the task loss of the batch. The term that is added is
    |L - b| + b - L, so the term "task" keeps its value. With several passes L is their mean.
    Needs `reg.loss`.

    Args:
        level: b, in the units of the task loss. The paper tunes it from 0 to 0.1 on validation.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.Flooding(0.5))
    >>> forward = lambda: model(torch.randn(4, 3, 8, 8))
    >>> loss, terms = reg.loss(forward, lambda out: 0 * out.sum() + 0.2)
    >>> round(loss.item(), 4), round(terms["task"].item(), 4)
    (0.8, 0.2)
    """

    stochastic = False
    level: Tensor

    def __init__(self, level: Value = 0.05) -> None:
        super().__init__()
        self.scheduled("level", level, high=math.inf)

    def task(self, loss: Tensor) -> None:
        value = wide(loss)
        level = as_wide(self.current("level"), value)
        # |L - b| + b - L
        self.penalize((value - level).abs() + level - value)


def mean_over(each: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of one value per prediction, over those that count.

    Args:
        each: any shape.
        valid: bool of the same shape, or None for all.
    """
    if valid is None:
        return each.mean() if each.numel() else each.sum()
    if valid.shape != each.shape:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)}, but the predictions have {tuple(each.shape)}. "
            "Give one bool per prediction, False on padding."
        )
    return each.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)
