"""Formulas that keep nothing but their arguments: the backward is written by hand, or makes the formula again.

Autograd keeps what a formula makes on the way. torch's own checkpoint would not, but it replays random numbers and
autocast and hooks every tensor that is saved, which costs more than the small formulas here; these draw nothing and
always run outside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dampen._torch import apply_directly, in_functorch, without_modes
from dampen.functional.explicit.precision import no_autocast

Formula = Callable[..., Tensor]


def by_hand(
    formula: Formula, gradients: Callable[..., Sequence[Tensor | None]], *args: Any, value: Tensor | None = None
) -> Tensor:
    """formula(*args), which may read no tensor with a gradient but those among its arguments.

    Args:
        formula: plain torch; compiled graphs and functorch differentiate it themselves.
        gradients: gradients(grad, wanted, *args) gives one gradient for each argument; those not wanted may be None.
            It is differentiated in its turn where a second derivative is asked for.
        value: what the formula would give, where that is known.
    """
    nobody_asks = not torch.is_grad_enabled() and value is None
    if nobody_asks or torch.compiler.is_compiling() or in_functorch():
        return formula(*args)
    out: Tensor = _apply(formula, gradients, value, *args)
    return out


def again(formula: Formula, *args: Any) -> Tensor:
    """formula(*args); what it makes on the way is made again in the backward."""
    return by_hand(formula, functools.partial(_make_again, formula), *args)


def _make_again(formula: Formula, grad: Tensor, wanted: Sequence[bool], *args: Any) -> list[Tensor | None]:
    twice = torch.is_grad_enabled()
    if not twice:
        args = tuple(
            a.detach().requires_grad_(w) if isinstance(a, Tensor) else a for a, w in zip(args, wanted, strict=True)
        )
    inputs = [a for a, w in zip(args, wanted, strict=True) if w]
    with torch.enable_grad():
        # a formula need not read all it is given: without the bias only the variance's tensors count
        found = torch.autograd.grad(formula(*args), inputs, grad, create_graph=twice, allow_unused=True)
    each = iter(found)
    return [next(each) if w else None for w in wanted]


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, formula: Formula, gradients: Any, value: Tensor | None, *args: Any) -> Tensor:
        ctx.gradients, ctx.others = gradients, [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        tensors = [args[i] for i in ctx.places]
        ctx.save_for_backward(*tensors)
        if value is not None:
            return value.detach()
        # who follows the data of a block must not take a sum in a formula for a residual addition
        with no_autocast(tensors[0].device.type), without_modes():
            return formula(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        args = list(ctx.others)
        for i, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = t
        with no_autocast(grad.device.type):
            return None, None, None, *ctx.gradients(grad, ctx.needs_input_grad[3:], *args)


_apply: Any = apply_directly(_ByHand)
