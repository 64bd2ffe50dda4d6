"""The sums of squares of all maps of a small model in one function, computed when the penalties are
consumed.

    J = sum_l factor_l sum_i w_li ||y_li - bias_l||^2

The row weights w are 0 for padded tokens.

A tap in each layer (`squares.tap`) costs a small model more in Python calls than in arithmetic.
Here the layers run as they are and keep their outputs, and one function of all of them computes the
sum and all gradients at once. Autograd adds these where they meet the layers' own. All gradients
exist at the same time, so this is for small tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dampen._torch import (
    apply_directly,
    functorch_level,
    norms_of_all,
    saved_tensor_hooks,
    scale_all,
    written_to,
)
from dampen.calls import Deferred
from dampen.functional.explicit.reductions import Number
from dampen.functional.explicit.squares import Cut, bias_row
from dampen.native import library
from dampen.native.entry import Place, TapJob, first_unreadable, spread_squares, sum_squares

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
            if bias is not None and job.cut is not None:  # as it stands in y
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
    """How a tensor lies, asked once for forward and backward: slabs, groups, rows and size, and the
    strides of its own and of a gradient like it."""

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
    """factor w (y - bias) of each y, and -factor sums where `to_biases` stands."""
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
