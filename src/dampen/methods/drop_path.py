"""DropPath: drop residual branches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dampen.masks import few_kept
from dampen.regularizer import BranchCall, Regularizer
from dampen.schedules import Value, linear

LEAST_KEPT = 2**-24
"""A rate of 1 is taken as just below, as everywhere: kept samples are divided by 1 - p."""


class DropPath(Regularizer):
    """Drop each residual branch, independently per sample, and scale up those that stay: stochastic
    depth (arXiv 1603.09382), as vision Transformers use it.

    x + b becomes x + m b / (1 - p), m ~ Bernoulli(1 - p), for the attention and the feed-forward
    branch of each block, before the norm in post-norm blocks.

    The paper's rates rise linearly with depth, from 0 in the first layer: `DropPath(linear(0.0,
    0.1))`, the default. A plain number is the same in every layer.

    Differences from the paper: the paper drops whole blocks and multiplies by the keep rate at test
    time; dividing in training is the same in expectation, and eval stays the plain model.

    `skip=True` computes a branch for the kept samples alone, in the manner of DINOv2 (arXiv
    2304.07193), and saves their share of its time. With k = (1 - p) B, ceil(k) of B samples are
    drawn without replacement and computed; all but one of them stay, and that one stays with
    probability k - (ceil(k) - 1). So floor(k) or ceil(k) samples stay, k on average. What stays is
    divided by 1 - p: E[m] / (1 - p) = (k / B) / (1 - p) = 1, exactly, for every batch size and
    rate. A batch of one sample is dropped with probability p. The number that is computed is a
    shape and depends on p and B alone, so with `torch.compile` use a rate that does not change in
    training. It acts where a module is the sublayer and no other method acts in the layer;
    elsewhere all samples are computed and multiplied, and `print(reg)` says why. Attention and
    feed-forward must treat samples apart.

    Args:
        rate: probability to drop a branch.
        skip: compute only what is kept.

    >>> from dampen import DropPath, linear
    >>> DropPath(linear(0.0, 0.1)), DropPath(0.1)
    (DropPath(rate=0), DropPath(rate=0.1))
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = linear(0.0, 0.1), skip: bool = False) -> None:  # noqa: B008 - schedules are immutable
        super().__init__()
        self.scheduled("rate", rate)
        self.skips_samples = skip
        self.per_sample = not skip  # a fixed number of samples stays: they depend on each other

    def keep_samples(self, x: Tensor, memory: dict[int, Any]) -> Tensor | None:
        drawn: tuple[Tensor | None, Tensor] | None = memory.get(self.serial)
        if drawn is not None:  # a second sublayer of the same branch, side by side
            return drawn[0]
        batch, keep_rate = len(x), max(1 - self._numbers["rate"], LEAST_KEPT)
        if keep_rate == 1 or batch == 0:
            return None
        # At least one sample is computed: a sublayer need not be able to run on none
        count = max(1, math.ceil(keep_rate * batch - 1e-9))
        order = torch.randperm(batch, device=x.device)
        last_stays = torch.rand((1,), dtype=torch.float32, device=x.device) < keep_rate * batch - (
            count - 1
        )
        mask = torch.zeros(batch, dtype=torch.float32, device=x.device).index_fill(
            0, order[: count - 1], 1.0
        )
        mask = mask.index_copy(0, order[count - 1 : count], last_stays.float()) / keep_rate
        kept = None if count == batch else order[:count].sort().values
        memory[self.serial] = kept, mask
        return kept

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
        if self.skips_samples:
            self.keep_samples(b.movedim(axis, 0), call.memory)  # where the sublayer has not drawn
            drawn: tuple[Tensor | None, Tensor] | None = call.memory.pop(self.serial, None)
            return b if drawn is None else b * drawn[1].to(b.dtype).view(shape)
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

    def extra_repr(self) -> str:
        skip = f", skip ({self.not_skipped})" if self.not_skipped else ", skip"
        return super().extra_repr() + (skip if self.skips_samples else "")


def batch_axis(method: Regularizer) -> int:
    """Which axis of a block's tokens is the batch: 1 where nn.MultiheadAttention takes (N, B, D),
    else 0."""
    return int(
        any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in method.neighbors)
    )
