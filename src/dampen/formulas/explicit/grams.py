"""A quadratic form per head and sample, of which every query-key penalty over all pairs is made.

    gram    G = sum_i r_i y_i y_i^T           y_i a token's query or key, r_i its row weight
    spread  M = W diag(g) W^T                 g_j = sum_i r_i x_ij^2, the same tokens seen feature by feature

M is the gram of the weight's columns, which all samples share. Both are dh x dh. Autograd would keep copies of the
heads and, for M, a tensor of B x d x d: the backward is written by hand and saves nothing that the forward pass does
not keep anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dampen.formulas.explicit.precision import no_autocast, wide

CHUNK = 2**20
"""Entries of the largest temporary of `spread`, samples x in x dh."""


def gram(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
    """sum_i r_i (y_i - bias)(y_i - bias)^T of (B or 1, H, N, dh), bias (H, 1, dh), rows (B, N): (B, H, dh, dh)."""
    if torch.compiler.is_compiling():
        return _gram(_bare(y, bias), rows)
    out: Tensor = _Gram.apply(y, bias, rows)
    return out


def spread(weight: Tensor, power: Tensor) -> Tensor:
    """W_h diag(power_b) W_h^T of weight (H, dh, in) and power (B, in): (B, H, dh, dh)."""
    return gram(weight.transpose(1, 2).unsqueeze(0), None, power)


def _bare(y: Tensor, bias: Tensor | None) -> Tensor:
    """Without bias, in the layout in which B and H are one batch for the matrix products."""
    return (wide(y) if bias is None else wide(y) - wide(bias)).contiguous()


def _weigh(y: Tensor, rows: Tensor | None) -> Tensor:
    return y if rows is None else y * rows[:, None, :, None]


def _gram(y: Tensor, rows: Tensor | None) -> Tensor:
    parts = [_weigh(y[:, h], r).transpose(-2, -1) @ y[:, h] for h, _, r in _parts(y, rows)]
    if len(parts) == 1:
        return parts[0]
    few = len(parts) // y.shape[1]
    return torch.cat([torch.cat(parts[i : i + few]) for i in range(0, len(parts), few)], 1)


def _parts(y: Tensor, rows: Tensor | None) -> list[tuple[slice, slice, Tensor | None]]:
    """Heads, samples and their rows: all at once, or what the samples share head by head and few samples at a time, so
    that no (B, H, N, dh) is built."""
    if rows is None or y.shape[0] == rows.shape[0]:
        return [(slice(None), slice(None), rows)]
    samples = rows.shape[0]
    step = samples if torch.compiler.is_compiling() else max(1, CHUNK // y[0, 0].numel())
    cuts = [slice(start, start + step) for start in range(0, samples, step)]
    return [(slice(h, h + 1), cut, rows[cut]) for h in range(y.shape[1]) for cut in cuts]


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
        ctx.save_for_backward(y, bias, rows)
        with no_autocast(y.device.type):
            return _gram(_bare(y, bias), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        y, bias, rows = ctx.saved_tensors
        to_bias = None
        with no_autocast(y.device.type):
            bare, both = _bare(y, bias), grad + grad.transpose(-2, -1)
            parts = _parts(bare, rows)
            to_rows = torch.zeros_like(rows) if ctx.needs_input_grad[2] else None
            out = bare if len(parts) == 1 else torch.zeros_like(bare)
            for h, cut, r in parts:
                mixed = bare[:, h] @ both[cut, h]
                if len(parts) == 1:
                    out = _weigh(mixed, r).sum_to_size(bare.shape)
                else:
                    out[:, h] += _weigh(mixed, r).sum(0)
                if to_rows is not None:
                    to_rows[cut] += (mixed * bare[:, h]).sum((1, 3)) / 2
            if bias is not None and ctx.needs_input_grad[1]:
                to_bias = -out.sum(2).sum(0).unsqueeze(1).to(bias.dtype)
        return out.to(y.dtype), to_bias, to_rows
