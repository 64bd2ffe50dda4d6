"""DropKey: the paper's formula, its structures and schedules, and its two remedies for the train-test gap."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey, early, linear
from dampen.masks import keep_keys
from dampen.methods.drop_key import block_mask, cross_mask, grid_of
from tests.oracles import attention as reference


def operands(n=9, m=9, d=4, batch=2, heads=3, dtype=torch.float64):
    torch.manual_seed(0)
    return [
        torch.randn(batch, heads, length, d, dtype=dtype, requires_grad=True)
        for length in (n, m, m)
    ]


@pytest.mark.parametrize("unit", ["element", "column", "block", "cross"])
@pytest.mark.parametrize("length", [9, 65])
def test_equals_the_papers_formula(unit, length):
    """Values and gradients, with the very mask that was drawn, on the plain kernel (9 keys) and the fused one (65)."""
    q, k, v = operands(length, length)
    method = DropKey(0.4, unit=unit, window=2 if unit in ("block", "cross") else 1)
    torch.manual_seed(1)
    got = dampen.attention(q, k, v, regularizers=[method])
    torch.manual_seed(1)
    call = dampen.Call()
    if unit == "column":
        method.qkv(q, k, v, call)
    hidden = ~keep_keys(None, [method.mask(q, k, call)], length)
    expected = reference.drop_key(q, k, v, hidden)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(got)
    for a, b in zip(
        *(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (got, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("shape", [block_mask, cross_mask])
def test_structures_equal_loops(shape, window):
    torch.manual_seed(0)
    rate = torch.tensor(0.3)
    covered = window * window if shape is block_mask else window * (5 + 6) - window * window
    torch.manual_seed(1)
    got = shape((20, 5, 6), rate, window, None)
    torch.manual_seed(1)
    from dampen.masks import bernoulli, seed_rate

    seeds = bernoulli((20, 5, 6), seed_rate(rate, covered))
    plain = reference.block_hidden if shape is block_mask else reference.cross_hidden
    assert torch.equal(got, torch.stack([plain(s, window) for s in seeds]))


@pytest.mark.parametrize(
    ("unit", "window"), [("element", 1), ("column", 1), ("block", 3), ("cross", 1), ("cross", 2)]
)
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_rate_away_from_borders(unit, window, rate):
    """Every key is hidden with probability p; keys near the border of a grid a little less."""
    torch.manual_seed(0)
    q = k = torch.zeros(400, 4, 8, 50) if unit == "column" else torch.zeros(60, 4, 50, 50)
    k = torch.zeros(q.shape[0], 4, 50, 8)
    q = torch.zeros(q.shape[0], 4, 12, 8)
    method, call = DropKey(rate, unit=unit, window=window), dampen.Call()
    method.qkv(q, k, k, call)
    hidden = method.mask(q, k, call).double().mean((0, 1, 2))
    center = hidden[1 + 3 * 7 + 3]  # the middle of the 7 x 7 grid behind the class token
    assert abs(center - rate) < 0.03
    assert abs(hidden[0] - rate) < 0.03  # the class token is dropped singly
    assert (hidden < rate + 0.03).all()


def test_masks_are_independent_per_sample_head_and_query():
    torch.manual_seed(0)
    mask = DropKey(0.5).mask(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 64, 4), dampen.Call())
    flat = mask.flatten(0, 2)
    assert flat.shape == (12, 64)
    assert len({tuple(row.tolist()) for row in flat}) == 12
    method, call, k = DropKey(0.5, unit="column"), dampen.Call(), torch.zeros(2, 2, 64, 4)
    method.qkv(k, k, k, call)
    assert method.mask(torch.zeros(2, 2, 3, 4), k, call).shape == (2, 2, 1, 64)


def test_no_rescaling():
    """The softmax renormalizes: each row of weights still sums to 1."""
    q, k, _ = operands()
    ones = torch.ones_like(k)
    torch.testing.assert_close(
        dampen.attention(q, k, ones, regularizers=[DropKey(0.5)]), torch.ones_like(q)
    )


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (linear(0.3, 0.0), [0.3, 0.2, 0.1, 0.0]),
        (0.3, [0.3] * 4),
        (linear(0.0, 0.3), [0.0, 0.1, 0.2, 0.3]),
        ([0.1, 0.0, 0.4, 0.2], [0.1, 0.0, 0.4, 0.2]),
    ],
    ids=["decreasing", "constant", "increasing", "list"],
)
def test_depth_schedules(rate, expected):
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=4, heads=2, mlp=8)
    reg = dampen.regularize(model, DropKey(rate))
    assert [c.rate.item() for c in reg.clones] == pytest.approx(expected)


def test_fine_tune_phase():
    """`early` switches DropKey off for the last part of training, where the plain model is tuned."""
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=8).train()
    reg = dampen.regularize(model, DropKey(early(linear(0.4, 0.2), until=0.9)))
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(x), model(x))
    reg.progress(0.95)
    assert [c.rate.item() for c in reg.clones] == [0.0, 0.0]
    assert torch.equal(model(x), model(x))


def test_monte_carlo_average_at_test_time():
    """mc_average draws in eval mode, leaves the mode alone, and converges to the mean over masks."""
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=8).eval()
    reg = dampen.regularize(model, DropKey(0.5))
    x = torch.randn(2, 3, 8, 8)
    plain = model(x)
    with reg.mc_mode():
        samples = torch.stack([model(x).softmax(-1) for _ in range(200)]).detach()
    assert samples.std(0).max() > 0
    average = reg.mc_average(lambda: model(x), samples=200)
    assert not average.requires_grad
    torch.testing.assert_close(average, samples.mean(0), atol=0.05, rtol=0)
    assert torch.equal(model(x), plain)
    assert not model.training
    with pytest.raises(ValueError, match="at least one sample"):
        reg.mc_average(lambda: model(x), samples=0)


def test_shift_invariance_of_the_hidden():
    """What is hidden gets no gradient at all."""
    q, k, v = operands(n=1, m=5, batch=1, heads=1)
    torch.manual_seed(3)
    out = dampen.attention(q, k, v, regularizers=[DropKey(0.6)])
    torch.manual_seed(3)
    keep = keep_keys(None, [DropKey(0.6).mask(q, k, dampen.Call())], 5)
    (gradient,) = torch.autograd.grad(out.sum(), v)
    assert torch.equal(gradient[0, 0].abs().sum(-1) > 0, keep[0, 0, 0])


def test_guard_matches_enumeration():
    assert reference.realized_rate(0.6, 3) == pytest.approx(0.6 - 0.6**3 / 3)


def test_in_cross_attention():
    """Keys of another sequence are dropped as well."""
    q, k, v = operands(n=3, m=70)
    out = dampen.attention(q, k, v, regularizers=[DropKey(0.5)])
    assert not torch.allclose(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rate": 1.0}, ValueError, r"probability in \[0, 1\), got 1.0"),
        ({"rate": -0.1}, ValueError, "probability"),
        ({"rate": float("nan")}, ValueError, "got nan"),
        ({"rate": "0.1"}, TypeError, "got '0.1' of type str"),
        ({"rate": True}, TypeError, "of type bool"),
        ({"rate": []}, ValueError, "empty list"),
        ({"rate": [0.1, 2.0]}, ValueError, "layer 1"),
        ({"unit": "row"}, ValueError, "element, column, block, cross, got 'row'"),
        ({"window": 0, "unit": "block"}, ValueError, "at least 1"),
        ({"window": 3}, ValueError, "needs unit='block' or 'cross'"),
        ({"grid": (0, 3), "unit": "block"}, ValueError, "two positive integers"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        DropKey(**arguments)


def test_grids():
    assert grid_of(65, None) == (8, 8)
    assert grid_of(64, None) == (8, 8)
    assert grid_of(201, None) == (14, 14)
    assert grid_of(51, (5, 10)) == (5, 10)
    with pytest.raises(ValueError, match=r"no square grid.*grid=\(rows, columns\)"):
        grid_of(62, None)
    with pytest.raises(ValueError, match="has 80 patches, but there are only 65 keys"):
        grid_of(65, (8, 10))
