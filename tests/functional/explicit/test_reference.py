"""The oracles agree with each other: traces are norms, pairs are enough, and real dropout has these expectations."""

import pytest
import torch
from torch import nn

from tests.oracles import explicit as slow


@pytest.fixture
def toy():
    torch.manual_seed(0)
    x, wq, wk = torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)
    return x.double(), wq.double(), wk.double()


def test_the_papers_traces_are_squared_norms(toy):
    x, wq, wk = toy
    scores = x @ wq.T @ (x @ wk.T).T
    torch.testing.assert_close(slow.trace_query(x, wq, wk, 0.3), 0.5 * 0.09 * scores.square().sum())
    torch.testing.assert_close(slow.trace_key(x, wq, wk, 0.3), 0.5 * 0.09 * scores.square().sum())
    torch.testing.assert_close(
        slow.trace_linear(x, wq, 0.3), 0.5 * 0.09 * (x @ wq.T).square().sum()
    )
    a = torch.rand(4, 2, dtype=torch.float64)
    torch.testing.assert_close(
        slow.trace_attended(a, x, wq, 0.3), 0.5 * 0.09 * (a @ x @ wq.T).square().sum()
    )


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_pair_by_pair_is_the_enumeration_of_everything(toy, inverted, shared):
    """4096 masks of two independent inputs, or 64 of a shared one, at once and pair by pair."""
    x, wq, wk = toy
    whole = slow.enumerate_query_key(x, x, wq, wk, 0.3, inverted, shared=shared)
    pairs = slow.enumerate_pairwise(x, x, wq, wk, 0.3, inverted, shared=shared)
    torch.testing.assert_close(whole, pairs, rtol=1e-13, atol=0)


def test_plain_masks_shrink_and_inverted_ones_do_not(toy):
    """E[m x] = (1-p) x, so the exact form has a bias part that the inverted one lacks."""
    x, wq, _ = toy
    exact, inverted = (slow.enumerate_linear(x, wq, 0.3, i) for i in (False, True))
    v = x.square().sum(0) @ wq.square().sum(0)
    b = (x @ wq.T).square().sum()
    torch.testing.assert_close(exact, 0.5 * (0.09 * b + 0.21 * v))
    torch.testing.assert_close(inverted, 0.5 * 0.3 / 0.7 * v)


@pytest.mark.parametrize("shared", [False, True])
def test_dropout_before_the_projections(toy, shared):
    x, wq, wk = (t.float() for t in toy)
    torch.manual_seed(1)
    mean, error = slow.sample_query_key(x, wq, wk, 0.3, shared, draws=200_000)
    expected = slow.enumerate_query_key(
        *(t.double() for t in (x, x, wq, wk)), 0.3, True, shared=shared
    ).item()
    assert abs(mean - expected) < 4 * error
    assert error < 0.01 * expected
    other = slow.enumerate_query_key(
        *(t.double() for t in (x, x, wq, wk)), 0.3, True, shared=not shared
    ).item()
    assert abs(mean - other) > 4 * error  # a shared mask is really something else


def test_dropout_on_linear_maps_and_attended_values(toy):
    x, w, _ = (t.float() for t in toy)
    a = torch.rand(4, 2)
    torch.manual_seed(1)
    cases = [
        (
            slow.sample_linear(x, w, 0.3, 100_000),
            slow.enumerate_linear(x.double(), w.double(), 0.3, True),
        )
    ]
    for attended in ("pre", "post"):
        oracle = slow.enumerate_attended(a.double(), x.double(), w.double(), 0.3, True, attended)
        cases.append((slow.sample_attended(a, x, w, 0.3, attended, 100_000), oracle))
    for (mean, error), expected in cases:
        assert abs(mean - expected.item()) < 4 * error
        assert error < 0.01 * expected.item()


def test_unfolded_patches_are_the_convolution():
    torch.manual_seed(0)
    conv = nn.Conv2d(
        4, 6, (2, 3), stride=(1, 2), padding=(1, 2), dilation=(2, 1), groups=2, bias=False
    ).double()
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    out = torch.cat([patches @ w.T for patches, w in slow.unfold(x, conv)], 1)
    torch.testing.assert_close(out, conv(x[None])[0].flatten(1).T)
