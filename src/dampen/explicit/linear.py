"""The penalty of one linear map y = x W^T: value, and both feed-forward layers (arXiv 2604.20505).

    J = 1/2 (bias factor * b + variance factor * v)
    b = sum_i ||x_i W^T||^2                        the paper's Tr(X^T X W^T W), from the output that the forward has
    v = sum_j (sum_i x_ij^2) (sum_o W_oj^2)        two vectors, no matrix product

Nothing of shape in x in or out x out is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.explicit.forms import Number, combine, single
from dampen.explicit.precision import in_full_precision, wide
from dampen.explicit.reductions import Rows, token_rows


@in_full_precision
def linear_penalty(
    x: Tensor,
    weight: Tensor,
    rate: Number,
    *,
    form: str = "paper",
    reduction: str = "mean",
    valid: Tensor | None = None,
    output: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The penalty of dropout on the input of a linear map.

    Args:
        x: (B, N, in), or more token dimensions in the middle.
        weight: (out, in).
        rate: p.
        form: paper, exact or inverted.
        reduction: mean, sum, token_mean or author.
        valid: (B, N) bool, False on padded tokens.
        output: x W^T + bias, if the forward has it already; saves the matrix product.
        bias: what `output` has added; biases are in no penalty.

    >>> import torch
    >>> x, w = torch.ones(2, 3, 4), torch.ones(5, 4)
    >>> linear_penalty(x, w, 0.5).item()  # 1/2 p^2 ||x W^T||^2 / 6 tokens = 1/8 * 5 * 4^2
    10.0
    """
    tokens = x.shape[1:-1].numel() if x.ndim > 2 else x.shape[0]
    batch = x.shape[0] if x.ndim > 2 else 1
    rows = token_rows(reduction, batch, tokens, None if valid is None else valid.reshape(-1, tokens), wide(x).dtype)
    factors = single(form, rate)
    b = v = None
    if factors.bias is not None:
        output = torch.nn.functional.linear(wide(x), wide(weight)) if output is None else output
        b = squared_norm(bare(output, bias).reshape(batch, tokens, -1), rows.weights)
    if factors.variance is not None:
        v = feature_power(x.reshape(batch, tokens, -1), rows.weights) @ column_power(weight)
    return combine(factors, b, v) * rows.factor


def bare(y: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map's output without its bias: always a tensor of its own, because a model may change y in place."""
    y = wide(y)
    return y.clone() if bias is None else y - wide(bias)


def squared_norm(y: Tensor, weights: Tensor | None) -> Tensor:
    """sum_i weights_i ||y_i||^2 over all vectors y_i in the last dimension; `weights` broadcast to y.shape[:-1]."""
    norms = torch.linalg.vector_norm(y, dim=-1).square()
    return norms.sum() if weights is None else (norms * weights).sum()


def feature_power(x: Tensor, weights: Tensor | None, per_sample: bool = False) -> Tensor:
    """sum_i weights_i x_ij^2, of (B, N, in): (in,), or (B, in) per sample."""
    squares = wide(x).square()
    if weights is not None:
        squares = squares * weights.unsqueeze(-1)
    return squares.sum(1 if per_sample else (0, 1))


def column_power(weight: Tensor) -> Tensor:
    """sum_o W_oj^2 of a (..., out, in) weight."""
    return wide(weight).square().sum(-2)


def scaled_rows(rows: Rows) -> Tensor | Number:
    """Row weights and factor as one."""
    return rows.factor if rows.weights is None else rows.weights * rows.factor
