"""The penalties of query, key and both, over all pairs of a query and a key, without any n x n or d x d tensor.

Per head, with two dh x dh matrices of the queries and of the keys,

    gram    G = sum_i r_i y_i y_i^T           y_i a token's query or key, r_i its row weight
    spread  M = W diag(g) W^T                 g_j = sum_i r_i x_ij^2, the same tokens seen feature by feature

the four sums over pairs are inner products:

    b  = sum_ij S_ij^2                         = <G_q, G_k>          S = Q K^T without biases, rotary, norm or scale
    vq = sum_ij sum_l x_il^2 (Wq^T k_j)_l^2    = <M_q, G_k>          dropout on the input of the queries
    vk = sum_ij sum_l x_jl^2 (Wk^T q_i)_l^2    = <G_q, M_k>          dropout on the input of the keys
    w  = sum_ij sum_lm x_il^2 C_lm^2 x_jm^2    = <M_q, M_k>          both at once, C = Wq^T Wk

So the paper's J_q and J_k (arXiv 2604.20505), 1/2 p^2 b both, are one and the same function. Autograd would keep copies
of the heads and, for M, a tensor of B x dh x d in each: the backwards are written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dampen.functional.explicit.by_hand import by_hand
from dampen.functional.explicit.forms import Number, single
from dampen.functional.explicit.layer import HeadMap
from dampen.functional.explicit.precision import wide
from dampen.functional.explicit.reductions import Pairs
from dampen.functional.explicit.squares import contract_squares
from dampen.functional.explicit.tap import weighed

PAIR_TERMS = ("query", "key", "query_key")
_MATRICES = {"b": "GG", "vq": "MG", "vk": "GM", "w": "MM"}
"""The sums over pairs: which matrix of the queries, and which of the keys."""


def pair_factors(term: str, form: str, p: Number) -> dict[str, Number]:
    """How much of each sum over pairs a term takes; two independent masks give S -> c^2 S in the mean.

    >>> pair_factors("query", "exact", 0.5)
    {'b': 0.25, 'vq': 0.25}
    >>> pair_factors("query_key", "exact", 0.5)
    {'b': 0.5625, 'vq': 0.0625, 'vk': 0.0625, 'w': 0.0625}
    """
    if term != "query_key":  # one mask, on the queries or on the keys
        bias, variance = single(form, p)
        factors = {"b": bias, "vq" if term == "query" else "vk": variance}
        return {name: factor for name, factor in factors.items() if factor is not None}
    c = 1 - p
    if form == "inverted":
        r = p / c
        return {"vq": r, "vk": r, "w": r * r}
    shrink = 1 - c * c
    exact: dict[str, Number] = {} if form == "paper" else {"vq": c * c * c * p, "vk": c * c * c * p, "w": c * c * p * p}
    return {"b": shrink * shrink, **exact}


def needed(terms: Iterable[str], form: str) -> list[str]:
    """Which sums to compute: nothing for a term that is off.

    >>> needed({"query", "key"}, "paper")
    ['b']
    """
    wanted = {name for term in terms for name in pair_factors(term, form, 0.5)}
    return [name for name in _MATRICES if name in wanted]


def pair_penalty(term: str, form: str, rate: Number, sums: Mapping[str, Tensor]) -> Tensor:
    """One of the terms query, key and query_key from the sums over pairs; the factor of the reduction is not in it."""
    parts = [factor * sums[name] for name, factor in pair_factors(term, form, rate).items()]
    return sum(parts[1:], start=parts[0])


def all_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str]) -> dict[str, Tensor]:
    """The sums over all pairs of valid tokens, head by head; in grouped-query attention several heads share a key."""
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
    """sum_i r_i (y_i - bias)(y_i - bias)^T of (B, H, N, dh), bias (H, 1, dh), rows (B, N): (B, H, dh, dh)."""
    return by_hand(_gram, _gram_gradients, y, bias, rows)


def spread(weight: Tensor, power: Tensor) -> Tensor:
    """W_h diag(power_b) W_h^T of weight (H, dh, in) and power (B, in): (B, H, dh, dh)."""
    return by_hand(_spread, _spread_gradients, weight, power)


def _gram(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
    bare = _bare(y, bias)
    return weighed(bare, rows).transpose(-2, -1) @ bare


def _gram_gradients(
    grad: Tensor, wanted: Sequence[bool], y: Tensor, bias: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor | None, None]:
    to_y = weighed(_bare(y, bias) @ (grad + grad.transpose(-2, -1)), rows)
    to_bias = None if bias is None else -to_y.sum(2).sum(0).unsqueeze(1).to(bias.dtype)
    return to_y.to(y.dtype), to_bias, None


def _spread(weight: Tensor, power: Tensor) -> Tensor:
    return torch.stack([(w * power.unsqueeze(1)) @ w.t() for w in wide(weight)], 1)  # head by head: no (B, H, dh, in)


def _spread_gradients(grad: Tensor, wanted: Sequence[bool], weight: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
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
    return t if t.shape[1] == groups else t.unflatten(1, (groups, -1)).sum(2)
