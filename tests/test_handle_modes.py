"""Modes of the handle nest and restore what was; copies made inside them are plain; `remove` needs no handle."""

import copy
import pickle

import pytest
import torch

import dampen
from dampen import DropKey, TokenGraying

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(depth=2):
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=depth, heads=2, mlp=12)


def random_now(model):
    """Whether two forwards differ."""
    return not torch.equal(model(X), model(X))


def test_mc_mode_nests():
    model = vit().eval()
    reg = dampen.regularize(model, DropKey(0.5))
    with reg.mc_mode():
        with reg.mc_mode():
            assert random_now(model)
        assert random_now(model)
        reg.mc_average(lambda: model(X), samples=2)
        assert random_now(model)
    assert not random_now(model)


def test_mc_mode_is_restored_after_an_error():
    model = vit().eval()
    reg = dampen.regularize(model, DropKey(0.5))
    with reg.mc_mode():
        with pytest.raises(ZeroDivisionError), reg.mc_mode():
            raise ZeroDivisionError
        assert random_now(model)
    assert not random_now(model)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_disable_is_regularized(how):
    model = vit().train()
    reg = dampen.regularize(model, [DropKey(0.5), TokenGraying("dct", eps=0.5)])
    with reg.disable():
        twin = COPIES[how](model)
        assert not random_now(model)
        assert random_now(twin)
        assert not torch.equal(twin.eval()(X), model(X))  # the grayed input too
    assert random_now(model)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_made_inside_mc_mode_is_deterministic_in_eval(how):
    model = vit().eval()
    reg = dampen.regularize(model, DropKey(0.5))
    with reg.mc_mode():
        twin = COPIES[how](model)
        assert random_now(model)
        assert not random_now(twin)


def test_remove_inside_a_mode_is_an_error():
    model = vit().train()
    reg = dampen.regularize(model, DropKey(0.5))
    for mode, name in ((reg.disable, "disable"), (reg.mc_mode, "mc_mode")):
        with (
            mode(),
            pytest.raises(
                RuntimeError, match=rf"remove\(\) inside reg.{name}\(\).*Leave the with block"
            ),
        ):
            reg.remove()
    assert random_now(model)  # nothing was changed
    reg.remove()
    assert type(model) is dampen.models.ViT


@pytest.mark.parametrize("how", COPIES)
def test_remove_without_a_handle(how):
    plain, model = vit().train(), vit().train()
    dampen.regularize(model, [DropKey(0.5), dampen.DropPath(0.5)])
    twin = COPIES[how](model)
    dampen.remove(twin)
    for (name, a), (other, b) in zip(plain.named_modules(), twin.named_modules(), strict=True):
        assert (name, type(a), vars(a).keys()) == (other, type(b), vars(b).keys())
    assert torch.equal(twin(X), plain(X))
    assert random_now(model)  # the original keeps its regularizers


def test_remove_of_a_model_tells_its_handle():
    model = vit()
    reg = dampen.regularize(model, DropKey(0.5))
    dampen.remove(model)
    assert repr(reg) == "dampen: removed"
    with pytest.raises(RuntimeError, match="was removed"):
        reg.progress(0.5)


def test_remove_of_a_plain_model_is_an_error():
    with pytest.raises(ValueError, match="ViT carries no regularizers"):
        dampen.remove(vit())
    with pytest.raises(TypeError, match="takes an nn.Module, got int"):
        dampen.remove(3)


def test_mc_average_is_the_mean_of_the_forwards_it_ran():
    model = vit().eval()
    reg = dampen.regularize(model, DropKey(rate=0.5))
    outputs = []

    def forward():
        outputs.append(model(X))
        return outputs[-1]

    found = reg.mc_average(forward, samples=5)
    assert len(outputs) == 5
    assert not torch.equal(outputs[0], outputs[1])  # they are samples
    torch.testing.assert_close(found, torch.stack(outputs).softmax(-1).mean(0))
    torch.testing.assert_close(found.sum(-1), torch.ones(len(X)))
    with pytest.raises(ValueError, match="at least one sample, got 0"):
        reg.mc_average(forward, samples=0)
