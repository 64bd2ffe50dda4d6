"""Sums of squares, all one contraction, with a backward of one pass; autograd takes three and keeps the squares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dampen.functional.explicit.by_hand import by_hand
from dampen.functional.explicit.precision import wide


def contract_squares(equation: str, x: Tensor, weights: Tensor | None) -> Tensor:
    """einsum(equation, x^2, weights), as in "bni,bn->i"; all weights are 1 where they are None.

    >>> contract_squares("ni,n->i", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None)
    tensor([10., 20.])
    """
    return by_hand(_contract, _gradients, equation, x, weights)


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a weight (out, in), or by heads (H, out, in)."""
    return contract_squares("oj,o->j" if weight.ndim == 2 else "hoj,ho->hj", weight, None)


def feature_power(x: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i w_i x_ij^2 of (..., in) and (...)."""
    return contract_squares("ij,i->j", x.flatten(0, -2), None if weights is None else weights.reshape(-1))


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


def _gradients(
    grad: Tensor, wanted: Sequence[bool], equation: str, x: Tensor, weights: Tensor | None
) -> tuple[None, Tensor | None, Tensor | None]:
    squares, factor, out = _indices(equation)
    to_x = to_weights = None
    if weights is None:
        here = tuple(slice(None) if index in out else None for index in squares)  # the others were summed over
        return None, (x * (2 * grad)[here]).to(x.dtype), None
    if wanted[1]:
        to_x = (x * torch.einsum(f"{out},{factor}->{squares}", grad, 2 * wide(weights))).to(x.dtype)
    if wanted[2]:
        to_weights = torch.einsum(f"{out},{squares}->{factor}", grad, wide(x).square()).to(weights.dtype)
    return None, to_x, to_weights
