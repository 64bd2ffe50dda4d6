"""The native kernels as torch operators: attention that hides keys, inverted dropout, and the masks
behind them.

Random numbers are Philox's, a function of a seed and of a place. The seed is drawn from torch's
global generator in the forward, so a checkpoint's recompute draws it again, and the backward makes
every mask anew instead of keeping it. In eager mode an `autograd.Function` is called directly; in a
graph, and where a dispatch mode watches (to count FLOPs, for one), the same code is behind
`torch.library` operators. A backward that is itself to be differentiated runs on torch, with the
mask that the kernel drew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dampen._torch import count_dispatch_modes
from dampen.native.entry import (
    AttentionSettings,
    Place,
    TapJob,
    attend,
    attend_backward,
    draws,
    dropped,
    factors,
    first_unreadable,
    hidden_keys,
    kept_keys,
    rows_of,
    settled,
    spread_squares,
    sum_squares,
    unreadable,
)

__all__ = [
    "FACTORS_UP_TO",
    "Hiding",
    "Place",
    "attention",
    "draws",
    "dropout",
    "fits_tap",
    "hidden_keys",
    "tap_gradient",
    "tap_sums",
]


class Hiding(NamedTuple):
    """How keys are hidden: all alike, or only the largest scores of each query."""

    rate: float | Tensor
    top: tuple[int, int] | None = None
    """Share of the visible keys as numerator and denominator, or a count and 0; None: every key
    may be hidden."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    causal: bool,
    scale: float,
    hiding: Hiding | None,
) -> Tensor:
    """softmax(q k^T scale) v in float32 with random keys hidden from each query; nothing of size N
    x M is kept.

    q (B, H, N, D), k and v (B, G, M, .) with G a divisor of H, `keep` a bool mask that broadcasts
    to (B, H, N, M). `hiding` None hides nothing and draws nothing.
    """
    mode, (num, den) = (
        (0, (0, 0)) if hiding is None else (1, (0, 0)) if hiding.top is None else (2, hiding.top)
    )
    keep = None if keep is None else keep.expand(*q.shape[:3], k.shape[2])
    if torch.compiler.is_compiling() or count_dispatch_modes():
        seed = _drawn() if hiding else torch.zeros((), dtype=torch.int64, device="cpu")
        rate = torch.as_tensor(hiding.rate if hiding else 0.0, dtype=torch.float32, device="cpu")
        out: Tensor = torch.ops.dampen.attention(
            q, k, v, keep, seed, rate, causal, scale, mode, num, den
        )[0]
        return out
    number, share = (int(_drawn().item()), float(hiding.rate)) if hiding else (0, 0.0)
    settings = AttentionSettings(number, share, causal, scale, mode, num, den)
    eager: Tensor = _Attention.apply(q, k, v, keep, settings)
    return eager


def _drawn() -> Tensor:
    """From torch's global generator, as every draw: a checkpoint's recompute draws it again."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


FACTORS_UP_TO = 2**18
"""Entries up to which dropout keeps its factors until the backward, where torch multiplies by them
again: a megabyte at most. That takes half the time of two Python functions around a kernel, which
larger tensors get."""


def dropout(x: Tensor, rate: float | Tensor) -> Tensor:
    """Inverted dropout of a float32 tensor."""
    if torch.compiler.is_compiling():
        share = torch.as_tensor(rate, dtype=torch.float32, device="cpu")
        out: Tensor = torch.ops.dampen.dropout(x, _drawn(), share)
        return out
    if x.numel() <= FACTORS_UP_TO:
        return x * factors(x.shape, int(_drawn().item()), float(rate))
    eager: Tensor = _Dropout.apply(x, int(_drawn().item()), float(rate))
    return eager


def _empty_like_heads(*tensors: Tensor) -> list[Tensor]:
    """Like each (B, H, N, size), in the layout (B, N, H, size), in which heads are merged
    without a copy."""
    made = []
    for t in tensors:
        made.append(t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2))
    return made


def _forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, settings: AttentionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = rows_of(q, k, v)
    # heads merge without a copy
    o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse, top = q.new_empty(q.shape[:3]), q.new_empty(q.shape[:3] if settings.mode == 2 else (0,))
    if not (o.numel() and k.numel()):
        return o.zero_(), lse, top
    attend(q, k, v, keep, o, lse, top, settings)
    return o, lse, top


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, top: Tensor,
    keep: Tensor | None, settings: AttentionSettings,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad, o = rows_of(q, k, v, grad, o)
    dq, dk, dv = _empty_like_heads(q, k, v)
    if not (o.numel() and k.numel()):
        return dq.zero_(), dk.zero_(), dv.zero_()
    attend_backward(q, k, v, keep, o, lse, top, (grad, dq, dk, dv), settings)
    return dq, dk, dv


def _again(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by torch, as functions that can be differentiated again, from the keys that
    the kernel kept."""
    with torch.enable_grad():
        # views, so that one tensor that is q, k and v at once gets the gradient of each apart
        q, k, v = (
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in (q, k, v)
        )
        many = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(many, 1) for t in (k, v)) if many > 1 else (k, v)
        # a query that the model shows nothing gets zeros
        some = kept.any(-1, keepdim=True)
        s = (q @ keys.mT * scale).masked_fill(~kept, float("-inf")).masked_fill(~some, 0.0)
        out = (s.softmax(-1) * some) @ values
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad, create_graph=torch.is_grad_enabled())
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, settings: AttentionSettings
    ) -> Tensor:
        o, lse, top = _forward(q, k, v, keep, settings)
        ctx.save_for_backward(q, k, v, o, lse, top, keep)
        ctx.settings = settings
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, top, keep = ctx.saved_tensors
        if type(grad) is Tensor:
            grad = settled(grad)
        if torch.is_grad_enabled() or first_unreadable((grad,)) is not None:
            queries, keys = rows_of(q.detach(), k.detach())
            kept = kept_keys(queries, keys, keep, top, ctx.settings)
            return (*_again(grad, q, k, v, kept, ctx.settings.scale), None, None)
        return (*_backward(grad, q, k, v, o, lse, top, keep, ctx.settings), None, None)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, rate: float) -> Tensor:
        ctx.seed, ctx.rate = seed, rate
        return dropped(x, seed, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if unreadable(grad):
            return grad * factors(grad.shape, ctx.seed, ctx.rate), None, None
        # linear: its backward is itself
        again: Tensor = _Dropout.apply(grad, ctx.seed, ctx.rate)
        return again, None, None


# --- the same as operators that a graph may hold


@torch.library.custom_op("dampen::attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, seed: Tensor, rate: Tensor, causal: bool,
    scale: float, mode: int, num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    settings = AttentionSettings(int(seed.item()), rate.item(), causal, scale, mode, num, den)
    return _forward(settled(q), settled(k), settled(v), keep, settings)


@torch.library.custom_op("dampen::attention_backward", mutates_args=())
def _attention_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, top: Tensor,
    keep: Tensor | None, seed: Tensor, rate: Tensor, causal: bool, scale: float, mode: int,
    num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    settings = AttentionSettings(int(seed.item()), rate.item(), causal, scale, mode, num, den)
    q, k, v = settled(q), settled(k), settled(v)
    return _backward(settled(grad), q, k, v, o, lse, top, keep, settings)


@torch.library.custom_op("dampen::kept_keys", mutates_args=())
def _kept_keys_op(
    q: Tensor, k: Tensor, top: Tensor, keep: Tensor | None, seed: Tensor, rate: Tensor,
    causal: bool, scale: float, mode: int, num: int, den: int,
) -> Tensor:  # fmt: skip
    settings = AttentionSettings(int(seed.item()), rate.item(), causal, scale, mode, num, den)
    queries, keys = rows_of(settled(q), settled(k))
    return kept_keys(queries, keys, keep, top, settings)


@torch.library.custom_op("dampen::dropout", mutates_args=())
def _dropout_op(x: Tensor, seed: Tensor, rate: Tensor) -> Tensor:
    return dropped(settled(x), int(seed.item()), rate.item())


@_attention_op.register_fake
def _(q, k, v, keep, seed, rate, causal, scale, mode, num, den):  # type: ignore[no-untyped-def]
    o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return o, q.new_empty(q.shape[:3]), q.new_empty(q.shape[:3] if mode == 2 else (0,))


@_attention_backward_op.register_fake
def _(grad, q, k, v, o, lse, top, keep, seed, rate, causal, scale, mode, num, den):  # type: ignore[no-untyped-def]
    return tuple(
        t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2)
        for t in (q, k, v)
    )


@_kept_keys_op.register_fake
def _(q, k, top, keep, seed, rate, causal, scale, mode, num, den):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.bool)


@_dropout_op.register_fake
def _(x, seed, rate):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_attention(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    q, k, v, keep, seed, rate, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, keep, seed, rate)


def _attention_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, top, keep, seed, rate = ctx.saved_tensors
    if torch.is_grad_enabled():
        kept = torch.ops.dampen.kept_keys(q.detach(), k.detach(), top, keep, seed, rate, *ctx.rest)
        return (*_again(grad, q, k, v, kept, ctx.rest[1]), *[None] * 8)
    back = torch.ops.dampen.attention_backward(
        grad, q, k, v, o, lse, top, keep, seed, rate, *ctx.rest
    )
    return (*back, *[None] * 8)


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _dropout_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.dampen.dropout(grad, *ctx.saved_tensors), None, None


_attention_op.register_autograd(_attention_gradient, setup_context=_keep_attention)
_dropout_op.register_autograd(_dropout_gradient, setup_context=_keep_dropout)


# --- what they cost, for torch's FlopCounterMode


@register_flop_formula(torch.ops.dampen.attention)
def _attention_flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """q k^T and the weights times v, as torch counts its own attention."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


@register_flop_formula(torch.ops.dampen.attention_backward)
def _attention_backward_flops(
    grad: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    """The scores again, the gradients of the weights and of v, and those of q and k."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


# --- the penalty tap
#
# The native side of the penalty tap: sums of squares read off tensors, and the gradients that
# they send back.
#
# One tensor at a time in the middle of a layer, or all tensors of a step at once:
# `functional/explicit/layers.py`.


def fits_tap(y: Tensor, bias: Tensor | None) -> bool:
    """Whether the functions below can read these: float32 on a CPU, the bias one row per group
    of heads or none."""
    return (
        not unreadable(y)
        and y.numel() > 0
        and _in_rows(y)
        and (
            bias is None or (not unreadable(bias) and bias.is_contiguous() and _bias_fits(y, bias))
        )
    )


def _in_rows(t: Tensor) -> bool:
    """Whether the numbers of a vector lie side by side, and vectors in order where they are not
    by heads."""
    return t.ndim > 0 and t.stride(-1) == 1 and (t.ndim == 4 or t.is_contiguous())


def _bias_fits(y: Tensor, bias: Tensor) -> bool:
    if bias.ndim == 1 or y.ndim != 4:
        return bias.numel() == y.shape[-1] and y.ndim != 4
    return bias.numel() == y.shape[1] * y.shape[3] and bias.shape[-1] == y.shape[3]


def tap_sums(y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """sum ||y_i - bias||^2 over the vectors y_i of y, and sum (y_i - bias), in the shape of the
    bias, in one pass."""
    total, sums = y.new_zeros(()), None if bias is None else torch.empty_like(bias)
    shape = _shape(y)
    sum_squares([TapJob(shape, y, _strides(y), 1.0, _place(bias), total, _place(sums))])
    return total, sums


def fits_gradient(through: Tensor, y: Tensor) -> bool:
    """Whether `tap_gradient` can read a gradient of y."""
    return not unreadable(through) and through.shape == y.shape


def tap_gradient(through: Tensor, y: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """through + scale (y - bias) in one pass."""
    if not _in_rows(through):
        through = through.contiguous()
    out = torch.empty_like(through)
    if not _in_rows(out):
        out = torch.empty_like(through, memory_format=torch.contiguous_format)
    shape = _shape(y, through, out)
    spread_squares(
        [
            TapJob(
                shape,
                y,
                _strides(y),
                scale,
                _place(bias),
                through=through,
                through_strides=_strides(through),
                out=out,
                out_strides=_strides(out),
            )
        ]
    )
    return out


def _place(t: Tensor | None) -> Place | None:
    if t is None:
        return None
    return Place(t)


def _strides(t: Tensor) -> tuple[int, ...]:
    if t.ndim == 4:
        return t.stride()[:3]
    return (0, 0, t.shape[-1])


def _shape(y: Tensor, *others: Tensor) -> tuple[int, int, int, int]:
    """Slabs, groups, rows and numbers of what lies like y."""
    size = y.shape[-1]
    if y.ndim != 4:
        return 1, 1, y.numel() // size, size
    b, h, n, _ = y.shape
    # heads side by side: one long row
    together = all(t.stride(1) == size for t in (y, *others))
    if together:
        return (b, 1, n, h * size)
    return (b, h, n, size)
