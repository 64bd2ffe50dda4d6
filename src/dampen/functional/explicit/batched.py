"""The sums of squares of all maps of a small model in one function, computed when the penalties are
consumed.

    J = sum_l factor_l ||y_l - bias_l||^2

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
    has_numbers,
    norms_of_all,
    saved_tensors_are_hooked,
    scale_all,
    version_of,
)
from dampen.calls.later import Later
from dampen.functional.explicit.reductions import Number
from dampen.functional.explicit.squares import Cut, bias_row
from dampen.native.entry import Place, unreadable
from dampen.native.library import available as native_available

BATCHED_UP_TO = 2**17
"""Numbers of an output up to which it waits for the others: above, calls are no longer what a
step is made of."""


class Tapped(NamedTuple):
    """One map's output that waits, and what it was made of."""

    y: Tensor
    bias: Tensor | None
    factor: float
    cut: Cut | None
    x: Tensor
    weight: Tensor
    version: int  # of y, when it was made


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
        isinstance(factor, float)
        and 0 < size <= BATCHED_UP_TO
        and like.dtype is weight.dtype is torch.float32
        and like.device.type == "cpu"
        # then autograd itself sees to it that the input stays as it was
        and weight.requires_grad
        and (bias is None or (bias.dtype is torch.float32 and bias.is_contiguous()))
        and torch.is_grad_enabled()
        and has_numbers(like)
        and not saved_tensors_are_hooked()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )


def wait(
    y: Tensor,
    bias: Tensor | None,
    factor: Number | None,
    x: Tensor,
    weight: Tensor,
    cut: Cut | None = None,
) -> Later:
    """The penalty factor * ||y - bias||^2 of a map y = x W^T + bias, to be summed with others';
    as for `tap`.

    Args:
        y: output of the layer.
        bias: in no penalty; None: there is none.
        factor: of the sum.
        x: input of the layer.
        weight: (out, in).
        cut: first row and number of rows, where a fused layer makes y.
    """
    assert isinstance(factor, float)  # `may_wait` has looked
    return Later((Tapped(y, bias, factor, cut, x, weight, version_of(y)),), sum_up)


def sum_up(penalties: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The values of several penalties of `Tapped`.

    Args:
        penalties: of several names, each with its parts.
    """
    plan, ys, biases, changed = [], [], [], []
    for number, parts in enumerate(penalties):
        for part in parts:
            # the model went on in place
            if version_of(part.y) != part.version or not _is_read(part):
                changed.append((number, part))
                continue
            plan.append((number, part.factor, part.cut))
            # (B, height, width, out): four axes mean heads below
            whole_map_in_2d = part.cut is None and part.y.ndim == 4
            ys.append(part.y.flatten(0, 2) if whole_map_in_2d else part.y)
            biases.append(part.bias)
    nothing = [torch.zeros((), dtype=torch.float32, device="cpu")] * len(penalties)
    values: list[Tensor] = list(_apply(plan, len(penalties), *ys, *biases)) if plan else nothing
    for number, part in changed:
        if part.cut is None:
            weight = part.weight
        else:
            weight = part.weight.narrow(0, *part.cut)
        values[number] = (
            values[number] + part.factor * torch.nn.functional.linear(part.x, weight).square().sum()
        )
    return values


def _is_read(part: Tapped) -> bool:
    """Whether the function below can read it: by heads (B, H, N, dh) where it is a cut, else as
    rows in order."""
    if part.cut is not None:
        return part.y.stride(-1) == 1
    return part.y.ndim > 1 and part.y.is_contiguous()


class _Batched(torch.autograd.Function):
    """Takes the plan (which penalty, its factor, the cut of its bias), how many penalties, all
    outputs, all biases."""

    @staticmethod
    def forward(
        ctx: Any, plan: list[tuple[int, float, Cut | None]], count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ys, biases = cast(tuple[Tensor, ...], tensors[: len(plan)]), tensors[len(plan) :]
        ctx.native = native_available() and not any(unreadable(t) for t in tensors if t is not None)
        values = [torch.zeros((), dtype=torch.float32, device="cpu") for _ in range(count)]
        if ctx.native:
            from dampen.native.taps import all_sums, layouts_of  # only where it was built

            sums = torch.empty(_room(biases), dtype=torch.float32, device="cpu")
            ctx.layouts = layouts_of(ys)
            factors, totals = (
                [factor for _, factor, _ in plan],
                [values[number] for number, _, _ in plan],
            )
            all_sums(
                ys, ctx.layouts, _places(biases, plan), factors, totals, _places(biases, plan, sums)
            )
            ctx.save_for_backward(*tensors, sums)
            return tuple(values)
        rows = (bias_row(b, y, cut) for b, y, (_, _, cut) in zip(biases, ys, plan, strict=True))
        bares = [y if row is None else y - row for y, row in zip(ys, rows, strict=True)]
        squares = torch.stack(norms_of_all(bares)).square_()
        for number, value in enumerate(values):
            own = [f if n == number else 0.0 for n, f, _ in plan]
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
        scales = [twice[number] * factor for number, factor, _ in plan]
        room = torch.zeros(_room(biases), dtype=torch.float32, device="cpu")
        if ctx.native:
            from dampen.native.taps import all_gradients  # it was there in the forward

            to_ys = all_gradients(
                ys,
                ctx.layouts,
                _places(biases, plan),
                scales,
                _places(biases, plan, rest[0]),
                _places(biases, plan, room),
            )
            to_biases = _split(room, biases)
        else:
            to_ys, to_biases = scale_all(rest, scales), _split(room, biases)
            for g, to, (_, _, cut) in zip(to_ys, to_biases, plan, strict=True):
                if to is not None:
                    to = to if cut is None else to.narrow(0, *cut)
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
    plan: list[tuple[int, float, Cut | None]],
    ys: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    grads: Any,
) -> list[Tensor | None]:
    to_ys: list[Tensor | None] = []
    to_biases: list[Tensor | None] = []
    for y, bias, (number, factor, cut) in zip(ys, biases, plan, strict=True):
        row, grad = bias_row(bias, y, cut), grads[number]
        if grad is None:
            g = None
        else:
            g = (y if row is None else y - row) * (2 * factor * grad)
        to = None if g is None or row is None else -g.sum_to_size(row.shape)
        if to is not None and bias is not None:
            to = to.view(-1 if cut else bias.shape)
            if cut is None:
                to = to
            else:
                to = torch.nn.functional.pad(to, (cut[0], bias.shape[0] - sum(cut)))
        to_ys.append(g)
        to_biases.append(to)
    return [*to_ys, *to_biases]


def _room(biases: Sequence[Tensor | None]) -> int:
    return sum(0 if b is None else b.shape[0] for b in biases)


def _places(
    biases: Sequence[Tensor | None],
    plan: list[tuple[int, float, Cut | None]],
    room: Tensor | None = None,
) -> list[Place | None]:
    """Where the biases stand, or their cuts where a fused map has one; with a room for all of
    them, where there."""
    found: list[Place | None] = []
    first = 0
    for bias, (_, _, cut) in zip(biases, plan, strict=True):
        if bias is None:
            found.append(None)
            continue
        start = 0 if cut is None else cut[0]
        found.append(Place(bias, start) if room is None else Place(room, first + start))
        first += bias.shape[0]
    return found


def _split(room: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor | None]:
    parts = iter(room.split([b.shape[0] for b in biases if b is not None]))
    return [None if b is None else next(parts) for b in biases]
