"""The sums over pairs from the scores themselves, in chunks of queries: for visible pairs, and for all heads as one.

Where a causal mask restricts the pairs, or where the heads are taken together (`heads="concat"`), no small Gram matrix
carries the sum. The scores of a few queries at a time are made, squared, masked and added up, and made again in the
backward pass, so that memory stays linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dampen.functional.explicit.by_hand import again
from dampen.functional.explicit.layer import HeadMap
from dampen.functional.explicit.precision import wide
from dampen.functional.explicit.reductions import Pairs
from dampen.functional.explicit.tap import weighed
from dampen.masks import causal_rows
from dampen.regularizer import Call

CHUNK = 2**21
"""Entries of the scores B x H x rows x M of one chunk."""
COMPILED_CHUNKS = 8
"""Chunks at most in a compiled graph, where the loop is unrolled."""

Keep = Callable[[slice], Tensor]
"""The pairs that some of the queries see: bool (B or 1, rows or 1, M)."""


def restricts_pairs(call: Call) -> bool:
    """Whether the model's mask is more than padding, so that visible pairs are fewer than pairs of valid tokens."""
    return call.is_causal or (call.mask is not None and (call.mask.shape[-2] != 1 or call.mask.shape[1] != 1))


def seen_by_any_head(call: Call) -> Call:
    """The call as all heads together see it: a pair is visible where any of them may see it."""
    if call.mask is None or call.mask.shape[1] == 1:
        return call
    return replace(call, mask=call.mask.any(1, keepdim=True))


def visible_diagonal(call: Call) -> Tensor | None:
    """Whether each token sees itself: bool (B or 1, H or 1, N); None: all do."""
    if call.mask is None:
        return None
    return call.mask[..., 0, :] if call.mask.shape[-2] == 1 else call.mask.diagonal(dim1=-2, dim2=-1)


def visible_pairs(q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str], call: Call) -> dict[str, Tensor]:
    """The sums over the pairs of valid tokens that the model's mask shows."""
    masks, repeat = _masks(call), q.weight.shape[0] // k.weight.shape[0]
    if len(masks) == 1:
        return chunked_pairs(q, k, rows, need, masks[0])
    heads = range(q.weight.shape[0])
    parts = [chunked_pairs(q.head(h), k.head(h // repeat), rows, need, masks[h]) for h in heads]
    return {name: torch.stack([part[name] for part in parts]).sum() for name in need}


def count_visible(call: Call, rows: Pairs, dtype: torch.dtype = torch.float32) -> Tensor:
    """The number of visible pairs of valid tokens in the batch, averaged over heads."""
    (batch, _, queries, keys), masks = call.shape, _masks(call)
    ones = torch.ones((), dtype=dtype, device=call.device)
    left, right = weighed(ones.expand(batch, queries, 1), rows.queries), weighed(ones.expand(batch, keys, 1), rows.keys)
    seen = [_products(keep(cut), left[:, cut], right) for keep in masks for cut in _chunks(batch, queries, keys)]
    return torch.stack(seen).sum() / len(masks)


def chunked_pairs(
    q: HeadMap, k: HeadMap, rows: Pairs, need: Sequence[str], keep: Keep | None = None
) -> dict[str, Tensor]:
    """The sums over all pairs of valid tokens, or those that `keep` shows to every head."""
    sides = ((q, rows.queries), (k, rows.keys))
    y_q, y_k = (weighed(m.bare, None if w is None else w.sqrt()) for m, w in sides)  # each sum takes its square
    power_q, power_k = (weighed(wide(m.x).square(), w) for m, w in sides)
    w_k = k.weight
    if (repeat := y_q.shape[1] // y_k.shape[1]) > 1:
        y_k, w_k = y_k.repeat_interleave(repeat, 1), w_k.repeat_interleave(repeat, 0)
    # features of a query and of a key whose products, summed over visible pairs, are the variance parts
    features: dict[str, tuple[Tensor, Tensor]] = {}
    if "vq" in need:
        features["vq"] = power_q, sum_of_squares(y_k, q.weight)
    if "vk" in need:
        features["vk"] = sum_of_squares(y_q, w_k), power_k
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
            sums[name] = sums[name] + run(_products, seen, left[:, cut], right)
    return sums


def _squared_scores(seen: Tensor | None, y_q: Tensor, y_k: Tensor) -> Tensor:
    squares = (y_q @ y_k.transpose(-2, -1)).square().sum(1)
    return squares.sum() if seen is None else (squares * seen).sum()


def _products(seen: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """sum_ij seen_ij left_i . right_j."""
    mixed = right.sum(1, keepdim=True) if seen is None else seen.to(right.dtype) @ right
    return (left * mixed).sum()


def _once(formula: Callable[..., Tensor], *args: Any) -> Tensor:
    return formula(*args)


def sum_of_squares(y: Tensor, weight: Tensor) -> Tensor:
    """sum_h (y_h W_h)^2 of (B, H, T, dh) and (H, dh, in): (B, T, in)."""
    run = again if weight.shape[0] > 1 else _once  # of many heads, each one's (B, T, in) product is not kept
    return functools.reduce(torch.add, (run(_square_of_product, y[:, h], w) for h, w in enumerate(wide(weight))))


def _square_of_product(y: Tensor, weight: Tensor) -> Tensor:
    return (wide(y) @ weight).square()


def sum_of_squared_products(left: Tensor, right: Tensor) -> Tensor:
    """sum_h (left_h^T right_h)^2 of (H, dh, in) and (H, dh, in'): (in, in')."""
    squares: list[Tensor] = [(a.t() @ b).square() for a, b in zip(wide(left), wide(right), strict=True)]
    return functools.reduce(torch.add, squares)


def _masks(call: Call) -> list[Keep]:
    """The visible pairs of all heads, or of each where they differ."""

    def causal(cut: slice) -> Tensor:
        return causal_rows(call.shape[2], call.shape[3], cut, call.device)[None]

    def shown(mask: Tensor, cut: slice) -> Tensor:
        return mask if mask.shape[-2] == 1 else mask[:, cut]

    return [causal] if call.mask is None else [functools.partial(shown, mask) for mask in call.mask.unbind(1)]


def _chunks(batch: int, queries: int, keys: int) -> list[slice]:
    """The queries in slices of at most `CHUNK` entries of the scores."""
    step = max(1, CHUNK // max(1, batch * keys))
    if torch.compiler.is_compiling():
        step = max(step, -(-queries // COMPILED_CHUNKS))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]
