"""Scores that a model computed itself: what methods hide of them, and attention computed as
dampen's instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen._torch import has_numbers
from dampen.hooks.tracing.products import name_of
from dampen.kernels.kernel import HIDE, adds_to_hide
from dampen.masks import ModelMask, hides, keep_keys, mask_memory, versions_of

if TYPE_CHECKING:
    from dampen.hooks.context import AttentionSite
    from dampen.hooks.tracing.products import Equation, Layout, Product, Way
    from dampen.regularizer import Call, Regularizer


# --- scores, as the hook points meet them
#
# Scores that a model computed itself, as the stages meet them: which keys it hides, and what
# methods hide of them.

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


def read_model_mask(product: Product, layout: Layout, site: AttentionSite) -> ModelMask | None:
    """Which keys the model lets each query see, by the rule of `dampen.masks` for what it adds to
    its scores (B, H, N, M); None: all. Layers that add the same tensors read
    them once per forward."""
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
        known = memory.find(parts) or known_by_content(site, parts)
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
    if not torch.compiler.is_compiling() and not (blind is not None and bool(blind.any())):
        found = None if bool(keep.all()) else ModelMask(keep, None, None)
    if memory is not None:
        memory.keep(parts, (found,))
        small = _is_small(parts)
        site.mask = (parts, versions_of(parts), (found,)) if small else None
        if small and found is not None and found.blind is None:
            found.shows_all = bool(found.keep.flatten(1, 2).any(1).all())
    return found


SMALL_MASK = 2**16
"""Numbers up to which it is quicker to compare a mask with that of the forward
before than to read it."""


def _is_small(parts: Sequence[Any]) -> bool:
    return not any(
        isinstance(x, Tensor)
        and (x.requires_grad or x.numel() > SMALL_MASK or not (x.is_cpu and has_numbers(x)))
        for x in parts
    )


def known_by_content(site: AttentionSite, parts: Sequence[Any]) -> Any:
    """What the forward before has read of the same mask, which the model makes anew every time
    (`mask == 0`); None: it was another.

    Args:
        site: of the attention.
        parts: what the mask is made of.
    """
    if site.mask is None or not _is_small(parts):
        return None
    before, versions, found = site.mask
    same = len(before) == len(parts) and versions_of(before) == versions
    return found if same and all(map(_equal, before, parts)) else None


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    return a is b or (a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b))


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
    """Whether values were made by `exp`, as far as their graph says: the logarithm of the output is
    taken later (LASER), so that an output of 0 is no head left out."""
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
    """The leading axes of an operand as the scores have them: BLOOM's product is (B * H, N, M), its
    softmax 4-d."""
    own = tuple(t.shape[:-2])
    size = 1
    for n in own:
        size *= n
    total = 1
    for n in leading:
        total *= n
    return tuple(leading) if size == total else own


# --- replace_attention=True
#
# `regularize(..., replace_attention=True)`: attention that a model computes itself, run as
# dampen's.
#
# It is replaced where it is softmax(c q k^T + mask) v and nothing else. The functions between
# the product and the softmax show that in every forward, and for each new shape the first
# forward runs the model's own code and compares its output with that of
# `F.scaled_dot_product_attention`.

_FACTORS = {"mul": 1, "__mul__": 1, "__rmul__": 1, "div": -1, "__truediv__": -1, "true_divide": -1}
"""Functions that scale, and the power in which their number enters."""
_HIDES = {"masked_fill", "add", "__add__", "__radd__"}
_PRODUCTS = {"matmul", "__matmul__"}

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""q, k, v, the mask and the scale: the output with the methods in it."""


class Plain(NamedTuple):
    """What an attention is made of that is softmax(scale q k^T + mask) v."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None  # bool, True may be seen
    scale: float

    def key(self) -> tuple[Any, ...]:
        """What the first forward of each shape is known by."""
        masked = self.mask is not None
        return (self.q.shape, self.k.shape, self.v.shape, self.q.dtype, self.scale, masked)

    def agrees(self, output: Tensor) -> bool:
        """Whether torch's attention gives the output that the model's own code gave.

        Args:
            output: without any method.
        """
        with torch.no_grad():
            same = F.scaled_dot_product_attention(
                self.q, self.k, self.v, self.mask, scale=self.scale
            )
            return bool(torch.allclose(same, output, rtol=1e-3, atol=1e-4))


def read_plain(product: Product, way: Way, outputs: Equation) -> Plain | None:
    """The parts of an attention, where its functions show that nothing else is in it.

    Args:
        product: of queries and keys, which has met its softmax.
        way: the weights that the values are multiplied with.
        outputs: the product with the values.
    """
    scores, softmax = product.scores, product.softmax
    if scores is None or softmax is None or product.keys is not None or product.early:
        return None
    if product.turned is not None or product.equation.letters is not None:
        return None
    if outputs.letters is not None or name_of(product.start.func) not in _PRODUCTS:
        return None
    if set(way.names(softmax)) - {"dropout"} or way.drops(softmax):
        return None
    (q, k), v = product.equation.tokens_last(), outputs.values_last()
    four = q.ndim == k.ndim == v.ndim == scores.tensor.ndim == 4
    if not four or q.dtype is not torch.float32 or not q.dtype is k.dtype is v.dtype:
        return None
    if softmax.kwargs.get("dtype") not in (None, q.dtype) or len(softmax.args) > 2:
        return None
    scale = _scale(scores, product.start)
    if scale is None:
        return None
    if not set(scores.names()) & _HIDES:
        return Plain(q, k, v, None, scale)
    with torch.no_grad():
        start = product.start.tensor
        added = scores.again(start.new_zeros((1, 1, *start.shape[-2:])), product.start)
        keep, blind = hides(added)
        # a bias, or a row without keys, of which each code makes something else
        if bool(blind.any()) or not bool(((added == 0) | ~keep).all()):
            return None
    return Plain(q, k, v, keep, scale)


def _scale(way: Way, start: Way) -> float | None:
    """The number that the scores are multiplied with; None: other things happen to them."""
    scale = 1.0
    while way is not start:
        source, name = way.source, name_of(way.func)
        if source is None or (way.kwargs and set(way.kwargs) - {"value", "mask", "other"}):
            return None
        if name in _FACTORS:
            others = [x for x in (*way.args, *way.kwargs.values()) if x is not source.tensor]
            if len(others) != 1 or not isinstance(others[0], int | float):
                return None
            scale *= float(others[0]) ** _FACTORS[name]
        elif name not in _HIDES or any(
            isinstance(x, Tensor) and x.requires_grad for x in _others(way, source.tensor)
        ):
            return None
        way = source
    return scale if math.isfinite(scale) else None


def _others(way: Way, tensor: Tensor) -> list[Any]:
    return [x for x in (*way.args, *way.kwargs.values()) if x is not tensor]
