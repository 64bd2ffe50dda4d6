"""The penalties of query, key and both, over all pairs of a query and a key.

No n x n or d x d tensor is built.

Per head, with two dh x dh matrices of the queries and of the keys,

    gram    G = sum_i r_i y_i y_i^T           y_i a token's query or key, r_i its row weight
    spread  M = W diag(g) W^T                 g_j = sum_i r_i x_ij^2, the tokens by feature

the four sums over pairs are inner products:

    b  = sum_ij S_ij^2                         = <G_q, G_k>    S = Q K^T, no bias, rotary or norm
    vq = sum_ij sum_l x_il^2 (Wq^T k_j)_l^2    = <M_q, G_k>    dropout on the input of the queries
    vk = sum_ij sum_l x_jl^2 (Wk^T q_i)_l^2    = <G_q, M_k>    dropout on the input of the keys
    w  = sum_ij sum_lm x_il^2 C_lm^2 x_jm^2    = <M_q, M_k>    both at once, C = Wq^T Wk

So the paper's J_q and J_k (arXiv 2604.20505), 1/2 p^2 b both, are one and the same function.

Where a causal mask restricts the pairs, or where the heads are joined (`heads="concat"`), no small
Gram matrix carries the sum. Then the scores of a few queries at a time are computed, squared,
masked and added up, and computed again in the backward pass, so that memory stays linear in the
length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dampen.functional.explicit.projections import HeadMap
from dampen.functional.explicit.reductions import Number, Pairs, single, wide
from dampen.functional.explicit.squares import again, by_hand, contract_squares, weighed
from dampen.masks import causal_rows
from dampen.regularizer import Call

PAIR_TERMS = ("query", "key", "query_key")
_MATRICES = {"b": "GG", "vq": "MG", "vk": "GM", "w": "MM"}
"""The sums over pairs: which matrix of the queries, and which of the keys."""


def pair_factors(term: str, form: str, p: Number) -> dict[str, Number]:
    """How much of each sum over pairs a term takes; two independent masks give S -> c^2 S in the
    mean.

    Args:
        term: query, key or query_key.
        form: paper, exact or inverted.
        p: rate of the dropout.

    >>> pair_factors("query", "exact", 0.5)
    {'b': 0.25, 'vq': 0.25}
    >>> pair_factors("query_key", "exact", 0.5)
    {'b': 0.5625, 'vq': 0.0625, 'vk': 0.0625, 'w': 0.0625}
    """
    # one mask, on the queries or on the keys
    if term != "query_key":
        bias, variance = single(form, p)
        factors = {"b": bias, "vq" if term == "query" else "vk": variance}
        return {name: factor for name, factor in factors.items() if factor is not None}
    c = 1 - p
    if form == "inverted":
        r = p / c
        return {"vq": r, "vk": r, "w": r * r}
    shrink = 1 - c * c
    exact: dict[str, Number] = (
        {} if form == "paper" else {"vq": c * c * c * p, "vk": c * c * c * p, "w": c * c * p * p}
    )
    return {"b": shrink * shrink, **exact}


def needed(terms: Iterable[str], form: str) -> list[str]:
    """Which sums to compute: nothing for a term that is off.

    Args:
        terms: names in `PAIR_TERMS`.
        form: paper, exact or inverted.

    >>> needed({"query", "key"}, "paper")
    ['b']
    """
    wanted = {name for term in terms for name in pair_factors(term, form, 0.5)}
    return [name for name in _MATRICES if name in wanted]


def pair_penalty(term: str, form: str, rate: Number, sums: Mapping[str, Tensor]) -> Tensor:
    """One of the terms query, key and query_key from the sums over pairs; the factor of the
    reduction is not in it.

    Args:
        term: query, key or query_key.
        form: paper, exact or inverted.
        rate: of the dropout.
        sums: by name, from `all_pairs`.
    """
    parts = [factor * sums[name] for name, factor in pair_factors(term, form, rate).items()]
    return sum(parts[1:], start=parts[0])


def all_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str]) -> dict[str, Tensor]:
    """The sums over all pairs of valid tokens, head by head; in grouped-query attention several
    heads share a key.

    Args:
        q: the queries and their projection.
        k: the keys and their projection.
        rows: row weights of the tokens; None: all are 1.
        need: names of the sums over pairs.
    """
    groups, power = k.weight.shape[0], None
    of_queries, of_keys = ("".join(_MATRICES[name][side] for name in need) for side in (0, 1))
    left: dict[str, Tensor] = {}
    right: dict[str, Tensor] = {}
    if "G" in of_queries:
        left["G"] = _by_group(gram(q.y, q.bias, rows.queries), groups)
    if "M" in of_queries:
        power = contract_squares("bni,bn->bi", q.x, rows.queries)
        left["M"] = _by_group(spread(q.weight, power), groups)
    if "G" in of_keys:
        right["G"] = gram(k.y, k.bias, rows.keys)
    if "M" in of_keys:
        if power is None or q.x is not k.x or rows.queries is not None or rows.keys is not None:
            power = contract_squares("bni,bn->bi", k.x, rows.keys)
        right["M"] = spread(k.weight, power)
    return {name: (left[_MATRICES[name][0]] * right[_MATRICES[name][1]]).sum() for name in need}


def gram(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
    """sum_i r_i (y_i - bias)(y_i - bias)^T of (B, H, N, dh), bias (H, 1, dh), rows (B, N): (B, H,
    dh, dh).

    Args:
        y: queries or keys (B, H, N, dh).
        bias: in no penalty; None: there is none.
        rows: row weights of the tokens; None: all are 1.
    """
    return by_hand(_gram, _gram_gradients, y, bias, rows)


def spread(weight: Tensor, power: Tensor) -> Tensor:
    """W_h diag(power_b) W_h^T of weight (H, dh, in) and power (B, in): (B, H, dh, dh).

    Args:
        weight: (H, dh, in).
        power: sum over tokens of x^2, (B, in).
    """
    return by_hand(_spread, _spread_gradients, weight, power)


def _gram(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
    bare = _bare(y, bias)
    return weighed(bare, rows).transpose(-2, -1) @ bare


def _gram_gradients(
    grad: Tensor, wanted: Sequence[bool], y: Tensor, bias: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    to_y = weighed(_bare(y, bias) @ (grad + grad.transpose(-2, -1)), rows)
    if bias is None:
        to_bias = None
    else:
        to_bias = -to_y.sum(2).sum(0).unsqueeze(1).to(bias.dtype)
    return to_y.to(y.dtype), to_bias, None


def _spread(weight: Tensor, power: Tensor) -> Tensor:
    # head by head: no (B, H, dh, in)
    return torch.stack([(w * power.unsqueeze(1)) @ w.t() for w in wide(weight)], 1)


def _spread_gradients(
    grad: Tensor, wanted: Sequence[bool], weight: Tensor, power: Tensor
) -> tuple[Tensor, Tensor]:
    to_weight, to_power = [], torch.zeros_like(power)
    for g, w in zip((grad + grad.transpose(-2, -1)).unbind(1), wide(weight), strict=True):
        mixed = g @ w  # (B, dh, in)
        to_weight.append((mixed * power.unsqueeze(1)).sum(0))
        to_power = to_power + (mixed * w).sum(1) / 2
    return torch.stack(to_weight).to(weight.dtype), to_power


def _bare(y: Tensor, bias: Tensor | None) -> Tensor:
    """Without bias, in the layout in which B and H are one batch for the matrix products."""
    return (wide(y) if bias is None else wide(y) - wide(bias)).contiguous()


def _by_group(t: Tensor, groups: int) -> Tensor:
    """Sum the heads that share a key."""
    if t.shape[1] == groups:
        return t
    summed: Tensor = t.unflatten(1, (groups, -1)).sum(2)
    return summed


CHUNK = 2**21
"""Entries of the scores B x H x rows x M of one chunk."""
COMPILED_CHUNKS = 8
"""Chunks at most in a compiled graph, where the loop is unrolled."""

Keep = Callable[[slice], Tensor]
"""The pairs that some of the queries see: bool (B or 1, rows or 1, M)."""


def restricts_pairs(call: Call) -> bool:
    """Whether the model's mask is more than padding, so that visible pairs are fewer than pairs of
    valid tokens.

    Args:
        call: the attention, or the linear layer, at work.
    """
    return call.is_causal or (
        call.mask is not None and (call.mask.shape[-2] != 1 or call.mask.shape[1] != 1)
    )


def seen_by_any_head(call: Call) -> Call:
    """The call as all heads together see it: a pair is visible where any of them may see it.

    Args:
        call: the attention, or the linear layer, at work.
    """
    if call.mask is None or call.mask.shape[1] == 1:
        return call
    return replace(call, mask=call.mask.any(1, keepdim=True))


def visible_diagonal(call: Call) -> Tensor | None:
    """Whether each token sees itself: bool (B or 1, H or 1, N); None: all do.

    Args:
        call: the attention, or the linear layer, at work.
    """
    if call.mask is None:
        return None
    if call.mask.shape[-2] == 1:
        return call.mask[..., 0, :]
    return call.mask.diagonal(dim1=-2, dim2=-1)


def visible_pairs(
    q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str], call: Call
) -> dict[str, Tensor]:
    """The sums over the pairs of valid tokens that the model's mask shows.

    Args:
        q: the queries and their projection.
        k: the keys and their projection.
        rows: row weights of the tokens; None: all are 1.
        need: names of the sums over pairs.
        call: the attention, or the linear layer, at work.
    """
    masks, repeat = _masks(call), q.weight.shape[0] // k.weight.shape[0]
    if len(masks) == 1:
        return chunked_pairs(q, k, rows, need, masks[0])
    heads = range(q.weight.shape[0])
    parts = [chunked_pairs(q.head(h), k.head(h // repeat), rows, need, masks[h]) for h in heads]
    return {name: torch.stack([part[name] for part in parts]).sum() for name in need}


def count_visible(call: Call, rows: Pairs, dtype: torch.dtype = torch.float32) -> Tensor:
    """The number of visible pairs of valid tokens in the batch, averaged over heads.

    Args:
        call: the attention, or the linear layer, at work.
        rows: row weights of the tokens; None: all are 1.
        dtype: of the result.
    """
    (batch, _, queries, keys), masks = call.shape, _masks(call)
    ones = torch.ones((), dtype=dtype, device=call.device)
    left, right = (
        weighed(ones.expand(batch, queries, 1), rows.queries),
        weighed(ones.expand(batch, keys, 1), rows.keys),
    )
    seen = [
        _sum_of_products(keep(cut), left[:, cut], right)
        for keep in masks
        for cut in _chunks(batch, queries, keys)
    ]
    return torch.stack(seen).sum() / len(masks)


def chunked_pairs(
    q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str], keep: Keep | None = None
) -> dict[str, Tensor]:
    """The sums over all pairs of valid tokens, or those that `keep` shows to every head.

    Args:
        q: the queries and their projection.
        k: the keys and their projection.
        rows: row weights of the tokens; None: all are 1.
        need: names of the sums over pairs.
        keep: which pairs some queries see; None: all.
    """
    sides = ((q, rows.queries), (k, rows.keys))
    # each sum takes its square
    y_q, y_k = (weighed(m.bare, None if w is None else w.sqrt()) for m, w in sides)
    power_q, power_k = (weighed(wide(m.x).square(), w) for m, w in sides)
    w_k = k.weight
    if (repeat := y_q.shape[1] // y_k.shape[1]) > 1:
        y_k, w_k = y_k.repeat_interleave(repeat, 1), w_k.repeat_interleave(repeat, 0)
    # features of a query and of a key whose products, summed over visible pairs, are the variance
    # parts
    features: dict[str, tuple[Tensor, Tensor]] = {}
    if "vq" in need:
        features["vq"] = power_q, squares_over_heads(y_k, q.weight)
    if "vk" in need:
        features["vk"] = squares_over_heads(y_q, w_k), power_k
    if "w" in need:
        features["w"] = power_q, power_k @ sum_of_squared_products(q.weight, w_k).t()
    cuts = _chunks(y_q.shape[0] * y_q.shape[1], y_q.shape[2], y_k.shape[2])
    run = again if len(cuts) > 1 else _once
    sums = dict.fromkeys(need, y_q.new_zeros(()))
    for cut in cuts:
        seen = None if keep is None else keep(cut)
        if "b" in need:
            sums["b"] = sums["b"] + run(_squared_scores, seen, y_q[:, :, cut], y_k)
        for name, (left, right) in features.items():
            sums[name] = sums[name] + run(_sum_of_products, seen, left[:, cut], right)
    return sums


def _squared_scores(seen: Tensor | None, y_q: Tensor, y_k: Tensor) -> Tensor:
    squares = (y_q @ y_k.transpose(-2, -1)).square().sum(1)
    if seen is None:
        return squares.sum()
    return (squares * seen).sum()


def _sum_of_products(seen: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """sum_ij seen_ij left_i . right_j."""
    if seen is None:
        mixed = right.sum(1, keepdim=True)
    else:
        mixed = seen.to(right.dtype) @ right
    return (left * mixed).sum()


def _once(formula: Callable[..., Tensor], *args: Any) -> Tensor:
    return formula(*args)


def squares_over_heads(y: Tensor, weight: Tensor) -> Tensor:
    """sum_h (y_h W_h)^2 of (B, H, T, dh) and (H, dh, in): (B, T, in).

    Args:
        y: (B, H, T, dh).
        weight: (H, dh, in).
    """
    # of many heads, each one's (B, T, in) product is not kept
    if weight.shape[0] > 1:
        run = again
    else:
        run = _once
    return functools.reduce(
        torch.add, (run(_square_of_product, y[:, h], w) for h, w in enumerate(wide(weight)))
    )


def _square_of_product(y: Tensor, weight: Tensor) -> Tensor:
    return (wide(y) @ weight).square()


def sum_of_squared_products(left: Tensor, right: Tensor) -> Tensor:
    """sum_h (left_h^T right_h)^2 of (H, dh, in) and (H, dh, in'): (in, in').

    Args:
        left: (H, dh, in).
        right: (H, dh, in').
    """
    squares: list[Tensor] = [
        (a.t() @ b).square() for a, b in zip(wide(left), wide(right), strict=True)
    ]
    return functools.reduce(torch.add, squares)


def _masks(call: Call) -> list[Keep]:
    """The visible pairs of all heads, or of each where they differ."""

    def causal(cut: slice) -> Tensor:
        return causal_rows(call.shape[2], call.shape[3], cut, call.device)[None]

    def shown(mask: Tensor, cut: slice) -> Tensor:
        if mask.shape[-2] == 1:
            return mask
        return mask[:, cut]

    if call.mask is None:
        return [causal]
    return [functools.partial(shown, mask) for mask in call.mask.unbind(1)]


def _chunks(batch: int, queries: int, keys: int) -> list[slice]:
    """The queries in slices of at most `CHUNK` entries of the scores."""
    step = max(1, CHUNK // max(1, batch * keys))
    if torch.compiler.is_compiling():
        step = max(step, -(-queries // COMPILED_CHUNKS))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]
