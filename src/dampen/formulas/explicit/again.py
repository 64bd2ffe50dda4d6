"""A checkpoint for plain formulas: what they make on the way is made again in the backward rather than kept.

torch's own checkpoint replays random numbers and autocast and hooks every tensor that is saved, which costs more than
the small formulas here; these draw nothing and always run outside autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dampen._torch import in_functorch
from dampen.formulas.explicit.precision import no_autocast


def again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), which may read no tensor with a gradient but those among its arguments."""
    if torch.compiler.is_compiling() or in_functorch() or not torch.is_grad_enabled():
        return function(*args)
    out: Tensor = _Again.apply(function, *args)
    return out


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.function, ctx.others = function, [None if isinstance(a, Tensor) else a for a in args]
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        tensors = [args[i] for i in ctx.places]
        ctx.save_for_backward(*tensors)
        with no_autocast(tensors[0].device.type):
            return function(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        twice, args = torch.is_grad_enabled(), list(ctx.others)
        for i, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = t if twice else t.detach().requires_grad_(ctx.needs_input_grad[i + 1])
        wanted = [i for i in ctx.places if ctx.needs_input_grad[i + 1]]
        with torch.enable_grad(), no_autocast(grad.device.type):
            out = ctx.function(*args)
            # a formula need not read all it is given: without the bias only the variance's tensors count
            found = torch.autograd.grad(out, [args[i] for i in wanted], grad, create_graph=twice, allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
        return None, *(grads.get(i) for i in range(len(args)))
