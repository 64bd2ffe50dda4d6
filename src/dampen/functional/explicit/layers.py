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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from dampen._torch import (
    apply_directly,
    functorch_level,
    norms_of_all,
    saved_tensor_hooks,
    saved_tensors_are_hooked,
    scale_all,
    version_of,
    written_to,
)
from dampen.calls import Deferred, LinearCall, Penalty, now
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
    bias_row,
    by_hand,
    column_power,
    feature_power,
    native_fits,
    sum_of_squares,
    tap,
    twice_of,
)
from dampen.native import library
from dampen.native.entry import Place, TapJob, first_unreadable, spread_squares, sum_squares

# --- the sums of squares of all layers of a small model
#
# The sums of squares of all maps of a small model in one function, computed when the penalties
# are consumed.
#
# J = sum_l factor_l sum_i w_li ||y_li - bias_l||^2
#
# The row weights w are 0 for padded tokens.
#
# A tap in each layer (`squares.tap`) costs a small model more in Python calls than in
# arithmetic. Here the layers run as they are and keep their outputs, and one function of all of
# them computes the sum and all gradients at once. Autograd adds these where they meet the
# layers' own. All gradients exist at the same time, so this is for small tensors alone.

BATCHED_UP_TO = 2**19
"""Numbers of an output up to which it waits for the others. Above, calls are no longer what a step
is made of, and all gradients at once would take memory that counts. Beside a tap per layer this
saves 7 % of a step of a BERT or a nanoGPT of 4 x 128, for a third more memory (of some MB)."""


class Tapped(NamedTuple):
    """One map's output that waits, and what it was made of."""

    y: Tensor
    bias: Tensor | None
    factor: float
    cut: Cut | None
    x: Tensor
    weight: Tensor
    version: int  # of y, when it was made
    rows: Tensor | None = None  # weights of the vectors of y, without heads; None: all are 1


def may_wait(
    like: Tensor, weight: Tensor, bias: Tensor | None, factor: Number | None, size: int
) -> bool:
    """Whether the penalty of a map can wait for others. `like`: what its output of `size` numbers
    resembles.

    Not while tensors that autograd saves are replaced (checkpoints), because the output would be
    kept all the same; and not where processes train together, because sharded parameters are not
    there any more when penalties are taken.

    Args:
        like: a tensor whose penalty is computed.
        weight: (out, in).
        bias: in no penalty; None: there is none.
        factor: of the sum.
        size: numbers in the output.
    """
    return (
        (type(factor) is float or _is_number(factor))
        and 0 < size <= BATCHED_UP_TO
        and like.dtype is weight.dtype is torch.float32
        and like.device.type == "cpu"
        # then autograd itself sees to it that the input stays as it was
        and weight.requires_grad
        and (bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()))
        and torch.is_grad_enabled()
        and type(like) is Tensor
        and not torch.compiler.is_compiling()
        and functorch_level() is None
        and saved_tensor_hooks(True) is None
        and not torch.is_autocast_enabled("cpu")
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


def _is_number(factor: Number | None) -> bool:
    """Whether a factor, which under padding is a tensor, can be read at once."""
    return isinstance(factor, Tensor) and factor.device.type == "cpu" and not factor.requires_grad


def wait(
    y: Tensor,
    bias: Tensor | None,
    factor: Number | None,
    x: Tensor,
    weight: Tensor,
    cut: Cut | None = None,
    rows: Tensor | None = None,
) -> Deferred:
    """The penalty factor * sum_i w_i ||y_i - bias||^2 of a map y = x W^T + bias, to be summed with
    others'; as for `tap`.

    Args:
        y: output of the layer.
        bias: in no penalty; None: there is none.
        factor: of the sum.
        x: input of the layer.
        weight: (out, in).
        cut: first row and number of rows, where a fused layer makes y.
        rows: weights of the vectors, (B, N) or as y without its channels; None: all are 1.
    """
    assert factor is not None  # `may_wait` has looked
    if rows is not None:
        rows = rows.contiguous()
    part = Tapped(y, bias, float(factor), cut, x, weight, written_to(y), rows)
    return Deferred((part,), sum_up)


def sum_up(penalties: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The values of several penalties of `Tapped`.

    Args:
        penalties: of several names, each with its parts.
    """
    plan, ys, biases, changed = [], [], [], []
    for number, parts in enumerate(penalties):
        for part in parts:
            y, cut = part.y, part.cut
            # by heads (B, H, N, dh) where it is a cut, else as rows in order
            readable = y.ndim > 1 and y.is_contiguous() if cut is None else y.stride(-1) == 1
            if written_to(y) != part.version or not readable:  # the model went on in place
                changed.append((number, part))
                continue
            plan.append(Summand(number, part.factor, cut, part.rows))
            if cut is None and y.ndim == 4:  # (B, height, width, out): four axes mean heads below
                y = y.flatten(0, 2)
            ys.append(y)
            biases.append(part.bias)
    nothing = [torch.zeros((), dtype=torch.float32, device="cpu")] * len(penalties)
    values: list[Tensor] = list(_apply(plan, len(penalties), *ys, *biases)) if plan else nothing
    for number, part in changed:
        if part.cut is None:
            weight = part.weight
        else:
            weight = part.weight.narrow(0, *part.cut)
        norms = torch.nn.functional.linear(part.x, weight).square().sum(-1)
        if part.rows is not None:
            norms = norms * part.rows.view(norms.shape)
        values[number] = values[number] + part.factor * norms.sum()
    return values


class Summand(NamedTuple):
    """How one output enters the sums."""

    number: int  # of the penalty
    factor: float
    cut: Cut | None  # of its bias
    rows: Tensor | None

    def weights(self, y: Tensor) -> Tensor:
        """The row weights beside the vectors of y, (..., 1)."""
        assert self.rows is not None
        return (
            self.rows.view(y.shape[0], 1, y.shape[2], 1)
            if y.ndim == 4
            else self.rows.view(*y.shape[:-1], 1)
        )


class _Batched(torch.autograd.Function):
    """Takes the plan, how many penalties, all outputs, all biases."""

    @staticmethod
    def forward(
        ctx: Any, plan: list[Summand], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ys, biases = cast(tuple[Tensor, ...], tensors[: len(plan)]), tensors[len(plan) :]
        there = library.loaded is not None if library.looked else library.available()
        ctx.native = there and first_unreadable(tensors) is None
        values = [torch.zeros((), dtype=torch.float32, device="cpu") for _ in range(count)]
        if ctx.native:
            sums = torch.empty(_room(biases), dtype=torch.float32, device="cpu")
            ctx.layouts = layouts_of(ys)
            totals = [values[job.number] for job in plan]
            all_sums(
                ys, ctx.layouts, _places(biases, plan), plan, totals, _places(biases, plan, sums)
            )
            ctx.save_for_backward(*tensors, sums)
            return tuple(values)
        bares = []
        for y, bias, job in zip(ys, biases, plan, strict=True):
            if bias is not None and job.cut is not None:  # as in y
                bias = bias.narrow(0, *job.cut).view(y.shape[1], 1, y.shape[3])
            bare = y if bias is None else y - bias
            # sqrt(w) here and in the backward
            bares.append(bare if job.rows is None else bare * job.weights(y).sqrt())
        squares = torch.stack(norms_of_all(bares)).square_()
        for number, value in enumerate(values):
            own = [job.factor if job.number == number else 0.0 for job in plan]
            value.add_(squares.dot(torch.tensor(own, dtype=torch.float32, device="cpu")))
        ctx.save_for_backward(*tensors, *bares)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan, (many, saved) = ctx.plan, (len(ctx.plan), ctx.saved_tensors)
        ys, biases, rest = saved[:many], saved[many : 2 * many], saved[2 * many :]
        # to be differentiated again: as functions of y and bias
        if torch.is_grad_enabled():
            return (None, None, *_again(plan, ys, biases, grads))
        twice = [0.0 if grad is None else 2 * grad.item() for grad in grads]
        scales = [twice[job.number] * job.factor for job in plan]
        room = torch.zeros(_room(biases), dtype=torch.float32, device="cpu")
        if ctx.native:
            to_ys = all_gradients(
                ys,
                ctx.layouts,
                _places(biases, plan),
                [job._replace(factor=scale) for job, scale in zip(plan, scales, strict=True)],
                _places(biases, plan, rest[0]),
                _places(biases, plan, room),
            )
            to_biases = _split(room, biases)
        else:
            to_ys, to_biases = scale_all(rest, scales), _split(room, biases)
            for y, g, to, job in zip(ys, to_ys, to_biases, plan, strict=True):
                if job.rows is not None:
                    g.mul_(job.weights(y).sqrt())
                if to is not None:
                    to = to if job.cut is None else to.narrow(0, *job.cut)
                    by_heads = g.ndim == 4
                    torch.sum(
                        g,
                        (0, 2) if by_heads else tuple(range(g.ndim - 1)),
                        out=to.view(g.shape[1::2]) if by_heads else to,
                    )
            room.neg_()
        return (None, None, *to_ys, *to_biases)


_apply: Any = apply_directly(_Batched)


def _again(
    plan: list[Summand],
    ys: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    grads: Any,
) -> list[Tensor | None]:
    to_ys: list[Tensor | None] = []
    to_biases: list[Tensor | None] = []
    for y, bias, job in zip(ys, biases, plan, strict=True):
        cut = job.cut
        row, grad = bias_row(bias, y, cut), grads[job.number]
        if grad is None:
            g = None
        else:
            g = (y if row is None else y - row) * (2 * job.factor * grad)
            g = g if job.rows is None else g * job.weights(y)
        to = None if g is None or row is None else -g.sum_to_size(row.shape)
        if to is not None and bias is not None:
            to = to.view(-1 if cut else bias.shape)
            if cut is not None:
                to = torch.nn.functional.pad(to, (cut[0], bias.shape[0] - sum(cut)))
        to_ys.append(g)
        to_biases.append(to)
    return [*to_ys, *to_biases]


def _room(biases: Sequence[Tensor | None]) -> int:
    room = 0
    for b in biases:
        room += 0 if b is None else b.shape[0]
    return room


def _places(
    biases: Sequence[Tensor | None],
    plan: list[Summand],
    room: Tensor | None = None,
) -> list[Place | None]:
    """Where the biases are, or their cuts where a fused map has one; with a room for all of
    them, where there."""
    found: list[Place | None] = []
    first = 0
    for bias, job in zip(biases, plan, strict=True):
        if bias is None:
            found.append(None)
            continue
        start = 0 if job.cut is None else job.cut[0]
        found.append(Place(bias, start) if room is None else Place(room, first + start))
        first += bias.shape[0]
    return found


def _split(room: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    parts = iter(room.split([b.shape[0] for b in biases if b is not None]))
    return [None if b is None else next(parts) for b in biases]


# --- the same by the native kernels, all tensors of a step in one call


class Strided(NamedTuple):
    """The memory layout of a tensor, computed once for forward and backward: slabs, groups, rows
    and size, and the strides of its own and of a gradient like it."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, ...]
    out: tuple[int, int, int]


def layouts_of(ys: Sequence[Tensor]) -> list[Strided]:
    """How each tensor lies. By heads (B, H, N, dh) a gradient lies as (B, N, H, dh), in which
    attention gives its own too."""
    found = []
    for y in ys:
        size = y.shape[-1]
        if y.ndim != 4:
            found.append(Strided((1, 1, y.numel() // size, size), (0, 0, size), (0, 0, size)))
            continue
        (b, h, n, _), strides = y.shape, y.stride()[:3]
        # heads side by side: one long row
        if strides[1] == size:
            found.append(Strided((b, 1, n, h * size), strides, (n * h * size, 0, h * size)))
        else:
            found.append(Strided((b, h, n, size), strides, (n * h * size, size, h * size)))
    return found


def all_sums(
    ys: Sequence[Tensor],
    layouts: Sequence[Strided],
    biases: Sequence[Place | None],
    plan: Sequence[Summand],
    totals: Sequence[Tensor],
    sums: Sequence[Place | None],
) -> None:
    """Of each y: totals += factor sum w_i ||y_i - bias||^2, and its sums."""
    sum_squares(
        [
            TapJob(
                at.shape, y, at.strides, job.factor, bias, total, to,
                weights=job.rows, weights_strides=_rows_of(at),
            )
            for y, at, bias, job, total, to in zip(
                ys, layouts, biases, plan, totals, sums, strict=True
            )
        ]
    )  # fmt: skip


def _rows_of(at: Strided) -> tuple[int, int]:
    """The strides of row weights by slab and row."""
    return at.shape[2], 1


def all_gradients(
    ys: Sequence[Tensor],
    layouts: Sequence[Strided],
    biases: Sequence[Place | None],
    plan: Sequence[Summand],
    sums: Sequence[Place | None],
    to_biases: Sequence[Place | None],
) -> list[Tensor]:
    """factor w (y - bias) of each y, and -factor sums where `to_biases` is given."""
    outs = []
    for y in ys:
        if y.ndim != 4:
            outs.append(y.new_empty(y.shape))
            continue
        b, h, n, size = y.shape
        outs.append(y.new_empty(b, n, h, size).transpose(1, 2))
    spread_squares(
        [
            TapJob(
                at.shape,
                y,
                at.strides,
                job.factor,
                bias,
                sums=s,
                weights=job.rows,
                weights_strides=_rows_of(at),
                out=out,
                out_strides=at.out,
                to_bias=to,
            )
            for y, at, out, bias, job, s, to in zip(
                ys, layouts, outs, biases, plan, sums, to_biases, strict=True
            )
        ]
    )
    return outs


# --- one linear layer

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
