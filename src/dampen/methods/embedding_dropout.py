"""Embedding dropout: drop single features of the input or patch embeddings."""

from __future__ import annotations

from torch import Tensor

from dampen.masks import drop
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class EmbeddingDropout(Regularizer):
    """Plain dropout on what the input or patch embedding gives, before positions are added.

    e becomes m * e / (1 - p), m ~ Bernoulli(1 - p) per feature: the first place of dropout in figure 1 of Explicit
    Dropout (arXiv 2604.20505). Departure: the Transformer (arXiv 1706.03762) drops the sum of embeddings and positions;
    here positions stay whole, so that no token loses its place. The token lookup itself is untouched: whole words are
    not dropped.

    Args:
        rate: probability to zero a feature.

    >>> from dampen import EmbeddingDropout
    >>> EmbeddingDropout(0.1)
    EmbeddingDropout(rate=0.1)
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def embeddings(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return drop(x, self.rate)
