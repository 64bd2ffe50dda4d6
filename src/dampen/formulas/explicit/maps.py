"""The bare projections behind one attention call, split into heads: what every query, key and value penalty reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dampen.formulas.explicit.low_rank import merge
from dampen.formulas.explicit.precision import no_autocast, wide
from dampen.regularizer import Call, LinearCall


@dataclass(frozen=True)
class HeadMap:
    """One projection: y = x W^T + bias, head by head. T tokens of its own input."""

    y: Tensor  # (B, H, T, dh), with the bias
    bias: Tensor | None  # (H, 1, dh)
    x: Tensor  # (B, T, in)
    weight: Tensor  # (H, dh, in)

    @property
    def bare(self) -> Tensor:
        """(B, H, T, dh) without the bias, in float32 or wider."""
        return wide(self.y) if self.bias is None else wide(self.y) - wide(self.bias)

    @property
    def tokens(self) -> tuple[Tensor, Tensor | None]:
        """y as (B, T, H dh), a view where the heads are one, and its bias."""
        return self.y.transpose(1, 2).flatten(2), None if self.bias is None else self.bias.flatten()

    def as_one_head(self) -> HeadMap:
        """All heads as a single one: the authors' own code, with one full Wq^T Wk."""
        return replace(
            self,
            y=self.tokens[0].unsqueeze(1),
            bias=None if self.bias is None else self.bias.reshape(1, 1, -1),
            weight=self.weight.flatten(0, 1).unsqueeze(0),
        )


def read_map(call: Call, role: str, operand: Tensor | None, head_size: int, detach: bool) -> HeadMap:
    """The projection behind "q", "k" or "v" of an attention call.

    `operand` is what arrived at the attention for this role. Where it is a mere view of the projection's output (no
    rotary, no norm, no scaling in between), the penalty's gradient enters there, which spares a fused projection the
    gradients of its slices.
    """
    linear = merge(call.projection(role))
    x, y = linear.input, linear.output
    if y is None:
        raise RuntimeError(
            f"the output of the {role} projection at '{_where(call)}' was not kept."
        )  # the core's promise
    if x.ndim == 2:
        x, y = x.unsqueeze(0), y.unsqueeze(0)
    x, y = x.flatten(1, -2), y.flatten(1, -2)
    if x.shape[0] != call.shape[0]:
        raise RuntimeError(
            f"{type(call.module).__name__} at '{_where(call)}': the {role} projection reads a batch of {x.shape[0]} "
            f"but the attention works on {call.shape[0]}, so tokens cannot be told from samples. "
            "Leave the layer out with sites=."
        )
    heads = y.unflatten(-1, (-1, head_size)).transpose(1, 2)
    plain = detach or operand is None or torch.compiler.is_compiling()
    if not plain and operand is not None and _same_memory(call, role, heads, operand, linear):
        heads = operand
    weight = linear.weight.unflatten(0, (-1, head_size))
    bias = None if linear.bias is None else linear.bias.unflatten(0, (-1, 1, head_size))
    if detach:
        x, bias = x.detach(), None
        y = only_weight(y.detach(), linear.bias, x, linear.weight)
        heads = y.unflatten(-1, (-1, head_size)).transpose(1, 2)
    return HeadMap(heads, bias, x, weight)


def _same_memory(call: Call, role: str, heads: Tensor, operand: Tensor, linear: LinearCall) -> bool:
    """Whether the operand of the attention is a view of exactly these heads. A view of others means another layout."""
    if heads.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr():
        return False
    if operand.stride(1) == 0:  # one head of keys shown to all queries (multi-query attention)
        return False
    if heads.data_ptr() == operand.data_ptr() and _layout(heads) == _layout(operand):
        return heads.requires_grad == operand.requires_grad
    raise RuntimeError(
        f"{type(call.module).__name__} at '{_where(call)}': the map '{linear.role}' was taken to give {role} as "
        f"{heads.shape[1]} heads of size {heads.shape[3]} in order, but the attention reads it in another layout "
        "(heads of q, k and v interleaved). Use separate projections, or leave the layer out with sites=."
    )


def _layout(t: Tensor) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _where(call: Call) -> str:
    return call.site.name if call.site else "this attention"


class _OnlyWeight(torch.autograd.Function):
    @staticmethod
    def forward(bare: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return bare.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        x, weight = ctx.saved_tensors
        with no_autocast(x.device.type):
            return None, None, (grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)).to(weight.dtype)


def only_weight(y: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """x W^T as a function of W alone, from y = x W^T + bias: no gradient to x, and no second matrix product."""
    if torch.compiler.is_compiling():
        return torch.nn.functional.linear(x.detach(), weight)
    with torch.no_grad():
        bare = wide(y) if bias is None else wide(y) - wide(bias)
    out: Tensor = _OnlyWeight.apply(bare, x.detach(), weight)
    return out
