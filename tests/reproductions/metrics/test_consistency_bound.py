"""The bound in which consistency appears: the identity it stands on, Pinsker, coverage, refusals."""

import math
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import dampen
from dampen import DropKey, LayerDrop, RDrop, regularize
from reproductions.metrics.consistency_bound import _upper, consistency_bound

CLASSES = 4


def test_the_identity_and_pinsker_over_random_predictions():
    """Brier(average) = Brier(one draw) - 1/2 E ||p1 - p2||^2 over all pairs of a finite set of draws, exactly."""
    torch.manual_seed(0)
    for _ in range(20):
        p = (
            torch.randn(6, CLASSES, dtype=torch.float64).mul(3).softmax(1)
        )  # six equally likely draws
        e = torch.eye(CLASSES, dtype=torch.float64)[torch.randint(CLASSES, ())]
        pairs = [(a, b) for a in p for b in p]
        apart = 0.5 * sum((a - b).square().sum() for a, b in pairs) / len(pairs)
        torch.testing.assert_close(
            (p.mean(0) - e).square().sum(), (p - e).square().sum(1).mean() - apart
        )
        kl = sum((a * (a / b).log()).sum() for a, b in pairs) / len(pairs)
        assert apart <= kl
        wrong = p.mean(0).argmax() != e.argmax()
        assert (
            not wrong or (p.mean(0) - e).square().sum() >= 0.5
        )  # so the error is at most twice the Brier score


def model_and_data(n=300):
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, classes=CLASSES, width=16, depth=2, heads=2, mlp=16
    )
    with torch.no_grad():
        model.head.weight.mul_(30)  # predictions that say something, and differ between draws
    data = [
        (torch.randn(n // 2, 1, 8, 8), torch.randint(CLASSES, (n // 2,))) for _ in range(2)
    ]  # synthetic
    return model.eval(), data


def test_equals_a_plain_loop_and_leaves_everything_alone():
    model, data = model_and_data()
    handle = regularize(model, DropKey(0.5))
    state = torch.get_rng_state()
    found = consistency_bound(model, data, handle, draws=3, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    torch.manual_seed(5)
    labels = torch.cat([y for _, y in data])
    with handle.mc_mode(), torch.no_grad():
        p = [torch.cat([model(x) for x, _ in data]).double().softmax(1) for _ in range(3)]
    e = torch.eye(CLASSES, dtype=torch.float64)[labels]
    one = sum((a - e).square().sum(1).mean() for a in p) / 3
    apart = sum(0.5 * (p[i] - p[j]).square().sum(1).mean() for i, j in ((0, 1), (0, 2), (1, 2))) / 3
    assert found.one_draw == pytest.approx(one.item())
    assert found.disagreement == pytest.approx(apart.item())
    assert found.average == pytest.approx((one - apart).item())
    assert found.kl >= found.disagreement > 0
    assert found.disagreement_bound < found.disagreement
    assert found.one_draw_bound > found.one_draw
    assert found.bound == pytest.approx(found.one_draw_bound - found.disagreement_bound)
    assert found.plain_bound > found.plain


def test_the_bound_covers():
    """Bernoulli examples of a known mean: the upper bound fails at most as often as it says (200 sets of 50)."""
    torch.manual_seed(0)
    failed = sum(
        _upper((torch.rand(50) < 0.1).double(), 1.0, math.log(1 / 0.1)) < 0.1 for _ in range(200)
    )
    assert failed <= 32  # 20 expected at most, three standard deviations


class Flip(nn.Module):
    """Evidence 2 for class 0, turned into -2 in 30 % of draws: model, method and handle in one, so all is known."""

    stochastic, passes, sampling = True, 1, False

    @property
    def methods(self):
        return [self]

    @contextmanager
    def mc_mode(self):
        self.sampling = True
        yield
        self.sampling = False

    def forward(self, x):
        x = x * torch.where(torch.rand(len(x), 1) < 0.3, -1.0, 1.0) if self.sampling else x
        return torch.cat([x, -x], dim=1)


def test_a_known_average():
    """Average and disagreement follow by hand, and the bound lies above the true average and below one draw's."""
    model = Flip().eval()
    data = [(torch.full((4000, 1), 2.0), torch.zeros(4000, dtype=torch.int64))]
    found = consistency_bound(model, data, model, draws=6)
    p = torch.sigmoid(torch.tensor(4.0)).item()
    averaged = 0.7 * p + 0.3 * (1 - p)
    assert found.average == pytest.approx(2 * (1 - averaged) ** 2, abs=0.02)
    assert found.disagreement == pytest.approx(0.3 * 0.7 * 2 * (2 * p - 1) ** 2, abs=0.02)
    assert 2 * (1 - averaged) ** 2 < found.bound < found.one_draw_bound


def test_what_is_refused():
    model, data = model_and_data(20)
    with pytest.raises(ValueError, match="no method attached"):
        consistency_bound(model, data, None)
    handle = regularize(model, DropKey(0.2))
    with pytest.raises(ValueError, match="Two draws are needed"):
        consistency_bound(model, data, handle, draws=1)
    handle.remove()
    handle = regularize(model, [LayerDrop(0.2), RDrop(1.0)])
    with pytest.raises(ValueError, match="LayerDrop draws once for a whole batch"):
        consistency_bound(model, data, handle)
    handle.remove()
    handle = regularize(model, dampen.ExplicitDropout(value=0.1))
    with pytest.raises(ValueError, match="draw none"):
        consistency_bound(model, data, handle)
