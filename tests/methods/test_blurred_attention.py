"""Blurred attention: blurring keys is blurring scores, and no mask is looked through."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import BlurredAttention
from dampen.functional import blur
from dampen.regularizer import Call
from tests.oracles.stochastic import blur_scores, blurred_attention, gaussian

B, H, N, D = 2, 3, 11, 4


def operands(keys=N, heads=H):
    torch.manual_seed(0)
    return [
        torch.randn(B, h, n, D, dtype=torch.float64)
        for h, n in ((H, N), (heads, keys), (heads, keys))
    ]


def fixed(monkeypatch, fraction):
    """Let the draw from U(0, 1) be `fraction`."""
    monkeypatch.setattr(
        torch, "rand", lambda shape=(), dtype=None, device=None: torch.full(tuple(shape), fraction)
    )


def make_masks():
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    window = causal & torch.ones(N, N, dtype=torch.bool).triu(-2)
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    packed = document[:, None] == document
    padding = torch.ones(B, 1, 1, N, dtype=torch.bool)
    padding[1, ..., 6:] = False
    per_head = torch.rand(1, H, N, N, generator=torch.Generator().manual_seed(1)) < 0.9
    return {
        "none": None,
        "causal": causal,
        "sliding": window,
        "packed": packed,
        "packed causal": packed & causal,
        "padding": padding,
        "padded causal": padding & causal,
        "per head": per_head | torch.eye(N, dtype=torch.bool),
    }


MASKS = make_masks()


def oracle(q, k, v, mask, sigma, width, **options):
    s = q @ k.mT / D**0.5
    visible = torch.ones_like(s, dtype=torch.bool) if mask is None else mask.expand_as(s)
    blurred = torch.stack(
        [
            torch.stack(
                [
                    blur_scores(s[b, h], sigma, width, visible[b, h], **options)
                    for h in range(s.shape[1])
                ]
            )
            for b in range(len(s))
        ]
    )
    return blurred.masked_fill(~visible, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("edge", ["renormalize", "zero"])
def test_equals_blurring_the_scores(monkeypatch, mask, dense, edge):
    fixed(monkeypatch, 0.7)
    monkeypatch.setattr(blur, "DENSE_UP_TO", 256 if dense else 0)
    q, k, v = operands()
    got = dampen.attention(q, k, v, MASKS[mask], regularizers=[BlurredAttention(5, 2.0, edge=edge)])
    torch.testing.assert_close(
        got, oracle(q, k, v, MASKS[mask], 1.4, 5, edge=edge), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("edge", ["renormalize", "zero"])
def test_grid_blurs_in_two_dimensions_and_leaves_prefix_tokens(monkeypatch, mask, edge):
    fixed(monkeypatch, 0.5)
    q, k, v = operands()
    method = BlurredAttention(3, 2.0, grid=(3, 3), edge=edge)  # two prefix tokens
    got = dampen.attention(q, k, v, MASKS[mask], regularizers=[method])
    torch.testing.assert_close(got, oracle(q, k, v, MASKS[mask], 1.0, 3, grid=(3, 3), edge=edge))
    new = method.qkv(q, k, v, Call(kv_heads=H))[1]
    assert torch.equal(new[:, :, :2], k[:, :, :2])


def test_causal_flag_equals_causal_mask():
    q, k, v = operands()
    results = []
    for arguments in ({"is_causal": True}, {"attn_mask": MASKS["causal"]}):
        torch.manual_seed(3)
        results.append(
            dampen.attention(q, k, v, **arguments, regularizers=[BlurredAttention(5, 2.0)])
        )
    torch.testing.assert_close(*results)


def test_grouped_queries_share_the_strictest_mask(monkeypatch):
    fixed(monkeypatch, 0.7)
    q, k, v = operands(heads=1)
    mask = MASKS["per head"]
    got = dampen.attention(q, k, v, mask, enable_gqa=True, regularizers=[BlurredAttention(5, 2.0)])
    sees = mask[0].flatten(0, 1)  # one key for three heads: all their queries must agree
    for h in range(H):
        s = (q[0] @ k[0].mT / D**0.5).flatten(0, 1)
        expected = blur_scores(s, 1.4, 5, sees)[h * N : (h + 1) * N]
        weights = expected.masked_fill(~mask[0, h], float("-inf")).softmax(-1)
        torch.testing.assert_close(got[0, h], weights @ v[0, 0], atol=1e-6, rtol=1e-6)


def test_matches_the_papers_convolution_away_from_edges(monkeypatch):
    """With zero edges and no mask it is the paper's conv1d on the scores."""
    fixed(monkeypatch, 0.6)
    q, k, v = operands()
    got = dampen.attention(q, k, v, regularizers=[BlurredAttention(5, 1.0, edge="zero")])
    torch.testing.assert_close(
        got, blurred_attention(q @ k.mT / D**0.5, v, 0.6, 5), atol=1e-6, rtol=1e-6
    )


def test_the_sketch_of_the_proof():
    """conv(Q K^T) = Q conv(K)^T."""
    q, k, _ = operands()
    g = gaussian(5, 1.1).view(1, 1, -1)
    rows = F.conv1d((q @ k.mT).reshape(-1, 1, N), g, padding=2).view(B, H, N, N)
    keys = F.conv1d(k.mT.reshape(-1, 1, N), g, padding=2).view(B, H, D, N).mT
    torch.testing.assert_close(rows, q @ keys.mT, atol=1e-14, rtol=1e-14)


def test_a_position_bias_is_not_blurred(monkeypatch):
    fixed(monkeypatch, 0.7)
    q, k, v = operands()
    bias = torch.randn(1, H, N, N, dtype=torch.float64)
    got = dampen.attention(q, k, v, bias, regularizers=[BlurredAttention(3, 2.0)])
    s = q @ k.mT / D**0.5
    blurred = torch.stack([torch.stack([blur_scores(x, 1.4, 3) for x in y]) for y in s])
    torch.testing.assert_close(got, (blurred + bias).softmax(-1) @ v, atol=1e-6, rtol=1e-6)


def test_zero_sigma_is_the_identity_to_the_bit():
    q, k, v = operands()
    for sigma in (0.0, 1e-8):
        assert torch.equal(BlurredAttention(5, sigma).qkv(q, k, v, Call(kv_heads=H))[1], k)


def test_sigma_is_drawn_per_forward_or_per_head():
    torch.manual_seed(0)
    q, k, v = operands()
    k = k[:1, :1].expand_as(k)
    shared, own = (BlurredAttention(5, 2.0, draw=d) for d in ("forward", "head"))
    first, second = (shared.qkv(q, k, v, Call(kv_heads=H))[1] for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first[:, 0], first[:, 1])
    per_head = own.qkv(q, k, v, Call(kv_heads=H))[1]
    assert not torch.allclose(per_head[:, 0], per_head[:, 1])
    torch.testing.assert_close(per_head[0], per_head[1])


def test_sigma_is_uniform():
    """U(0, sigma): the center weight 1 / (1 + 2 exp(-1 / (2 s^2))) of a wide row, inverted, has mean sigma / 2."""
    torch.manual_seed(0)
    k = torch.zeros(1, 4000, 3, 1)
    k[:, :, 1] = 1
    center = (
        BlurredAttention(3, 3.0, draw="head")
        .qkv(k, k, k, Call(kv_heads=4000))[1][0, :, 1, 0]
        .double()
    )
    s = (-0.5 / ((1 / center - 1) / 2).log()).sqrt()[center < 1 - 1e-6]
    assert abs((s.sum() / 4000).item() - 1.5) < 0.06
    assert s.max() <= 3.0
    assert (s > 2.0).double().mean().item() == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"width": 4}, "odd"),
        ({"width": 0}, "odd"),
        ({"width": -3}, "odd"),
        ({"width": 5.0}, "odd"),
        ({"sigma": -1.0}, ">= 0"),
        ({"edge": "wrap"}, "renormalize"),
        ({"draw": "token"}, "head"),
        ({"grid": (0, 4)}, "two positive integers"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        BlurredAttention(**arguments)


@pytest.mark.parametrize("grid", [(4, 4), (1, 2)])
def test_a_grid_that_does_not_match_the_tokens(grid):
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"grid \(\d, \d\) has \d+ patches"):
        dampen.attention(q, k, v, regularizers=[BlurredAttention(grid=grid)])


def test_wide_kernels_warn():
    with pytest.warns(UserWarning, match="above 9"):
        BlurredAttention(11)
