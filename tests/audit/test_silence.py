"""`dampen.silence`: every dropout off and on again, of one model and no other."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen


class Everything(nn.Module):
    """A module's dropout, functional dropout, and dropout in attention."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(16, 16)

    def forward(self, x):
        x = F.dropout(self.fc(self.drop(self.layer(x))), 0.3)
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).squeeze(1)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Everything()


def without_dropout(model):
    """What the model computes without dropout, by a copy of its code."""
    x = copy.deepcopy(model).layer.eval()(X)
    q = model.fc(x).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).squeeze(1)


def repeats(model):
    return torch.equal(model(X), model(X))


def test_everything_is_off_and_comes_back(model):
    rates = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    with dampen.silence(model) as quiet:
        assert quiet.active
        assert repeats(model)
        torch.testing.assert_close(model(X), without_dropout(model))
    assert not quiet.active
    assert not repeats(model)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == rates
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_it_is_a_switch(model):
    quiet = dampen.silence(model)
    assert not repeats(model)
    for _ in range(2):
        assert quiet.on() is quiet
        assert repeats(model)
        assert "nothing drops" in repr(quiet)
        quiet.off()
        assert not repeats(model)


def test_another_model_goes_on_dropping(model):
    other = copy.deepcopy(model)
    with dampen.silence(model):
        torch.manual_seed(1)
        inside = other(X)
        assert repeats(model)
        assert not repeats(other)
        F.dropout(X, 0.5)
        assert not torch.equal(F.dropout(X, 0.5), X)
    torch.manual_seed(1)
    assert torch.equal(inside, other(X))


def test_the_gradient_is_the_one_without_dropout(model):
    with dampen.silence(model):
        model(X).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    without_dropout_of(model).square().sum().backward()
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def without_dropout_of(model):
    model.layer.eval()
    q = model.fc(model.layer(X)).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).squeeze(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_silent_too(model, reentrant):
    x = X.clone().requires_grad_()
    with dampen.silence(model):
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    without_dropout_of(model).square().sum().backward()
    for a, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(a, p.grad)


def test_a_recompute_after_it_is_an_error(model):
    quiet = dampen.silence(model).on()
    out = checkpoint(model, X, use_reentrant=False)
    with pytest.raises(RuntimeError, match="activation checkpointing inside silence"):
        quiet.off()
    assert not quiet.active
    assert out.requires_grad


def test_regularizers_are_off_too():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=8)
    images = torch.randn(2, 3, 8, 8)
    dampen.regularize(model, [dampen.DropKey(0.5), dampen.DropPath(0.5)])
    with dampen.silence(model):
        assert torch.equal(model(images), model(images))
    assert not torch.equal(model(images), model(images))


def test_a_compiled_model():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), Functional())
    model = torch.compile(plain, backend="eager")
    assert not repeats(model)
    with dampen.silence(model):
        assert repeats(model)
        torch.testing.assert_close(model(X), plain[0](X))
    assert not repeats(model)


class Functional(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("place", ["", "1"])
def test_a_hook_that_fails_leaves_the_model_silent(place):
    """A hook of the user's that ran before ours: the forward ended, and had never begun."""
    model, fail = nn.Sequential(nn.Linear(16, 16), Functional()), [True]

    def hook(*given):
        if fail[0]:
            raise ZeroDivisionError

    model.get_submodule(place).register_forward_pre_hook(hook)
    with dampen.silence(model):
        model.get_submodule(place).register_forward_pre_hook(hook, prepend=True)
        with pytest.raises(ZeroDivisionError):
            model(X)
        fail[0] = False
        assert repeats(model)
    assert not repeats(model)


def test_threads_at_once():
    """As nn.DataParallel runs its replicas: one inside a forward, while another begins its own."""
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                go_on.wait(60)
            return F.dropout(x, 0.5)

    model, found = Waits(), []
    with dampen.silence(model):
        thread = threading.Thread(target=lambda: found.append(model(X)))
        thread.start()
        inside.wait(60)
        here = model(X)
        go_on.set()
        thread.join()
        assert torch.equal(here, X)
        assert torch.equal(found[0], X)
    assert not torch.equal(model(X), X)


def test_wrong_use_is_an_error(model):
    with pytest.raises(TypeError, match="silence takes an nn.Module, got int"):
        dampen.silence(3)
    quiet = dampen.silence(model)
    with pytest.raises(RuntimeError, match="is not silent"):
        quiet.off()
    with quiet, pytest.raises(RuntimeError, match="silent already"):
        quiet.on()


def test_an_error_inside_is_passed_on(model):
    with pytest.raises(ZeroDivisionError), dampen.silence(model):
        checkpoint(model, X, use_reentrant=False)
        1 / 0  # noqa: B018
    assert not repeats(model)
