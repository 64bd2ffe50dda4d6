"""The sums over pairs from the scores themselves, in chunks of queries: for visible pairs, and for all heads as one.

Where a causal mask restricts the pairs, or where the heads are taken together (`heads="concat"`), no small Gram matrix
carries the sum. The scores of a few queries at a time are made, squared, masked and added up, and made again in the
backward pass, so that memory stays linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dampen.formulas.explicit.again import again
from dampen.formulas.explicit.maps import HeadMap
from dampen.formulas.explicit.pairs import Needed, PairParts
from dampen.formulas.explicit.precision import in_full_precision, wide
from dampen.formulas.explicit.reductions import Pairs
from dampen.masks import causal_rows
from dampen.regularizer import Call

CHUNK = 2**21
"""Entries of the scores B x H x rows x M of one chunk."""
COMPILED_CHUNKS = 8
"""Chunks at most in a compiled graph, where the loop is unrolled."""

Keep = Callable[[slice], Tensor]


def restricts_pairs(call: Call) -> bool:
    """Whether the model's mask is more than padding, so that visible pairs are fewer than pairs of valid tokens."""
    return call.is_causal or (call.mask is not None and (call.mask.shape[-2] != 1 or call.mask.shape[1] != 1))


def visible_diagonal(call: Call) -> Tensor | None:
    """Whether each token sees itself: bool (B or 1, H or 1, N); None: all do."""
    if call.mask is None:
        return None
    return call.mask[..., 0, :] if call.mask.shape[-2] == 1 else call.mask.diagonal(dim1=-2, dim2=-1)


def visible_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Needed, call: Call) -> PairParts:
    """The sums over the pairs of valid tokens that the model's mask shows."""
    if call.is_causal or (call.mask is not None and call.mask.shape[1] == 1):
        return chunked_pairs(q, k, rows, need, _keep(call))
    repeat = q.weight.shape[0] // k.weight.shape[0]
    parts = [
        chunked_pairs(_head(q, h), _head(k, h // repeat), rows, need, _keep(call, h)) for h in range(q.weight.shape[0])
    ]
    return PairParts(*(None if p[0] is None else torch.stack(p).sum() for p in zip(*parts, strict=True)))


def count_visible(call: Call, rows: Pairs, dtype: torch.dtype = torch.float32) -> Tensor:
    """The number of visible pairs of valid tokens in the batch, averaged over heads."""
    batch, heads, queries, keys = call.shape
    masks = [0] if call.is_causal or (call.mask is not None and call.mask.shape[1] == 1) else list(range(heads))
    total = torch.zeros((), dtype=dtype, device=call.device)
    for cut in _chunks(batch, queries, keys):
        for h in masks:
            seen = _keep(call, h)(cut).to(dtype).expand(batch, -1, -1)
            total = total + _weighted(seen, _rows(rows, cut), rows.keys)
    return total / len(masks)


def chunked_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Needed, keep: Keep | None = None) -> PairParts:
    """The sums over all pairs of valid tokens, or those that `keep` shows to every head: bool (B or 1, rows, M)."""
    y_q, y_k, w_k = q.bare, k.bare, k.weight
    if (repeat := y_q.shape[1] // y_k.shape[1]) > 1:
        y_k, w_k = y_k.repeat_interleave(repeat, 1), w_k.repeat_interleave(repeat, 0)
    power_q, power_k = wide(q.x).square(), wide(k.x).square()  # (B, N, in), (B, M, in)
    # three pairs of a query's and a key's features; their products, summed over visible pairs, are the variance parts
    features: list[tuple[Tensor, Tensor]] = []
    if need.vq:
        features.append((power_q, sum_of_squares(y_k, q.weight)))
    if need.vk:
        features.append((sum_of_squares(y_q, w_k), power_k))
    if need.w:
        features.append((power_q, power_k @ sum_of_squared_products(q.weight, w_k).t()))

    cuts = list(_chunks(y_q.shape[0] * y_q.shape[1], y_q.shape[2], y_k.shape[2]))
    total = y_q.new_zeros(sum(need))
    for cut in cuts:
        left = [t for pair in features for t in (pair[0][:, cut], pair[1])]
        seen = None if keep is None else keep(cut)
        operands: tuple[Any, ...] = (y_q[:, :, cut], y_k, _rows(rows, cut), rows.keys, seen, need.b, *left)
        total = total + (again(_chunk, *operands) if len(cuts) > 1 else _chunk(*operands))
    values = iter(total)
    return PairParts(*(next(values) if wanted else None for wanted in need))


def _chunk(
    y_q: Tensor, y_k: Tensor, r: Tensor | None, keys: Tensor | None, seen: Tensor | None, b: bool, *features: Tensor
) -> Tensor:
    """The sums of some queries; `features` are three pairs at most, of the queries' and of all keys'."""
    out = []
    if b:
        squares = (y_q @ y_k.transpose(-2, -1)).square().sum(1)
        out.append(_weighted(squares if seen is None else squares * seen, r, keys))
    for left, right in zip(features[::2], features[1::2], strict=True):
        right = right if keys is None else right * keys.unsqueeze(-1)
        mixed = right.sum(1, keepdim=True) if seen is None else seen.to(right.dtype) @ right
        per_query = (left * mixed).sum(-1)
        out.append(per_query.sum() if r is None else (per_query * r).sum())
    return torch.stack(out)


def sum_of_squares(y: Tensor, weight: Tensor) -> Tensor:
    """sum_h (y_h W_h)^2 of (B, H, T, dh) and (H, dh, in): (B, T, in)."""
    if weight.shape[0] == 1:  # of many heads, each one's (B, T, in) product is made again rather than kept
        return _square_of_product(y[:, 0], weight[0])
    return functools.reduce(torch.add, (again(_square_of_product, y[:, h], w) for h, w in enumerate(wide(weight))))


@in_full_precision
def _square_of_product(y: Tensor, weight: Tensor) -> Tensor:
    return (wide(y) @ wide(weight)).square()


def sum_of_squared_products(left: Tensor, right: Tensor) -> Tensor:
    """sum_h (left_h^T right_h)^2 of (H, dh, in) and (H, dh, in'): (in, in')."""
    squares: list[Tensor] = [(a.t() @ b).square() for a, b in zip(wide(left), wide(right), strict=True)]
    return functools.reduce(torch.add, squares)


def _keep(call: Call, head: int = 0) -> Keep:
    """The visible pairs of one head for some of the queries: bool (B or 1, rows or 1, M)."""

    def keep(rows: slice) -> Tensor:
        if call.mask is None:
            return causal_rows(call.shape[2], call.shape[3], rows, call.device)[None]
        mask = call.mask[:, head]
        return mask if mask.shape[-2] == 1 else mask[:, rows]

    return keep


def _chunks(batch: int, queries: int, keys: int) -> Iterator[slice]:
    """The queries in slices of at most `CHUNK` entries of the scores."""
    step = max(1, CHUNK // max(1, batch * keys))
    if torch.compiler.is_compiling():
        step = max(step, -(-queries // COMPILED_CHUNKS))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def _head(m: HeadMap, h: int) -> HeadMap:
    cut = slice(h, h + 1)
    return replace(m, y=m.y[:, cut], bias=None if m.bias is None else m.bias[cut], weight=m.weight[cut])


def _rows(rows: Pairs, cut: slice) -> Tensor | None:
    return None if rows.queries is None else rows.queries[:, cut]


def _weighted(squares: Tensor, r: Tensor | None, keys: Tensor | None) -> Tensor:
    """sum_ij r_i keys_j squares_ij."""
    squares = squares if keys is None else squares * keys.unsqueeze(1)
    per_query = squares.sum(-1)
    return per_query.sum() if r is None else (per_query * r).sum()
