"""DropHead: whole heads, per sample, rescaled, never all of them."""

import pytest
import torch

from dampen import DropHead, vshape
from dampen.regularizer import Call
from tests.oracles.stochastic import drop_head


def test_equals_the_loop_over_samples_and_heads():
    torch.manual_seed(0)
    o = torch.randn(6, 4, 5, 3)
    got = DropHead(0.5).heads(o, Call())
    kept = (got != 0).any(-1).any(-1)
    assert 0 < kept.sum() < 24
    torch.testing.assert_close(got, drop_head(o, kept))


def test_each_sample_keeps_a_head_and_the_rate_is_the_stated_one():
    """METHODS: at least one head; so the realized rate is p - p^H / H."""
    torch.manual_seed(0)
    batch, heads, rate = 20000, 3, 0.6
    kept = DropHead(rate).heads(torch.ones(batch, heads, 1, 1), Call()).flatten(1) > 0
    assert kept.any(-1).all()
    expected = rate - rate**heads / heads
    assert (
        abs((~kept).double().mean().item() - expected)
        < 4 * (expected * (1 - expected) / (batch * heads)) ** 0.5
    )


def test_the_kept_weight_is_always_one():
    """Rescaling by H / kept keeps the sum over heads of equal outputs exactly, not only on average."""
    torch.manual_seed(0)
    out = DropHead(0.4).heads(torch.ones(50, 8, 2, 2), Call())
    torch.testing.assert_close(out.sum(1), torch.full((50, 2, 2), 8.0))


def test_unbiased_over_draws():
    torch.manual_seed(0)
    o = torch.randn(1, 4, 2, 3).expand(30000, -1, -1, -1)
    mean = DropHead(0.3).heads(o, Call()).mean(0)
    torch.testing.assert_close(mean, o[0], atol=0.03, rtol=0.03)


def test_v_shaped_schedule():
    method = DropHead(vshape(0.2, 0.1))
    rates = []
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        method.at(progress)
        rates.append(method.rate.item())
    assert rates == pytest.approx([0.2, 0.1, 0.0, 0.05, 0.1])
