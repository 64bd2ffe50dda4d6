"""Long sequences on CUDA, on request: FlexAttention hides keys inside its kernel, by a function of
a seed and a place.

`DAMPEN_FLEX=1` enables it. A bool mask over all queries takes N x M bytes, and its draw as long;
here each score is hidden or not by Philox2x32-10 (Salmon et al., SC 2011) of (seed; head, query;
key), which the backward computes again. Checked on a CPU against dense attention, values and
gradients, in its eager form; untested on a GPU, speed unmeasured.
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
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor], key: Tensor, rounds: int = 10) -> Tensor:
    """32 random bits for each pair of counters, as int64: Philox2x32, in arithmetic on 64 bits that
    may wrap around.

    Args:
        counter: the place that is drawn for.
        key: the seed.
        rounds: of Philox.
    """
    x, y = counter[0] & _LOW, counter[1] & _LOW
    for _ in range(rounds):
        product = x * 0xD256D193
        x, y = ((product >> 32) & _LOW) ^ key ^ y, product & _LOW
        key = (key + 0x9E3779B9) & _LOW
    return x


def hiding(
    seed: Tensor, rate: float | Tensor, heads: int, queries: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """From sample, head, query and key (tensors that broadcast) to whether the key is hidden from
    the query.

    Args:
        seed: of this call.
        rate: of the hidden keys.
        heads: H.
        queries: N.
    """
    limit = rate * 2**32

    def hidden(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (b.long() * heads + h) * queries + i
        return philox((j.long() + (row >> 32), row), seed) < limit

    return hidden


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
    """The call itself; its seed comes from the global generator, which a checkpoint rewinds.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        rate: of the hidden keys.
        scale: of the scores.
        compiled: compile FlexAttention.
    """
    from torch.nn.attention.flex_attention import flex_attention

    seed = torch.randint(2**32, (), device=q.device)
    hidden = hiding(seed, rate, q.shape[1], q.shape[2])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(hidden(b, h, i, j), -float("inf"), score)

    run = torch.compile(flex_attention) if compiled else flex_attention
    out: Tensor = run(
        q, k, v, score_mod=score_mod, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    return out
