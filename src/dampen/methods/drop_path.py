"""DropPath: drop residual branches."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.masks import few_kept
from dampen.regularizer import BranchCall, Regularizer
from dampen.schedules import Value, linear


class DropPath(Regularizer):
    """Drop each residual branch, independently per sample, and scale up those that stay: stochastic
    depth (arXiv 1603.09382), as vision Transformers use it.

    x + b becomes x + m b / (1 - p), m ~ Bernoulli(1 - p), for the attention and the feed-forward
    branch of each block, before the norm in post-norm blocks.

    The paper's rates rise linearly with depth, from 0 in the first layer: `DropPath(linear(0.0,
    0.1))`, the default. A plain number is the same in every layer.

    Differences from the paper: the paper drops whole blocks and multiplies by the keep rate at test
    time; dividing in training is the same in expectation, and eval stays the plain model.

    Args:
        rate: probability to drop a branch.

    >>> from dampen import DropPath, linear
    >>> DropPath(linear(0.0, 0.1)), DropPath(0.1)
    (DropPath(rate=0), DropPath(rate=0.1))
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = linear(0.0, 0.1)) -> None:  # noqa: B008 - schedules are immutable
        super().__init__()
        self.scheduled("rate", rate)

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        if b.ndim < 3:
            raise ValueError(
                f"DropPath draws per sample, but a branch of shape {tuple(b.shape)} has no batch "
                "axis. "
                "Either the model was called without a batch, (B, N, D), or its blocks lay all "
                "tokens of a batch in "
                "one row (OPT), where samples cannot be separated: leave those out with "
                "target_modules=."
            )
        axis = batch_axis(self) if call.batch_axis is None else call.batch_axis
        shape = [1] * b.ndim
        shape[axis] = b.shape[axis]
        # Both branches of a block in one draw: in a small model each small operation counts
        waiting: Tensor | None = call.memory.pop(self.serial, None)
        if waiting is not None and (list(waiting.shape), waiting.dtype) == (shape, b.dtype):
            return b * waiting
        rate = self.current("rate")
        first, second = (
            few_kept((2, *shape), rate, b.device).mul_(1 / (1 - rate)).to(b.dtype).unbind(0)
        )
        call.memory[self.serial] = second
        return b * first


def batch_axis(method: Regularizer) -> int:
    """Which axis of a block's tokens is the batch: 1 where nn.MultiheadAttention takes (N, B, D),
    else 0."""
    return int(
        any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in method.neighbors)
    )
