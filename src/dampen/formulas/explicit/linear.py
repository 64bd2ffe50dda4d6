"""The penalty of one linear map y = x W^T: value, and both feed-forward layers (arXiv 2604.20505).

    J = 1/2 (bias factor * b + variance factor * v)
    b = sum_i ||x_i W^T||^2                        the paper's Tr(X^T X W^T W), from the output that the forward has
    v = sum_j (sum_i x_ij^2) (sum_o W_oj^2)        two vectors, no matrix product

Nothing of shape in x in or out x out is built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.formulas.explicit.forms import Number, Parts, single
from dampen.formulas.explicit.precision import in_full_precision, wide
from dampen.formulas.explicit.reductions import Rows, token_rows
from dampen.formulas.explicit.squares import feature_power, map_variance
from dampen.formulas.explicit.tap import tap


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
    columns: Tensor | None = None,
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
        columns: sum_o W_oj^2, if it is known already.

    >>> import torch
    >>> x, w = torch.ones(2, 3, 4), torch.ones(5, 4)
    >>> round(linear_penalty(x, w, 0.5).item(), 4)  # 1/2 p^2 ||x W^T||^2 / 6 tokens = 1/8 * 5 * 4^2
    10.0
    """
    tokens = x.shape[1:-1].numel() if x.ndim > 2 else x.shape[0]
    batch = x.shape[0] if x.ndim > 2 else 1
    rows = token_rows(reduction, batch, tokens, None if valid is None else valid.reshape(-1, tokens), wide(x).dtype)
    factors, flat = single(form, rate), x.reshape(batch, tokens, -1)
    y = flat
    if factors.bias is not None:
        # a copy of the output, because a model may change it in place (nn.ReLU(inplace=True))
        y = torch.nn.functional.linear(wide(x), wide(weight)) if output is None else output.clone()
    return tap_linear(y.reshape(batch, tokens, -1), bias, flat, weight, rows, factors, columns=columns)[1]


def tap_linear(
    y: Tensor,
    bias: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    factors: Parts,
    scale: Number = 1.0,
    *,
    made_by: tuple[Tensor, Tensor] | None = None,
    columns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias, as (..., out) or by heads (B, H, N, dh), and scale times the penalty of the map.

    y is read where the form has a bias part; `made_by` as in `tap`.
    """
    values = []
    if factors.bias is not None:
        weights = rows.weights if rows.weights is None or y.ndim == x.ndim else rows.weights.unsqueeze(1)
        y, value = tap(y, bias, weights, scale * factors.bias * rows.factor, made_by)
        values.append(value)
    if factors.variance is not None:
        v = map_variance(x, weight, rows.weights) if columns is None else feature_power(x, rows.weights) @ columns
        values.append(scale * factors.variance * rows.factor * v)
    return y, sum(values[1:], start=values[0])
