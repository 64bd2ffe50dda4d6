"""The native side of the penalty tap: sums of squares read off tensors, and the gradients that they send back.

One tensor at a time in the middle of a layer, or all tensors of a step at once: `formulas/explicit/together.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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


def all_sums(
    ys: Sequence[Tensor], biases: Sequence[int], factors: Sequence[float], totals: Sequence[Tensor], sums: Sequence[int]
) -> None:
    """Of each y: totals += factor sum ||y_i - bias||^2, and its sums; biases and sums by their addresses, 0 for
    none."""
    parts = zip(ys, biases, factors, totals, sums, strict=True)
    packed = [_tapped(y, b, None, None, f, total=t.data_ptr(), sums=s) for y, b, f, t, s in parts]
    library().dampen_taps(b"".join(packed), len(packed))


def all_gradients(
    ys: Sequence[Tensor], biases: Sequence[int], scales: Sequence[float], sums: Sequence[int], to_biases: Sequence[int]
) -> list[Tensor]:
    """scale (y - bias) of each y, and -scale sums where `to_biases` points."""
    outs = [_empty_as(y) for y in ys]
    parts = zip(ys, biases, outs, scales, sums, to_biases, strict=True)
    packed = [_tapped(y, b, None, out, scale, sums=s, to_bias=to) for y, b, out, scale, s, to in parts]
    library().dampen_taps_backward(b"".join(packed), len(packed))
    return outs


def _empty_as(y: Tensor) -> Tensor:
    """By heads (B, H, N, dh) in the layout (B, N, H, dh), in which attention gives its gradients too."""
    if y.ndim != 4:
        return torch.empty_like(y)
    b, h, n, size = y.shape
    return torch.empty(b, n, h, size).transpose(1, 2)


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return _NO_STRIDES if t is None else t.stride()[:3] if t.ndim == 4 else (0, 0, t.shape[-1])


def _tapped(
    y: Tensor, bias: int, through: Tensor | None, out: Tensor | None, scale: float, *, total: int = 0, sums: int = 0,
    to_bias: int = 0,
) -> bytes:  # fmt: skip
    size = y.shape[-1]
    shape = tuple(y.shape) if y.ndim == 4 else (1, 1, y.numel() // size, size)
    if y.ndim == 4 and all(t is None or t.stride(1) == size for t in (y, through, out)):
        shape = (shape[0], 1, shape[2], shape[1] * size)  # heads side by side: one long row
    pointers = (y.data_ptr(), bias, _at(through), _at(out), total, sums, to_bias)
    return _TAPPED.pack(*shape, *pointers, *_strides(y), *_strides(through), *_strides(out), scale)
