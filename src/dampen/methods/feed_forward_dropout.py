"""Feed-forward dropout, switched on without editing the model."""

from __future__ import annotations

from torch import Tensor

from dampen.masks import drop
from dampen.regularizer import LinearCall, Regularizer
from dampen.schedules import Value


class FeedForwardDropout(Regularizer):
    """Plain dropout on the input of each feed-forward map: the "implicit" feed-forward of Explicit Dropout (arXiv
    2604.20505).

    y = W (m * x) / (1 - p) + b, m ~ Bernoulli(1 - p), on both layers of the feed-forward (gate, up and down of a
    gated one).

    Args:
        rate: probability to zero a feature.

    >>> from dampen import FeedForwardDropout
    >>> FeedForwardDropout(0.2)
    FeedForwardDropout(rate=0.2)"""

    per_sample = True
    rate: Tensor
    roles = frozenset({"ffn_in", "ffn_out"})

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        return drop(x, self.current("rate")), weight
