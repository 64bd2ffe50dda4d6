"""Attention entropy: keep attention from collapsing onto single keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dampen.functional.explicit.reductions import as_wide, wide
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class AttentionEntropy(Regularizer):
    """Penalize attention whose entropy falls below a floor: against the entropy collapse that goes
    with unstable training (arXiv 2303.06296).

    weight * mean over queries and heads of relu(floor * log(m) - H(A_i)), H(a) = - sum_j a_j log
    a_j, with m the keys that the model lets the query see.

    The paper bounds the entropy by reparametrizing the weights; this is the direct penalty, zero
    for attention that is spread enough. Needs the matrix of weights, as they are before other
    methods and the model's own dropout act on them. Padded queries do not count.

    Args:
        weight: factor of the penalty.
        floor: share of the largest possible entropy, in [0, 1], below which attention pays.

    >>> from dampen import AttentionEntropy
    >>> AttentionEntropy(0.1, floor=0.5)
    AttentionEntropy(weight=0.1, floor=0.5)
    """

    stochastic = False
    needs_valid = True
    weight: Tensor

    def __init__(self, weight: Value = 0.1, floor: float = 0.5) -> None:
        super().__init__()
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 <= floor <= 1:
            raise ValueError(
                f"AttentionEntropy: floor is a share of the largest entropy, in [0, 1], got "
                f"{floor!r}."
            )
        self.scheduled("weight", weight, high=math.inf)
        self.floor = float(floor)

    def probs(self, a: Tensor, call: Call) -> Tensor:
        # clamped to the smallest number, because the gradient of a log a at 0 is not finite
        # (B, H, N)
        entropy = torch.special.entr(wide(a).clamp(min=torch.finfo(torch.float32).tiny)).sum(-1)
        keep = call.keep
        if keep is None:
            seen = entropy.new_tensor(a.shape[-1])
        else:
            seen = keep.sum(-1).clamp(min=1).to(entropy.dtype)
        missing = (self.floor * seen.log() - entropy).relu()
        weight = as_wide(self.current("weight"), missing)
        # all of them: a chunk of queries adds its part of the mean
        batch, heads, queries = call.shape[:3]
        if call.valid is None:
            self.penalize(weight * missing.sum() / (batch * heads * queries))
        else:
            valid = call.valid if call.rows is None else call.valid[:, call.rows]
            total = (call.valid.sum() * (heads * batch // call.valid.shape[0])).clamp(min=1)
            self.penalize(weight * missing.masked_fill(~valid.unsqueeze(1), 0).sum() / total)
        return a

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, floor={self.floor:.3g}"
