"""The audit leaves a model, its gradients, buffers, hooks and all generators exactly as they were."""

import random

import numpy
import pytest
import torch
from torch import nn

import dampen

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Stateful(nn.Module):
    """Everything that a forward may leave behind."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = (
            nn.BatchNorm1d(8),
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 2)
        self.codebook = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.log, self.last, self.seen, self.calls = [], None, {}, 0
        self.average = torch.zeros(8)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        x = self.drop(torch.tanh(self.fc(self.norm(x))))
        with torch.no_grad():
            self.codebook.add_(x.mean(0))  # as a vector-quantizer's moving average
            self.average.mul_(0.9).add_(x.mean(0))
        self.count += 1
        self.calls += 1
        self.log.append(self.calls)
        self.seen[self.calls], self.last = x.detach(), x
        self.extra = "set by forward"
        x = x + 0 * torch.randn(8, generator=self.generator)
        return self.head(x)


def everything(model):
    """Values of all that the audit has to leave, and the identity of what has one."""
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "average": model.average.clone(),
        "plain": (list(model.log), dict(model.seen), model.calls, model.last, sorted(vars(model))),
        "modes": [m.training for m in model.modules()],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "hooks": [
            (list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks))
            for m in model.modules()
        ],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [numpy.random.get_state()[1].copy(), numpy.random.get_state()[2]],
        "generator": model.generator.get_state(),
    }  # fmt: skip


def assert_same(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, numpy.ndarray):
        assert (a == b).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def used():
    """A model in the middle of training, one part of it in eval mode, with hooks of its user."""
    torch.manual_seed(0)
    model = Stateful()
    model(X).sum().backward()
    model.norm.eval()
    model.fc.register_forward_hook(lambda *_: None)
    return model


def test_everything_is_as_it_was():
    model = used()
    before = everything(model)
    found = dampen.audit(model, X, lambda out: out.square().mean())
    assert_same(before, everything(model))
    assert [d.where for d in found.dropouts if d.in_training] == ["drop"]


def test_the_next_step_is_the_one_that_would_have_been():
    steps = []
    for audited in (False, True):
        model = used()
        torch.manual_seed(5)
        if audited:
            dampen.audit(model, X)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        out = model(X)
        out.square().mean().backward()
        optimizer.step()
        steps.append([out.detach(), *model.state_dict().values(), torch.get_rng_state()])
    assert_same(*steps)


def test_an_error_in_forward_leaves_it_as_it_was():
    model = used()
    wrong = torch.randn(4, 9)
    before = everything(model)
    with pytest.raises(RuntimeError, match="elements"):
        dampen.audit(model, wrong)
    assert_same(before, everything(model))


def test_an_optimizer_in_the_backward_does_not_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    stepped = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: stepped.append(p))
    dampen.audit(model, X)
    assert stepped == []
    model(X).sum().backward()
    assert len(stepped) == 4
    assert all(p._backward_hooks is None for p in model.parameters())


def test_the_example_is_not_changed():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2).sum(1)

    x = X.clone()
    dampen.audit(nn.Sequential(InPlace()), x)
    assert torch.equal(x, X)


def test_a_regularized_model_keeps_its_regularizers():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=8)
    images = torch.randn(3, 3, 8, 8)
    reg = dampen.regularize(model, [dampen.DropKey(0.3), dampen.ExplicitDropout(value=0.1)])
    torch.manual_seed(0)
    plain = model.train()(images), reg.penalty()
    found = dampen.audit(model, images)
    torch.manual_seed(0)
    assert_same(plain, (model(images), reg.penalty()))
    assert found.ok
