"""The penalty of one linear map y = x W^T: value, output, and both feed-forward layers (arXiv 2604.20505).

    J = 1/2 (bias factor * b + variance factor * v)
    b = sum_i ||x_i W^T||^2        v = sum_j (sum_i x_ij^2) (sum_o W_oj^2)

A map of a layer and its penalty are one function, `multiply`; the penalty is read off beside the map where that cannot
be (compiled graphs, adapters, modules with a forward of their own). Nothing of shape in x in or out x out is built.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dampen._torch import apply_directly, in_functorch, saved_tensors_are_hooked, version_of
from dampen.calls import LinearCall
from dampen.calls.later import Penalty, now
from dampen.formulas.explicit.again import again
from dampen.formulas.explicit.forms import Number, single
from dampen.formulas.explicit.low_rank import add_adapter, merge
from dampen.formulas.explicit.maps import only_weight
from dampen.formulas.explicit.precision import in_full_precision, no_autocast, wide, wide_dtype
from dampen.formulas.explicit.reductions import Rows, token_rows
from dampen.formulas.explicit.squares import column_power, feature_sums, map_variance
from dampen.formulas.explicit.tap import Cut, add_bare, native_fits, sum_of_squares, tap, twice_of, weighed
from dampen.formulas.explicit.together import may_wait, wait

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


def multiply(call: LinearCall, term: Term, swapped: bool = False) -> tuple[Tensor, Penalty] | None:
    """The linear map itself, x W^T + bias, together with its penalty; None where `map_penalty` must read it off
    beside."""
    x = call.input
    plain = type(x) is Tensor and type(call.weight) in (Tensor, torch.nn.Parameter)
    if term.detach or call.adapter is not None or not plain or torch.compiler.is_compiling() or in_functorch():
        return None
    rows = _rows(x, call.valid, term, swapped, call)
    b, v = _factors(term, rows)
    size = x.numel() // call.weight.shape[1] * call.weight.shape[0]
    if v is None and rows.weights is None and may_wait(x, call.weight, call.bias, b, size):
        y = torch.nn.functional.linear(x, call.weight, call.bias)
        return y, wait(y, call.bias, b, x, call.weight)
    out: tuple[Tensor, Penalty] = _apply(x, call.weight, call.bias, rows.weights, b, v)
    return out


def map_penalty(call: LinearCall, term: Term, swapped: bool = False) -> Tensor:
    """The penalty of one linear map as a layer ran it, read off beside it."""
    columns, reads_output = None, term.form != "inverted"
    if call.adapter is not None:
        columns = None if term.form == "paper" else call.adapter.columns(call.weight)
        call = merge(call) if term.detach else add_adapter(call)
    x, y, bias = call.input, call.output, call.bias
    rows = _rows(x, call.valid, term, swapped, call)
    x = x.detach() if term.detach else x
    if not reads_output or y is None:
        y, bias = torch.nn.functional.linear(wide(x), wide(call.weight)) if reads_output else None, None
    elif term.detach:
        y, bias = only_weight(y.detach(), bias, x, call.weight), None
    else:
        y = y.clone()  # a model may change its own in place (nn.ReLU(inplace=True))
    if columns is None:
        return now(tap_linear(y, bias, x, call.weight, rows, term)[1])
    factor, variance = _factors(term, rows)  # the adapter has its part in y, and in the columns
    value = variance * (again(feature_sums, x, rows.weights) @ columns)  # type: ignore[operator]
    if y is None or factor is None:  # none where the output is not read
        return value
    return value + tap(y, bias, rows.weights, factor)[1]


def tap_branch(y: Tensor, call: LinearCall, term: Term, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """y, and the penalty of dropout on the residual branch that the map gives out: no weight stands in it.

    With y the branch just before it is added, bias and all, and m a plain mask, E ||m y - y||^2 = p ||y||^2, which
    splits into p^2 ||y||^2 (bias, the paper's form) and p (1-p) ||y||^2; with inverted masks it is p/(1-p) ||y||^2.
    """
    rows = _rows(y, call.valid, term, swapped, call)
    factor = sum(f for f in _factors(term, rows) if f is not None)
    if call.adapter is not None:  # LoRA beside the map: the branch is the sum of both
        return y, tap(wide(y) + call.adapter.output(call.input), None, rows.weights, factor)[1]
    return tap(y, None, rows.weights, factor)


def tap_linear(
    y: Tensor | None, bias: Tensor | None, x: Tensor, weight: Tensor, rows: Rows, term: Term, cut: Cut | None = None
) -> tuple[Tensor, Penalty]:
    """y = x W^T + bias, as (..., out) or by heads (B, H, N, dh), and the penalty of the map."""
    factor, variance = _factors(term, rows)
    usual = variance is None and rows.weights is None
    if usual and cut is not None and y is not None and may_wait(y, weight, bias, factor, y.numel()):
        return y, wait(y, bias, factor, x, weight, cut)
    values = []
    if factor is not None and y is not None:
        y, value = tap(y, bias, rows.weights, factor, cut)
        values.append(value)
    if variance is not None:
        part = slice(None) if cut is None else slice(cut[0], sum(cut))
        values.append(variance * again(map_variance, x, weight, rows.weights, part))
    return y, sum(values[1:], start=values[0])  # type: ignore[return-value]


def _factors(term: Term, rows: Rows) -> tuple[Number | None, Number | None]:
    """Of the sums over y and over x and W, with lambda and the reduction in them."""
    (b, v, _), scale = single(term.form, term.rate), term.weight * rows.factor
    return None if b is None else scale * b, None if v is None else scale * v


def _rows(x: Tensor, valid: Tensor | None, term: Term, swapped: bool, call: LinearCall) -> Rows:
    """The row weights, shaped as the vectors of x: (B, N, in), more token dimensions in the middle, tokens without
    samples, or (N, B, in) where `swapped`."""
    swapped = swapped and x.ndim == 3
    tokens = x.shape[0] if swapped or x.ndim == 2 else x.shape[1:-1].numel()
    batch = x.shape[1] if swapped else 1 if x.ndim == 2 else x.shape[0]
    if x.ndim == 2 and call.role and term.reduction in ("token_mean", "author"):
        raise RuntimeError(
            f"reduction={term.reduction!r} divides by each sample's tokens, but "
            f"'{call.site.name if call.site else call.role}' gives its {call.role} map tokens without samples, of "
            f"shape {tuple(x.shape)}. Use reduction='mean' or 'sum'."
        )
    if valid is None:
        return token_rows(term.reduction, batch, tokens, None)
    valid = (valid.t() if swapped else valid).reshape(-1, tokens)
    weights, factor = token_rows(term.reduction, batch, tokens, valid, wide_dtype(x))
    return Rows((weights.t() if swapped else weights).reshape(x.shape[:-1]), factor)  # type: ignore[union-attr]


class _Linear(torch.autograd.Function):
    """One function for map and penalty: x W^T is read before the bias is added, so that nothing has to be taken back
    from the bias, and the gradients of both are added up in the products that the map's own backward makes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor | None, factor: Number | None,
        variance: Number | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.variance, ctx.kept, ctx.version = factor, variance, None, 0
        ctx.bias_dtype = None if bias is None else bias.dtype
        value: Any = None
        kept = features = columns = None
        y = torch.nn.functional.linear(x, weight)  # with a bias it would be a view, which no model may change in place
        if factor is not None:
            value = sum_of_squares(wide(y), weights) * factor
        y = y if bias is None else y.add_(bias)
        if factor is not None:
            if saved_tensors_are_hooked():  # a checkpoint or offloading sees every tensor that is kept
                kept, ctx.version = y.clone(), None
            else:
                ctx.kept = y.detach()
                ctx.version = version_of(ctx.kept)
        if variance is not None:
            with no_autocast(x.device.type):
                features, columns = feature_sums(x, weights), column_power(weight)
                v = torch.dot(features, columns) * variance
            value = v if value is None else value + v
        ctx.dtype = y.dtype
        ctx.save_for_backward(x, weight, bias, weights, kept, features, columns)
        return y, value

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, weights, y, features, columns = ctx.saved_tensors
        scale = None if grad is None else twice_of(grad)
        g = through = None if through is None else through.reshape(-1, weight.shape[0])  # tokens, as the products do
        shape, x = x.shape, x.reshape(-1, weight.shape[1])
        weights = None if weights is None else weights.reshape(-1)
        if scale is not None and ctx.factor is not None:
            y, ctx.kept = ctx.kept if y is None else y, None  # the graph may outlive its backward
            changed = ctx.version is not None and y is not None and version_of(y) != ctx.version  # in place
            if y is None or changed or torch.is_grad_enabled():
                with no_autocast(x.device.type):
                    y, bias = torch.nn.functional.linear(wide(x), wide(weight)), None
            y = y.view(-1, weight.shape[0])
            native = y.dtype is torch.float32 and weights is None and native_fits(y, bias)
            row = None if bias is None else wide(bias)
            g = add_bare(through, y, row, weights, scale * ctx.factor, native).to(ctx.dtype)
        to_x = to_weight = to_bias = None
        if g is not None and ctx.needs_input_grad[0]:
            to_x = g.mm(weight.to(g.dtype))
        if g is not None and ctx.needs_input_grad[1]:
            to_weight = g.t().mm(x.to(g.dtype))
        if through is not None and ctx.needs_input_grad[2]:
            to_bias = through.sum(0)
        if scale is not None and ctx.variance is not None:
            if torch.is_grad_enabled():  # to be differentiated again: as functions of x and W
                features, columns = feature_sums(x, weights), column_power(weight)
            s = scale * ctx.variance
            if ctx.needs_input_grad[0]:
                added = weighed(x * (columns * s), weights)
                to_x = added if to_x is None else to_x + added
            if ctx.needs_input_grad[1]:
                added = weight * (features * s)
                to_weight = added if to_weight is None else to_weight + added
        return (
            None if to_x is None else to_x.to(x.dtype).view(shape),
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(ctx.bias_dtype),
            None,
            None,
            None,
        )


_apply: Any = apply_directly(_Linear)
