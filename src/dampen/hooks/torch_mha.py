"""`nn.MultiheadAttention` and F.multi_head_attention_forward: their attention call is out of reach
inside the latter, so it is written out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

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
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward of `nn.MultiheadAttention` with the stages open: same arguments, same results
    when no regularizer acts."""

    def project(role: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        linear = LinearCall(role, x, weight, bias, self, site.layer.site, frame.valid)
        return apply_linear(frame, regularizers, linear, F.linear)

    attend = partial(attention, site, frame, regularizers, call)
    return _forward(cast(MultiHead, self), project, attend, frame, call, *args, **kwargs)


class MultiHead(Protocol):
    """What the function of torch is given beside queries, keys and values, by
    the names of its module."""

    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout: float
    training: bool
    batch_first: bool
    out_proj: Callable[[Tensor], Tensor]


def functional_mha(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    attend: Callable[..., Any],
    frame: Frame,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward, called by a module of another library (CLIP's pooling,
    WavLM), with the stages open. Its tensors are (tokens, batch, channels)."""
    if static_k is not None or static_v is not None:
        raise RuntimeError(
            f"{type(call.module).__name__} gives "
            "F.multi_head_attention_forward keys or values that are made already "
            "(static_k, static_v), which regularizers cannot act on. "
            "Call F.scaled_dot_product_attention there."
        )
    given: Any = SimpleNamespace(
        num_heads=num_heads, in_proj_weight=None if use_separate_proj_weight else in_proj_weight,
        in_proj_bias=in_proj_bias, q_proj_weight=q_proj_weight, k_proj_weight=k_proj_weight,
        v_proj_weight=v_proj_weight, bias_k=bias_k, bias_v=bias_v, add_zero_attn=add_zero_attn, dropout=dropout_p,
        training=training, batch_first=False, out_proj=lambda o: linear(o, out_proj_weight, out_proj_bias),
    )  # fmt: skip
    out = _forward(
        given, lambda role, *operands: linear(*operands), attend, frame, call, query, key, value, key_padding_mask,
        need_weights, attn_mask, average_attn_weights, is_causal,
    )  # fmt: skip
    # the module may have put its tokens first for this call alone
    same = call.given is not None and tuple(call.given[:2]) == tuple(query.shape[:2])
    frame.sequence_first = same and query.shape[0] != query.shape[1]
    return out


def _forward(
    self: MultiHead,
    project: Callable[[str, Tensor, Tensor, Tensor | None], Tensor],
    attend: Callable[..., Any],
    frame: Frame,
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Both of them: projections, heads, masks in one convention, attention, and
    the output projection."""
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
    for role, x, weight, bias in zip(
        "qkv", (query, key, value), _weights(self), _biases(self), strict=True
    ):
        projected.append(project(role, x, weight, bias))
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

    # is_causal is a hint that attn_mask is causal; with padding merged in, the
    # mask itself is what counts
    causal = (
        is_causal and not need_weights and key_padding_mask is None and q.shape[2] == k.shape[2]
    )
    dropout = self.dropout if self.training else 0.0
    out = attend(q, k, v, None if causal else mask, dropout, causal, need_weights=need_weights)
    o, weights = out if need_weights else (out, None)
    frame.sequence_first = (
        batched and not self.batch_first
    )  # the feed-forward beside sees (N, B, D)
    o = self.out_proj(o.transpose(1, 2).flatten(-2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return o.squeeze(0), None if weights is None else weights.squeeze(0)
    return (o if self.batch_first else o.transpose(0, 1)), weights


def _weights(self: MultiHead) -> tuple[Tensor, Tensor, Tensor]:
    if self.in_proj_weight is not None:  # None where q, k and v have maps of their own
        q, k, v = self.in_proj_weight.chunk(3)
        return q, k, v
    return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight


def _biases(self: MultiHead) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if self.in_proj_bias is None:
        return None, None, None
    q, k, v = self.in_proj_bias.chunk(3)
    return q, k, v


def _merge(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks in SDPA's convention: bool (True may be seen) where both are bool,
    else added to the scores."""
    if attn_mask is not None:
        attn_mask = (
            attn_mask.unflatten(0, (batch, heads))
            if attn_mask.dim() == 3
            else attn_mask[None, None]
        )
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
    return (
        None
        if mask is None
        else F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    )
