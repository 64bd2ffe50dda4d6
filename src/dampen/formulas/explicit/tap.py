"""The penalty tap: a tensor passes through unchanged, and the sum of its squares is read off beside it.

    y, J = tap(y)       J = b sum_i w_i ||y_i - bias||^2  +  v sum_j (sum_i w_i x_ij^2) (sum_o W_oj^2)

For a map y = x W^T + bias the first sum is the paper's Tr(X^T X W^T W), from the output that the forward has; the
second is two vectors, no matrix product. Read off in the ordinary way, J sends a second gradient to y, which autograd
makes, keeps and adds. The backward of the tap adds it to the gradient that passes through anyway, g + 2 b w (y - bias),
in one pass. The bias is in no penalty: what the map behind y would pass on to it is taken back, by the column sums of
y - bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen._torch import apply_directly, has_numbers, in_functorch
from dampen.formulas.explicit.forms import Number
from dampen.formulas.explicit.precision import wide
from dampen.native.library import available as native_available

Cut = tuple[int, int]
"""The first row of a fused map that makes y, and how many do."""


def tap(
    y: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    factor: Number | None = 1.0,
    variance: Number | None = None,
    made_by: tuple[Tensor, Tensor] | None = None,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """y, and factor * sum_i weights_i ||y_i - bias||^2 over its vectors y_i, plus the variance part of the map behind
    it; use the y that is returned. The backward reads y again: give a copy of what may change in place.

    Args:
        y: (..., out), or by heads (B, H, N, dh); not read where `factor` is None.
        bias: broadcasts to y; in no penalty.
        weights: of the vectors y_i and x_i, (...); None: all are 1.
        factor: of the sum over y; None: the form has no such part.
        variance: factor of the sum over x and W; None: the form has no such part.
        made_by: x and W, for the variance part.
        cut: where y, by heads, comes from some rows of a fused map, and bias and W are those of the whole map.
    """
    x, weight = (None, None) if made_by is None or variance is None else made_by
    if torch.compiler.is_compiling() or in_functorch():
        return y, _plain(y, bias, weights, factor, variance, x, weight, cut)  # type: ignore[return-value]
    seen, bias = (None, None) if factor is None else (y, bias)
    passed, value = _apply(seen, bias, weights, factor, variance, x, weight, cut)
    return y if passed is None else passed, value  # type: ignore[return-value]


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 alone."""
    return tap(y, bias, weights)[1]


def column_power(weight: Tensor, cut: Cut | None = None) -> Tensor:
    """sum_o W_oj^2 of a (..., out, in) weight, or of some of its rows."""
    return wide(weight if cut is None else weight.narrow(0, *cut)).square().sum(-2)


def feature_sums(x: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i x_ij^2 of (..., in) and (...)."""
    squares = wide(x).square().flatten(0, -2)
    return squares.sum(0) if weights is None else weights.reshape(-1) @ squares


def _of_vectors(weights: Tensor, y: Tensor) -> Tensor:
    """Row weights (B, N) beside the vectors of y, which may be by heads (B, H, N, dh)."""
    return weights if weights.ndim == y.ndim - 1 else weights.unsqueeze(1)


def weighed(y: Tensor, weights: Tensor | None) -> Tensor:
    """w_i y_i."""
    return y if weights is None else y * _of_vectors(weights, y).unsqueeze(-1)


def sum_of_squares(bare: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i ||y_i||^2."""
    if weights is not None:
        return (torch.linalg.vector_norm(bare, dim=-1).square() * _of_vectors(weights, bare)).sum()
    if bare.is_contiguous():
        flat = bare.view(-1)
        return torch.dot(flat, flat)
    return torch.linalg.vector_norm(bare).square()


def _row(bias: Tensor | None, y: Tensor, cut: Cut | None) -> Tensor | None:
    """The bias as it stands in y."""
    if bias is None or cut is None:
        return None if bias is None else wide(bias)
    return wide(bias.narrow(0, *cut).view(y.shape[1], 1, y.shape[3]))


def _plain(
    y: Tensor | None, bias: Tensor | None, weights: Tensor | None, factor: Number | None, variance: Number | None,
    x: Tensor | None, weight: Tensor | None, cut: Cut | None,
) -> Tensor:  # fmt: skip
    """The same for compiled graphs and for functorch, which differentiate it themselves."""
    values = []
    if factor is not None and y is not None:
        row = _row(bias, y, cut)
        bare = wide(y) if row is None else wide(y) - row
        values.append(factor * (weighed(bare, weights) * bare).sum())
    if variance is not None and x is not None and weight is not None:
        values.append(variance * (feature_sums(x, weights) @ column_power(weight, cut)))
    return sum(values[1:], start=values[0])


class _Tap(torch.autograd.Function):
    """`forward` takes the context, because torch binds the signature of one that does not on every call, by
    `inspect`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor | None, bias: Tensor | None, weights: Tensor | None, factor: Number | None,
        variance: Number | None, x: Tensor | None, weight: Tensor | None, cut: Cut | None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.variance, ctx.cut, ctx.native = factor, variance, cut, False
        value: Any = None
        sums = features = columns = None
        if factor is not None and y is not None:
            row = _row(bias, y, cut)
            if weights is None and not isinstance(factor, Tensor) and native_fits(y, row):
                from dampen.native.ops import tap_sums  # only where it was built

                value, sums = tap_sums(y, row)
                ctx.native = True
            else:
                bare = wide(y) if row is None else wide(y) - row
                value = sum_of_squares(bare, weights)
                sums = None if row is None else weighed(bare, weights).sum_to_size(row.shape)
            value = value * factor
        if variance is not None and x is not None and weight is not None:
            features, columns = feature_sums(x, weights), column_power(weight, cut)
            v = torch.dot(features, columns) * variance
            value = v if value is None else value + v
        ctx.save_for_backward(y, bias, weights, sums, x, weight, features, columns)
        return None if y is None else y.detach(), value  # not a view: a model may go on in place

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return through, None, None, None, None, None, None, None
        y, bias, weights, sums, x, weight, features, columns = ctx.saved_tensors
        scale = twice_of(grad)
        to_y, to_bias, to_x, to_weight = through, None, None, None
        if ctx.factor is not None:
            row, s = _row(bias, y, ctx.cut), scale * ctx.factor
            to_y = add_bare(through, y, row, weights, s, ctx.native)
            if row is not None and ctx.needs_input_grad[1]:
                if torch.is_grad_enabled():
                    sums = weighed(wide(y) - row, weights).sum_to_size(row.shape)
                to_bias = _as_whole(bias, ctx.cut, (sums * -s).to(bias.dtype))
        if ctx.variance is not None:
            s = scale * ctx.variance
            if torch.is_grad_enabled():  # to be differentiated again: as functions of x and W
                features, columns = feature_sums(x, weights), column_power(weight, ctx.cut)
            if ctx.needs_input_grad[5]:
                to_x = weighed(x * (columns * s), weights).to(x.dtype)
            if ctx.needs_input_grad[6]:
                part = weight if ctx.cut is None else weight.narrow(0, *ctx.cut)
                to_weight = _as_whole(weight, ctx.cut, (part * (features * s)).to(weight.dtype))
        return to_y, to_bias, None, None, None, to_x, to_weight, None


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
        return (bare if through is None else through + bare).to(y.dtype)
    if native and through is not None and through.dtype is torch.float32:
        from dampen.native.ops import tap_gradient  # it was there in the forward

        return tap_gradient(through, y, row, scale)
    out = wide(y) * scale if through is None else torch.add(wide(through), wide(y), alpha=scale)
    return (out if row is None else out.sub_(row, alpha=scale)).to(y.dtype)


def _as_whole(whole: Tensor, cut: Cut | None, part: Tensor) -> Tensor:
    """The gradient of some rows as one of the whole."""
    if cut is None or cut[1] == whole.shape[0]:
        return part.view(whole.shape)
    rest = whole.shape[0] - sum(cut)
    return torch.nn.functional.pad(part.reshape(cut[1], *whole.shape[1:]), (0, 0) * (whole.ndim - 1) + (cut[0], rest))


def native_fits(y: Tensor, row: Tensor | None) -> bool:
    """Whether a native kernel does it."""
    if not native_available() or not has_numbers(y):
        return False
    from dampen.native.ops import fits_tap  # only where it was built

    return fits_tap(y, row)
