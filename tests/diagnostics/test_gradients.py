"""Gradient variance against closed forms of linear regression."""

import numpy as np
import pytest
import torch
from torch import nn

from dampen.diagnostics import gradient_variance


def squared_error(model, x, y):
    return 0.5 * (model(x).squeeze(-1) - y).square().mean()


def test_equals_numpy_on_the_same_batches():
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    data = [
        (
            torch.randn(4, 3, generator=generator).double(),
            torch.randn(4, generator=generator).double(),
        )
        for _ in range(7)
    ]
    w = model.weight.detach().numpy()[0]
    # g = mean of (w x - y) x
    g = np.stack([((x.numpy() @ w - y.numpy())[:, None] * x.numpy()).mean(axis=0) for x, y in data])
    result = gradient_variance(model, data, squared_error)
    assert result.trace == pytest.approx(np.trace(np.cov(g.T)), rel=1e-12)
    assert result.mean_squared_norm == pytest.approx((g**2).sum(axis=1).mean(), rel=1e-12)
    assert result.squared_norm_of_mean == pytest.approx((g.mean(axis=0) ** 2).sum(), rel=1e-12)
    assert result.normalized == pytest.approx(result.trace / result.mean_squared_norm)
    assert result.by_parameter == {"weight": pytest.approx(result.trace)}
    assert (result.batches, result.batch_size) == (7, 4)


@pytest.mark.parametrize("batch", [1, 8])
def test_closed_form_of_linear_regression(batch):
    """x ~ N(0, I_d), y = w* x + s e: tr Cov(g) = (s^2 d + |w - w*|^2 (d + 1)) / batch, E g = w - w*."""
    generator = torch.Generator().manual_seed(0)
    d, s, n = 5, 0.7, 4000
    truth, weight = torch.randn(d, generator=generator), torch.randn(d, generator=generator)
    model = nn.Linear(d, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight[None])
    x = torch.randn(n, batch, d, generator=generator)
    y = x @ truth + s * torch.randn(n, batch, generator=generator)
    result = gradient_variance(model, list(zip(x, y, strict=True)), squared_error)
    delta = float((weight - truth).square().sum())
    expected = (s**2 * d + delta * (d + 1)) / batch
    assert result.trace == pytest.approx(expected, rel=0.1)
    assert result.squared_norm_of_mean == pytest.approx(delta + expected / n, rel=0.1)
    assert result.normalized == pytest.approx(expected / (expected + delta), rel=0.05)


def test_equal_batches_have_no_variance():
    torch.manual_seed(0)
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    result = gradient_variance(nn.Linear(4, 3), [batch] * 3)
    assert result.trace == pytest.approx(0, abs=1e-12)
    assert result.mean_squared_norm > 0


def test_dropout_counts_in_training_mode_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    assert gradient_variance(model, [batch] * 4, mode="eval").trace == pytest.approx(0, abs=1e-12)
    assert gradient_variance(model, [batch] * 4).trace > 1e-3
    assert gradient_variance(model, [batch] * 4) == gradient_variance(model, [batch] * 4)


def test_model_is_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    model[2].eval()
    unused = nn.Parameter(torch.ones(2))
    model.register_parameter("unused", unused)
    model[0].weight.grad = torch.ones(4, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    result = gradient_variance(
        model, [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    )
    assert result.by_parameter["unused"] == 0
    assert model[0].weight.grad.eq(1).all()
    assert model[3].weight.grad is None
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.set_rng_state(
        state
    )  # the data above were drawn before; the measurement itself must not have drawn
    drawn = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    after = torch.get_rng_state()
    gradient_variance(model, drawn)
    assert torch.equal(torch.get_rng_state(), after)


def test_errors():
    model, batch = nn.Linear(4, 3), (torch.randn(6, 4), torch.randint(3, (6,)))
    with pytest.raises(ValueError, match="at least two batches: got 1"):
        gradient_variance(model, [batch])
    with pytest.raises(ValueError, match="got 6 and then 5"):
        gradient_variance(model, [batch, (batch[0][:5], batch[1][:5])])
    with pytest.raises(TypeError, match=r"scalar tensor: got a tensor of shape \(6, 3\)"):
        gradient_variance(model, [batch] * 2, lambda m, x, y: m(x))
    with pytest.raises(ValueError, match="The loss is nan"):
        gradient_variance(model, [batch] * 2, lambda m, x, y: m(x).sum() * torch.nan)
    with pytest.raises(ValueError, match="frozen"):
        gradient_variance(nn.Linear(4, 3).requires_grad_(False), [batch] * 2)
