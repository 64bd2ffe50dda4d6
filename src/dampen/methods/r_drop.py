"""R-Drop: two random passes should agree, in both directions."""

from __future__ import annotations

import math

from torch import Tensor

from dampen.methods.consistency import divergence
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class RDrop(Regularizer):
    """Penalize the divergence between two random passes in both directions: R-Drop (arXiv 2106.14448).

    L = (L_task(P1) + L_task(P2)) / 2 + alpha (KL(P1 || P2) + KL(P2 || P1)) / 2.

    The paper's randomness is dropout; here it is whatever stochastic method stands beside it, or the model's own
    dropout. As the paper, it averages over predictions; it differs from `Consistency(symmetric=True)` in name only.
    Needs `reg.loss`, which runs both passes.

    Args:
        weight: alpha. The paper takes 0.3 to 0.6 for ViT and 1 to 5 for text.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, [dampen.DropAttention(0.1), dampen.RDrop(0.5)])
    >>> reg.passes
    2
    """

    passes = 2
    stochastic = False
    weight: Tensor

    def __init__(self, weight: Value = 1.0) -> None:
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        first, second = outputs
        self.penalize(self.weight * divergence(first, second, valid, symmetric=True))
