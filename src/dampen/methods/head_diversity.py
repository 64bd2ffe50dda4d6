"""Head diversity: keep heads from saying the same."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dampen.functional.explicit.reductions import as_wide, wide
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class HeadDiversity(Regularizer):
    """Penalize heads whose outputs point the same way: the head-diversity (orthogonality) penalty
    that AttentionDrop names as future work (arXiv 2504.12088).

    weight * mean over tokens and pairs of heads h < g of cos(o_h, o_g)^2.

    Works on the heads' outputs, so the fused kernel stays. Beside methods that act on the
    attention, and beside the model's own attention dropout, it reads an attention without them,
    which is computed once more. Padded tokens do not count.

    Args:
        weight: factor of the penalty.

    >>> from dampen import HeadDiversity
    >>> HeadDiversity(0.1)
    HeadDiversity(weight=0.1)
    """

    stochastic = False
    needs_valid = True
    weight: Tensor

    def __init__(self, weight: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)

    def heads(self, o: Tensor, call: Call) -> Tensor:
        value = squared_cosine(o, call.valid)
        self.penalize(as_wide(self.current("weight"), value) * value)
        return o


def squared_cosine(o: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean of cos(o_h, o_g)^2 over pairs of heads and (valid) tokens of o (B, H, N, D), in
    float32 or wider.

    With G = O O^T of one token's outputs O (H, D), cos_hg = G_hg / sqrt(G_hh G_gg): the outputs
    themselves are touched by one product only, and everything else is H x H.

    Args:
        o: head outputs (B, H, N, D).
        valid: bool (B, N); None: all tokens count.

    >>> round(squared_cosine(torch.tensor([[1.0, 0.0], [1.0, 1.0]]).view(1, 2, 1, 2)).item(), 4)
    0.5
    """
    batch, heads, tokens, _ = o.shape
    if heads < 2:
        raise ValueError(
            "HeadDiversity compares heads, but this attention has only one. Leave it out with "
            "target_modules=."
        )
    with torch.autocast(o.device.type, enabled=False):
        rows = wide(o.transpose(1, 2))  # (B, N, H, D)
        gram = rows @ rows.mT
        # a head of zeros has cosine 0
        shrink = gram.diagonal(dim1=-2, dim2=-1).clamp(min=1e-24).rsqrt()
        cosine = gram * shrink.unsqueeze(-1) * shrink.unsqueeze(-2)
        pairs = cosine.triu(1).square().sum((-2, -1))
    if valid is None:
        return pairs.sum() / (heads * (heads - 1) / 2 * batch * tokens)
    total = (valid.sum() * (batch // valid.shape[0])).clamp(min=1).to(pairs.dtype)
    return pairs.masked_fill(~valid, 0).sum() / (heads * (heads - 1) / 2 * total)
