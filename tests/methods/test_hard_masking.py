"""Hard Attention Masking: which keys can go, how often, and what the two fills do."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import HardMasking
from dampen.functional.top_k import in_top, top_share, transposed_scores
from dampen.methods import hard_masking
from dampen.regularizer import Call
from tests.oracles.stochastic import attend_scores, top_keys

B, H, N, D = 2, 3, 9, 4


def operands(heads=H, keys=N):
    torch.manual_seed(0)
    return torch.randn(B, H, N, D), torch.randn(B, heads, keys, D), torch.randn(B, heads, keys, D)


def causal(n=N, m=N):
    return torch.ones(n, m, dtype=torch.bool).tril()


def padding(m=N):
    keep = torch.ones(B, 1, 1, m, dtype=torch.bool)
    keep[1, ..., 5:] = False
    return keep


@pytest.fixture
def always(monkeypatch):
    """Every draw says: drop."""
    monkeypatch.setattr(
        hard_masking,
        "bernoulli",
        lambda shape, rate, device=None: torch.ones(tuple(shape), dtype=torch.bool),
    )


@pytest.mark.parametrize("top", [1, 3, 0.1, 0.3, 0.34, 1.0])
@pytest.mark.parametrize("keep", [None, causal(), padding()], ids=["all", "causal", "padding"])
def test_top_is_the_largest_visible_scores(top, keep):
    q, k, _ = operands()
    s = q @ k.mT
    visible = torch.ones(1, dtype=torch.bool) if keep is None else keep
    assert torch.equal(
        in_top(s.mT.contiguous(), keep, top_share(top)).mT, top_keys(s, visible, top)
    )


def test_fraction_of_visible_keys_is_rounded_up_exactly():
    """0.1 * 30 is 3.0000000000000004 in floating point; the top of 30 keys is 3 of them."""
    s = torch.randn(1, 1, 30, 5)
    assert in_top(s, None, top_share(0.1)).sum(-2).tolist() == [[[3] * 5]]
    assert in_top(s, torch.ones(5, 30, dtype=torch.bool), top_share(0.1)).sum(-2).tolist() == [
        [[3] * 5]
    ]


@pytest.mark.parametrize("mask", [None, "causal", "padding", "bias"])
def test_minus_infinity_equals_softmax_over_the_rest(always, mask):
    q, k, v = operands()
    keep = {"causal": causal(), "padding": padding()}.get(mask)
    bias = torch.randn(1, H, N, N) * 3 if mask == "bias" else None
    got = dampen.attention(
        q, k, v, keep if bias is None else bias, regularizers=[HardMasking(0.5, top=0.3)]
    )
    s = q @ k.mT / D**0.5 + (0 if bias is None else bias)
    visible = torch.ones(1, dtype=torch.bool) if keep is None else keep
    rest = visible & ~top_keys(s, visible, 0.3)
    kept = rest.any(-1)  # a query with one visible key gets it back
    torch.testing.assert_close(got[kept], attend_scores(s, v, rest)[kept])
    assert torch.isfinite(got).all()


def test_zero_fill_sets_the_score_to_zero_and_raises_negative_scores(always):
    q, k, v = operands()
    got = dampen.attention(q, k, v, regularizers=[HardMasking(0.5, top=2, fill="zero")])
    s = q @ k.mT / D**0.5
    top = top_keys(s, torch.ones(1, dtype=torch.bool), 2)
    torch.testing.assert_close(got, attend_scores(s.masked_fill(top, 0), v))
    negative = s - s.amax() - 1  # METHODS: not shift-invariant
    before, after = (
        (x.softmax(-1) * top).sum(-1) for x in (negative, negative.masked_fill(top, 0))
    )
    assert (after > before).all()


def test_grouped_queries_rank_by_their_own_scores(always):
    q, k, v = operands(heads=1)
    got = dampen.attention(q, k, v, enable_gqa=True, regularizers=[HardMasking(0.5, top=2)])
    wide = dampen.attention(
        q, k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1), regularizers=[HardMasking(0.5, top=2)]
    )
    torch.testing.assert_close(got, wide)


def test_realized_rate_and_nothing_but_the_top():
    torch.manual_seed(0)
    q, k = torch.randn(16, 4, 32, 8), torch.randn(16, 4, 32, 8)
    method = HardMasking(0.3, top=0.2)
    hidden = method.mask(q, k, Call(shape=(16, 4, 32, 32)))
    top = top_keys(q @ k.mT, torch.ones(1, dtype=torch.bool), 0.2)
    assert not (hidden & ~top).any()
    n = top.sum().item()
    assert abs(hidden.sum().item() / n - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5


def test_ranking_is_in_float32_whatever_the_dtype():
    """In bfloat16 many scores tie; the top must not grow by that."""
    q, k = torch.randn(2, 2, 40, 8).bfloat16(), torch.randn(2, 2, 40, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        s = transposed_scores(q, k, Call())
    assert s.dtype == torch.float32
    assert (in_top(s, None, top_share(4)).sum(-2) == 4).all()


def test_fused_kernel_and_long_sequences_agree_with_one_piece():
    from dampen.kernels import kernel as kernels

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, kernels.LONG + 8, 4, requires_grad=True) for _ in range(3))
    regs = [
        HardMasking(0.0, top=0.01)
    ]  # the draws differ with the chunks, so only rate 0 can be compared
    out = dampen.attention(q, k, v, regularizers=regs)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-4)
    out.sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"top": 0}, ValueError, "at least 1"),
        ({"top": 1.5}, ValueError, "fraction in"),
        ({"top": True}, TypeError, "count"),
        ({"top": "few"}, TypeError, "count"),
        ({"fill": "nan"}, ValueError, "-inf"),
        ({"rate": 1.0}, ValueError, "probability"),
    ],
)
def test_bad_arguments(arguments, error, says):
    with pytest.raises(error, match=says):
        HardMasking(**arguments)


def test_more_keys_than_there_are_raises():
    q, k, v = operands()
    with pytest.raises(ValueError, match="more keys than the 9"):
        dampen.attention(q, k, v, regularizers=[HardMasking(0.1, top=10)])


def test_high_rates_warn_when_they_are_reached():
    with pytest.warns(UserWarning, match="above 0.5"):
        HardMasking(0.6)
    rising = HardMasking(dampen.linear(0.0, 0.8, along="progress"))
    with pytest.warns(UserWarning, match="above 0.5"):
        rising.at(1.0)
