"""DropKey's argument in numbers: the expected gradient through the masked softmax, over all masks, beside the plain
softmax with a smoothing term of first order in the rate.

For one query with scores s over m keys, a = softmax(s) and a loss f of the weights:

    masked     E f(a'),  a' = the softmax over the keys that stay, each hidden with probability p     (all 2^m masks)
    expansion  f(a) + p sum_j [f(a without key j) - f(a)]                                             (any f)
    smoothed   f(softmax(s - p / (1 - a)))                                                            (f linear in a)

The last is the weights a that maximize sum_j a_j s_j + H(a) + p sum_j log(1 - a_j), to first order in p.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor], Tensor]


def masked(s: Tensor, loss: Loss, rate: float) -> Tensor:
    """E f(a') over every mask, weighted by its probability. Where all keys are hidden one comes back, each with the
    same chance, as `DropKey` does.

    Args:
        s: scores (m,).
        loss: of weights (..., m), gives (...).
        rate: the probability to hide a key.
    """
    m = len(s)
    rows = torch.tensor(list(itertools.product((True, False), repeat=m)))[:-1]
    kept = rows.sum(-1).double()
    chances = (1 - rate) ** kept * rate ** (m - kept)
    chances = chances + (kept == 1) * rate**m / m  # all hidden: one of them comes back
    values = loss(s.masked_fill(~rows, float("-inf")).softmax(-1))
    return (chances.to(values) * values).sum()


def expansion(s: Tensor, loss: Loss, rate: float) -> Tensor:
    """f(a) + p sum_j [f(a without j) - f(a)]: one key hidden at a time.

    Args:
        s: scores (m,).
        loss: of weights (..., m), gives (...).
        rate: the probability to hide a key.
    """
    plain = loss(s.softmax(-1))
    hidden = torch.eye(len(s), dtype=torch.bool)
    return plain + rate * (loss(s.masked_fill(hidden, float("-inf")).softmax(-1)) - plain).sum()


def smoothed(s: Tensor, loss: Loss, rate: float) -> Tensor:
    """f(softmax(s - p / (1 - a))): a key loses the more the larger its weight is.

    Args:
        s: scores (m,).
        loss: of weights (..., m), gives (...).
        rate: the probability to hide a key.
    """
    return loss((s - rate / (1 - s.softmax(-1))).softmax(-1))


FORMS: dict[str, Callable[[Tensor, Loss, float], Tensor]] = {
    "plain": lambda s, loss, rate: loss(s.softmax(-1)),
    "expansion": expansion,
    "smoothed": smoothed,
}


def gradient(
    form: Callable[[Tensor, Loss, float], Tensor], s: Tensor, loss: Loss, rate: float
) -> Tensor:
    """d form / d s.

    Args:
        form: one of the above.
        s: scores (m,).
        loss: of weights (..., m), gives (...).
        rate: the probability to hide a key.
    """
    s = s.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(form(s, loss, rate), s)
    return g


def errors(s: Tensor, loss: Loss, rate: float) -> dict[str, float]:
    """By form, how far its gradient is from the expected one, as a share of what hiding keys changes in it:
    |form - masked| / |masked - plain|. 1 is what the plain softmax has.

    Args:
        s: scores (m,).
        loss: of weights (..., m), gives (...).
        rate: the probability to hide a key.
    """
    exact = gradient(masked, s, loss, rate)
    effect = (exact - gradient(FORMS["plain"], s, loss, rate)).norm()
    return {
        name: ((gradient(form, s, loss, rate) - exact).norm() / effect).item()
        for name, form in FORMS.items()
    }
