"""Long sequences: masks by blocks of queries on any device, FlexAttention on request, and how much
a GPU may hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dampen._torch import constant_in_graphs, has_numbers
from dampen.calls import makes_penalties
from dampen.masks import may_empty
from dampen.regularizer import Call, Regularizer

# --- memory
#
# How much of the N x M matrix one attention may hold at once on a GPU.
#
# A GPU loses time with every small chunk, so there the free memory of the card decides. It is
# looked up once per process and card: a checkpoint's recompute must cut the queries as its
# forward did, or it would draw other masks.

KEPT_SHARE = 1 / 64
"""Of the free memory, what one attention may keep for its backward before it is chunked."""
CHUNK_SHARE = 1 / 8
"""Of the free memory, what one chunk may take while it is computed."""
MASK_BYTES, MATRIX_BYTES = 3, 14
"""Bytes per score: a bool mask and the 16-bit one that SDPA makes of it; or scores, weights and
their gradients."""

_free: dict[int, int] = {}


def exceeds_memory(q: Tensor, keys: int, matrix: bool) -> bool:
    """Whether the queries of an attention are taken in chunks, each computed again in the backward.

    Args:
        q: (B, H, N, d), on a GPU.
        keys: M.
        matrix: the whole matrix of weights is built, not only a mask.
    """
    entries = q.shape[0] * q.shape[1] * q.shape[2] * keys
    return entries * (MATRIX_BYTES if matrix else MASK_BYTES) > KEPT_SHARE * free_bytes(q)


def rows_in_memory(q: Tensor, keys: int, matrix: bool) -> int:
    """How many queries a chunk holds.

    Args:
        q: (B, H, N, d), on a GPU.
        keys: M.
        matrix: as in `exceeds_memory`.
    """
    per_row = max(1, q.shape[0] * q.shape[1] * keys) * (MATRIX_BYTES if matrix else MASK_BYTES)
    return max(1, int(CHUNK_SHARE * free_bytes(q)) // per_row)


def free_bytes(q: Tensor) -> int:
    """The memory of a card that was free, or held by torch without use, at the first query.

    Args:
        q: a tensor on it.
    """
    found: int = _free_bytes(q.device.index or 0)
    return found


@constant_in_graphs
def _free_bytes(card: int) -> int:
    if card not in _free:
        unused = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
        _free[card] = torch.cuda.mem_get_info(card)[0] + unused
    return _free[card]


# --- blocks of queries
#
# Long sequences without a compiler: fused attention with masks by blocks of queries, and no
# second forward.
#
# A mask over all queries would take N x M numbers. So the queries come in blocks, each with a
# mask of its own, and one autograd Function calls torch's fused kernel for each of them. It
# keeps what the fused backward needs, the output and the logarithms of the row sums; the masks
# are drawn again in the backward, from the state that the generator had. (A checkpoint around
# each block, which is what runs where this cannot, computes every block's forward a second
# time.)

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


# --- FlexAttention
#
# Long sequences on CUDA, on request: FlexAttention hides keys inside its kernel, by a function
# of a seed and a place.
#
# `DAMPEN_FLEX=1` enables it. A bool mask over all queries takes N x M bytes, and its draw as
# long; here each score is hidden or not by a mixer of two multiplications over (key of its row)
# xor (key of its column), 32 random bits each, which the backward computes again: 15 integer
# instructions a score where a Philox for each takes 40. Checked on a CPU against dense
# attention, values and gradients, in its eager form; untested on a GPU, speed unmeasured.

FROM = 2048
"""Keys from which it runs where it was enabled: below, a bool mask is small."""


def hiding(
    rows: Tensor, columns: Tensor, rate: float | Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """From sample, head, query and key (tensors that broadcast) to whether the key is hidden from
    the query.

    Args:
        rows: (B, H, N), 32 random bits for each query, as int32.
        columns: (B, H, M), 32 random bits for each key, as int32.
        rate: of the hidden keys.
    """
    limit = rate * 2**32 - 2**31

    def hidden(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = rows[b, h, i] ^ columns[b, h, j]
        # the shifts of a signed number bring copies of its sign: they are removed
        x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
        x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B as a signed number
        return (x ^ ((x >> 16) & 0xFFFF)) < limit

    return hidden


def bits(*shape: int, device: torch.device | None = None) -> Tensor:
    """32 random bits each, as int32, from the global generator, which a checkpoint rewinds.

    Args:
        shape: of the result.
        device: of the result.
    """
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)


def fits_flex(q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], enabled: bool) -> bool:
    """Whether it was enabled and can do what is to be done: one method that hides single keys on
    CUDA, of so many that no query loses all.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        regularizers: methods at work, in order.
        enabled: FlexAttention may run.
    """
    keys, maskers = k.shape[2], [r for r in regularizers if "mask" in r.stages]
    return (
        enabled
        and os.environ.get("DAMPEN_FLEX", "0") == "1"
        and q.device.type == "cuda"
        and isinstance(keys, int)
        and keys >= FROM
        and len(maskers) == 1
        and (how := maskers[0].native_hiding(keys)) is not None
        and how[1] is None
        and not may_empty([maskers[0].hiding_rate()], keys, q.shape[0] * q.shape[1] * q.shape[2])
    )


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> Tensor:
    """softmax(q k^T scale) v with keys hidden inside FlexAttention, compiled for the GPU.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    how = next(
        h
        for r in regularizers
        if "mask" in r.stages and (h := r.native_hiding(k.shape[2])) is not None
    )
    return flex_hiding(q, k, v, how[0], call.scale, compiled=not torch.compiler.is_compiling())


def flex_hiding(
    q: Tensor, k: Tensor, v: Tensor, rate: float | Tensor, scale: float, compiled: bool
) -> Tensor:
    """The call itself.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        rate: of the hidden keys.
        scale: of the scores.
        compiled: compile FlexAttention.
    """
    from torch.nn.attention.flex_attention import flex_attention

    batch, heads, queries = q.shape[:3]
    rows = bits(batch, heads, queries, device=q.device)
    hidden = hiding(rows, bits(batch, heads, k.shape[2], device=q.device), rate)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(hidden(b, h, i, j), -float("inf"), score)

    run = torch.compile(flex_attention) if compiled else flex_attention
    out: Tensor = run(
        q, k, v, score_mod=score_mod, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out
