"""The penalty tap: a tensor passes through unchanged, and the sum of its squares is read off beside it.

    y, J = tap(y)       J = factor * sum_i w_i ||y_i - bias||^2

Read off in the ordinary way, J sends a second gradient to y, which autograd makes, keeps and adds. The backward of the
tap adds it to the gradient that passes through anyway, g + 2 factor w (y - bias), in one pass. The bias is in no
penalty: what the map behind y would pass on to it is taken back, by the column sums of y - bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen._torch import apply_directly, has_numbers, in_functorch
from dampen.functional.explicit.forms import Number
from dampen.functional.explicit.precision import wide
from dampen.native.library import available as native_available

Cut = tuple[int, int]
"""The first row of a fused map that makes y, and how many do."""


def tap(
    y: Tensor, bias: Tensor | None, weights: Tensor | None, factor: Number = 1.0, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """y, and factor * sum_i weights_i ||y_i - bias||^2 over its vectors y_i; use the y that is returned. The backward
    reads y again: give a copy of what may change in place.

    Args:
        y: (..., out), or by heads (B, H, N, dh).
        bias: broadcasts to y; in no penalty.
        weights: of the vectors y_i, (...); None: all are 1.
        factor: of the whole sum.
        cut: where y, by heads, comes from some rows of a fused map, and bias is that of the whole map.
    """
    if torch.compiler.is_compiling() or in_functorch():  # these differentiate it themselves
        row = bias_row(bias, y, cut)
        bare = wide(y) if row is None else wide(y) - row
        return y, factor * (weighed(bare, weights) * bare).sum()
    out: tuple[Tensor, Tensor] = _apply(y, bias, weights, factor, cut)
    return out


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 alone."""
    return tap(y, bias, weights)[1]


def _of_vectors(weights: Tensor, y: Tensor) -> Tensor:
    """Row weights (B, N) beside the vectors of y, which may be by heads (B, H, N, dh)."""
    return weights if weights.ndim == y.ndim - 1 else weights.unsqueeze(1)


def weighed(y: Tensor, weights: Tensor | None) -> Tensor:
    """w_i y_i."""
    return y if weights is None else y * _of_vectors(weights, y).unsqueeze(-1)


def sum_of_squares(bare: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i ||y_i||^2."""
    if weights is not None:
        norms: Tensor = torch.linalg.vector_norm(bare, dim=-1)
        return (norms.square() * _of_vectors(weights, bare)).sum()
    if bare.is_contiguous():
        flat = bare.view(-1)
        return torch.dot(flat, flat)
    norm: Tensor = torch.linalg.vector_norm(bare)
    return norm.square()


def bias_row(bias: Tensor | None, y: Tensor, cut: Cut | None) -> Tensor | None:
    """The bias as it stands in y."""
    if bias is None or cut is None:
        return None if bias is None else wide(bias)
    return wide(bias.narrow(0, *cut).view(y.shape[1], 1, y.shape[3]))


class _Tap(torch.autograd.Function):
    """`forward` takes the context, because torch binds the signature of one that does not on every call, by
    `inspect`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor | None, weights: Tensor | None, factor: Number, cut: Cut | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.cut = factor, cut
        row, sums = bias_row(bias, y, cut), None
        ctx.native = weights is None and not isinstance(factor, Tensor) and native_fits(y, row)
        if ctx.native:
            from dampen.native.taps import tap_sums  # only where it was built

            value, sums = tap_sums(y, row)
        else:
            bare = wide(y) if row is None else wide(y) - row
            value = sum_of_squares(bare, weights)
            if row is not None:
                sums = weighed(bare, weights).sum_to_size(row.shape)
        ctx.save_for_backward(y, bias, weights, sums)
        return y.detach(), value * factor  # not a view: a model may go on in place

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return through, None, None, None, None
        y, bias, weights, sums = ctx.saved_tensors
        row, scale, to_bias = bias_row(bias, y, ctx.cut), twice_of(grad) * ctx.factor, None
        if row is not None and ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # to be differentiated again: as a function of y
                sums = weighed(wide(y) - row, weights).sum_to_size(row.shape)
            to_bias = (sums * -scale).to(bias.dtype).view(-1 if ctx.cut else bias.shape)
            if ctx.cut is not None:
                to_bias = torch.nn.functional.pad(to_bias, (ctx.cut[0], bias.shape[0] - sum(ctx.cut)))
        return add_bare(through, y, row, weights, scale, ctx.native), to_bias, None, None, None


_apply: Any = apply_directly(_Tap)


def twice_of(grad: Tensor) -> Any:
    """2 grad: a plain number, which spares small operations, where nobody has to wait for it or differentiates it."""
    return 2 * grad if torch.is_grad_enabled() or grad.device.type != "cpu" else 2 * grad.item()


def add_bare(
    through: Tensor | None, y: Tensor, row: Tensor | None, weights: Tensor | None, scale: Any, native: bool = False
) -> Tensor:
    """through + scale w (y - bias), in the dtype of y."""
    if weights is not None or isinstance(scale, Tensor):
        bare = weighed(wide(y) if row is None else wide(y) - row, weights) * scale
        both: Tensor = bare if through is None else through + bare
        return both.to(y.dtype)
    if native and through is not None:
        from dampen.native.taps import fits_gradient, tap_gradient  # it was there in the forward

        if fits_gradient(through, y):
            return tap_gradient(through, y, row, scale)
    out = wide(y) * scale if through is None else torch.add(wide(through), wide(y), alpha=scale)
    return (out if row is None else out.sub_(row, alpha=scale)).to(y.dtype)


def native_fits(y: Tensor, row: Tensor | None) -> bool:
    """Whether a native kernel does it."""
    if not native_available() or not has_numbers(y):
        return False
    from dampen.native.taps import fits_tap  # only where it was built

    return fits_tap(y, row)
