"""The expected gradient of DropKey over all masks, against DropKey itself and loops, and the closed forms around it."""

import itertools

import pytest
import torch

from dampen import DropKey
from dampen.regularizer import Call
from reproductions.metrics.drop_key_argument import expansion, gradient, masked, smoothed

GENERATOR = torch.Generator().manual_seed(0)
S = torch.randn(5, generator=GENERATOR, dtype=torch.float64)
G = torch.randn(5, generator=GENERATOR, dtype=torch.float64)
READ = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
LOSSES = {"linear": lambda a: a @ G, "curved": lambda a: -(a @ READ).log_softmax(-1)[..., 0]}


def slow(s, loss, rate):
    """Mask by mask, softmax by hand."""
    total = 0.0
    for kept in itertools.product((1, 0), repeat=len(s)):
        chance = 1.0
        for k in kept:
            chance = chance * (1 - rate if k else rate)
        back = [kept] if any(kept) else [tuple(int(i == j) for i in range(5)) for j in range(5)]
        for row in back:
            e = torch.stack([x.exp() * k for x, k in zip(s, row, strict=True)])
            total = total + chance / len(back) * loss(e / e.sum())
    return total


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_over_all_masks(kind, rate):
    torch.testing.assert_close(masked(S, LOSSES[kind], rate), slow(S, LOSSES[kind], rate))
    got, expected = (gradient(form, S, LOSSES[kind], rate) for form in (masked, slow))
    torch.testing.assert_close(got, expected)


def test_it_is_the_expectation_of_the_method_itself():
    rate, draws = 0.4, 40000
    torch.manual_seed(0)
    call = Call(shape=(draws, 1, 1, 5), device=torch.device("cpu"))
    q, k = torch.zeros(draws, 1, 1, 2), torch.zeros(draws, 1, 5, 2)
    hidden = DropKey(rate).mask(q, k, call).expand(draws, 1, 1, 5)[:, 0, 0]
    rows = hidden[~hidden.all(-1)]  # who is left without keys gets one back elsewhere
    a = S.masked_fill(rows, float("-inf")).softmax(-1)
    mean = LOSSES["curved"](a).mean()
    whole = masked(S, LOSSES["curved"], rate)
    alone = torch.stack([LOSSES["curved"](row) for row in torch.eye(5).double()]).mean()
    expected = (whole - rate**5 * alone) / (1 - rate**5)
    assert abs(mean - expected) < 0.02 * abs(expected)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_expansion_is_the_derivative_at_rate_zero(kind):
    loss, h = LOSSES[kind], 1e-5
    for form in (expansion, *([smoothed] if kind == "linear" else [])):
        slope = (gradient(masked, S, loss, h) - gradient(masked, S, loss, 0.0)) / h
        found = (gradient(form, S, loss, h) - gradient(form, S, loss, 0.0)) / h
        torch.testing.assert_close(found, slope, rtol=1e-3, atol=1e-4)


def test_the_smoothed_weights_solve_the_lagrangian_to_first_order():
    """The gradient of sum a s + H(a) + p sum log(1 - a) is the same for all keys, up to p^2."""
    gaps = []
    for rate in (1e-2, 1e-3):
        a = (S - rate / (1 - S.softmax(-1))).softmax(-1).requires_grad_()
        value = (a * S).sum() - (a * a.log()).sum() + rate * (1 - a).log().sum()
        (g,) = torch.autograd.grad(value, a)
        gaps.append((g.max() - g.min()).item())
    assert gaps[1] < 1.2e-2 * gaps[0]


def test_inverted_dropout_after_the_softmax_has_no_such_term():
    a, rate = S.softmax(-1), 0.3
    mean = torch.zeros(5, dtype=torch.float64)
    for kept in itertools.product((1, 0), repeat=5):
        chance = rate ** (5 - sum(kept)) * (1 - rate) ** sum(kept)
        mean += chance * a * torch.tensor(kept) / (1 - rate)
    torch.testing.assert_close(mean, a)
