"""The penalty tap: what a linear map gives passes through unchanged, and the penalty of the map is read off beside it.

    y, J = tap(y)       J = b sum_i w_i ||y_i - bias||^2  +  v sum_j (sum_i w_i x_ij^2) (sum_o W_oj^2)

The first sum is the paper's Tr(X^T X W^T W), from the output that the forward has; the second is two vectors, no matrix
product. Read off in the ordinary way, J sends a second gradient to y, which autograd makes, keeps and adds. The backward
of the tap adds it to the gradient that passes through anyway, g + 2 b w (y - bias), in one pass. The bias is in no
penalty: what the map behind y would pass on to it is taken back, by the column sums of y - bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen._torch import apply_directly, has_numbers, in_functorch, saved_tensors_are_hooked, version_of
from dampen.formulas.explicit.forms import Number
from dampen.formulas.explicit.precision import no_autocast, wide
from dampen.native.library import available as native_available

Cut = tuple[int, int]
"""The first row of a fused map that makes y, and how many do."""


def tap(
    y: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    factor: Number | None = 1.0,
    made_by: tuple[Tensor, Tensor] | None = None,
    variance: Number | None = None,
    cut: Cut | None = None,
) -> tuple[Tensor | None, Tensor]:
    """y, and factor * sum_i weights_i ||y_i - bias||^2 over its vectors y_i, plus the variance part of the map; use the
    y that is returned.

    Args:
        y: (..., out), or by heads (B, H, N, dh); not read where `factor` is None.
        bias: broadcasts to y; in no penalty.
        weights: of the vectors y_i and x_i, (...); None: all are 1.
        factor: of the sum over y; None: the form has no such part.
        made_by: x and W of y = x W^T + bias. With them the model may change y in place afterwards (an activation
            with inplace=True): x W^T is then made again in the backward, which reads it.
        variance: factor of the sum over x and W; None: the form has no such part.
        cut: where y, by heads, comes from some rows of a fused map, and bias and W are those of the whole map.
    """
    x, weight = made_by if made_by is not None and (cut is None or variance is not None) else (None, None)
    if torch.compiler.is_compiling() or in_functorch():
        y = y.clone() if y is not None and x is not None else y  # may change in place
        return y, _plain(y, bias, weights, factor, variance, x, weight, cut)
    if factor is None:
        return y, _apply(None, None, weights, None, variance, x, weight, cut)[1]
    out: tuple[Tensor, Tensor] = _apply(y, bias, weights, factor, variance, x, weight, cut)
    return out


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 alone. The backward reads y again: give a copy of what may change in place."""
    return tap(y, bias, weights)[1]


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a (..., out, in) weight."""
    return wide(weight).square().sum(-2)


def _row(bias: Tensor | None, y: Tensor, cut: Cut | None) -> Tensor | None:
    """The bias as it stands in y."""
    if bias is None or cut is None:
        return None if bias is None else wide(bias)
    return wide(bias.narrow(0, *cut).view(y.shape[1], 1, y.shape[3]))


def _of_vectors(weights: Tensor, y: Tensor) -> Tensor:
    """Row weights (B, N) beside the vectors of y, which may be by heads."""
    return weights if weights.ndim == y.ndim - 1 else weights.unsqueeze(1)


def _weighed(y: Tensor, weights: Tensor | None) -> Tensor:
    return y if weights is None else y * _of_vectors(weights, y).unsqueeze(-1)


def feature_sums(x: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i x_ij^2."""
    squares = wide(x).square().flatten(0, -2)
    return squares.sum(0) if weights is None else weights.reshape(-1) @ squares


def _columns(weight: Tensor, cut: Cut | None) -> Tensor:
    return column_power(weight if cut is None else weight.narrow(0, *cut))


def _sum_of_squares(bare: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return torch.linalg.vector_norm(bare).square()
    return (torch.linalg.vector_norm(bare, dim=-1).square() * _of_vectors(weights, bare)).sum()


def _plain(
    y: Tensor | None, bias: Tensor | None, weights: Tensor | None, factor: Number | None, variance: Number | None,
    x: Tensor | None, weight: Tensor | None, cut: Cut | None,
) -> Tensor:  # fmt: skip
    """The same for compiled graphs and for functorch, which differentiate it themselves."""
    values = []
    if factor is not None and y is not None:
        row = _row(bias, y, cut)
        bare = wide(y) if row is None else wide(y) - row
        squares = bare.square().sum(-1)
        values.append(factor * (squares if weights is None else squares * _of_vectors(weights, y)).sum())
    if variance is not None and x is not None and weight is not None:
        values.append(variance * (feature_sums(x, weights) @ _columns(weight, cut)))
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
        ctx.factor, ctx.variance, ctx.cut, ctx.native, ctx.kept = factor, variance, cut, False, None
        value: Any = None
        kept = sums = features = columns = None
        if factor is not None and y is not None:
            row = _row(bias, y, cut)
            if weights is None and native_available() and not isinstance(factor, Tensor) and _fits_native(y, row):
                from dampen.native.ops import tap_sums  # only where it was built

                value, sums = tap_sums(y, row)
                ctx.native = True
            else:
                bare = wide(y) if row is None else wide(y) - row
                value = _sum_of_squares(bare, weights)
                sums = None if row is None else _weighed(bare, weights).sum_to_size(row.shape)
            value = value * factor if isinstance(factor, Tensor) else value.mul_(factor)
            ctx.dtype = y.dtype
            if x is None or y.ndim != x.ndim:
                kept = y
            elif saved_tensors_are_hooked():  # a checkpoint or offloading sees every tensor that is kept
                kept = y.clone()
            else:
                ctx.kept, ctx.version = y.detach(), version_of(y)
            y = y.detach()  # not a view: a model may go on in place
        if variance is not None and x is not None and weight is not None:
            features, columns = feature_sums(x, weights), _columns(weight, cut)
            v = torch.dot(features, columns) * variance
            value = v if value is None else value + v
        ctx.save_for_backward(kept, bias, weights, sums, x, weight, features, columns)
        return y, value

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return through, None, None, None, None, None, None, None
        y, bias, weights, sums, x, weight, features, columns = ctx.saved_tensors
        twice = torch.is_grad_enabled()  # differentiated itself: as functions of y, x and W
        # a plain number spares small operations, but must be waited for where it is not in this machine's memory
        scale: Any = 2 * grad if twice or grad.device.type != "cpu" else 2 * grad.item()
        to_y, to_bias, to_x, to_weight = through, None, None, None
        if ctx.factor is not None:
            to_y, to_bias = _to_output(ctx, through, scale * ctx.factor, y, bias, weights, sums, x, weight)
        if ctx.variance is not None:
            scale = scale * ctx.variance
            if twice:
                features, columns = feature_sums(x, weights), _columns(weight, ctx.cut)
            if ctx.needs_input_grad[5]:
                to_x = x * (columns * scale)
                to_x = (to_x if weights is None else to_x * weights.unsqueeze(-1)).to(x.dtype)
            if ctx.needs_input_grad[6]:
                part = weight if ctx.cut is None else weight.narrow(0, *ctx.cut)
                to_weight = _in_place_of(weight, ctx.cut, (part * (features * scale)).to(weight.dtype))
        return to_y, to_bias, None, None, None, to_x, to_weight, None


_apply: Any = apply_directly(_Tap)


def _to_output(
    ctx: Any, through: Tensor | None, scale: Any, y: Tensor | None, bias: Tensor | None, weights: Tensor | None,
    sums: Tensor | None, x: Tensor | None, weight: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of y and of the bias."""
    twice, remade = torch.is_grad_enabled(), False
    if y is None:
        y, ctx.kept = ctx.kept, None  # the graph may outlive its backward
        if y is None or version_of(y) != ctx.version or twice:
            with no_autocast(x.device.type):  # type: ignore[union-attr]
                y, remade = torch.nn.functional.linear(wide(x), wide(weight)), True  # type: ignore[arg-type]
    row = _row(bias, y, ctx.cut)
    to_bias = None
    if weights is None and isinstance(scale, float) and not remade:
        if ctx.native and through is not None and through.dtype is torch.float32:
            from dampen.native.ops import tap_gradient  # it was there in the forward

            out = tap_gradient(through, y, row, scale)
        else:
            out = wide(y) * scale if through is None else torch.add(wide(through), wide(y), alpha=scale)
            out = out if row is None else out.sub_(row, alpha=scale)
    else:
        bare = wide(y) if row is None or remade else wide(y) - row
        bare = _weighed(bare, weights)
        sums = bare.sum_to_size(row.shape) if twice and row is not None else sums
        out = bare * scale if through is None else through + bare * scale
    if bias is not None and sums is not None and ctx.needs_input_grad[1]:
        to_bias = _in_place_of(bias, ctx.cut, (sums * -scale).to(bias.dtype))
    return out.to(ctx.dtype), to_bias


def _in_place_of(whole: Tensor, cut: Cut | None, part: Tensor) -> Tensor:
    """The gradient of some rows as one of the whole."""
    if cut is None or cut[1] == whole.shape[0]:
        return part.view(whole.shape)
    rest = whole.shape[0] - sum(cut)
    return torch.nn.functional.pad(part.reshape(cut[1], *whole.shape[1:]), (0, 0) * (whole.ndim - 1) + (cut[0], rest))


def _fits_native(y: Tensor, row: Tensor | None) -> bool:
    from dampen.native.ops import fits_tap

    return has_numbers(y) and fits_tap(y, row)
