"""ConcreteDropout: the penalty against sums written out, the draw against dropout, the rate that it learns."""

import math

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import ConcreteDropout, DropConnect, regularize
from dampen.methods.concrete_dropout import divergence

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0])


def vit(depth=2):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=2, classes=3, width=16, depth=depth, heads=2, mlp=24
    ).train()


def slow_divergence(p, weight, length):
    """Entry by entry: l^2 / (2 (1 - p)) w^2, and log 2 - H(p) for each input."""
    total = 0.0
    for row in weight:
        for w in row:
            total = total + length**2 / (2 * (1 - p)) * w * w
    for _ in range(weight.shape[1]):
        total = total + math.log(2) + p * torch.log(p) + (1 - p) * torch.log(1 - p)
    return total


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_the_divergence_and_its_gradients(p):
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    log_odds = torch.logit(torch.tensor([p], dtype=torch.float64)).requires_grad_()
    got = divergence(log_odds, weight, 0.7)
    expected = slow_divergence(log_odds.sigmoid()[0], weight, 0.7)
    torch.testing.assert_close(got, expected)
    for g, e in zip(
        *(torch.autograd.grad(v, [log_odds, weight]) for v in (got, expected)), strict=True
    ):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("others", [[], [DropConnect(0.3)]], ids=["alone", "beside"])
def test_the_penalty_is_summed_over_maps_of_the_clean_weights(others):
    model = vit()
    reg = regularize(model, [ConcreteDropout(0.2, weight=0.01, length=2.0), *others])
    _, terms = reg.loss(lambda: model(X), lambda out: F.cross_entropy(out, Y))
    shapes = ((24, 16), (16, 24))
    maps = [m for m in model.blocks.modules() if getattr(m, "weight", X).shape in shapes]
    assert len(maps) == 4
    p = torch.tensor(0.2)
    expected = 0.01 * sum(slow_divergence(p, m.weight.detach(), 2.0) for m in maps)
    torch.testing.assert_close(terms["concrete_dropout"], expected, rtol=1e-4, atol=1e-6)


def test_one_rate_for_each_map_in_the_state_of_the_handle_alone():
    model = vit()
    keys = list(model.state_dict())
    reg = regularize(model, ConcreteDropout(0.2, targets=["qkv", "ffn_in", "ffn_out"]))
    assert len(reg.parameters()) == 2 * 3
    assert list(model.state_dict()) == keys
    assert "ffn_in 0.2" in repr(reg.clones[0])
    torch.optim.SGD(reg.parameters(), lr=1.0).zero_grad()
    with torch.no_grad():
        reg.parameters()[0].fill_(1.0)
    other = regularize(vit(), ConcreteDropout(0.2, targets=["qkv", "ffn_in", "ffn_out"]))
    other.load_state_dict(reg.state_dict())
    assert other.parameters()[0].item() == 1.0


def test_the_factor_has_mean_one_and_is_nearly_always_zero_or_the_inverse():
    """At a low temperature the draw is Bernoulli: as in inverted dropout, kept features are divided by 1 - p."""
    model = vit(depth=1)
    reg = regularize(model, ConcreteDropout(0.3, targets=["ffn_in"], temperature=0.01))
    clone = reg.clones[0]
    torch.manual_seed(2)
    call = dampen.regularizer.LinearCall("ffn_in", torch.ones(200, 16), torch.ones(2, 16), None)
    made = torch.stack([clone.operands(call.input, call.weight, call)[0] for _ in range(40)])
    reg.penalties()
    error = math.sqrt(0.3 / 0.7 / made.numel())
    assert abs(made.mean().item() - 1) < 5 * error
    kept = (made - 1 / 0.7).abs() < 0.01
    assert abs(kept.double().mean().item() - 0.7) < 0.02
    assert (kept | (made < 0.01)).double().mean() > 0.95


def test_the_rate_settles_where_the_divergence_is_least():
    """Without a task p solves log(p / (1 - p)) d = -l^2 ||W||^2 / (2 (1 - p)^2)."""
    torch.manual_seed(3)
    weight, length = 0.3 * torch.randn(4, 6, dtype=torch.float64), 1.5
    log_odds = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_odds], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        divergence(log_odds, weight, length).backward()
        optimizer.step()
    p, norm = log_odds.sigmoid().item(), weight.square().sum().item()
    assert math.log(p / (1 - p)) * 6 == pytest.approx(
        -(length**2) * norm / (2 * (1 - p) ** 2), rel=1e-3
    )


@pytest.mark.parametrize("examples", [20, 200000])
def test_few_data_learn_a_high_rate_and_many_a_low_one(examples):
    """The paper's claim: the rate falls as the data grow. Here the same batch stands for few examples or many."""
    model = vit()
    reg = regularize(model, ConcreteDropout(0.3, weight=1 / examples, length=0.05))
    optimizer = torch.optim.Adam(
        [{"params": [p for n, p in model.named_parameters() if "dampen" not in n], "lr": 1e-3},
         {"params": reg.parameters(), "lr": 0.05}]
    )  # fmt: skip
    for seed in range(60):
        torch.manual_seed(seed)
        loss, _ = reg.loss(lambda: model(X), lambda out: F.cross_entropy(out, Y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rates = torch.cat([p.sigmoid() for p in reg.parameters()])
    assert rates.min() > 0.35 if examples == 20 else rates.max() < 0.3


def test_a_gradient_reaches_every_rate_from_the_task_too():
    model = vit()
    reg = regularize(model, ConcreteDropout(0.3, weight=0.0))
    loss, _ = reg.loss(lambda: model(X), lambda out: F.cross_entropy(out, Y))
    loss.backward()
    assert all(p.grad.abs().item() > 0 for p in reg.parameters())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        ConcreteDropout(0.1, length=0)
    with pytest.raises(ValueError, match="targets are"):
        ConcreteDropout(0.1, targets="heads")
