"""Consistency: two random passes of the same batch should agree."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dampen._torch import is_empty
from dampen.functional.explicit.reductions import as_wide, wide
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class Consistency(Regularizer):
    """Penalize the divergence between the predictions of two passes that draw independently: the
    consistency regularization of AttentionDrop (arXiv 2504.12088).

    L = L_task + lambda KL(softmax(Z1) || softmax(Z2)), averaged over predictions, beside any
    stochastic method. `symmetric=True` takes (KL(P1 || P2) + KL(P2 || P1)) / 2, which is R-Drop's.

    Blocks below the first perturbed one are computed once where that changes nothing. Where none
    can be, a small model runs both passes as one batch that holds every sample twice, if all that
    is drawn is each sample's own: the halves would share a draw that is one per forward (a blur's
    sigma, LayerDrop, DropConnect) or batch norm's statistics. Else two forwards run; `print(reg)`
    says which and why. The task loss is the mean over both passes. Needs `reg.loss`.

    With more than two `passes` the divergence is the mean over all pairs i < j of passes, and a
    step costs as many forwards.

    Args:
        weight: lambda.
        symmetric: both directions of the divergence.
        axis: the axis of the classes in the model's output.
        passes: forwards per step, 2 or more.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, [dampen.DropKey(0.3), dampen.Consistency(1.0)])
    >>> x = torch.randn(4, 3, 8, 8)
    >>> loss, terms = reg.loss(lambda: model(x), lambda out: out.square().mean())
    >>> sorted(terms)
    ['consistency', 'task']
    """

    passes = 2
    stochastic = False
    weight: Tensor

    def __init__(
        self, weight: Value = 1.0, symmetric: bool = False, axis: int = -1, passes: int = 2
    ) -> None:
        super().__init__()
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 2:
            raise ValueError(f"Consistency: passes is a count from 2, got {passes!r}.")
        self.passes = passes  # type: ignore[misc]
        self.scheduled("weight", weight, high=math.inf)
        self.symmetric, self.axis = symmetric, axis

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        pairs = list(itertools.combinations([o.movedim(self.axis, -1) for o in outputs], 2))
        each = [divergence(a, b, valid, self.symmetric) for a, b in pairs]
        value = each[0] if len(each) == 1 else torch.stack(each).mean()
        self.penalize(as_wide(self.current("weight"), value) * value)

    def extra_repr(self) -> str:
        more = f", passes={self.passes}" if self.passes > 2 else ""
        return f"{super().extra_repr()}, symmetric={self.symmetric}{more}"


def divergence(
    first: Tensor, second: Tensor, valid: Tensor | None = None, symmetric: bool = False
) -> Tensor:
    """KL(softmax(first) || softmax(second)) in float32 or wider, averaged over the predictions
    where `valid` is True.

    Args:
        first: logits of the first pass (..., C).
        second: logits of the second pass (..., C).
        valid: bool, the predictions that count; None: all.
        symmetric: the mean of both directions.

    >>> import torch
    >>> divergence(torch.zeros(3, 2), torch.zeros(3, 2)).item()
    0.0
    """
    if first.ndim < 1 or first.shape[-1] < 2:
        raise ValueError(
            f"two passes are compared by their class probabilities, but the output has shape "
            f"{tuple(first.shape)}: the "
            "last axis must hold two classes or more. Give the logits with reg.loss(..., "
            "logits=...), or axis=; for "
            "regression use RDrop(distance='mse')."
        )
    if valid is not None and valid.shape != first.shape[:-1]:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)}, but the predictions to compare have "
            f"{tuple(first.shape[:-1])}. "
            "Give one bool per prediction, False on padding."
        )
    log_p, log_q = wide(first).log_softmax(-1), wide(second).log_softmax(-1)
    # classes that a mask forbids in both passes
    impossible = (log_p == -math.inf) & (log_q == -math.inf)
    difference = (log_p - log_q).masked_fill(impossible, 0.0)
    # KL(P || Q) + KL(Q || P) = sum (P - Q) (log P - log Q)
    if symmetric:
        each = 0.5 * ((log_p.exp() - log_q.exp()) * difference).sum(-1)
    else:
        each = (log_p.exp() * difference).sum(-1)
    if valid is None:
        if is_empty(each):
            return each.sum()
        return each.mean()
    return each.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)


def squared_distance(first: Tensor, second: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean squared difference of two predictions in float32 or wider, over the positions where
    `valid` is True.

    Args:
        first: logits of the first pass (..., C).
        second: logits of the second pass (..., C).
        valid: bool, the predictions that count; None: all.

    >>> import torch
    >>> squared_distance(torch.zeros(3, 1), torch.full((3, 1), 2.0)).item()
    4.0
    """
    each = (wide(first) - wide(second)).square()
    if valid is None:
        if is_empty(each):
            return each.sum()
        return each.mean()
    if valid.shape != each.shape[: valid.ndim]:
        raise ValueError(
            f"valid has shape {tuple(valid.shape)}, but the predictions to compare have "
            f"{tuple(each.shape)}. "
            "Give one bool per prediction, False on padding."
        )
    kept = each.reshape(*valid.shape, -1).mean(-1)
    return kept.masked_fill(~valid, 0).sum() / valid.sum().clamp(min=1)
