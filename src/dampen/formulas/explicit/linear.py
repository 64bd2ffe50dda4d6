"""The penalty of one linear map y = x W^T: value, output, and both feed-forward layers (arXiv 2604.20505).

    J = 1/2 (bias factor * b + variance factor * v)
    b = sum_i ||x_i W^T||^2        v = sum_j (sum_i x_ij^2) (sum_o W_oj^2)

A map of a layer is tapped (`tap.py`) where its output goes on as it is; beside it, where it was changed on its way, has
an adapter, or gives no gradient to its input. Nothing of shape in x in or out x out is built.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dampen.calls import LinearCall
from dampen.formulas.explicit.again import again
from dampen.formulas.explicit.forms import Number, single
from dampen.formulas.explicit.low_rank import add_adapter, merge
from dampen.formulas.explicit.maps import only_weight
from dampen.formulas.explicit.precision import in_full_precision, wide, wide_dtype
from dampen.formulas.explicit.reductions import Rows, token_rows
from dampen.formulas.explicit.tap import Cut, feature_sums, tap

BRANCHES = ("out", "ffn_out")
"""The maps that give out a residual branch."""


class Term(NamedTuple):
    """One term of a penalty: lambda, and what its formula depends on."""

    weight: Number
    rate: Number
    form: str
    reduction: str
    detach: bool = False  # no gradient to the activations


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
    >>> round(linear_penalty(x, w, 0.5).item(), 4)  # 1/2 p^2 ||x W^T||^2 / 6 tokens = 1/8 * 5 * 4^2
    10.0
    """
    call = LinearCall("", x, weight, bias, valid=valid, output=output)
    return map_penalty(call, Term(1.0, rate, form, reduction))


def tap_map(y: Tensor, call: LinearCall, term: Term, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """y, and the penalty of the linear map that made it; `swapped` where its tokens are (N, B, in)."""
    x = call.input
    _check_samples(x, call, term.reduction)
    if term.detach or call.output is None or y is not call.output or call.adapter is not None:
        return y, map_penalty(call, term, swapped)
    rows = _rows(x, call.valid, term.reduction, swapped)
    call.output, value = tap_linear(y, call.bias, x, call.weight, rows, term)
    return call.output, value  # a second tap on this map sees this output


def map_penalty(call: LinearCall, term: Term, swapped: bool = False) -> Tensor:
    """The penalty of one linear map as a layer ran it, read off beside it."""
    columns, reads_output = None, term.form != "inverted"
    if call.adapter is not None:
        columns = None if term.form == "paper" else call.adapter.columns(call.weight)
        call = merge(call) if term.detach else add_adapter(call)
    x, y, bias = call.input, call.output, call.bias
    rows = _rows(x, call.valid, term.reduction, swapped)
    x = x.detach() if term.detach else x
    if not reads_output or y is None:
        y, bias = torch.nn.functional.linear(wide(x), wide(call.weight)) if reads_output else None, None
    elif term.detach:
        y, bias = only_weight(y.detach(), bias, x, call.weight), None
    else:
        y = y.clone()  # a model may change its own in place (nn.ReLU(inplace=True))
    if columns is None:
        return tap_linear(y, bias, x, call.weight, rows, term)[1]
    factors, scale = single(term.form, term.rate), term.weight * rows.factor  # an adapter beside W made y too
    value = scale * factors.variance * (again(feature_sums, x, rows.weights) @ columns)  # type: ignore[operator]
    return value if y is None else value + tap(y, bias, rows.weights, scale * factors.bias)[1]  # type: ignore[operator]


def tap_branch(y: Tensor, call: LinearCall, term: Term, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """y, and the penalty of dropout on the residual branch that the map gives out: no weight stands in it.

    With y the branch just before it is added, bias and all, and m a plain mask, E ||m y - y||^2 = p ||y||^2, which
    splits into p^2 ||y||^2 (bias, the paper's form) and p (1-p) ||y||^2; with inverted masks it is p/(1-p) ||y||^2.
    """
    _check_samples(y, call, term.reduction)
    rows = _rows(y, call.valid, term.reduction, swapped)
    factor = sum(f for f in single(term.form, term.rate) if f is not None) * term.weight * rows.factor
    if call.adapter is not None:  # LoRA beside the map: the branch is the sum of both
        return y, tap(wide(y) + call.adapter.output(call.input), None, rows.weights, factor)[1]
    call.output, value = tap(y, None, rows.weights, factor)
    return call.output, value


def tap_linear(
    y: Tensor | None,
    bias: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    term: Term,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias, as (..., out) or by heads (B, H, N, dh), and the penalty of the map."""
    factors, scale = single(term.form, term.rate), term.weight * rows.factor
    b, v = (None if f is None else scale * f for f in factors[:2])
    return tap(y, bias, rows.weights, b, (x, weight), v, cut)


def _rows(x: Tensor, valid: Tensor | None, reduction: str, swapped: bool) -> Rows:
    """The row weights, shaped as the vectors of x: (B, N, in), more token dimensions in the middle, tokens without
    samples, or (N, B, in) where `swapped`."""
    swapped = swapped and x.ndim == 3
    tokens = x.shape[0] if swapped or x.ndim == 2 else x.shape[1:-1].numel()
    batch = x.shape[1] if swapped else 1 if x.ndim == 2 else x.shape[0]
    if valid is None:
        return token_rows(reduction, batch, tokens, None)
    valid = (valid.t() if swapped else valid).reshape(-1, tokens)
    weights, factor = token_rows(reduction, batch, tokens, valid, wide_dtype(x))
    return Rows((weights.t() if swapped else weights).reshape(x.shape[:-1]), factor)  # type: ignore[union-attr]


def _check_samples(x: Tensor, call: LinearCall, reduction: str) -> None:
    if x.ndim == 2 and reduction in ("token_mean", "author"):
        raise RuntimeError(
            f"reduction={reduction!r} divides by each sample's tokens, but "
            f"'{call.site.name if call.site else call.role}' gives its {call.role} map tokens without samples, of "
            f"shape {tuple(x.shape)}. Use reduction='mean' or 'sum'."
        )
