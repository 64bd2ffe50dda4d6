"""The penalty of one linear layer y = x W^T: value, output, and both feed-forward layers (arXiv
2604.20505).

    J = 1/2 (bias factor * b + variance factor * v)
    b = sum_i ||x_i W^T||^2        v = sum_j (sum_i x_ij^2) (sum_o W_oj^2)

A layer and its penalty are one function, `multiply`. The penalty is computed beside the layer where
that is impossible (compiled graphs, adapters, modules with a forward of their own). No x in x in or
out x out matrix is built.

With a low-rank adapter beside the layer, W' = W + s B A (LoRA, arXiv 2106.09685), the penalty reads

    output     x W'^T = x W^T + s (x A^T) B^T      a path of rank r, without LoRA's dropout
    columns    sum_o W'_oj^2 = sum_o W_oj^2 + 2 s sum_r A_rj (B^T W)_rj + s^2 A_:j^T (B^T B) A_:j

Neither builds the merged matrix; `merged` does, for the terms that need all of it (query and key in
the exact forms).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dampen._torch import apply_directly, functorch_level, saved_tensors_are_hooked, version_of
from dampen.calls import LinearCall, Penalty, now
from dampen.functional.explicit.batched import may_wait, wait
from dampen.functional.explicit.reductions import (
    Number,
    RowWeights,
    no_autocast,
    single,
    token_rows,
    wide,
    wide_dtype,
)
from dampen.functional.explicit.squares import (
    Cut,
    add_bare,
    by_hand,
    column_power,
    feature_power,
    native_fits,
    sum_of_squares,
    tap,
    twice_of,
)

BRANCHES = ("out", "ffn_out")
"""The linear layers whose output is a residual branch."""
ATTENTION = ("q", "k", "v", "qkv", "kv")
"""The maps that an attention reads."""


class Term(NamedTuple):
    """One term of a penalty: lambda, and what its formula depends on."""

    weight: Number
    rate: Number
    form: str
    reduction: str
    detach: bool = False  # no gradient to the activations


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
    with no_autocast(x.device.type):
        return map_penalty(call, Term(1.0, rate, form, reduction))


def multiply(call: LinearCall, term: Term, swapped: bool) -> tuple[Tensor, Penalty] | None:
    """The linear map itself, x W^T + bias, together with its penalty; None where `map_penalty` must
    read it off beside.

    Args:
        call: the attention, or the linear layer, at work.
        term: coefficient, rate, form and reduction.
        swapped: tokens come as (N, B, D).
    """
    x, weight = call.input, call.weight
    plain = type(x) is Tensor and type(weight) in (Tensor, torch.nn.Parameter)
    followed = torch.compiler.is_compiling() or functorch_level() is not None
    if term.detach or call.adapter is not None or not plain or followed:
        return None
    rows = _rows(x, call, term, swapped)
    factor, variance = _factors(term, rows)
    size = x.numel() // weight.shape[1] * weight.shape[0]
    y: Tensor
    value: Any
    if variance is None and may_wait(x, weight, call.bias, factor, size):
        y = functional.linear(x, weight, call.bias)
        return y, wait(y, call.bias, factor, x, weight, rows=rows.weights)
    # nothing is read of the output
    if factor is None:
        y, value = functional.linear(x, weight, call.bias), 0.0
    else:
        y, value = _apply_linear(x, weight, call.bias, rows.weights, factor)
    if variance is not None:
        value = value + variance * torch.dot(feature_power(x, rows.weights), column_power(weight))
    return y, value


def map_penalty(call: LinearCall, term: Term, swapped: bool = False) -> Tensor:
    """The penalty of one linear map as a layer ran it, read off beside it.

    Args:
        call: the attention, or the linear layer, at work.
        term: coefficient, rate, form and reduction.
        swapped: tokens come as (N, B, D).
    """
    call = replace(call, input=call.input.detach()) if term.detach else call
    return now(
        tap_linear(*_output(call, term), call, _rows(call.input, call, term, swapped), term)[1]
    )


def _output(call: LinearCall, term: Term) -> tuple[Tensor | None, Tensor | None]:
    """What a penalty reads of a map's output, x W^T + bias, and the bias in it."""
    if term.form == "inverted":
        return None, None  # nothing
    x, y, adapter = call.input, call.output, call.adapter
    if y is not None and adapter is not None:
        y = wide(y) + adapter.output(x)
    elif y is not None and not term.detach and call.role not in ATTENTION:
        # a model may change its own in place (nn.ReLU(inplace=True)), but not what an attention has
        # read
        y = y.clone()
    if y is not None and not term.detach:
        return y, call.bias
    weight = call.weight if adapter is None else adapter.merged(call.weight)
    return only_weight(x, weight, y, call.bias) if term.detach else functional.linear(
        wide(x), wide(weight)
    ), None


def tap_branch(
    y: Tensor, call: LinearCall, term: Term, swapped: bool = False
) -> tuple[Tensor, Tensor]:
    """y, and the penalty of dropout on the residual branch that the layer returns: no weight is
    in it.

    With y the branch just before it is added, bias and all, and m a plain mask, E ||m y - y||^2 = p
    ||y||^2, which splits into p^2 ||y||^2 (bias, the paper's form) and p (1-p) ||y||^2; with
    inverted masks it is p/(1-p) ||y||^2.

    Args:
        y: output of the layer.
        call: the attention, or the linear layer, at work.
        term: coefficient, rate, form and reduction.
        swapped: tokens come as (N, B, D).
    """
    rows = _rows(y, call, term, swapped)
    factor = sum(f for f in _factors(term, rows) if f is not None)
    # LoRA beside the map: the branch is the sum of both
    if call.adapter is not None:
        return y, tap(wide(y) + call.adapter.output(call.input), None, rows.weights, factor)[1]
    return tap(y, None, rows.weights, factor)


def tap_linear(
    y: Tensor | None,
    bias: Tensor | None,
    call: LinearCall,
    rows: RowWeights,
    term: Term,
    cut: Cut | None = None,
) -> tuple[Tensor, Penalty]:
    """y = x W^T + bias, as (..., out) or by heads (B, H, N, dh), and the penalty of the map or of a
    cut of it.

    Args:
        y: output of the layer.
        bias: in no penalty; None: there is none.
        call: the attention, or the linear layer, at work.
        rows: row weights of the tokens; None: all are 1.
        term: coefficient, rate, form and reduction.
        cut: first row and number of rows, where a fused layer makes y.
    """
    factor, variance = _factors(term, rows)
    if (
        variance is None
        and cut is not None
        and y is not None
        and (rows.weights is None or rows.weights.shape == (y.shape[0], y.shape[2]))
        and may_wait(y, call.weight, bias, factor, y.numel())
    ):
        return y, wait(y, bias, factor, call.input, call.weight, cut, rows.weights)
    values = []
    if factor is not None and y is not None:
        y, value = tap(y, bias, rows.weights, factor, cut)
        values.append(value)
    if variance is not None:
        weight = call.weight if cut is None else call.weight.narrow(0, *cut)
        if call.adapter is None:
            columns = column_power(weight)
        else:
            columns = call.adapter.columns(weight)
        values.append(variance * torch.dot(feature_power(call.input, rows.weights), columns))
    return y, sum(values[1:], start=values[0])  # type: ignore[return-value]


def only_weight(x: Tensor, weight: Tensor, y: Tensor | None, bias: Tensor | None) -> Tensor:
    """x W^T as a function of W alone: no gradient to x, and no matrix product where y = x W^T +
    bias is there.

    Args:
        x: input of the layer.
        weight: (out, in).
        y: output of the layer.
        bias: in no penalty; None: there is none.
    """
    bare = None
    if y is not None:
        with torch.no_grad():
            bare = wide(y).clone() if bias is None else wide(y) - wide(bias)
    return by_hand(functional.linear, _to_weight, x.detach(), weight, value=bare)


def _to_weight(
    grad: Tensor, wanted: Sequence[bool], x: Tensor, weight: Tensor
) -> tuple[None, Tensor]:
    return None, (grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)).to(weight.dtype)


def _factors(term: Term, rows: RowWeights) -> tuple[Number | None, Number | None]:
    """Of the sums over y and over x and W, with lambda and the reduction in them."""
    scale = term.weight * rows.factor
    if type(scale) is float and type(term.rate) is float:
        return _scaled(term.form, term.rate, scale)
    b, v = single(term.form, term.rate)
    return None if b is None else scale * b, None if v is None else scale * v


@functools.lru_cache(maxsize=1024)
def _scaled(form: str, rate: float, scale: float) -> tuple[float | None, float | None]:
    """The same of plain numbers, which mostly stay what they were from step to step."""
    b, v = single(form, rate)
    bias = None if b is None else scale * float(b)
    variance = None if v is None else scale * float(v)
    return bias, variance


all_rows = functools.lru_cache(maxsize=1024)(token_rows)
"""`token_rows` where nothing is padded: a function of plain numbers."""


def _rows(x: Tensor, call: LinearCall, term: Term, swapped: bool) -> RowWeights:
    """The row weights, shaped as the vectors of x: (B, N, in), more token dimensions in the middle,
    tokens without samples, or (N, B, in) where `swapped`."""
    if call.tokens is not None:
        return _routed_rows(call, term, wide_dtype(x))
    swapped = swapped and x.ndim == 3
    tokens = x.shape[0] if swapped or x.ndim == 2 else x.shape[1:-1].numel()
    batch = x.shape[1] if swapped else 1 if x.ndim == 2 else x.shape[0]
    if x.ndim == 2 and call.role and term.reduction in ("token_mean", "author"):
        raise RuntimeError(
            f"reduction={term.reduction!r} divides by each sample's tokens, but "
            f"'{call.site.name if call.site else call.role}' gives its {call.role} map tokens "
            "without samples, of "
            f"shape {tuple(x.shape)}. Use reduction='mean' or 'sum'."
        )
    if call.valid is None:
        rows = token_rows if torch.compiler.is_compiling() else all_rows
        return rows(term.reduction, batch, tokens, None)
    valid = (call.valid.t() if swapped else call.valid).reshape(-1, tokens)
    weights, factor = token_rows(term.reduction, batch, tokens, valid, wide_dtype(x))
    return RowWeights((weights.t() if swapped else weights).reshape(x.shape[:-1]), factor)  # type: ignore[union-attr]


def _routed_rows(call: LinearCall, term: Term, dtype: torch.dtype) -> RowWeights:
    """The row weights of an expert: its tokens count as those of the batch do, so that the experts
    of a mixture sum to what one feed-forward for all tokens would give. A token counts once in each
    expert that it is routed to."""
    if term.reduction in ("token_mean", "author"):
        raise RuntimeError(
            f"reduction={term.reduction!r} divides by each sample's tokens, but the experts at "
            f"'{call.site.name if call.site else call.role}' get tokens without samples. Use "
            "reduction='mean' or 'sum'."
        )
    factor = 0.5 if term.reduction == "sum" else 0.5 / call.tokens  # type: ignore[operator]
    return RowWeights(None if call.valid is None else call.valid.to(dtype), factor)


class _Linear(torch.autograd.Function):
    """One function for map and penalty: x W^T is read before the bias is added, so that nothing has
    to be taken back from the bias, and the gradients of both are added up before the products that
    the map's own backward makes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: Tensor | None,
        factor: Number,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # with a bias it would be a view, which no model may change in place
        y = functional.linear(x, weight)
        value = sum_of_squares(wide(y), weights) * factor
        y = y if bias is None else y.add_(bias)
        # a checkpoint or offloading sees every tensor that is kept
        hooked = saved_tensors_are_hooked()
        ctx.kept = None if hooked else y.detach()
        ctx.factor, ctx.dtype, ctx.version = (
            factor,
            y.dtype,
            None if hooked else version_of(ctx.kept),
        )
        ctx.save_for_backward(x, weight, bias, weights, y.clone() if hooked else None)
        return y, value

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, weights, y = ctx.saved_tensors
        # tokens, as the products do
        g = through = None if through is None else through.reshape(-1, weight.shape[0])
        shape, x = x.shape, x.reshape(-1, weight.shape[1])
        if grad is not None:
            # the graph may outlive its backward
            y, ctx.kept = ctx.kept if y is None else y, None
            # in place
            changed = y is not None and ctx.version is not None and version_of(y) != ctx.version
            row = None if bias is None else wide(bias)
            if y is None or changed or torch.is_grad_enabled():
                with no_autocast(x.device.type):
                    y, row = functional.linear(wide(x), wide(weight)), None
            y, weights = (
                y.view(-1, weight.shape[0]),
                None if weights is None else weights.reshape(-1),
            )
            native = y.dtype is torch.float32 and weights is None and native_fits(y, row)
            g = add_bare(through, y, row, weights, twice_of(grad) * ctx.factor, native).to(
                ctx.dtype
            )
        if g is None:
            return None, None, None, None, None
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        return (
            g.mm(weight.to(g.dtype)).to(x.dtype).view(shape) if to_x else None,
            g.t().mm(x.to(g.dtype)).to(weight.dtype) if to_weight else None,
            through.sum(0).to(bias.dtype) if to_bias and through is not None else None,
            None,
            None,
        )


_apply_linear: Any = apply_directly(_Linear)


@dataclass(frozen=True, eq=False)
class LowRank:
    """The active adapters of one map: (A, B, s) each, A (r, in) and B (out, r)."""

    parts: tuple[tuple[Tensor, Tensor, float], ...]

    def rows(self, cut: slice | Tensor) -> LowRank:
        """The adapters of some rows of a fused map.

        Args:
            cut: first row and number of rows, where a fused layer makes y.
        """
        return LowRank(tuple((a, b[cut], s) for a, b, s in self.parts))

    def output(self, x: Tensor) -> Tensor:
        """What the adapters add to x W^T.

        Args:
            x: input of the layer.
        """
        added = [s * ((wide(x) @ wide(a).t()) @ wide(b).t()) for a, b, s in self.parts]
        return sum(added[1:], start=added[0])

    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A.

        Args:
            weight: (out, in).
        """
        added = [s * (wide(b) @ wide(a)) for a, b, s in self.parts]
        return sum(added, start=wide(weight))

    def columns(self, weight: Tensor) -> Tensor:
        """sum_o W'_oj^2, from products with r columns only.

        Args:
            weight: (out, in).
        """
        # several adapters are one of the summed rank
        a = torch.cat([wide(a) for a, _, _ in self.parts])
        b = torch.cat([s * wide(b) for _, b, s in self.parts], dim=1)
        cross = (a * (b.t() @ wide(weight))).sum(0)
        return column_power(weight) + 2 * cross + (a * ((b.t() @ b) @ a)).sum(0)


def merge(call: LinearCall) -> LinearCall:
    """The call of the whole map: its weight and output with the adapters in them. The call itself
    where it has none.

    Args:
        call: the attention, or the linear layer, at work.
    """
    if call.adapter is None:
        return call
    if call.output is None:
        output = None
    else:
        output = wide(call.output) + call.adapter.output(call.input)
    return replace(call, weight=call.adapter.merged(call.weight), output=output, adapter=None)
