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

from dampen._torch import has_numbers, in_functorch, saved_tensors_are_hooked, version_of
from dampen.formulas.explicit.forms import Number
from dampen.formulas.explicit.precision import no_autocast, wide
from dampen.native.library import available as native_available


def tap(
    y: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    factor: Number = 1.0,
    made_by: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """y, and factor * sum_i weights_i ||y_i - bias||^2 over its vectors y_i; use the y that is returned.

    Args:
        y: (..., out).
        bias: broadcasts to y; in no penalty.
        weights: broadcast to y.shape[:-1]; None: all are 1.
        factor: of the whole sum.
        made_by: x and W of y = x W^T + bias. With them the model may change y in place afterwards (an activation
            with inplace=True): x W^T is then made again in the backward, which reads it.
    """
    if torch.compiler.is_compiling() or in_functorch():
        if made_by is not None:
            y = y.clone()  # may change in place
        return y, factor * _plain(y, bias, weights)
    out: tuple[Tensor, Tensor] = _Tap.apply(y, bias, weights, factor, *(made_by or (None, None)))[:2]
    return out


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 alone. The backward reads y again: give a copy of what may change in place."""
    return tap(y, bias, weights)[1]


def _plain(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    bare = wide(y) if bias is None else wide(y) - wide(bias)
    squares = torch.linalg.vector_norm(bare, dim=-1).square()
    out: Tensor = squares.sum() if weights is None else (squares * weights).sum()
    return out


class _Tap(torch.autograd.Function):
    """With s = sum_i w_i y_i and r = s - (sum_i w_i) bias: sum_i w_i ||y_i - bias||^2 = sum_i w_i ||y_i||^2 - bias .
    (s + r), so y - bias is never written down, and -2 r is the gradient of the bias.

    `forward` takes the context, because torch binds the signature of one that does not on every call, by `inspect`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        factor: Number,
        x: Tensor | None,
        weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.kept, ctx.dtype, ctx.native = factor, None, y.dtype, False
        full = wide(y)
        if weights is None and native_available() and not isinstance(factor, Tensor) and _fits_native(y, bias):
            from dampen.native.ops import tap_sums  # only where it was built

            total, sums = tap_sums(y, bias)
            ctx.native = True
            return _Tap.keep(ctx, y, bias, weights, None if bias is None else sums, x, weight), total.mul_(factor)
        if weights is not None:
            total = (torch.linalg.vector_norm(full, dim=-1).square() * weights).sum()
        elif full.is_contiguous():
            flat = full.view(-1)
            total = torch.dot(flat, flat)
        else:
            total = torch.linalg.vector_norm(full).square()
        r = None
        if bias is not None:
            b = wide(bias)
            if weights is None:
                s = full.sum_to_size(bias.shape)
                r = torch.sub(s, b, alpha=y.numel() // bias.numel())
            else:
                s = (full * weights.unsqueeze(-1)).sum_to_size(bias.shape)
                r = s - weights.sum() * b
            total = total - torch.dot((s + r).view(-1), b.reshape(-1))
        return _Tap.keep(ctx, y, bias, weights, r, x, weight), total * factor

    @staticmethod
    def keep(
        ctx: Any,
        y: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        r: Tensor | None,
        x: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:
        """What the backward needs, and y as it goes on."""
        if x is None or saved_tensors_are_hooked():  # a checkpoint or offloading sees every tensor that is kept
            ctx.save_for_backward(y if x is None else y.clone(), bias, weights, r)
        else:
            ctx.save_for_backward(None, bias, weights, r, x, weight)
            ctx.kept, ctx.version = y.detach(), version_of(y)
        return y.detach()  # not a view: a model may go on in place

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return through, None, None, None, None, None
        y, bias, weights, r, *made_by = ctx.saved_tensors
        if y is None:
            kept, ctx.kept = ctx.kept, None  # the graph may outlive its backward
            if kept is not None and version_of(kept) == ctx.version and not torch.is_grad_enabled():
                y = kept
            else:
                y, bias_in_y = _again(*made_by), None
                return (*_slow(through, grad * ctx.factor, y, bias_in_y, bias, weights, r, ctx.dtype), None, None)
        if (
            torch.is_grad_enabled()
            or weights is not None
            or isinstance(ctx.factor, Tensor)
            or grad.device.type != "cpu"
        ):
            return (*_slow(through, grad * ctx.factor, y, bias, bias, weights, r, ctx.dtype), None, None)
        scale = 2 * ctx.factor * grad.item()
        if ctx.native and through is not None and through.dtype is torch.float32:
            from dampen.native.ops import tap_gradient  # it was there in the forward

            return tap_gradient(through, y, bias, scale), None if r is None else r.mul(-scale), None, None, None, None
        full = wide(y)
        out = full * scale if through is None else torch.add(wide(through), full, alpha=scale)
        if bias is not None:
            out.sub_(bias, alpha=scale)
        return out.to(ctx.dtype), None if r is None else (r * -scale).to(bias.dtype), None, None, None, None


def _fits_native(y: Tensor, bias: Tensor | None) -> bool:
    from dampen.native.ops import fits_tap

    return has_numbers(y) and fits_tap(y, bias)


def _again(x: Tensor, weight: Tensor) -> Tensor:
    with no_autocast(x.device.type):
        return torch.nn.functional.linear(wide(x), wide(weight))


def _slow(
    through: Tensor | None,
    grad: Tensor,
    y: Tensor,
    bias_in_y: Tensor | None,
    bias: Tensor | None,
    weights: Tensor | None,
    r: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """The backward with row weights, on any device, and where it is differentiated itself."""
    bare = wide(y) if bias_in_y is None else wide(y) - wide(bias_in_y)
    rows = bare if weights is None else bare * weights.unsqueeze(-1)
    out = 2 * grad * rows
    to_bias = None
    if bias is not None:
        sums = rows.sum_to_size(bias.shape) if torch.is_grad_enabled() or r is None else r
        to_bias = (-2 * grad * sums).to(bias.dtype)
    out = out if through is None else through + out
    return out.to(dtype), to_bias, None, None
