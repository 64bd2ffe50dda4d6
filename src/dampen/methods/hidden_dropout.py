"""Hidden dropout: drop single features of what a block adds to its residual stream."""

from __future__ import annotations

from torch import Tensor

from dampen.masks import drop
from dampen.regularizer import BranchCall, Regularizer
from dampen.schedules import Value


class HiddenDropout(Regularizer):
    """Plain dropout on each residual branch just before it is added: the residual dropout of the Transformer
    (arXiv 1706.03762), `hidden_dropout_prob` of BERT-like models, switched on without editing the model.

    x + b becomes x + m * b / (1 - p), m ~ Bernoulli(1 - p) per feature, for the attention and the feed-forward branch
    of each block. With `EmbeddingDropout`, `DropAttention(normalized=False)`, `ProjectionDropout` and
    `FeedForwardDropout` it makes up the places of dropout in figure 1 of Explicit Dropout (arXiv 2604.20505), whose
    penalty for this place is `ExplicitDropout(residual=...)`; with `DropKey(unit="column")` and `RDrop` it is HiddenKey
    (`dampen.hidden_key`). A model's own dropout stays as it is and acts besides.

    Args:
        rate: probability to zero a feature. One number, a schedule, or one value per layer: `last(0.3, rest=0.1)` gives
            the last layer a rate of its own.

    >>> from dampen import HiddenDropout, last
    >>> HiddenDropout(0.1), HiddenDropout(last(0.3, rest=0.1))
    (HiddenDropout(rate=0.1), HiddenDropout(rate=0.1))
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        return drop(b, self.rate)
