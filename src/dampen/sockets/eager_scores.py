"""Scores that a model computed itself, as the stages meet them: which keys it hides, and what methods hide of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dampen.masks import keep_keys

if TYPE_CHECKING:
    from dampen.regularizer import Call, Regularizer

_MASKS = set("add add_ __add__ __radd__ __iadd__ masked_fill masked_fill_ where max maximum sub __sub__".split())
HIDDEN = 1000.0
"""A score so far below its row's largest is a mask: its weight is zero in every dtype, so -1e4 and -1e9 hide too."""


def stages_of_scores(s: Tensor, q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call) -> Tensor:
    """mask and logits: the scores with hidden keys at -inf. What the model hides stays as the model has it."""
    hidden = [h for r in regularizers if "mask" in r.stages and (h := r.mask(q, k, call)) is not None]
    if any("logits" in r.stages for r in regularizers):
        raw = s if call.mask is None else s.masked_fill(~call.mask, 0.0)
        for r in regularizers:
            if "logits" in r.stages:
                raw = r.logits(raw, call)
        s = raw if call.mask is None else torch.where(call.mask, raw, s)
    if not hidden:
        return s
    dropped = ~keep_keys(call.mask, hidden, s.shape[-1])
    return s.masked_fill(dropped if call.mask is None else dropped & call.mask, float("-inf"))


def visible(s: Tensor, way: set[str]) -> Tensor | None:
    """Which keys the model lets each query see, from its final scores; None: all, as its functions say or as it turns
    out."""
    if not way & _MASKS:
        return None
    low = s.detach()
    seen = (low > torch.finfo(s.dtype).min / 2) & (low > low.amax(-1, keepdim=True) - HIDDEN)
    if not torch.compiler.is_compiling() and bool(seen.all()):
        return None
    return seen


def fit(t: Tensor, leading: Sequence[int]) -> tuple[int, ...]:
    """The leading axes of an operand as the scores have them: BLOOM's product is (B * H, N, M), its softmax 4-d."""
    own = tuple(t.shape[:-2])
    size = 1
    for n in own:
        size *= n
    total = 1
    for n in leading:
        total *= n
    return tuple(leading) if size == total else own
