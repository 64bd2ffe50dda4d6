"""The native side of the penalty tap: sums of squares read off tensors, and the gradients that they
send back.

One tensor at a time in the middle of a layer, or all tensors of a step at once:
`functional/explicit/batched.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.native.entry import Place, TapJob, spread_squares, sum_squares, unreadable

__all__ = [
    "Place",
    "fits_tap",
    "tap_gradient",
    "tap_sums",
]


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
