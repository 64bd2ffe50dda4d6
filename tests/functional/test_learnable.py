"""Learned rates, counts and widths: soft forms that become the hard ones, gradients, and no collapse."""

import copy
import re

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import BlurredAttention, HardMasking, regularize
from dampen.functional.learnable import (
    count_heads,
    rate_divergence,
    scale_divergence,
    soft_bernoulli,
    soft_top,
)
from dampen.functional.top_k import in_top, top_share
from dampen.regularizer import Call

LEARNED = [
    HardMasking(0.2, 0.3, learn="rate"),
    HardMasking(0.2, 0.3, learn="top"),
    HardMasking(0.2, 0.3, learn=["rate", "top"]),
    HardMasking(0.2, 0.3, fill="zero", learn=["rate", "top"]),
    BlurredAttention(5, 1.0, learn=True),
    BlurredAttention(5, 1.0, learn=True, draw="head"),
]
IDS = ["rate", "top", "rate and top", "zero fill", "sigma", "sigma per head"]


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=2, classes=3, width=16, depth=2, heads=2, mlp=16
    )


X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2] * 2)


def step(model, reg, seed=0):
    torch.manual_seed(seed)
    loss, terms = reg.loss(lambda: model(X), lambda out: F.cross_entropy(out, Y))
    loss.backward()
    return loss, terms


@pytest.mark.parametrize("method", LEARNED, ids=IDS)
def test_parameters_are_per_head_and_layer_outside_the_state_dict_and_get_gradients(method):
    model = vit()
    keys = list(model.state_dict())
    reg = regularize(model, method)
    parameters = reg.parameters()
    values = 2 if isinstance(method, HardMasking) and len(method.learn) == 2 else 1
    assert [p.shape for p in parameters] == [(2,)] * 2 * values
    assert list(model.state_dict()) == keys
    assert {id(p) for p in parameters} <= {id(p) for p in model.parameters()}
    _, terms = step(model, reg)
    assert f"{method.name}.prior" in terms
    assert all(torch.isfinite(p.grad).all() and (p.grad != 0).any() for p in parameters)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("method", LEARNED, ids=IDS)
def test_the_handle_saves_and_loads_them(method):
    model = vit()
    reg = regularize(model, method)
    with torch.no_grad():
        for i, p in enumerate(reg.parameters()):
            p += 0.1 * (i + 1)
    state = copy.deepcopy(reg.state_dict())
    other = vit()
    fresh = regularize(other, method)
    fresh.load_state_dict(state)
    for a, b in zip(reg.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(step(model, reg)[0], step(other, fresh)[0])


@pytest.fixture(scope="module")
def fitted():
    model = vit()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model.requires_grad_(False)


@pytest.mark.parametrize("method", LEARNED, ids=IDS)
def test_they_do_not_collapse_although_the_noise_only_hurts(method, fitted):
    """A frozen, fitted model: the task's gradient says less noise, the divergence holds it near its stated value."""
    model, lowest = fitted, {}
    for weight in (0.0, 1.0):
        chosen = copy.deepcopy(method)
        chosen.scheduled("prior_weight", weight, high=float("inf"))
        reg = regularize(model, chosen)
        values = reg.parameters()
        with torch.no_grad():  # start far too low, as after a collapse
            for p in values:
                p -= 4.0
        start = torch.cat([p.detach() for p in values]).clone()
        optimizer = torch.optim.Adam(values, 0.1)
        for i in range(50):
            optimizer.zero_grad()
            step(model, reg, seed=i)
            optimizer.step()
        lowest[weight] = torch.cat([p.detach() for p in values]) - start
        reg.remove()
    assert (lowest[1.0] > 2.0).all()  # came back towards the prior
    assert (lowest[0.0] < lowest[1.0] - 1.0).all()  # and would not have without it


def test_by_default_they_move_but_do_not_collapse_while_a_model_learns_digits():
    """Training all of a small ViT with a fast rate for the learned values: they fall, and stay well above zero."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=4, mlp=32
    )
    methods = [
        HardMasking(0.3, top=0.3, learn=["rate", "top"]),
        BlurredAttention(sigma=1.0, learn=True),
    ]
    reg = regularize(model, methods)
    learned = {id(p) for p in reg.parameters()}
    own = [p for p in model.parameters() if id(p) not in learned]
    optimizer = torch.optim.Adam(
        [{"params": own, "lr": 2e-3}, {"params": reg.parameters(), "lr": 5e-2}]
    )
    for _ in range(200):
        batch = torch.randint(0, len(x), (64,))
        loss, terms = reg.loss(lambda: model(x[batch]), lambda out: F.cross_entropy(out, y[batch]))  # noqa: B023
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert terms["task"] < 1.0
    rates = [c.log_odds["rate"].sigmoid() for c in reg.clones if isinstance(c, HardMasking)]
    sigmas = [c.log_sigma.exp() for c in reg.clones if isinstance(c, BlurredAttention)]
    assert min(r.min() for r in rates) > 0.1
    assert min(s.min() for s in sigmas) > 0.4
    assert min(r.min() for r in rates) < 0.25  # they did learn
    assert re.search(
        r"HardMasking\(rate=0\.\d+\.\.0\.\d+, top=0\.\d+\.\.0\.\d+", str(reg)
    )  # and that is shown


def test_soft_top_becomes_the_hard_top():
    s = torch.randn(2, 3, 5, 12)
    keep = torch.ones(5, 12, dtype=torch.bool).tril(6)
    for mask in (None, keep):
        share = torch.full((3, 1, 1), 0.24)
        soft = soft_top(s, mask, share, 1e-3)
        seen = torch.full((5,), 12) if mask is None else mask.sum(-1)
        counts = (soft > 0.5).sum(-1)
        assert (counts == (0.24 * seen).add(0.5).floor().clamp(min=1)).all()
        for n in range(5):
            k = int(counts[0, 0, n])
            shown = None if mask is None else mask[n : n + 1]
            hard = in_top(s[..., n : n + 1, :].mT.contiguous(), shown, top_share(k)).mT
            assert torch.equal(soft[..., n : n + 1, :] > 0.5, hard)


def test_soft_draws_have_the_stated_rate():
    torch.manual_seed(0)
    odds = torch.logit(torch.tensor(0.3))
    hard = soft_bernoulli(odds, (200000,), 1e-3)
    assert (hard > 0.5).double().mean().item() == pytest.approx(0.3, abs=0.005)
    assert ((hard < 1e-3) | (hard > 1 - 1e-3)).double().mean() > 0.99
    assert (soft_bernoulli(odds, (200000,), 0.3) > 0.5).double().mean().item() == pytest.approx(
        0.3, abs=0.005
    )


@pytest.mark.parametrize("fill", ["-inf", "zero"])
def test_a_cold_learned_method_has_the_hard_ones_distribution(fill):
    """With temperature to 0 the mean weight on each query's best key is that of the hard method."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8)
    v = torch.eye(9).expand(1, 2, -1, -1)
    best = (q @ k.mT).argmax(-1)
    means = []
    for method in (
        HardMasking(0.4, 0.2, fill),
        HardMasking(0.4, 0.2, fill, learn=["rate", "top"], heads=2, temperature=0.01),
    ):
        out = torch.stack(
            [dampen.attention(q, k, v, regularizers=[method]).detach() for _ in range(800)]
        ).mean(0)
        means.append(out.gather(-1, best.unsqueeze(-1)))
    torch.testing.assert_close(*means, atol=0.03, rtol=0.05)


def test_divergences_are_zero_at_the_prior_and_grow_towards_zero():
    prior = torch.tensor(0.2)
    assert rate_divergence(prior, torch.logit(prior).expand(3)).item() == pytest.approx(0, abs=1e-6)
    assert scale_divergence(prior, prior.log().expand(3)).item() == pytest.approx(0, abs=1e-6)
    for divergence in (rate_divergence, scale_divergence):
        values = [divergence(prior, torch.tensor([x])).item() for x in (-3.0, -6.0, -12.0)]
        assert values[0] < values[1] < values[2]
        low = torch.tensor([-12.0], requires_grad=True)
        divergence(prior, low).backward()
        assert low.grad.item() < -0.15  # the pull back does not fade


def test_chunks_add_the_divergence_once(monkeypatch):
    from dampen.kernels import kernel as kernels

    q = torch.randn(1, 2, 12, 4)
    values = []
    for long in (2048, 4):
        monkeypatch.setattr(kernels, "LONG", long)
        monkeypatch.setattr(kernels, "CHUNK", 48)
        method = HardMasking(0.2, 0.3, learn="rate", heads=2)
        with torch.no_grad():
            method.rate_log_odds += 1
        dampen.attention(q, q, q, regularizers=[method])
        values.append(method.take_penalties()["hard_masking.prior"])
    torch.testing.assert_close(*values)


class Mute(nn.Module):
    """An attention that does not say how many heads it has."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "make",
    [lambda **o: HardMasking(learn="rate", **o), lambda **o: BlurredAttention(learn=True, **o)],
)
def test_heads_that_the_model_does_not_tell(make):
    with pytest.raises(ValueError, match="heads=8"):
        regularize(nn.Sequential(Mute()), make())
    model = nn.Sequential(Mute())
    regularize(model, make(heads=2))
    model(torch.randn(2, 5, 8)).sum().backward()
    model = nn.Sequential(Mute())
    regularize(model, make(heads=4))
    with pytest.raises(ValueError, match="this attention has 2"):
        model(torch.randn(2, 5, 8))


def test_used_without_parameters_it_says_what_to_do():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match="heads="):
        BlurredAttention(learn=True).qkv(q, q, q, Call(kv_heads=2))
    with pytest.raises(RuntimeError, match="heads="):
        HardMasking(learn="rate").logits(q, Call())


def test_grouped_queries_count_key_heads():
    from dampen.checking import SUBJECTS

    model = SUBJECTS["llama"].model()
    reg = regularize(model, [HardMasking(learn="rate"), BlurredAttention(learn=True)])
    assert [p.shape[0] for p in reg.parameters()] == [4, 2, 4, 2]
    assert count_heads(reg.clones[0]) == 4
    model(**SUBJECTS["llama"].inputs()).logits.sum().backward()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"learn": "k"}, "'rate', 'top'"),
        ({"learn": "top", "top": 3}, "as a fraction"),
        ({"learn": "rate", "temperature": 0.0}, "temperature"),
        ({"learn": "rate", "prior_weight": -1.0}, ">= 0"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        HardMasking(0.2, **arguments)


@pytest.mark.parametrize("method", LEARNED[2:5], ids=IDS[2:5])
def test_learned_methods_compile_whole(method):
    torch._dynamo.reset()
    model = vit()
    reg = regularize(model, method)
    eager = step(model, reg)[0]
    run = torch.compile(model, fullgraph=True, backend="eager")
    torch.manual_seed(0)
    loss, _ = reg.loss(lambda: run(X), lambda out: F.cross_entropy(out, Y))
    torch.testing.assert_close(loss, eager)
    torch._dynamo.reset()
