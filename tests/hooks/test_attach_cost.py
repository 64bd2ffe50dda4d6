"""The work of attaching grows with the number of layers and not with its square: 1,000 layers took
107 seconds."""

import gc
import sys

import pytest
import torch
from torch import nn

import dampen
from dampen.checking.subjects import adapted, with_companion, with_example
from dampen.registry import methods


def vit(depth):
    return dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=depth, heads=2, mlp=8)


def torch_encoder(depth):
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class FlatList(nn.Module):
    """Attention and feed-forward in turns in one list, as x-transformers has them."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(nn.MultiheadAttention(8, 2, batch_first=True))
            self.layers.append(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))

    def forward(self, x):
        for attention, feed_forward in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + attention(x, x, x)[0]
            x = x + feed_forward(x)
        return x


def calls_of(function):
    """How many functions are called, Python's own included: a number that no other process
    disturbs."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what is collected meanwhile would be counted
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def growth(build, chosen, run=None):
    """How much more work 16 further layers are than 8 were: 2 where it is linear, 4 where it is
    quadratic."""
    counts = []
    for depth in (8, 16, 32):
        model = build(depth)
        handle = []
        counts.append(calls_of(lambda m=model, h=handle: h.append(dampen.regularize(m, chosen()))))
        if run is not None:
            run(model)  # the first forward is watched for the order of the layers
            counts[-1] += calls_of(lambda h=handle: h[0].progress(0.5))
    return (counts[2] - counts[1]) / (counts[1] - counts[0])


@pytest.mark.parametrize("name", methods())
def test_every_method_is_attached_in_linear_time(name):
    make = with_example(methods()[name])

    def build(depth):
        return adapted(vit(depth), make)

    growth(build, lambda: with_companion([make()]))  # what is cached once per class
    assert growth(build, lambda: with_companion([make()])) < 2.02


@pytest.mark.parametrize("build", [vit, torch_encoder, FlatList])
def test_three_methods_on_models_of_three_kinds(build):
    def chosen():
        return [dampen.DropKey(0.1), dampen.ExplicitDropout(ffn=0.1), dampen.HeadDiversity(0.1)]

    x = torch.rand(2, 3, 8, 8) if build is vit else torch.rand(2, 3, 8)
    growth(build, chosen)
    assert growth(build, chosen, run=lambda model: model(x)) < 2.02
