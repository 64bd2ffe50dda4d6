"""Scores that a model computed itself, as the stages meet them: which keys it hides, and what methods hide of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dampen.hooks.ways import name_of
from dampen.kernels.kernel import HIDE, adds_to_hide
from dampen.masks import ModelMask, hides, keep_keys, mask_memory

if TYPE_CHECKING:
    from dampen.hooks.layout import Layout
    from dampen.hooks.ways import Product, Way
    from dampen.regularizer import Call, Regularizer

_MASKS = set(
    "add add_ __add__ __radd__ __iadd__ masked_fill masked_fill_ where max maximum sub __sub__".split()
)


_BY_ELEMENT = set(
    "matmul __matmul__ add __add__ __radd__ sub __sub__ __rsub__ mul __mul__ __rmul__ div "
    "__truediv__ true_divide masked_fill where clamp tanh maximum to float contiguous".split()
)
"""Functions that act on each score alone, so that the model's mask keeps the axes of size 1 that it
has: a causal mask is then read as (1, 1, N, M) and not once per sample and head."""


def stages_of_scores(
    s: Tensor, q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> Tensor:
    """mask and logits: the scores with hidden keys at -inf, those that the model hides too."""
    hidden = [
        h for r in regularizers if "mask" in r.stages and (h := r.mask(q, k, call)) is not None
    ]
    if any("logits" in r.stages for r in regularizers):
        raw = s if call.mask is None else s.masked_fill(~call.mask, 0.0)
        for r in regularizers:
            if "logits" in r.stages:
                raw = r.logits(raw, call)
        s = raw if call.mask is None else torch.where(call.mask, raw, s)
    if not hidden:
        return s
    dropped = ~keep_keys(call.mask, hidden, s.shape[-1])
    if call.blind is None and adds_to_hide(s) and dropped.shape == s.shape:
        # the softmax gives both the weight 0; the backward of a sum is free
        return torch.add(s, dropped.view(torch.uint8), alpha=HIDE)
    return s.masked_fill(dropped, float("-inf"))


def read_model_mask(product: Product, layout: Layout) -> ModelMask | None:
    """Which keys the model lets each query see, by the rule of `dampen.masks` for what it adds to its scores (B, H, N,
    M); None: all. Layers that add the same tensors read them once per forward."""
    if product.scores is None or not set(product.scores.names()) & _MASKS:
        return None
    memory, parts = mask_memory(), []
    if memory is not None:
        parts = [
            product.start.tensor.shape,
            product.start.tensor.dtype,
            layout.leading,
            *product.scores.parts(),
        ]
        known = memory.find(parts)
        if known is not None:
            return known[0]  # type: ignore[no-any-return]
    with torch.no_grad():
        if layout.plain and _by_element(product.scores):
            start = product.start.tensor
            nothing = start.new_zeros((1,) * (start.ndim - 2) + start.shape[-2:])
            keep, low = hides(product.scores.again(nothing, product.start))
        else:
            added = product.scores.again(_nothing(product.start), product.start)
            keep, low = hides(layout.fold(added))
    blind = (
        None if product.scores.shifts_rows() else low
    )  # what is subtracted from a row does not hide it
    found: ModelMask | None = ModelMask(keep, None, blind)
    if (
        not torch.compiler.is_compiling()
        and bool(keep.all())
        and (blind is None or not bool(blind.any()))
    ):
        found = None
    if memory is not None:
        memory.keep(parts, (found,))
    return found


def _by_element(scores: Way) -> bool:
    """Whether each function from the product to the scores acts on each score alone."""
    return scores.tensor.ndim == 4 and _BY_ELEMENT.issuperset(scores.names())


_VIEWS = (
    "View",
    "Reshape",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "Permute",
    "Transpose",
    "Clone",
    "Repeat",
    "Alias",
)


def are_exponentials(values: Tensor) -> bool:
    """Whether values were made by `exp`, as far as their graph says: the logarithm of the output is taken later
    (LASER), so that an output of 0 is no head left out."""
    if torch.compiler.is_compiling():
        return False  # a graph that is being made shows none
    node = values.grad_fn
    while node is not None and node.name().startswith(_VIEWS) and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("ExpBackward")


def _nothing(start: Way) -> Tensor:
    """The product of queries and keys that are 0."""
    made = start.tensor.detach()
    if name_of(start.func) != "baddbmm":
        return torch.zeros_like(made)
    added: Tensor = start.args[0] if start.args else start.kwargs["input"]
    return torch.zeros_like(made).add_(added.detach(), alpha=start.kwargs.get("beta", 1))


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
