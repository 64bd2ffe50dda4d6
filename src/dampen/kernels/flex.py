"""Long sequences on CUDA, on request: FlexAttention hides keys inside its kernel, by a function of
a seed and a place.

`DAMPEN_FLEX=1` enables it. A bool mask over all queries takes N x M bytes, and its draw as long;
here each score is hidden or not by a mixer of two multiplications over (key of its row) xor (key of
its column), 32 random bits each, which the backward computes again: 15 integer instructions a score
where a Philox for each takes 40. Checked on a CPU against dense attention, values and gradients, in
its eager form; untested on a GPU, speed unmeasured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dampen.masks import may_empty
from dampen.regularizer import Call, Regularizer

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
        # the shifts of a signed number bring copies of its sign: they are cut off
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
