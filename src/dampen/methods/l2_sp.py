"""L2SP: weight decay towards the pre-trained weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dampen.functional.explicit.reductions import as_wide, no_autocast, wide
from dampen.methods.mixout import FromStart
from dampen.regularizer import LinearCall
from dampen.schedules import Value


class L2SP(FromStart):
    """Penalize the distance from the pre-trained weights: L2-SP (arXiv 1802.01483), a weight decay
    whose origin is the starting point.

    J = weight / 2 sum ||W - U||^2 over the chosen linear maps, U their weights at `regularize`. So
    load the pre-trained weights first. U costs the memory of the chosen weights once more as soon
    as they move, and is saved in `reg.state_dict()`. Differences from the paper: biases, norms,
    embeddings and the head are free; `WeightDecay` can decay the head.

    Args:
        weight: the penalty's factor. The paper tunes it from 0.001 to 0.1.
        targets: as for `Mixout`.

    >>> from dampen import L2SP
    >>> L2SP(0.01)
    L2SP(weight=0.01, targets=all)
    """

    stochastic = False
    reads_product = False
    weight: Tensor

    def __init__(self, weight: Value = 0.01, targets: str | Sequence[str] = "all") -> None:
        super().__init__(targets)
        self.scheduled("weight", weight, high=math.inf)

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        with no_autocast(x.device.type):
            moved = wide(self.distance(call))
            # weight / 2 ||W - U||^2
            self.penalize(0.5 * as_wide(self.current("weight"), moved) * moved.square().sum())
        return x, weight
