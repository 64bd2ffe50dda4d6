"""The native kernels as torch operators: attention that hides keys, inverted dropout, and the masks behind them.

Random numbers are Philox's, a function of a seed and of a place. The seed is drawn from torch's global generator in the
forward, so a checkpoint's recompute draws it again, and the backward makes every mask anew instead of keeping it. In
eager mode an `autograd.Function` is called directly; in a graph the same code stands behind `torch.library` operators.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dampen.native.library import library

# `struct Problem` of attention.h, field by field: to pack bytes is several times quicker than to fill a ctypes
# structure, and these calls are made in every layer
_PROBLEM = struct.Struct("12q2dQ11Q28q")
_NO_STRIDES = (0, 0, 0)


class Hiding(NamedTuple):
    """How keys are hidden: all alike, or only the largest scores of each query."""

    rate: float | Tensor
    top: tuple[int, int] | None = None
    """Share of the visible keys as numerator and denominator, or a count and 0; None: every key may be hidden."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, causal: bool, scale: float, hiding: Hiding | None
) -> Tensor:
    """softmax(q k^T scale) v in float32 with random keys hidden from each query; nothing of size N x M is kept.

    q (B, H, N, D), k and v (B, G, M, .) with G a divisor of H, `keep` a bool mask that broadcasts to (B, H, N, M).
    `hiding` None hides nothing and draws nothing.
    """
    mode, (num, den) = (0, (0, 0)) if hiding is None else (1, (0, 0)) if hiding.top is None else (2, hiding.top)
    keep = None if keep is None else keep.expand(*q.shape[:3], k.shape[2])
    if torch.compiler.is_compiling():
        seed = torch.randint(2**63 - 1, ()) if hiding else torch.zeros((), dtype=torch.int64)
        rate = torch.as_tensor(hiding.rate if hiding else 0.0, dtype=torch.float32)
        out: Tensor = torch.ops.dampen.attention(q, k, v, keep, seed, rate, causal, scale, mode, num, den)[0]
        return out
    number, share = (_seed(), float(hiding.rate)) if hiding else (0, 0.0)
    eager: Tensor = _Attention.apply(q, k, v, keep, number, share, causal, scale, mode, num, den)
    return eager


def _seed() -> int:
    """From torch's global generator, as every draw: a checkpoint's recompute draws it again."""
    seed: int = torch.randint(2**63 - 1, ()).item()  # type: ignore[assignment]
    return seed


FACTORS_UP_TO = 2**18
"""Entries up to which dropout keeps its factors until the backward, where torch multiplies by them again: a megabyte
at most. That takes half the time of two Python functions around a kernel, which larger tensors get."""


def dropout(x: Tensor, rate: float | Tensor) -> Tensor:
    """Inverted dropout of a float32 tensor."""
    if torch.compiler.is_compiling():
        seed = torch.randint(2**63 - 1, ())
        out: Tensor = torch.ops.dampen.dropout(x, seed, torch.as_tensor(rate, dtype=torch.float32))
        return out
    size = x.numel()
    if size <= FACTORS_UP_TO:
        factors = torch.empty(x.shape)
        library().dampen_factors(factors.data_ptr(), size, float(rate), _seed())
        return x * factors
    eager: Tensor = _Dropout.apply(x, _seed(), float(rate))
    return eager


def hidden_keys(slabs: int, queries: int, keys: int, rate: float, seed: int) -> Tensor:
    """Which keys `attention` hides under a seed where the model shows all: bool (slabs, queries, keys), True hides."""
    out = torch.empty(slabs, queries, keys, dtype=torch.uint8)
    library().dampen_mask(out.data_ptr(), slabs, queries, keys, rate, seed)
    return out.view(torch.bool)


def draws(count: int, seed: int, stream: int = 0, slab: int = 0) -> Tensor:
    """The first 16-bit draws of a slab, as int16: for tests of their quality."""
    out = torch.empty(count, dtype=torch.int16)
    library().dampen_draws(out.data_ptr(), count, seed, stream, slab)
    return out


def _rows(t: Tensor) -> Tensor:
    """A tensor whose rows BLAS can read: numbers side by side, rows that do not overlap."""
    return t if t.stride(3) == 1 and t.stride(2) >= t.shape[3] else t.contiguous()


def _empty_like_heads(t: Tensor, size: int) -> Tensor:
    """(B, H, N, size) in the layout (B, N, H, size), in which heads are merged without a copy."""
    return torch.empty(t.shape[0], t.shape[2], t.shape[1], size).transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, seed: int, rate: float, causal: bool, scale: float, mode: int,
    num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    o, lse = _empty_like_heads(q, v.shape[3]), torch.empty(q.shape[:3])
    top = torch.empty(q.shape[:3]) if mode == 2 else torch.empty(0)
    (b, h, n, d), (_, g, m, e) = q.shape, v.shape
    if not (o.numel() and m):
        return o.zero_(), lse, top
    problem = _PROBLEM.pack(
        *(b, h, g, n, m, d, e, torch.get_num_threads(), mode, causal, num, den, scale, rate, seed),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), 0, 0 if keep is None else keep.data_ptr()),
        *(o.data_ptr(), lse.data_ptr(), top.data_ptr(), 0, 0, 0),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *_NO_STRIDES, *_NO_STRIDES),
        *(*_NO_STRIDES, *_NO_STRIDES, *((0, 0, 0, 0) if keep is None else keep.stride())),
    )
    library().dampen_attention(problem)
    return o, lse, top


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, top: Tensor, keep: Tensor | None,
    seed: int, rate: float, causal: bool, scale: float, mode: int, num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad, o = _rows(q), _rows(k), _rows(v), _rows(grad), _rows(o)
    (b, h, n, d), (_, g, m, e) = q.shape, v.shape
    dq, dk, dv = _empty_like_heads(q, d), _empty_like_heads(k, d), _empty_like_heads(v, e)
    if not (o.numel() and m):
        return dq.zero_(), dk.zero_(), dv.zero_()
    problem = _PROBLEM.pack(
        *(b, h, g, n, m, d, e, torch.get_num_threads(), mode, causal, num, den, scale, rate, seed),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), grad.data_ptr(), 0 if keep is None else keep.data_ptr()),
        *(o.data_ptr(), lse.data_ptr(), top.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr()),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *grad.stride()[:3], *dq.stride()[:3]),
        *(*dk.stride()[:3], *dv.stride()[:3], *((0, 0, 0, 0) if keep is None else keep.stride())),
    )
    library().dampen_attention_backward(problem)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, *settings: Any) -> Tensor:
        o, lse, top = _forward(q, k, v, keep, *settings)
        ctx.save_for_backward(q, k, v, o, lse, top, keep)
        ctx.settings = settings
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, top, keep = ctx.saved_tensors
        return (*_backward(grad, q, k, v, o, lse, top, keep, *ctx.settings), *[None] * 8)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, rate: float) -> Tensor:
        ctx.seed, ctx.rate = seed, rate
        return _dropout(x, seed, rate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _dropout(grad, ctx.seed, ctx.rate), None, None


def _dropout(x: Tensor, seed: int, rate: float) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    library().dampen_dropout(x.data_ptr(), y.data_ptr(), x.numel(), rate, seed, torch.get_num_threads())
    return y


# --- the same as operators that a graph may hold ----------------------------------------------------------------------


@torch.library.custom_op("dampen::attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, seed: Tensor, rate: Tensor, causal: bool, scale: float,
    mode: int, num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(q, k, v, keep, int(seed.item()), rate.item(), causal, scale, mode, num, den)


@torch.library.custom_op("dampen::attention_backward", mutates_args=())
def _attention_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, top: Tensor, keep: Tensor | None,
    seed: Tensor, rate: Tensor, causal: bool, scale: float, mode: int, num: int, den: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    number = int(seed.item())
    return _backward(grad, q, k, v, o, lse, top, keep, number, rate.item(), causal, scale, mode, num, den)


@torch.library.custom_op("dampen::dropout", mutates_args=())
def _dropout_op(x: Tensor, seed: Tensor, rate: Tensor) -> Tensor:
    return _dropout(x, int(seed.item()), rate.item())


@_attention_op.register_fake
def _(q, k, v, keep, seed, rate, causal, scale, mode, num, den):  # type: ignore[no-untyped-def]
    o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return o, q.new_empty(q.shape[:3]), q.new_empty(q.shape[:3] if mode == 2 else (0,))


@_attention_backward_op.register_fake
def _(grad, q, k, v, o, lse, top, keep, seed, rate, causal, scale, mode, num, den):  # type: ignore[no-untyped-def]
    return tuple(t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))


@_dropout_op.register_fake
def _(x, seed, rate):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, keep, seed, rate, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, keep, seed, rate)


def _attention_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, top, keep, seed, rate = ctx.saved_tensors
    back = torch.ops.dampen.attention_backward(grad, q, k, v, o, lse, top, keep, seed, rate, *ctx.rest)
    return (*back, *[None] * 8)


def _keep_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _dropout_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.dampen.dropout(grad, *ctx.saved_tensors), None, None


_attention_op.register_autograd(_attention_gradient, setup_context=_keep_attention)
_dropout_op.register_autograd(_dropout_gradient, setup_context=_keep_dropout)
