"""The native side of the penalty tap: sums of squares read off tensors, and the gradients that they send back.

One tensor at a time in the middle of a layer, or all tensors of a step at once: `formulas/explicit/together.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dampen.native.library import library

# `struct Tapped` of penalty.h, field by field; see ops.py
_TAPPED = struct.Struct("4q7Q9qd")
_NO_STRIDES = (0, 0, 0)


def fits_tap(y: Tensor, bias: Tensor | None) -> bool:
    """Whether the functions below can read these: float32 on a CPU, the bias one row per group of heads or none."""
    return (
        y.dtype is torch.float32
        and y.device.type == "cpu"
        and y.numel() > 0
        and y.stride(-1) == 1
        and (y.ndim == 4 or y.is_contiguous())
        and (bias is None or (bias.dtype is torch.float32 and bias.is_contiguous() and _bias_fits(y, bias)))
    )


def _bias_fits(y: Tensor, bias: Tensor) -> bool:
    if bias.ndim == 1 or y.ndim != 4:
        return bias.numel() == y.shape[-1] and y.ndim != 4
    return bias.numel() == y.shape[1] * y.shape[3] and bias.shape[-1] == y.shape[3]


def tap_sums(y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """sum ||y_i - bias||^2 over the vectors y_i of y, and sum (y_i - bias), in the shape of the bias, in one pass."""
    total, sums = torch.zeros(()), None if bias is None else torch.empty_like(bias)
    library().dampen_taps(_tapped(y, _at(bias), None, None, 1.0, total=_at(total), sums=_at(sums)), 1)
    return total, sums


def tap_gradient(through: Tensor, y: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """through + scale (y - bias) in one pass."""
    if through.stride(-1) != 1 or (through.ndim != 4 and not through.is_contiguous()):
        through = through.contiguous()
    out = torch.empty_like(through)
    if out.stride(-1) != 1:
        out = torch.empty_like(through, memory_format=torch.contiguous_format)
    library().dampen_taps_backward(_tapped(y, _at(bias), through, out, scale), 1)
    return out


class Strided(NamedTuple):
    """How a tensor lies, asked once for forward and backward: slabs, groups, rows and size, and the strides of its own
    and of a gradient like it."""

    shape: tuple[int, int, int, int]
    strides: tuple[int, ...]
    out: tuple[int, int, int]


def layout_of(y: Tensor) -> Strided:
    """By heads (B, H, N, dh) a gradient lies as (B, N, H, dh), in which attention gives its own too."""
    if y.ndim != 4:
        size = y.shape[-1]
        return Strided((1, 1, y.numel() // size, size), (0, 0, size), (0, 0, size))
    (b, h, n, size), strides = y.shape, y.stride()
    if strides[1] == size:  # heads side by side: one long row
        return Strided((b, 1, n, h * size), strides[:3], (n * h * size, 0, h * size))
    return Strided((b, h, n, size), strides[:3], (n * h * size, size, h * size))


def all_sums(
    ys: Sequence[Tensor],
    layouts: Sequence[Strided],
    biases: Sequence[int],
    factors: Sequence[float],
    totals: Sequence[Tensor],
    sums: Sequence[int],
) -> None:
    """Of each y: totals += factor sum ||y_i - bias||^2, and its sums; biases and sums by their addresses, 0 for
    none."""
    packed = [
        _TAPPED.pack(*at.shape, y.data_ptr(), b, 0, 0, t.data_ptr(), s, 0, *at.strides, 0, 0, 0, 0, 0, 0, f)
        for y, at, b, f, t, s in zip(ys, layouts, biases, factors, totals, sums, strict=True)
    ]
    library().dampen_taps(b"".join(packed), len(packed))


def all_gradients(
    ys: Sequence[Tensor],
    layouts: Sequence[Strided],
    biases: Sequence[int],
    scales: Sequence[float],
    sums: Sequence[int],
    to_biases: Sequence[int],
) -> list[Tensor]:
    """scale (y - bias) of each y, and -scale sums where `to_biases` points."""
    outs = [_empty_as(y) for y in ys]
    packed = [
        _TAPPED.pack(*at.shape, y.data_ptr(), b, 0, out.data_ptr(), 0, s, to, *at.strides, 0, 0, 0, *at.out, scale)
        for y, at, out, b, scale, s, to in zip(ys, layouts, outs, biases, scales, sums, to_biases, strict=True)
    ]
    library().dampen_taps_backward(b"".join(packed), len(packed))
    return outs


def _empty_as(y: Tensor) -> Tensor:
    if y.ndim != 4:
        return torch.empty(y.shape)
    b, h, n, size = y.shape
    return torch.empty(b, n, h, size).transpose(1, 2)


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return _NO_STRIDES if t is None else t.stride()[:3] if t.ndim == 4 else (0, 0, t.shape[-1])


def _tapped(
    y: Tensor, bias: int, through: Tensor | None, out: Tensor | None, scale: float, *, total: int = 0, sums: int = 0
) -> bytes:
    size = y.shape[-1]
    shape = tuple(y.shape) if y.ndim == 4 else (1, 1, y.numel() // size, size)
    if y.ndim == 4 and all(t is None or t.stride(1) == size for t in (y, through, out)):
        shape = (shape[0], 1, shape[2], shape[1] * size)  # heads side by side: one long row
    pointers = (y.data_ptr(), bias, _at(through), _at(out), total, sums, 0)
    return _TAPPED.pack(*shape, *pointers, *_strides(y), *_strides(through), *_strides(out), scale)
