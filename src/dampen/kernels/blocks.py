"""Long sequences without a compiler: fused attention with masks by blocks of queries, and no second
forward.

A mask over all queries would take N x M numbers. So the queries come in blocks, each with a mask of
its own, and one autograd Function calls torch's fused kernel for each of them. It keeps what the
fused backward needs, the output and the logarithms of the row sums; the masks are drawn again in
the backward, from the state that the generator had. (A checkpoint around each block, which is what
runs where this cannot, computes every block's forward a second time.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dampen._torch import has_numbers
from dampen.calls import makes_penalties
from dampen.regularizer import Call, Regularizer

ROWS = 256
"""Queries in a block at most; measured at 2,048 and 4,096 keys, where 64 take 1.1 times as long."""
ENTRIES = 2**23
"""Entries of a block's B x H x rows x M mask at most."""

Mask = Callable[[Tensor, slice], Tensor | None]
"""From a block of queries and their places to what is added to their scores; None: nothing."""


def fits_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> bool:
    """Whether the Function below can replace the fused kernel: plain tensors on a CPU, and masks
    that are masks alone (a penalty made inside it would have no gradient).

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        dropout_p: the model's own dropout of attention weights.
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    return (
        q.device.type == "cpu"
        and q.dtype is k.dtype is v.dtype
        and q.dtype.is_floating_point
        and not torch.is_autocast_enabled("cpu")
        and dropout_p == 0
        and q.shape[-1] == v.shape[-1]
        and q.numel() > 0
        and k.numel() > 0
        and has_numbers(q)
        and (call.bias is None or not call.bias.requires_grad)
        and not any("mask" in r.stages and makes_penalties(r) for r in regularizers)
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def attention_by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> Tensor:
    """softmax(q k^T scale + mask) v; q, k and v with as many heads each.

    Args:
        q: (B, H, N, d).
        k: (B, H, M, d).
        v: (B, H, M, dv).
        scale: of the scores.
        mask: mask(queries, rows) -> what is added to the scores of a block.
    """
    out: Tensor = _Blocks.apply(q, k, v, scale, mask)
    return out


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask) -> Tensor:
        ctx.scale, ctx.mask, ctx.state = scale, mask, torch.get_rng_state()
        o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        sums = []
        for rows in _rows(q, k):
            part = q[:, :, rows]
            o[:, :, rows], row_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                part, k, v, 0.0, False, attn_mask=mask(part, rows), scale=scale
            )
            sums.append(row_sums)
        ctx.save_for_backward(q, k, v, o, *sums)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, *sums = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        try:
            for rows, row_sums in zip(_rows(q, k), sums, strict=True):
                part = q[:, :, rows]
                backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
                dq[:, :, rows], to_k, to_v = backward(
                    grad[:, :, rows], part, k, v, o[:, :, rows], row_sums, 0.0, False,
                    attn_mask=ctx.mask(part, rows), scale=ctx.scale,
                )  # fmt: skip
                dk += to_k
                dv += to_v
        finally:
            torch.set_rng_state(now)
        return dq, dk, dv, None, None


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, heads, queries, _ = q.shape
    size = max(1, min(ROWS, ENTRIES // (batch * heads * k.shape[2])))
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))
