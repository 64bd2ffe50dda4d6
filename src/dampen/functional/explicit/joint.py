"""One mask on X for queries, keys and values at once, to first order: one vector-Jacobian product
with random signs.

The paper (arXiv 2604.20505) found no expression for it. With inverted dropout the input deviates by
dX of mean zero, E dx_ij^2 = r x_ij^2 with r = p/(1-p), independently per entry. To first order the
attention output o(X) deviates by J dX, so that

    E ||o(X + dX) - o(X)||^2  ~  r sum_ij x_ij^2 ||d o / d x_ij||^2.

For random signs s on the outputs, g = J^T s has E g_ij^2 = ||d o / d x_ij||^2 (the signs are
uncorrelated), so that 1/2 r sum (x g)^2 is an unbiased estimate of half of it, differentiable,
whatever stands between X and o: rotary, norms, biases, masks. It is no limit: a dropped entry moves
by its full size however small p is (docs/joint_mask.md).
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from dampen.calls import Call, LinearCall
from dampen.functional.explicit.layers import ATTENTION
from dampen.functional.explicit.projections import at
from dampen.functional.explicit.reductions import Number, RowWeights, wide


def check_joint(form: str, detach_inputs: bool, heads: str) -> None:
    """Refuse what has no such term, with the reason."""
    if form != "inverted":
        raise ValueError(
            f"ExplicitDropout: joint is for form='inverted', got form={form!r}. Masks that are not "
            "rescaled shift the "
            "input by -p X on average, which is no small deviation to expand around. Use "
            "form='inverted'."
        )
    if detach_inputs:
        raise ValueError(
            "ExplicitDropout: joint has no form with detach_inputs=True: its Jacobian runs through "
            "the activations. "
            "Use a second ExplicitDropout(joint=...) beside this one."
        )
    if heads == "concat":
        raise ValueError(
            "ExplicitDropout: joint follows the model's own heads; heads='concat' is for query, "
            "key and query_key. "
            "Use a second ExplicitDropout(joint=...) beside this one."
        )


def with_gradient(x: Tensor, call: LinearCall) -> Tensor:
    """x, or a leaf of the same numbers where nothing below it is trained, so that a Jacobian can be
    taken."""
    if call.role in ATTENTION:
        call.input = (
            x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        )
        return call.input
    return x


def joint_variance(
    o: Tensor, call: Call, rows: RowWeights, rate: Number, signs: Tensor | None = None
) -> Tensor:
    """1/2 r sum (x g)^2 in the reduction of `rows`, for the attention output o (B, H, N, D) of one
    call.

    `signs` are -1 and 1, shaped like o; by default they are drawn.
    """
    return cast(Tensor, _outside_graphs()(o, call, rows, rate, signs))


@functools.cache
def _outside_graphs() -> Any:
    """A gradient inside the forward that is differentiated again: graphs have no double backward,
    so it stays out of them. Not as a decorator: that would import the compiler with `import
    dampen`."""
    return torch.compiler.disable(_joint_variance)


def _joint_variance(
    o: Tensor, call: Call, rows: RowWeights, rate: Number, signs: Tensor | None
) -> Tensor:
    inputs = _one_input(call)
    if signs is None:
        signs = torch.empty_like(o, dtype=wide(o).dtype).bernoulli_(0.5).mul_(2).sub_(1)
    # a sum of squares weighted by w is one of outputs weighted by sqrt(w)
    if rows.weights is not None:
        signs = signs * rows.weights.sqrt()[:, None, :, None]
    gradients = torch.autograd.grad(o, inputs, signs.to(o.dtype), create_graph=True)
    g = sum((wide(t) for t in gradients[1:]), start=wide(gradients[0]))
    return rate / (1 - rate) * (wide(inputs[0]) * g).square().sum() * rows.factor


def _one_input(call: Call) -> list[Tensor]:
    """The tensors that q, k and v read, which must hold one X: the very same one, or leaves made of
    one."""
    inputs = [call.projection(role).input for role in ("q", "k", "v")]
    first = inputs[0]
    same = all(t.data_ptr() == first.data_ptr() and t.shape == first.shape for t in inputs)
    if call.cross or not same:
        raise RuntimeError(
            f"joint is one mask on the input of queries, keys and values, but in {at(call)} they "
            "read "
            "different inputs. Use query_key, value and attended_value there, or regularize(..., "
            "attention='self')."
        )
    return list({id(t): t for t in inputs}.values())
