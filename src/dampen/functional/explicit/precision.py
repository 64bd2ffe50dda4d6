"""Penalties are computed in float32 or wider, whatever the dtype of the model: the query-key terms are quartic and
would overflow float16."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

_AUTOCASTS = {d for d in ("cpu", "cuda", "xpu", "hpu", "mps", "mtia", "xla") if torch.amp.is_autocast_available(d)}


def wide(t: Tensor) -> Tensor:
    """The tensor in float32, or as it is where it is wider."""
    if t.dtype is torch.float32:
        return t  # nearly always, and called a dozen times per layer
    return t.to(wide_dtype(t))


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which the penalty of a tensor is computed."""
    return torch.float32 if t.dtype is torch.float32 else torch.promote_types(t.dtype, torch.float32)


def as_wide(number: float | Tensor, like: Tensor) -> float | Tensor:
    """A scheduled number; a tensor in the dtype in which the penalty of `like` is computed."""
    return number if isinstance(number, float) else number.to(wide_dtype(like))


def no_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products keep their dtype, although the caller may be under autocast."""
    if device in _AUTOCASTS and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
