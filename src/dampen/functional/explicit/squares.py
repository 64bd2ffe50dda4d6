"""Sums of squares with backwards written by hand: each keeps its arguments only and is
differentiated in one pass.

Autograd keeps the intermediate results of a formula. torch's own checkpoint would not, but it
replays random numbers and autocast and hooks every tensor that is saved, which costs more than the
small formulas here.

The penalty tap: a tensor passes through unchanged, and the sum of its squares is computed beside
it.

    y, J = tap(y)       J = factor * sum_i w_i ||y_i - bias||^2

Without the tap, J sends a second gradient to y, which autograd makes, keeps and adds. The backward
of the tap adds it to the gradient that passes through anyway, g + 2 factor w (y - bias), in one
pass. The bias is in no penalty: the gradient that the map behind y would pass on to it is
subtracted, by the column sums of y - bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dampen._torch import apply_directly, has_numbers, in_functorch, without_modes
from dampen.functional.explicit.reductions import Number, no_autocast, wide
from dampen.native.library import available as native_available

Formula = Callable[..., Tensor]


def by_hand(
    formula: Formula,
    gradients: Callable[..., Sequence[Tensor | None]],
    *args: Any,
    value: Tensor | None = None,
) -> Tensor:
    """formula(*args), which may read no tensor with a gradient but those among its arguments.

    Args:
        formula: plain torch; compiled graphs and functorch differentiate it themselves.
        gradients: gradients(grad, wanted, *args) gives one gradient for each argument; those not
            wanted may be None. It is differentiated in its turn where a second derivative is needed
            for.
        value: what the formula would give, where that is known.
    """
    nobody_asks = not torch.is_grad_enabled() and value is None
    if nobody_asks or torch.compiler.is_compiling() or in_functorch():
        return formula(*args)
    out: Tensor = _apply_by_hand(formula, gradients, value, *args)
    return out


def again(formula: Formula, *args: Any) -> Tensor:
    """formula(*args); what it makes on the way is made again in the backward.

    Args:
        formula: plain torch.
    """
    return by_hand(formula, functools.partial(_make_again, formula), *args)


def _make_again(
    formula: Formula, grad: Tensor, wanted: Sequence[bool], *args: Any
) -> list[Tensor | None]:
    twice = torch.is_grad_enabled()
    if not twice:
        args = tuple(
            a.detach().requires_grad_(w) if isinstance(a, Tensor) else a
            for a, w in zip(args, wanted, strict=True)
        )
    inputs = [a for a, w in zip(args, wanted, strict=True) if w]
    with torch.enable_grad():
        # a formula need not read all it is given: without the bias only the variance's tensors
        # count
        found = torch.autograd.grad(
            formula(*args), inputs, grad, create_graph=twice, allow_unused=True
        )
    each = iter(found)
    return [next(each) if w else None for w in wanted]


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, formula: Formula, gradients: Any, value: Tensor | None, *args: Any
    ) -> Tensor:
        ctx.gradients, ctx.others = gradients, [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        tensors = [args[i] for i in ctx.places]
        ctx.save_for_backward(*tensors)
        if value is not None:
            return value.detach()
        # who follows the data of a block must not take a sum in a formula for a residual addition
        with no_autocast(tensors[0].device.type), without_modes():
            return formula(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        args = list(ctx.others)
        for i, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = t
        with no_autocast(grad.device.type):
            return None, None, None, *ctx.gradients(grad, ctx.needs_input_grad[3:], *args)


_apply_by_hand: Any = apply_directly(_ByHand)


def contract_squares(equation: str, x: Tensor, weights: Tensor | None) -> Tensor:
    """einsum(equation, x^2, weights), as in "bni,bn->i"; all weights are 1 where they are None.

    Args:
        equation: as for einsum, of the squares and the weights.
        x: what is squared.
        weights: row weights; None: all are 1.

    >>> contract_squares("ni,n->i", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None)
    tensor([10., 20.])
    """
    return by_hand(_contract, _contract_gradients, equation, x, weights)


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a weight (out, in), or by heads (H, out, in).

    Args:
        weight: (out, in), or by heads (H, out, in).
    """
    return contract_squares("oj,o->j" if weight.ndim == 2 else "hoj,ho->hj", weight, None)


def feature_power(x: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i x_ij^2 of (..., in) and (...).

    Args:
        x: (..., in).
        weights: (...); None: all are 1.
    """
    return contract_squares(
        "ij,i->j", x.flatten(0, -2), None if weights is None else weights.reshape(-1)
    )


def _indices(equation: str) -> tuple[str, str, str]:
    """Those of the squares, of the weights and of the result."""
    squares, rest = equation.split(",")
    factor, out = rest.split("->")
    return squares, factor, out


def _contract(equation: str, x: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        squares, _, out = _indices(equation)
        return torch.einsum(f"{squares}->{out}", wide(x).square())
    return torch.einsum(equation, wide(x).square(), wide(weights))


def _contract_gradients(
    grad: Tensor, wanted: Sequence[bool], equation: str, x: Tensor, weights: Tensor | None
) -> tuple[None, Tensor | None, Tensor | None]:
    squares, factor, out = _indices(equation)
    to_x = to_weights = None
    if weights is None:
        # the others were summed over
        here = tuple(slice(None) if index in out else None for index in squares)
        return None, (x * (2 * grad)[here]).to(x.dtype), None
    if wanted[1]:
        to_x = (x * torch.einsum(f"{out},{factor}->{squares}", grad, 2 * wide(weights))).to(x.dtype)
    if wanted[2]:
        to_weights = torch.einsum(f"{out},{squares}->{factor}", grad, wide(x).square()).to(
            weights.dtype
        )
    return None, to_x, to_weights


Cut = tuple[int, int]
"""The first row of a fused map that makes y, and how many do."""


def tap(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    factor: Number = 1.0,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """y, and factor * sum_i weights_i ||y_i - bias||^2 over its vectors y_i; use the y that is
    returned. The backward reads y again: give a copy of what may change in place.

    Args:
        y: (..., out), or by heads (B, H, N, dh).
        bias: broadcasts to y; in no penalty.
        weights: of the vectors y_i, (...); None: all are 1.
        factor: of the whole sum.
        cut: where y, by heads, comes from some rows of a fused map, and bias is that of the whole
            map.
    """
    # these differentiate it themselves
    if torch.compiler.is_compiling() or in_functorch():
        row = bias_row(bias, y, cut)
        bare = wide(y) if row is None else wide(y) - row
        return y, factor * (weighed(bare, weights) * bare).sum()
    out: tuple[Tensor, Tensor] = _apply_tap(y, bias, weights, factor, cut)
    return out


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 alone.

    Args:
        y: output of the layer.
        bias: in no penalty; None: there is none.
        weights: row weights; None: all are 1.
    """
    return tap(y, bias, weights)[1]


def _of_vectors(weights: Tensor, y: Tensor) -> Tensor:
    """Row weights (B, N) beside the vectors of y, which may be by heads (B, H, N, dh)."""
    if weights.ndim == y.ndim - 1:
        return weights
    return weights.unsqueeze(1)


def weighed(y: Tensor, weights: Tensor | None) -> Tensor:
    """w_i y_i.

    Args:
        y: output of the layer.
        weights: row weights; None: all are 1.
    """
    if weights is None:
        return y
    return y * _of_vectors(weights, y).unsqueeze(-1)


def sum_of_squares(bare: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i ||y_i||^2.

    Args:
        bare: without the bias.
        weights: row weights; None: all are 1.
    """
    if weights is not None:
        norms: Tensor = torch.linalg.vector_norm(bare, dim=-1)
        return (norms.square() * _of_vectors(weights, bare)).sum()
    if bare.is_contiguous():
        flat = bare.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(bare)
    return norm.square()


def bias_row(bias: Tensor | None, y: Tensor, cut: Cut | None) -> Tensor | None:
    """The bias in the layout of y.

    Args:
        bias: in no penalty; None: there is none.
        y: output of the layer.
        cut: first row and number of rows, where a fused layer makes y.
    """
    if bias is None or cut is None:
        if bias is None:
            return None
        return wide(bias)
    return wide(bias.narrow(0, *cut).view(y.shape[1], 1, y.shape[3]))


class _Tap(torch.autograd.Function):
    """`forward` takes the context, because torch binds the signature of one that does not on every
    call, by `inspect`."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        factor: Number,
        cut: Cut | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.cut = factor, cut
        row, sums = bias_row(bias, y, cut), None
        ctx.native = weights is None and not isinstance(factor, Tensor) and native_fits(y, row)
        if ctx.native:
            from dampen.native.ops import tap_sums  # only where it was built

            value, sums = tap_sums(y, row)
        else:
            bare = wide(y) if row is None else wide(y) - row
            value = sum_of_squares(bare, weights)
            if row is not None:
                sums = weighed(bare, weights).sum_to_size(row.shape)
        ctx.save_for_backward(y, bias, weights, sums)
        # not a view: a model may continue in place
        return y.detach(), value * factor

    @staticmethod
    def backward(
        ctx: Any, through: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad is None:
            return through, None, None, None, None
        y, bias, weights, sums = ctx.saved_tensors
        row, scale, to_bias = bias_row(bias, y, ctx.cut), twice_of(grad) * ctx.factor, None
        if row is not None and ctx.needs_input_grad[1]:
            # to be differentiated again: as a function of y
            if torch.is_grad_enabled():
                sums = weighed(wide(y) - row, weights).sum_to_size(row.shape)
            to_bias = (sums * -scale).to(bias.dtype).view(-1 if ctx.cut else bias.shape)
            if ctx.cut is not None:
                to_bias = torch.nn.functional.pad(
                    to_bias, (ctx.cut[0], bias.shape[0] - sum(ctx.cut))
                )
        return add_bare(through, y, row, weights, scale, ctx.native), to_bias, None, None, None


_apply_tap: Any = apply_directly(_Tap)


def twice_of(grad: Tensor) -> Any:
    """2 grad: a plain number, which spares small operations, where nothing has to wait for it or
    differentiates it.

    Args:
        grad: of the penalty.
    """
    if torch.is_grad_enabled() or grad.device.type != "cpu":
        return 2 * grad
    return 2 * grad.item()


def add_bare(
    through: Tensor | None,
    y: Tensor,
    row: Tensor | None,
    weights: Tensor | None,
    scale: Any,
    native: bool = False,
) -> Tensor:
    """through + scale w (y - bias), in the dtype of y.

    Args:
        through: gradient that passes through anyway; None: there is none.
        y: output of the layer.
        row: the bias in the layout of y; None: there is none.
        weights: row weights; None: all are 1.
        scale: of the gradient.
        native: a native kernel may do it.
    """
    if weights is not None or isinstance(scale, Tensor):
        bare = weighed(wide(y) if row is None else wide(y) - row, weights) * scale
        both: Tensor = bare if through is None else through + bare
        return both.to(y.dtype)
    if native and through is not None:
        from dampen.native.ops import fits_gradient, tap_gradient  # it was there in the forward

        if fits_gradient(through, y):
            return tap_gradient(through, y, row, scale)
    out: Tensor
    if through is None:
        out = wide(y) * scale
    else:
        out = torch.add(wide(through), wide(y), alpha=scale)
    if row is not None:
        out = out.sub_(row, alpha=scale)
    return out.to(y.dtype)


def native_fits(y: Tensor, row: Tensor | None) -> bool:
    """Whether a native kernel does it.

    Args:
        y: output of the layer.
        row: the bias in the layout of y; None: there is none.
    """
    if not native_available() or not has_numbers(y):
        return False
    from dampen.native.ops import fits_tap  # only where it was built

    return fits_tap(y, row)
