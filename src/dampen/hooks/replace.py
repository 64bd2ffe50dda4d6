"""`regularize(..., replace_attention=True)`: attention that a model computes itself, run as dampen's.

It is replaced where it is softmax(c q k^T + mask) v and nothing else. The functions between the
product and the softmax show that in every forward, and for each new shape the first forward runs
the model's own code and compares its output with that of `F.scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.hooks.ways import name_of
from dampen.masks import hides

if TYPE_CHECKING:
    from dampen.hooks.equations import Equation
    from dampen.hooks.ways import Product, Way

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
