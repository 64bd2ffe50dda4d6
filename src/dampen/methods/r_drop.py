"""R-Drop: two random passes should agree, in both directions."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from dampen.functional.explicit.reductions import as_wide
from dampen.methods.consistency import divergence, squared_distance
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class RDrop(Regularizer):
    """Penalize the divergence between two random passes in both directions: R-Drop (arXiv
    2106.14448).

    L = (L_task(P1) + L_task(P2)) / 2 + alpha (KL(P1 || P2) + KL(P2 || P1)) / 2.

    `distance="mse"` is for regression: alpha mean (f1 - f2)^2, the squared distance of the two
    predictions. For token classification and language models the divergence is averaged over the
    positions that `reg.loss(..., valid=...)` marks; the integrations mark those that have a label.

    The paper's randomness is dropout; here it is whatever stochastic method is attached beside it,
    or the model's own dropout. As the paper, it averages over predictions; it differs from
    `Consistency(symmetric=True)` in name only. Needs `reg.loss`, which runs both passes.

    Args:
        weight: alpha. The paper takes 0.3 to 0.6 for ViT and 1 to 5 for text.
        distance: kl between class probabilities, or mse between predictions.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, [dampen.DropAttention(0.1), dampen.RDrop(0.5)])
    >>> reg.passes
    2
    """

    passes = 2
    stochastic = False
    weight: Tensor

    def __init__(self, weight: Value = 1.0, distance: Literal["kl", "mse"] = "kl") -> None:
        super().__init__()
        if distance not in ("kl", "mse"):
            raise ValueError(
                f"RDrop: distance is 'kl' (classes) or 'mse' (regression), got {distance!r}."
            )
        self.distance = distance
        self.scheduled("weight", weight, high=math.inf)

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        first, second = outputs
        if self.distance == "mse":
            value = squared_distance(first, second, valid)
        else:
            value = divergence(first, second, valid, symmetric=True)
        self.penalize(as_wide(self.current("weight"), value) * value)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", distance=mse" if self.distance == "mse" else "")
