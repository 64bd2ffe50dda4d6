"""AnchorKL: stay close to the predictions of the model that fine-tuning started from."""

from __future__ import annotations

import math

from torch import Tensor

from dampen.functional.explicit.reductions import as_wide
from dampen.methods.consistency import divergence
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class AnchorKL(Regularizer):
    """Penalize the divergence of the predictions from those of the frozen start: learning without
    forgetting (arXiv 1606.09282), and the KL term of RLHF (arXiv 2203.02155), for fine-tuning.

    L = L_task + weight KL(p0 || p), averaged over predictions, p0 the model at `regularize`, in
    eval mode and without regularizers. With LoRA adapters (peft) p0 is the model with its adapters
    switched off, and of the other weights those that are trained at `regularize` are kept, no
    frozen one. Otherwise all starting weights are. They take memory once the weights move, and
    `reg.state_dict()` has them. A step costs one more forward, without gradient. Needs
    `reg.loss`, which runs it.

    Args:
        weight: factor of the penalty.
        axis: the axis of the classes in the model's output.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.AnchorKL(1.0))
    >>> x = torch.randn(4, 3, 8, 8)
    >>> reg.loss(lambda: model(x), lambda out: out.square().mean())[1]["anchor_kl"].item()
    0.0
    """

    stochastic = False
    reads_start = True
    weight: Tensor

    def __init__(self, weight: Value = 0.1, axis: int = -1) -> None:
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)
        self.axis = axis

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        if self.reference is None:
            raise RuntimeError("AnchorKL compares with the start: let reg.loss run the model.")
        start = self.reference.movedim(self.axis, -1)
        for z in outputs:
            value = divergence(start, z.movedim(self.axis, -1), valid)
            self.penalize(as_wide(self.current("weight"), value) * value / len(outputs))
