"""Which attention the Triton kernels take over, and the call of them.

The kernel draws for exactly one method: one that hides single keys, one that hides the largest
scores, or one that drops single weights. What other methods hide, alone or together, is drawn
before it and handed over as one bit a score. Methods on queries, keys, values and head outputs may
act besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.kernels.long_sequences import rows_in_memory
from dampen.kernels.triton import trial
from dampen.kernels.triton.tiles import (
    BY_BITS,
    BY_KEY,
    BY_NONE,
    BY_QUERY,
    DROP_WEIGHTS,
    HIDE_KEYS,
    HIDE_TOP,
    LARGEST_HEAD,
    NOTHING,
    SMALLEST_HEAD,
    Form,
)
from dampen.masks import may_empty
from dampen.regularizer import ATTENTION_STAGES, Call, Regularizer

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unfit(
    q: Tensor, k: Tensor, v: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> str | None:
    """Why the Triton kernels cannot run this, in a few words; "" where they can, and None where
    there is nothing for them to draw.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, dv).
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    acting = _acting(regularizers)
    if not any(r.per_query for r in acting):
        return None
    keys, size = k.shape[2], q.shape[3]
    if any(r.takes_jacobian for r in regularizers):
        return "the attention is differentiated twice"
    if not isinstance(size, int) or not SMALLEST_HEAD <= size <= LARGEST_HEAD:
        return f"heads of {size} channels, not {SMALLEST_HEAD} to {LARGEST_HEAD}"
    if v.shape[3] != size:
        return f"values of {v.shape[3]} channels beside keys of {size}"
    dtype = _dtype(q)
    if dtype not in DTYPES or (dtype is q.dtype and not q.dtype is k.dtype is v.dtype):
        return " and ".join({str(t.dtype).removeprefix("torch."): 0 for t in (q, k, v)})
    if call.bias is not None and call.bias.requires_grad:
        return "the bias of the scores is learned"
    draws = _draws(acting, keys)
    if draws is None:
        names = " and ".join(r.name for r in acting)
        return f"{names} {'needs' if len(acting) == 1 else 'need'} more than keys hidden at random"
    masked = BY_BITS if draws == NOTHING else _masked(call)
    form = Form(dtype, size, draws, call.is_causal, masked, call.bias is not None)
    return trial.refused(q.device, form)


def hides_by_bits(regularizers: Sequence[Regularizer], keys: int) -> bool:
    """Whether what is hidden is drawn before the kernel.

    Args:
        regularizers: methods at work, in order; the kernels can run them.
        keys: M.
    """
    return _draws(_acting(regularizers), keys) == NOTHING


def _masked(call: Call) -> int:
    if call.mask is None or call.is_causal:
        return BY_NONE
    return BY_KEY if call.mask.shape[2] == 1 else BY_QUERY


def _dtype(q: Tensor) -> torch.dtype:
    """In which attention is computed, as SDPA has it under autocast."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return q.dtype


def _draws(acting: Sequence[Regularizer], keys: int) -> int | None:
    """What the kernel draws: NOTHING where the hidden keys are drawn before it, None where it
    cannot run."""
    if len(acting) == 1:
        how = acting[0].native_hiding(keys)
        if how is not None:
            return HIDE_KEYS if how[1] is None else HIDE_TOP
        if acting[0].weight_dropout() is not None:
            return DROP_WEIGHTS
    masks_alone = all(r.stages <= {"qkv", "mask", "heads"} for r in acting)
    return NOTHING if masks_alone else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> Tensor:
    """softmax(q k^T scale + bias) v with the keys or weights of one method dropped in the kernel.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, d).
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    from dampen.kernels.triton import ops  # only where Triton is installed

    (method,) = _acting(regularizers)
    dtype = _dtype(q)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    bias = None if call.bias is None else call.bias.detach()
    top = None
    how = method.native_hiding(k.shape[2])
    if how is None:
        draws, rate, guard = DROP_WEIGHTS, method.weight_dropout(), False
    else:
        rate, share = how
        draws = HIDE_KEYS if share is None else HIDE_TOP
        if share is not None:
            top = thresholds(q, k, call, share)
        rows = q.shape[0] * q.shape[1] * q.shape[2]
        few = call.keep is not None or share is not None
        guard = few or may_empty([rate], k.shape[2], rows)
    assert rate is not None
    mask = None if _masked(call) == BY_NONE else call.mask
    return ops.attention(q, k, v, mask, bias, top, call.is_causal, call.scale, draws, rate, guard)


def attend_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    kept: Callable[[Tensor, slice], Tensor | None],
) -> Tensor:
    """softmax(q k^T scale + bias) v over the keys that are kept, one bit a score.

    The mask of a few queries at a time is drawn and packed, so that an eighth of a byte a score is
    kept for the backward, where a mask of SDPA takes two bytes.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, d).
        call: the attention at work.
        kept: from some queries and their places to their bool mask, the model's included; None:
            they see all keys.
    """
    from dampen.kernels.triton import ops  # only where Triton is installed

    parts, start = [], 0
    for part in q.split(rows_in_memory(q, k.shape[2], matrix=False), dim=2):
        shape = (*part.shape[:3], k.shape[2])
        keep = kept(part, slice(start, start + shape[2]))
        if keep is None:
            keep = torch.ones((), dtype=torch.bool, device=q.device)
        parts.append(packed(keep.expand(shape)))
        start += shape[2]
    bits = torch.cat(parts, dim=2)
    dtype = _dtype(q)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    bias = None if call.bias is None else call.bias.detach()
    return ops.attention(
        q, k, v, bits, bias, None, call.is_causal, call.scale, NOTHING, 0.0, guard=False
    )


def packed(keep: Tensor) -> Tensor:
    """Bools (..., M) as the bits of int32 (..., M / 32, rounded up), the first in the lowest bit.

    Args:
        keep: bool.

    >>> packed(torch.tensor([True, True, False, True])).tolist()
    [11]
    """
    eight = F.pad(keep, (0, -keep.shape[-1] % 32)).contiguous().view(torch.int64)
    # eight bytes of 0 or 1, moved into the highest byte by one product without carries
    high = (eight * 0x0102040810204080) >> 56
    return (high & 255).to(torch.uint8).view(torch.int32)


def _acting(regularizers: Sequence[Regularizer]) -> list[Regularizer]:
    """The methods between the scores and the product with the values."""
    between = set(ATTENTION_STAGES) - {"qkv", "heads"}
    return [r for r in regularizers if not between.isdisjoint(r.stages)]


@torch.no_grad()
def thresholds(q: Tensor, k: Tensor, call: Call, share: tuple[int, int]) -> Tensor:
    """(B, H, N): the score from which a key is among the top of its query.

    Halfway between the last of the top and the first of the others, because the kernel may round a
    score otherwise than this product. The scores are built in chunks and not kept.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        call: the attention at work.
        share: of the visible keys; see `top_share`.
    """
    keys, parts, start = k.shape[2], [], 0
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for part in q.detach().split(rows_in_memory(q, keys, matrix=True), dim=2):
        rows = call.part(slice(start, start + part.shape[2]))
        s = (part @ k.mT).float() * call.scale
        if rows.bias is not None:
            s = s + rows.bias
        parts.append(_between(s, rows.keep, share))
        start += part.shape[2]
    return torch.cat(parts, dim=2)


def _between(s: Tensor, keep: Tensor | None, share: tuple[int, int]) -> Tensor:
    """The threshold of each row of s (B, H, rows, M)."""
    num, den = share
    keys = s.shape[-1]
    most = -(-keys * num // den) if den else num
    largest = (
        (s if keep is None else s.masked_fill(~keep, float("-inf")))
        .topk(min(most + 1, keys), dim=-1)
        .values
    )
    largest = torch.cat([largest, torch.full_like(largest[..., :1], float("-inf"))], -1)
    if keep is None:
        last, other = largest[..., most - 1], largest[..., most]
    else:
        seen = keep.sum(-1, keepdim=True).expand(*s.shape[:-1], 1)
        count = (seen * num + den - 1) // den if den else seen.clamp(max=most)
        last = largest.gather(-1, (count - 1).clamp(min=0)).squeeze(-1)
        other = largest.gather(-1, count).squeeze(-1)
    return torch.where(other.isfinite(), (last + other) / 2, other)
