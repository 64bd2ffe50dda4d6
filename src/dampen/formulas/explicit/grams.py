"""Two quadratic forms per head and sample, of which every query-key penalty over all pairs is made.

    gram    G = sum_i r_i y_i y_i^T           y_i a token's query or key, r_i its row weight
    spread  M = W diag(g) W^T                 g_j = sum_i r_i x_ij^2, the same tokens seen feature by feature

Both are dh x dh. Autograd would keep copies of the heads and, for M, a tensor of B x d x d: the backwards are
written by hand, save nothing that the forward pass does not keep anyway, and go head by head so that what they touch
stays in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dampen.formulas.explicit.precision import no_autocast, wide

CHUNK = 2**20
"""Entries of the largest temporary of `spread`, samples x dh x in."""


def gram(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
    """sum_i r_i (y_i - bias)(y_i - bias)^T of (B, H, N, dh), bias (H, 1, dh), rows (B, N): (B, H, dh, dh)."""
    if torch.compiler.is_compiling():
        bare = _bare(y, bias)
        return _weigh(bare, rows).transpose(-2, -1) @ bare
    out: Tensor = _Gram.apply(y, bias, rows)
    return out


def spread(weight: Tensor, power: Tensor) -> Tensor:
    """W_h diag(power_b) W_h^T of weight (H, dh, in) and power (B, in): (B, H, dh, dh)."""
    if torch.compiler.is_compiling():
        return torch.stack([torch.matmul(w * power.unsqueeze(1), w.t()) for w in wide(weight)], 1)
    out: Tensor = _Spread.apply(weight, power)
    return out


def _bare(y: Tensor, bias: Tensor | None) -> Tensor:
    return wide(y) if bias is None else wide(y) - wide(bias)


def _weigh(y: Tensor, rows: Tensor | None) -> Tensor:
    return y if rows is None else y * rows[:, None, :, None]


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, bias: Tensor | None, rows: Tensor | None) -> Tensor:
        with no_autocast(y.device.type):
            heads = _contiguous_heads(y, bias)
            return _weigh(heads, rows).transpose(-2, -1) @ heads

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, bias, rows = ctx.saved_tensors
        with no_autocast(y.device.type):
            out = _weigh(_contiguous_heads(y, bias), rows) @ (grad + grad.transpose(-2, -1))
            to_bias = bias is not None and ctx.needs_input_grad[1]
            grad_bias = -out.sum(2).sum(0).unsqueeze(1).to(bias.dtype) if to_bias else None
        return out.to(y.dtype), grad_bias, None


def _contiguous_heads(y: Tensor, bias: Tensor | None) -> Tensor:
    """(B, H, N, dh) without bias, in the layout in which B and H are one batch for the matrix products."""
    return _bare(y, bias).contiguous()


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(weight: Tensor, power: Tensor) -> Tensor:
        with no_autocast(weight.device.type):
            return torch.stack([_spread_head(head, power) for head in wide(weight)], 1)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight, power = ctx.saved_tensors
        grad_weight, grad_power = [], torch.zeros_like(power)
        with no_autocast(weight.device.type):
            both = grad + grad.transpose(-2, -1)
            for h, head in enumerate(wide(weight)):
                by_weight, by_power = torch.zeros_like(head), []
                for g, p in zip(_samples(both[:, h], head), _samples(power, head), strict=True):
                    mixed = (g.reshape(-1, head.shape[0]) @ head).view(-1, *head.shape)  # (grad + grad^T) W, per sample
                    by_power.append((mixed * head).sum(1))
                    by_weight = by_weight + (mixed * p.unsqueeze(1)).sum(0)
                grad_weight.append(by_weight)
                grad_power = grad_power + torch.cat(by_power)
        return torch.stack(grad_weight).to(weight.dtype), grad_power / 2


def _spread_head(weight: Tensor, power: Tensor) -> Tensor:
    """W diag(power_b) W^T of one head, for all samples."""
    size, width = weight.shape
    parts = [(weight * p.unsqueeze(1)).view(-1, width) @ weight.t() for p in _samples(power, weight)]
    return torch.cat(parts).view(-1, size, size)


def _samples(t: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The batch in chunks, so that samples x dh x in stays below `CHUNK` entries."""
    return t.split(max(1, CHUNK // max(1, weight.numel())))
