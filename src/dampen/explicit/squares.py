"""Sums of squares with backwards of one pass each; autograd's own take three and keep the squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen.explicit.precision import no_autocast, wide


def squared_norm(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i - bias||^2 over the vectors y_i of (..., out); `weights` broadcast to y.shape[:-1].

    The backward reads y again: give a copy of what a model may change in place.
    """
    if torch.compiler.is_compiling():
        bare = wide(y) if bias is None else wide(y) - wide(bias)
        return _weigh(torch.linalg.vector_norm(bare, dim=-1).square(), weights).sum()
    total: Tensor = _SquaredNorm.apply(y, bias, weights)[0]
    return total


def feature_power(x: Tensor, weights: Tensor | None, per_sample: bool = False) -> Tensor:
    """sum_i weights_i x_ij^2, of (B, N, in): (in,), or (B, in) per sample."""
    if torch.compiler.is_compiling():
        return _feature_power(x, weights, per_sample)
    out: Tensor = _FeaturePower.apply(x, weights, per_sample)
    return out


def mixed_power(x: Tensor, columns: Tensor) -> Tensor:
    """sum_l x_il^2 columns_hl, of (B, N, in) and (H, in): (B, N, H)."""
    if torch.compiler.is_compiling():
        return wide(x).square() @ wide(columns).t()
    out: Tensor = _MixedPower.apply(x, columns)
    return out


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a (..., out, in) weight."""
    return wide(weight).square().sum(-2)


def column_sums(a: Tensor, rows: Tensor | None) -> Tensor:
    """sum_i r_i A_ij^2 of (B, H, N, M) and (B, N): (B, H, M)."""
    if torch.compiler.is_compiling():
        return _column_sums(a, rows)
    out: Tensor = _ColumnSums.apply(a, rows)
    return out


def _weigh(t: Tensor, weights: Tensor | None) -> Tensor:
    return t if weights is None else t * weights


def _feature_power(x: Tensor, weights: Tensor | None, per_sample: bool) -> Tensor:
    squares = wide(x).square()
    if weights is not None:
        squares = squares * weights.unsqueeze(-1)
    return squares.sum(1 if per_sample else (0, 1))


def _column_sums(a: Tensor, rows: Tensor | None) -> Tensor:
    squares = wide(a).square()
    return squares.sum(-2) if rows is None else (rows[:, None, None, :] @ squares).squeeze(-2)


class _SquaredNorm(torch.autograd.Function):
    """sum_i w_i ||y_i - bias||^2 = sum_i w_i ||y_i||^2 - bias . (s + r) with s = sum_i w_i y_i and r = s - (sum_i
    w_i) bias.

    So y - bias is never written down; r, which is also minus half the gradient of the bias, is the second output.
    """

    @staticmethod
    def forward(y: Tensor, bias: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = wide(y)
        if weights is None and y.is_contiguous():  # longer vectors are faster
            total = torch.linalg.vector_norm(y.flatten(1), dim=-1).square().sum()
        else:
            total = _weigh(torch.linalg.vector_norm(y, dim=-1).square(), weights).sum()
        if bias is None:
            return total, None
        s = (y if weights is None else y * weights.unsqueeze(-1)).sum_to_size(bias.shape)
        r = s - _count(y, bias, weights) * wide(bias)
        return total - ((s + r) * wide(bias)).sum(), r

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, Tensor | None], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_r: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        y, bias, weights, r = ctx.saved_tensors
        out = out_bias = None
        if grad is not None:
            scale = 2 * grad
            if bias is None:
                out = y * _row_scale(scale, weights)
            elif weights is None:
                out = torch.addcmul(-scale * wide(bias), wide(y), scale)
            else:
                out = (wide(y) - wide(bias)) * _row_scale(scale, weights)
            out_bias = None if bias is None else -scale * r
        if grad_r is not None:  # only when differentiated twice
            n = _count(y, bias, weights)
            more = grad_r.expand_as(y) if weights is None else grad_r * weights.unsqueeze(-1)
            out = more if out is None else out + more
            out_bias = -n * grad_r if out_bias is None else out_bias - n * grad_r
        return None if out is None else out.to(y.dtype), None if out_bias is None else out_bias.to(bias.dtype), None


def _row_scale(scale: Tensor, weights: Tensor | None) -> Tensor:
    return scale if weights is None else (scale * weights).unsqueeze(-1)


def _count(y: Tensor, bias: Tensor, weights: Tensor | None) -> Tensor | int:
    """How often each entry of the bias is subtracted: the number of rows, or the sum of their weights."""
    return y.numel() // bias.numel() if weights is None else weights.sum()


class _FeaturePower(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weights: Tensor | None, per_sample: bool) -> Tensor:
        return _feature_power(x, weights, per_sample)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weights = ctx.saved_tensors
        scale = 2 * (grad if grad.ndim == 1 else grad.unsqueeze(1))
        if weights is not None:
            scale = scale * weights.unsqueeze(-1)
        return (x * scale).to(x.dtype), None, None


class _MixedPower(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, columns: Tensor) -> Tensor:
        with no_autocast(x.device.type):
            return (wide(columns) @ wide(x).square().flatten(0, 1).t()).t().unflatten(0, x.shape[:2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, columns = ctx.saved_tensors
        with no_autocast(x.device.type):
            grad_columns = grad.flatten(0, -2).t() @ wide(x).square().flatten(0, -2)
            return (x * (grad @ (2 * wide(columns)))).to(x.dtype), grad_columns.to(columns.dtype)


class _ColumnSums(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, rows: Tensor | None) -> Tensor:
        with no_autocast(a.device.type):
            return _column_sums(a, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        a, rows = ctx.saved_tensors
        scale = 2 * grad.unsqueeze(-2)
        if rows is not None:
            scale = scale * rows[:, None, :, None]
        return (a * scale).to(a.dtype), None
