"""The PAC-Bayes bound: its parts against references, and what it promises on synthetic data."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal, kl_divergence

from dampen.diagnostics import generalization_gap
from reproductions.metrics.pac_bayes import (
    binary_kl,
    binary_kl_inverse,
    gaussian_kl,
    pac_bayes_bound,
)


@given(
    seed=st.integers(0, 1000),
    d=st.integers(1, 50),
    sigma=st.floats(0.01, 5.0),
    prior_sigma=st.floats(0.01, 5.0),
)
def test_gaussian_kl_matches_torch(seed, d, sigma, prior_sigma):
    generator = torch.Generator().manual_seed(seed)
    w, w0 = (torch.randn(d, generator=generator, dtype=torch.double) for _ in range(2))
    q = Independent(Normal(w, torch.full((d,), sigma, dtype=torch.double)), 1)
    p = Independent(Normal(w0, torch.full((d,), prior_sigma, dtype=torch.double)), 1)
    kl = gaussian_kl(float((w - w0).square().sum()), d, sigma, prior_sigma)
    assert kl == pytest.approx(float(kl_divergence(q, p)), rel=1e-9, abs=1e-9)
    assert kl >= 0


def test_gaussian_kl_is_exact_for_millions_of_parameters():
    """Near sigma = prior_sigma the KL per parameter is t^2, where a difference of logarithms would lose all digits."""
    t = 1e-7
    assert gaussian_kl(0.0, 10_000_000, 1 + t, 1.0) == pytest.approx(10_000_000 * t**2, rel=1e-5)
    assert gaussian_kl(0.0, 10_000_000, 0.3, 0.3) == 0


def test_the_printed_entropy_is_not_a_divergence():
    """1/sqrt(2 pi e) = 0.242 is where a Gaussian's entropy changes sign; the KL stays positive on both sides."""
    for sigma in (0.2, 0.3, 1.0):
        assert (Normal(0.0, sigma).entropy().item() > 0) == (sigma > 0.242)
        assert gaussian_kl(0.5, 1, sigma, 1.0) > 0


@given(q=st.floats(0.0, 1.0), p=st.floats(0.01, 0.99))
def test_binary_kl_matches_torch(q, p):
    expected = kl_divergence(
        Bernoulli(torch.tensor(q, dtype=torch.double)), Bernoulli(torch.tensor(p).double())
    )
    assert binary_kl(q, float(torch.tensor(p).double())) == pytest.approx(
        float(expected), rel=1e-5, abs=1e-6
    )


@given(q=st.floats(0.0, 1.0), budget=st.floats(0.0, 3.0))
def test_inverse_matches_brute_force(q, budget):
    p = binary_kl_inverse(q, budget)
    grid = [min(1.0, q + (1 - q) * i / 2000) for i in range(2001)]
    best = max(x for x in grid if binary_kl(q, x) <= budget)
    assert q <= best <= p + 1e-12
    assert p - best <= (1 - q) / 2000 + 1e-9
    assert p == 1 or binary_kl(q, p) >= budget - 1e-9  # rounded up, never down


def test_inverse_at_the_ends():
    assert binary_kl_inverse(0.3, 0.0) == pytest.approx(0.3, abs=1e-7)
    assert binary_kl_inverse(0.0, 0.2) == pytest.approx(1 - math.exp(-0.2))
    assert binary_kl_inverse(1.0, 0.5) == 1
    assert binary_kl_inverse(0.2, math.inf) == 1
    assert binary_kl(0.5, 0.0) == binary_kl(0.5, 1.0) == math.inf
    for q, budget in ((-0.1, 1.0), (0.5, -1.0), (0.5, math.nan)):
        with pytest.raises(ValueError, match="Expected q in"):
            binary_kl_inverse(q, budget)


def halfspace(n, seed=0, flip=0.1):
    """Synthetic: two classes split by a plane through the origin, a share of labels flipped."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator)
    y = (x[:, 0] < 0).long()
    return x, torch.where(torch.rand(n, generator=generator) < flip, 1 - y, y)


def halfspace_model():
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]]))
    return model


def test_bound_follows_the_formula():
    model, (x, y) = halfspace_model(), halfspace(1000)
    result = pac_bayes_bound(
        model, [(x[:600], y[:600]), (x[600:], y[600:])], sigma=0.3, prior_sigma=1.0, draws=50
    )
    kl = 0.5 * (6 * 0.09 + 2 - 6 - 6 * math.log(0.09))
    assert result.kl == pytest.approx(kl)
    assert (result.n, result.parameters, result.prior_sigma) == (1000, 6, 1.0)
    assert result.error == pytest.approx((model(x).argmax(dim=1) != y).double().mean().item())
    assert binary_kl(result.noisy_error, result.noisy_error_bound) == pytest.approx(
        math.log(100) / 50
    )
    budget = (kl + math.log(2 * math.sqrt(1000) / 0.04)) / 1000
    assert binary_kl(result.noisy_error_bound, result.bound) == pytest.approx(budget)
    assert result.noisy_error < result.noisy_error_bound < result.bound < 1


def test_noisy_error_has_its_closed_form():
    """The sign of u x with u ~ N((2, 0, 0), 2 sigma^2 I) is wrong with chance Phi(-2 |x_0| / (sqrt(2) sigma |x|))."""
    model, (x, y) = halfspace_model(), halfspace(400, flip=0.0)
    result = pac_bayes_bound(model, [(x, y)], sigma=0.5, draws=600)
    chance = Normal(0.0, 1.0).cdf(-2 * x[:, 0].abs() / (math.sqrt(2) * 0.5 * x.norm(dim=1)))
    assert result.noisy_error == pytest.approx(chance.mean().item(), abs=0.01)


def test_bound_holds_on_fresh_data_and_tightens_with_more():
    model = halfspace_model()
    few, many = (
        pac_bayes_bound(model, [halfspace(n)], 0.3, prior_sigma=1.0, draws=40) for n in (200, 5000)
    )
    assert many.bound < few.bound
    fresh = pac_bayes_bound(model, [halfspace(20_000, seed=9)], 0.3, prior_sigma=1.0, draws=40)
    assert fresh.noisy_error < many.bound
    assert few.bound > few.noisy_error
    wider = pac_bayes_bound(model, [halfspace(200)], 0.3, prior_sigma=1.0, draws=40, choices=10)
    assert wider.bound > few.bound
    assert wider.noisy_error == few.noisy_error
    assert wider.noisy_error_bound == binary_kl_inverse(
        few.noisy_error, math.log(10 / 0.01) / 40
    )  # both parts pay


def test_prior_at_the_weights_leaves_no_kl():
    model = halfspace_model()
    prior = {k: v.clone() for k, v in model.state_dict().items()}
    assert pac_bayes_bound(model, [halfspace(100)], 0.3, prior=prior, draws=3).kl == 0
    assert pac_bayes_bound(model, [halfspace(100)], 0.5, draws=3).kl == pytest.approx(
        2 / (2 * 0.25)
    )


def test_weights_and_modes_come_back_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[1].eval()
    model[3].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pointers = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()
    data = [halfspace(50)]
    first = pac_bayes_bound(model, data, 0.1, draws=4)
    assert pac_bayes_bound(model, data, 0.1, draws=4) == first
    assert first.parameters == 3 * 8 + 8 + 16 + 2

    class Broken(list):
        """Data that fail while the weights are noisy."""

        reads = 0

        def __iter__(self):
            self.reads += 1
            if self.reads == 3:
                raise OSError("disk gone")
            return super().__iter__()

    with pytest.raises(OSError, match="disk gone"):
        pac_bayes_bound(model, Broken(data), 0.1, draws=4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_gap():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2))
    train, test = halfspace(30, flip=0.3), halfspace(500, seed=1, flip=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    result = generalization_gap(model, [train], [test])
    assert result.accuracy_gap == result.train.accuracy - result.test.accuracy > 0.1
    assert result.nll_gap == result.test.nll - result.train.nll > 0.1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sigma": 0.0}, ValueError, "sigma must be positive"),
        ({"prior_sigma": math.inf}, ValueError, "prior_sigma must be positive and finite"),
        ({"draws": 0}, ValueError, "draws=0"),
        ({"delta": 0.0}, ValueError, "chances of failure"),
        ({"delta": 0.995}, ValueError, "sum below 1"),
        ({"train": iter([])}, TypeError, "got an iterator"),
        (
            {"prior": {"weights": torch.zeros(2, 3)}},
            ValueError,
            "no weights for 'weight'; the nearest is 'weights'",
        ),
        (
            {"prior": {"weight": torch.zeros(3, 2)}},
            ValueError,
            r"shape \(3, 2\), the model \(2, 3\)",
        ),
        (
            {"model": nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))},
            ValueError,
            r"0 \(BatchNorm1d\) keeps running",
        ),
        ({"model": nn.Linear(3, 2).requires_grad_(False)}, ValueError, "noise would touch nothing"),
    ],
)
def test_errors(change, error, message):
    arguments = {
        "model": halfspace_model(),
        "train": [halfspace(20)],
        "sigma": 0.3,
        "draws": 2,
        **change,
    }
    with pytest.raises(error, match=message):
        pac_bayes_bound(**arguments)
