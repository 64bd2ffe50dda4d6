"""DropHead: drop whole attention heads."""

from __future__ import annotations

from torch import Tensor

from dampen.masks import few_kept
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class DropHead(Regularizer):
    """Drop whole attention heads, independently per sample, and scale up those that stay (arXiv 2004.13342).

    o_h <- m_h o_h H / sum_h m_h, m_h ~ Bernoulli(1 - p), with at least one head left.

    The paper's schedule falls to zero in the middle of training and rises again: `DropHead(vshape(0.2, 0.2))`.
    Departure: where all heads would go, one random head stays (the paper draws again), so the realized rate is
    p - p^H / H.

    Args:
        rate: probability to drop a head.

    >>> from dampen import DropHead, vshape
    >>> DropHead(vshape(0.2, 0.2))
    DropHead(rate=0.2)
    """

    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def heads(self, o: Tensor, call: Call) -> Tensor:
        kept = few_kept(o.shape[:2], self.current("rate"), o.device, guard=True)
        scale = kept.div_(kept.mean(-1, keepdim=True))  # H / sum_h m_h
        return o * scale.to(o.dtype)[:, :, None, None]
