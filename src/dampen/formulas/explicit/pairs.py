"""The penalties of query, key and both, over all pairs of a query and a key, without any n x n or d x d tensor.

Per head, with G = sum_i r_i y_i y_i^T and M = W diag(sum_i r_i x_ij^2) W^T (`grams.py`) of the queries and of the
keys, the four sums over pairs are inner products of dh x dh matrices:

    b  = sum_ij S_ij^2                         = <G_q, G_k>          S = Q K^T without biases, rotary, norm or scale
    vq = sum_ij sum_l x_il^2 (Wq^T k_j)_l^2    = <M_q, G_k>          dropout on the input of the queries
    vk = sum_ij sum_l x_jl^2 (Wk^T q_i)_l^2    = <G_q, M_k>          dropout on the input of the keys
    w  = sum_ij sum_lm x_il^2 C_lm^2 x_jm^2    = <M_q, M_k>          both at once, C = Wq^T Wk

So the paper's J_q and J_k (arXiv 2604.20505), 1/2 p^2 b both, are one and the same function.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dampen.formulas.explicit.forms import Number, Parts, combine, joint, single
from dampen.formulas.explicit.grams import gram, spread
from dampen.formulas.explicit.maps import HeadMap
from dampen.formulas.explicit.reductions import Pairs
from dampen.formulas.explicit.squares import feature_power

PAIR_TERMS = ("query", "key", "query_key")


class PairParts(NamedTuple):
    """The sums over pairs that were asked for."""

    b: Tensor | None
    vq: Tensor | None
    vk: Tensor | None
    w: Tensor | None


class Needed(NamedTuple):
    """Which sums over pairs the terms and the form need."""

    b: bool
    vq: bool
    vk: bool
    w: bool


def needed(terms: set[str], form: str) -> Needed:
    """Which sums to compute: nothing for a term that is off.

    >>> needed({"query", "key"}, "paper")
    Needed(b=True, vq=False, vk=False, w=False)
    """
    variance, both = form != "paper", "query_key" in terms
    return Needed(form != "inverted", variance and (both or "query" in terms), variance and (both or "key" in terms),
                  variance and both)  # fmt: skip


def all_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Needed) -> PairParts:
    """The sums over all pairs of valid tokens, head by head; in grouped-query attention several heads share a key."""
    groups = k.weight.shape[0]
    g_q = g_k = m_q = m_k = None
    if need.b or need.vk:
        g_q = _by_group(gram(q.y, q.bias, rows.queries), groups)
    if need.b or need.vq:
        g_k = gram(k.y, k.bias, rows.keys)
    same = q.x is k.x and rows.queries is None and rows.keys is None
    power = feature_power(q.x, None, per_sample=True) if same and (need.vq or need.vk) else None
    if need.vq or need.w:
        power_q = feature_power(q.x, rows.queries, per_sample=True) if power is None else power
        m_q = _by_group(spread(q.weight, power_q), groups)
    if need.vk or need.w:
        power_k = feature_power(k.x, rows.keys, per_sample=True) if power is None else power
        m_k = spread(k.weight, power_k)
    return PairParts(
        _inner(g_q, g_k, need.b), _inner(m_q, g_k, need.vq), _inner(g_q, m_k, need.vk), _inner(m_q, m_k, need.w)
    )


def pair_penalty(term: str, form: str, rate: Number, parts: PairParts) -> Tensor:
    """One of the terms query, key and query_key from the sums over pairs; the factor of the reduction is not in it."""
    if term == "query_key":
        variance = None if parts.vq is None or parts.vk is None else parts.vq + parts.vk
        return combine(joint(form, rate), parts.b, variance, parts.w)
    factors: Parts = single(form, rate)
    return combine(factors, parts.b, parts.vq if term == "query" else parts.vk)


def _by_group(t: Tensor, groups: int) -> Tensor:
    """Sum the heads that share a key."""
    return t if t.shape[1] == groups else t.unflatten(1, (groups, -1)).sum(2)


def _inner(a: Tensor | None, b: Tensor | None, wanted: bool) -> Tensor | None:
    return (a * b).sum() if wanted and a is not None and b is not None else None
