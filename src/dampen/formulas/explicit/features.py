"""Sums over heads of squares in the space of the input features, made head by head.

Autograd would keep one (B, T, in) tensor per head; the backward here makes each head's again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen.formulas.explicit.precision import no_autocast, wide


def sum_of_squares(y: Tensor, weight: Tensor) -> Tensor:
    """sum_h (y_h W_h)^2 of (B, H, T, dh) and (H, dh, in): (B, T, in)."""
    if torch.compiler.is_compiling():
        return _sum_of_squares(wide(y), wide(weight))
    out: Tensor = _SumOfSquares.apply(y, weight)
    return out


def sum_of_squared_products(left: Tensor, right: Tensor) -> Tensor:
    """sum_h (left_h^T right_h)^2 of (H, dh, in) and (H, dh, in'): (in, in')."""
    return sum((a.t() @ b).square() for a, b in zip(wide(left), wide(right), strict=True))


def _sum_of_squares(y: Tensor, weight: Tensor) -> Tensor:
    total = (y[:, 0] @ weight[0]).square()
    for h in range(1, weight.shape[0]):
        total = total + (y[:, h] @ weight[h]).square()
    return total


class _SumOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, weight: Tensor) -> Tensor:
        with no_autocast(y.device.type):
            return _sum_of_squares(wide(y), wide(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, weight = ctx.saved_tensors
        grad_y, grad_weight = [], []
        with no_autocast(y.device.type):
            for head, w in zip(wide(y).unbind(1), wide(weight), strict=True):
                back = 2 * grad * (head @ w)
                grad_y.append(back @ w.t())
                grad_weight.append(head.flatten(0, 1).t() @ back.flatten(0, 1))
        return torch.stack(grad_y, 1).to(y.dtype), torch.stack(grad_weight).to(weight.dtype)
