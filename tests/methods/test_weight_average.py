"""Averages of weights against plain sums, evaluation at them, batch norm, and saved states."""

import copy

import pytest
import torch
from torch import nn

import dampen
from dampen import WeightAverage, regularize


def vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3, "width": 16, "heads": 2, "mlp": 16}
    return dampen.models.ViT(depth=2, **sizes)


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def train(reg, optimizer, steps, first=0, total=10):
    """Steps of SGD; returns the weights after each."""
    seen = []
    for step in range(first, first + steps):
        reg.progress(step / total)
        optimizer.zero_grad()
        reg.model(X).square().mean().backward()
        optimizer.step()
        seen.append({n: p.detach().clone() for n, p in reg.model.named_parameters()})
    return seen


def attached(method, lr=0.05):
    reg = regularize(vit(), method)
    optimizer = torch.optim.SGD(reg.model.parameters(), lr=lr)
    reg.attach_optimizer(optimizer)
    return reg, optimizer


def expected(kind, seen):
    """What the average is by its definition, from all weights of training."""
    if kind == "ema":
        average = seen[0]
        for t, weights in enumerate(seen[1:], 1):
            b = min(0.7, (1 + t) / (10 + t))
            average = {n: b * average[n] + (1 - b) * weights[n] for n in weights}
        return average
    counted = seen[5::2] if kind == "swa" else seen[5::2][-2:]
    return {n: sum(w[n] for w in counted) / len(counted) for n in seen[0]}


@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_the_average_is_the_one_of_its_definition(kind):
    reg, optimizer = attached(WeightAverage(kind, decay=0.7, start=0.5, every=2, window=2))
    seen = train(reg, optimizer, 10)
    own = {n: p.detach().clone() for n, p in reg.model.named_parameters()}
    with reg.averaged():
        for name, average in expected(kind, seen).items():
            torch.testing.assert_close(reg.model.get_parameter(name).detach(), average)
    assert all(torch.equal(p, own[n]) for n, p in reg.model.named_parameters())


def test_training_does_not_change():
    reg, optimizer = attached(WeightAverage())
    plain = vit()
    twin = torch.optim.SGD(plain.parameters(), lr=0.05)
    seen = train(reg, optimizer, 3)
    for _ in range(3):
        twin.zero_grad()
        plain(X).square().mean().backward()
        twin.step()
    assert all(torch.equal(p, seen[-1][n]) for n, p in plain.named_parameters())


def test_a_graph_from_before_can_still_go_backward():
    reg, optimizer = attached(WeightAverage())
    train(reg, optimizer, 2)
    out = reg.model(X)
    with reg.averaged(), torch.no_grad():
        reg.model.eval()(X)
    out.sum().backward()


@pytest.mark.parametrize("order", ["handle first", "model first", "optimizer attached last"])
@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_a_resumed_run_has_the_same_average(kind, order):
    method = WeightAverage(kind, decay=0.7, start=0.3, every=2, window=3)
    reg, optimizer = attached(method)
    train(reg, optimizer, 6)
    saved = copy.deepcopy((reg.state_dict(), reg.model.state_dict(), optimizer.state_dict()))
    train(reg, optimizer, 4, first=6)
    other = regularize(vit(), method)
    again = torch.optim.SGD(other.model.parameters(), lr=0.05)
    if order != "optimizer attached last":
        other.attach_optimizer(again)
    if order == "handle first":
        other.load_state_dict(saved[0])
    other.model.load_state_dict(saved[1])
    if order != "handle first":
        other.load_state_dict(saved[0])
    again.load_state_dict(saved[2])
    other.attach_optimizer(again)
    train(other, again, 4, first=6)
    with reg.averaged(), other.averaged():
        assert torch.equal(reg.model.head.weight, other.model.head.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_the_average_of_16_bit_weights_moves_by_less_than_they_can(kind, dtype):
    """Contract: the average is that of the numbers that the weights had, and so after loading."""
    method = WeightAverage(kind, decay=0.999, start=0.0, window=20)
    reg = regularize(vit().to(dtype), method)
    weight = reg.model.head.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    reg.attach_optimizer(optimizer)
    values = [1.0] * 10 + [1.03125] * 10
    expected = values[0]
    for t, value in enumerate(values):
        torch.nn.init.constant_(weight, value)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        b = min(0.999, (1 + t) / (10 + t))
        expected = b * expected + (1 - b) * value
    if kind != "ema":
        expected = sum(values) / len(values)
    other = regularize(vit().to(dtype), method)
    other.load_state_dict(reg.state_dict())
    for handle in (reg, other):
        (average,) = handle.clones
        found = average.averaged_weights()["head.weight"]
        torch.testing.assert_close(found, torch.full(found.shape, expected))
        with handle.averaged():
            assert torch.equal(handle.model.head.weight, found.to(dtype))


@pytest.mark.parametrize("kind", ["ema", "swa", "lawa"])
def test_autocast_sees_the_average_and_then_the_model(kind):
    reg, optimizer = attached(WeightAverage(kind, start=0.0), lr=0.5)
    train(reg, optimizer, 4)

    def fresh():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return reg.model(X)

    live = fresh()
    with reg.averaged():
        average = fresh()
    assert not torch.equal(live, average)
    with torch.autocast("cpu", torch.bfloat16):
        found = [reg.model(X)]
        with reg.averaged():
            found.append(reg.model(X))
        found.append(reg.model(X))
    for a, b in zip(found, [live, average, live], strict=True):
        assert torch.equal(a, b)


class WithBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_batch_norm_is_renewed_from_a_loader_and_given_back():
    torch.manual_seed(0)
    model, batches = WithBatchNorm(), [torch.randn(4, 5, 16) * 3 + i for i in range(3)]
    reg = regularize(model, WeightAverage("swa", start=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reg.attach_optimizer(optimizer)
    model(batches[0]).sum().backward()
    optimizer.step()
    before = {n: b.clone() for n, b in model.named_buffers()}
    with reg.averaged(batches):
        mean = torch.stack([b.mean((0, 1)) for b in batches]).mean(0)
        torch.testing.assert_close(model.norm.running_mean, mean)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers() if n in before)


def test_errors():
    with pytest.raises(ValueError, match="kind is one of ema, swa, lawa, got 'mean'"):
        WeightAverage("mean")
    with pytest.raises(ValueError, match="window are counts from 1"):
        WeightAverage("lawa", window=0)
    reg = regularize(vit(), dampen.DropKey(0.1))
    with pytest.raises(ValueError, match="this model has 0"), reg.averaged():
        pass


def test_a_step_that_would_be_undone_is_refused():
    """It would move the average, and the end of the block would bring the weights from before back."""
    model, other = vit(), vit()
    reg = regularize(model, WeightAverage("ema"), keep_start=True)
    optimizer, elsewhere = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    reg.attach_optimizer(optimizer)
    for m in (model, other):
        m(X).square().mean().backward()
    optimizer.step()
    before, kept = model.head.weight.clone(), other.head.weight.clone()
    for block in (reg.averaged, reg.at_start, lambda: reg.interpolate(0.5)):
        with block():
            elsewhere.step()
            with pytest.raises(RuntimeError, match=r"SGD\.step\(\) while ViT carries other"):
                optimizer.step()
        assert torch.equal(model.head.weight, before)
    assert not torch.equal(other.head.weight, kept)
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


def test_an_average_that_nothing_feeds_is_refused():
    reg = regularize(vit(), WeightAverage())
    with pytest.raises(RuntimeError, match="has no average.*attach_optimizer"), reg.averaged():
        pass
    optimizer = torch.optim.SGD(reg.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="WeightAverage acts in the steps"):
        train(reg, optimizer, 2)


def test_no_step_so_far_is_the_model_itself():
    reg, _ = attached(WeightAverage("swa"))
    before = reg.model.head.weight.detach().clone()
    with reg.averaged():
        assert torch.equal(reg.model.head.weight, before)
