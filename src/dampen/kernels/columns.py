"""Hide whole keys without a mask: by eight more channels of queries and keys.

A key that no query of a head may see needs no N x M mask. Its score is pushed down by a product:
one more channel is 1 in the queries and -30,000 in the hidden keys. Where several heads of queries
share one head of keys, each has a channel of its own, and the queries are one-hot. Attention then
has no mask, so flash attention stays, causal or not.

Beside SDPA with a mask of the same keys the result is equal to the bit without causality, and to
rounding with it. In a causal model a query whose visible keys are all hidden sees them as if none
were: their scores have moved by the same amount.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.masks import keep_keys, may_empty
from dampen.regularizer import Call, Regularizer

DOWN = 3e4
"""How far a hidden key's product lies below the others; exact in float16 and bfloat16."""
COLUMNS_FROM = 1024
"""Keys from which a causal model on a CPU hides whole keys this way: half the time of a mask from
2,048 keys on. Without causality a CPU takes as long or up to 1.2 times as long (`LOG.md`)."""
_ENOUGH = 200.0  # after scaling: exp(-200) is 0 beside 1


def fits_columns(
    q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call | None
) -> bool:
    """Whether all that is hidden here is whole keys, the model's own mask included.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    if call is None or call.bias is not None or call.rows is not None:
        return False
    by_key = call.mask is None or call.mask.shape[2] == 1
    hiding = [r for r in regularizers if "mask" in r.stages]
    far = call.scale * DOWN >= _ENOUGH
    return bool(hiding) and by_key and far and not any(r.per_query for r in hiding)


def attend_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> Tensor:
    """softmax(q k^T scale) v without the keys that the methods and the model hide.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, dv).
        dropout_p: the model's own dropout of attention weights.
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    keep = kept_columns(q, k, regularizers, call)
    out = shifted_attention(q, k, v, keep, dropout_p, call.is_causal, call.scale)
    if call.mask is not None:  # a sample without any key gives zeros, as in SDPA
        out = out * keep.any(-1, keepdim=True)
    return out


def kept_columns(q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call) -> Tensor:
    """(B, H, 1, M): the keys that methods and model leave to all queries of a head.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    hiding = [r for r in regularizers if "mask" in r.stages]
    hidden = [h for r in hiding if (h := r.mask(q, k, call)) is not None]
    batch, heads, keys = q.shape[0], q.shape[1], k.shape[2]
    rates = [r.hiding_rate() for r in hiding]
    guard = call.mask is not None or may_empty(rates, keys, batch * heads)
    return keep_keys(call.mask, hidden, keys, guard=guard).expand(batch, heads, 1, keys)


def shifted_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    """SDPA with the scores of hidden keys pushed down.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, dv).
        keep: (B, H, 1, M), False is hidden.
        dropout_p: dropout of attention weights.
        causal: each query sees the keys up to its own place.
        scale: of the scores.
    """
    shared, size = q.shape[1] > k.shape[1], v.shape[3]
    q, k, v = widened(q, k, v, keep)
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=scale, enable_gqa=shared
    )
    return out[..., :size]


def widened(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the channels that push hidden keys down; zeros in v, because flash attention
    wants values as wide as keys.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, dv).
        keep: (B, H, 1, M), False is hidden.
    """
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1:3]
    shared = heads // groups  # heads of queries to a head of keys, each with a channel of its own
    more = -(-shared // 8) * 8
    place = F.pad(torch.eye(shared, dtype=q.dtype, device=q.device), (0, more - shared))
    chosen = place.repeat(groups, 1).view(1, heads, 1, more).expand(batch, heads, queries, more)
    down = torch.where(keep.view(batch, groups, shared, keys), 0.0, -DOWN).to(k.dtype).mT
    k = torch.cat([k, F.pad(down, (0, more - shared))], -1)
    return torch.cat([q, chosen], -1), k, F.pad(v, (0, size + more - v.shape[3]))
