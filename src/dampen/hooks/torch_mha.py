"""`nn.MultiheadAttention`: its attention call is out of reach inside F.multi_head_attention_forward, so it is written
out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.hooks.block import apply_linear
from dampen.regularizer import Call, LinearCall, Regularizer

if TYPE_CHECKING:
    from dampen.hooks.context import AttentionSite, Frame


def mha_forward(
    self: nn.MultiheadAttention,
    site: AttentionSite,
    frame: Frame,
    regularizers: Sequence[Regularizer],
    call: Call,
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of `nn.MultiheadAttention` with the stages open: same arguments, same results when no regularizer
    acts."""
    batched = query.dim() == 3
    call.cross = call.cross or (key is not query and key.shape != query.shape)
    if not batched:
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not self.batch_first:
        same = key is query, value is key
        query = query.transpose(0, 1)
        key = query if same[0] else key.transpose(0, 1)
        value = key if same[1] else value.transpose(0, 1)

    projected = []
    for role, x, weight, bias in zip("qkv", (query, key, value), _weights(self), _biases(self), strict=True):
        linear = LinearCall(role, x, weight, bias, self, site.layer.site, frame.valid)
        projected.append(apply_linear(frame, regularizers, linear, F.linear))
    q, k, v = projected
    mask = _merge(attn_mask, key_padding_mask, query.shape[0], self.num_heads, q.dtype)
    if self.bias_k is not None and self.bias_v is not None:
        k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], dim=1)
        v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], dim=1)
        mask = _one_more_key(mask)
    q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    if self.add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, t.shape[3])], dim=2) for t in (k, v))
        mask = _one_more_key(mask)

    # is_causal is a hint that attn_mask is causal; with padding merged in, the mask itself is what counts
    causal = is_causal and not need_weights and key_padding_mask is None and q.shape[2] == k.shape[2]
    dropout = self.dropout if self.training else 0.0
    out = attention(
        site, frame, regularizers, call, q, k, v, None if causal else mask, dropout, causal, need_weights=need_weights
    )
    o, weights = out if need_weights else (out, None)
    frame.sequence_first = batched and not self.batch_first  # the feed-forward beside sees (N, B, D)
    o = self.out_proj(o.transpose(1, 2).flatten(-2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return o.squeeze(0), None if weights is None else weights.squeeze(0)
    return (o if self.batch_first else o.transpose(0, 1)), weights


def _weights(self: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    if self.in_proj_weight is not None:  # None where q, k and v have maps of their own
        q, k, v = self.in_proj_weight.chunk(3)
        return q, k, v
    return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight


def _biases(self: nn.MultiheadAttention) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if self.in_proj_bias is None:
        return None, None, None
    q, k, v = self.in_proj_bias.chunk(3)
    return q, k, v


def _merge(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks in SDPA's convention: bool (True may be seen) where both are bool, else added to the scores."""
    if attn_mask is not None:
        attn_mask = attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
    if padding is not None:
        padding = padding[:, None, None]
    masks = [m for m in (attn_mask, padding) if m is not None]
    if not masks:
        return None
    if all(m.dtype == torch.bool for m in masks):  # nn.MultiheadAttention's convention: True hides
        return ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
    added = [_additive(m, dtype) for m in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _one_more_key(mask: Tensor | None) -> Tensor | None:
    """Room for a key that is always visible."""
    return None if mask is None else F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
