"""A carrier for trainers whose loss cannot be touched: the gradient of the penalties rides on the model's own output.

    L -> L          forward, to the bit
    dL -> dL, dL    backward: what flows into the loss flows into the penalties as well

So whatever the trainer does to the loss (a gradient scaler, division by accumulation steps) happens to the penalties.
Where the model gives no loss, a number says what flows into them instead, and its first output carries them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dampen.containers import tensors_in, with_tensors


class CarrierSite:
    """What is kept on a model that carries its penalties: the handle, and the number that was given."""

    def __init__(self, reg: Any, scale: float | None) -> None:
        self.reg, self.scale = reg, scale


def carrier_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model whose output carries the penalties; inside `reg.loss` they are added as usual."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: CarrierSite = self._dampen_carrier
        output = base(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()) or site.reg.in_loss:
            return output
        terms = site.reg.penalties()
        site.reg.attached = {name: value.detach() for name, value in terms.items()}
        if not terms:
            return output
        shifts = str(getattr(self, "loss_type", "")).startswith("ForCausalLM")
        return carry(output, sum(terms.values()), site.scale, share_of_step(kwargs, shifts))

    return forward


class _Ride(torch.autograd.Function):
    """The first argument, unchanged; whatever its gradient is, a number goes to the second."""

    @staticmethod
    def forward(ctx: Any, carried_by: Tensor, penalty: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, penalty.dtype
        return carried_by.clone()  # a trainer may scale it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.new_full((), ctx.scale, dtype=ctx.like), None


def carry(output: Any, penalty: Tensor, scale: float | None, share: Tensor | float = 1.0) -> Any:
    """`output` with the penalty's gradient on its loss, or with a `scale` on its first tensor.

    `share` is what part of the step's items this forward holds, where the model divides its loss by those of all.
    """
    if scale is not None:
        return _replace_first(output, lambda t: _Ride.apply(t, penalty, scale))  # type: ignore[no-untyped-call]
    loss = _loss(output)
    if loss is None:
        raise RuntimeError(
            f"regularize(..., attach_to_loss=True) lets the penalties ride on the model's own loss, but it returned a "
            f"{type(output).__name__} without one. Call it with labels; or say how much of the penalties' gradient "
            "each backward should add, attach_to_loss=1.0 (or 1 / accumulation steps); or add reg.penalty() to "
            "the loss."
        )
    riding = penalty * share
    return _replace_loss(
        output, loss, loss + (riding - riding.detach()).to(loss.dtype)
    )  # adds 0, and its gradient


def share_of_step(kwargs: Mapping[str, Any], shifts: bool = False) -> Tensor | float:
    """The part of a step's labels that this forward holds: transformers' models divide by `num_items_in_batch`, the
    labels of all micro-batches, and their trainer then divides no more."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs.get("labels")
        labels = labels[..., 1:] if shifts and isinstance(labels, Tensor) else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    out: Tensor | float = (labels != -100).sum() / items
    return out


def _loss(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    else:
        found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, Tensor) and found.ndim == 0 and found.requires_grad else None


def _replace_loss(output: Any, before: Tensor, loss: Tensor) -> Any:
    new = with_tensors(output, lambda t: loss if t is before else t)
    if new is output:  # an object of the user's own
        output.loss = loss
    return new


def _replace_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    first = next((t for t in tensors_in(output) if t.requires_grad), None)
    if first is None:
        raise RuntimeError(
            f"regularize(..., attach_to_loss=NUMBER) needs a tensor with gradient in the model's output, got "
            f"{type(output).__name__}."
        )
    new = change(first)
    return with_tensors(output, lambda t: new if t is first else t)
