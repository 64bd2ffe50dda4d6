"""Sums of squares, all one contraction, with a backward of one pass; autograd takes three and keeps the squares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen._torch import in_functorch
from dampen.formulas.explicit.precision import no_autocast, wide


def contract_squares(equation: str, x: Tensor, weights: Tensor) -> Tensor:
    """einsum(equation, x^2, weights), as in "bni,bn->i"."""
    if torch.compiler.is_compiling() or in_functorch():
        return torch.einsum(equation, wide(x).square(), wide(weights))
    out: Tensor = _Squares.apply(equation, x, weights)
    return out


def feature_power(x: Tensor, weights: Tensor | None, per_sample: bool = False) -> Tensor:
    """sum_i weights_i x_ij^2, of (B, N, in): (in,), or (B, in) per sample."""
    weights = wide(x.new_ones(())).expand(x.shape[:2]) if weights is None else weights
    return contract_squares("bni,bn->bi" if per_sample else "bni,bn->i", x, weights)


def mixed_power(x: Tensor, columns: Tensor) -> Tensor:
    """sum_l x_il^2 columns_hl, of (B, N, in) and (H, in): (B, N, H)."""
    return contract_squares("bnl,hl->bnh", x, columns)


def column_sums(a: Tensor, rows: Tensor | None) -> Tensor:
    """sum_i r_i A_ij^2 of (B, H, N, M) and (B, N): (B, H, M)."""
    rows = wide(a.new_ones(())).expand(a.shape[0], a.shape[2]) if rows is None else rows
    return contract_squares("bhnm,bn->bhm", a, rows)


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a (..., out, in) weight."""
    return wide(weight).square().sum(-2)


def feature_sums(x: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i x_ij^2 of (..., in) and (...)."""
    squares = wide(x).square().flatten(0, -2)
    return squares.sum(0) if weights is None else weights.reshape(-1) @ squares


def map_variance(x: Tensor, weight: Tensor, weights: Tensor | None, rows: slice = slice(None)) -> Tensor:
    """sum_j (sum_i w_i x_ij^2) (sum_o W_oj^2), of some rows of W: the variance part of a map. To be run `again`."""
    return feature_sums(x, weights) @ column_power(weight[rows])


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, equation: str, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.equation = equation
        with no_autocast(x.device.type):
            return torch.einsum(equation, wide(x).square(), wide(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        x, weights = ctx.saved_tensors
        (squares, factor), out = ctx.equation.split("->")[0].split(","), ctx.equation.split("->")[1]
        to_x = to_weights = None
        with no_autocast(x.device.type):
            if ctx.needs_input_grad[1]:
                to_x = (x * torch.einsum(f"{out},{factor}->{squares}", grad, 2 * wide(weights))).to(x.dtype)
            if ctx.needs_input_grad[2]:
                to_weights = torch.einsum(f"{out},{squares}->{factor}", grad, wide(x).square()).to(weights.dtype)
        return None, to_x, to_weights
