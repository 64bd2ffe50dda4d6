"""Head diversity: against the sum pair by pair, padding, zero heads."""

import pytest
import torch

import dampen
from dampen import DropHead, HeadDiversity
from dampen.methods.head_diversity import squared_cosine
from tests.oracles.stochastic import head_diversity


def outputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_slow_sum(masked):
    o = outputs(2, 4, 5, 3)
    valid = torch.ones(2, 5, dtype=torch.bool)
    if masked:
        valid[1, 2:] = False
    got = squared_cosine(o, valid if masked else None)
    assert got.item() == pytest.approx(head_diversity(o, valid), rel=1e-5)


def test_one_for_equal_heads_zero_for_orthogonal_ones():
    o = outputs(1, 1, 3, 4).expand(-1, 4, -1, -1)
    assert squared_cosine(o).item() == pytest.approx(1.0)
    assert squared_cosine(
        -o * torch.tensor([1.0, -2, 3, 4]).view(1, 4, 1, 1)
    ).item() == pytest.approx(1.0)
    assert squared_cosine(torch.eye(4).view(1, 4, 1, 4)).item() == pytest.approx(0.0, abs=1e-7)


def test_a_head_that_is_exactly_zero_has_a_finite_gradient():
    o = outputs(2, 3, 4, 5)
    o[:, 1] = 0
    o.requires_grad_()
    squared_cosine(o).backward()
    assert torch.isfinite(o.grad).all()
    q = outputs(2, 3, 4, 5).requires_grad_()
    method = HeadDiversity(1.0)
    dampen.attention(q, q, q, regularizers=[DropHead(0.6), method])
    method.take_penalties()["head_diversity"].backward()
    assert torch.isfinite(q.grad).all()


def test_the_heads_go_on_unchanged_and_the_fused_kernel_stays():
    o = outputs(2, 3, 4, 5)
    from dampen.regularizer import Call

    assert HeadDiversity(1.0).heads(o, Call()) is o
    assert HeadDiversity.stages == {"heads"}


def test_descending_it_turns_heads_apart():
    o = (outputs(1, 4, 3, 8) + 2).requires_grad_()
    values = []
    for _ in range(50):
        loss = squared_cosine(o)
        values.append(loss.item())
        (gradient,) = torch.autograd.grad(loss, o)
        with torch.no_grad():
            o -= 10 * gradient
    assert values[-1] < 0.2 * values[0]


def test_a_single_head_raises():
    with pytest.raises(ValueError, match="only one"):
        squared_cosine(outputs(1, 1, 2, 3))


def test_bad_weight():
    with pytest.raises(ValueError, match=">= 0"):
        HeadDiversity(-0.1)
