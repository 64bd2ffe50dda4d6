"""Entries that pass the model's forward by, attentions that are not reached, and an example given at once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import Consistency, DropHead, DropKey, TokenGraying

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def vit(depth=2):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, width=8, depth=depth, heads=2, mlp=12
    ).train()


def features(model, x=X):
    """What `forward_features` is elsewhere."""
    return model.encode(model.embed(x))


@pytest.mark.parametrize("training", [True, False])
def test_what_needs_the_models_forward_says_so(training):
    model = vit().train(training)
    reg = dampen.regularize(model, TokenGraying("dct", eps=0.5))
    with pytest.raises(
        RuntimeError,
        match=r"TokenGraying acts on the model's input.*forward_features.*strict=False",
    ):
        features(model)
    model(X)
    with reg.disable():
        features(model)
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="TokenGraying acts on the model's input"):
        features(twin)
    reg.remove()
    features(model)


def test_those_who_mean_it():
    model = vit()
    dampen.regularize(model, TokenGraying("dct", eps=0.5), strict=False)
    features(model)


def test_checkpointing_is_no_entry_of_its_own():
    model = vit()
    dampen.regularize(model, TokenGraying("dct", eps=0.5))
    for block in model.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    model(X).mean().backward()


def test_layers_work_from_any_entry():
    model = vit()
    dampen.regularize(model, DropKey(0.5))
    assert not torch.equal(features(model), features(model))


def test_two_passes_around_an_entry():
    """Outside reg.loss it is noticed at the block; inside it works."""
    model = vit()
    reg = dampen.regularize(model, [DropHead(0.3), Consistency(1.0)])
    loss, terms = reg.loss(lambda: features(model).mean(1), lambda out: out.square().mean())
    loss.backward()
    assert terms["consistency"] > 0
    features(model).mean().backward()
    with pytest.raises(RuntimeError, match="Consistency compares two passes"):
        features(model)


class Maybe(nn.Module):
    """A model with a second attention that it only sometimes uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=12)
                                     .blocks[0] for _ in range(3)])  # fmt: skip

    def forward(self, x, all_of_them=False):
        x = self.layers[0](x)
        return self.layers[2](self.layers[1](x)) if all_of_them else x


def test_skipped_attentions_are_named():
    model = Maybe().train()
    reg = dampen.regularize(model, DropKey(0.1), target_modules=["layers.0", "layers.1"])
    assert "skipped" not in repr(reg)
    assert "(left out)  layers.2.attn: not chosen by target_modules= or attention=" in repr(reg)
    model(torch.randn(2, 5, 8))
    assert "(skipped)  layers.1.attn: not run by the forwards so far, though others were" in repr(
        reg
    )
    model(torch.randn(2, 5, 8), all_of_them=True)
    assert "skipped" not in repr(reg)


class Talking(nn.Module):
    """An attention that mixes heads between softmax and values, for tests: it cannot be entered."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(4, 12), nn.BatchNorm1d(3)

    def attention(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.normalize(q @ k.transpose(-2, -1), 1) @ v

    def forward(self, x):
        return self.attention(self.norm(x))


class TalkingAttention(Talking):
    pass


def test_an_example_tells_at_once():
    model = nn.Sequential(TalkingAttention()).eval()
    before, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="TalkingAttention"):
        dampen.regularize(
            model, DropKey(0.1), example=torch.randn(2, 3, 4, generator=torch.Generator())
        )
    assert [type(m) for m in model.modules()] == before
    assert not any(m.training for m in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "example", [X, (X,), [X], {"images": X}], ids=["tensor", "tuple", "list", "dict"]
)
def test_an_example_that_works(example):
    model = vit().eval()
    random = torch.get_rng_state()
    reg = dampen.regularize(
        model, [DropKey(0.1), dampen.ExplicitDropout(value=0.1)], example=example
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.training
    assert reg.penalties() == {}
    assert "no forward yet" not in repr(reg)
    with pytest.raises(TypeError, match="a tensor, a tuple of arguments or a dict"):
        dampen.regularize(vit(), DropKey(0.1), example=3)
