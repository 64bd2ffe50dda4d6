"""DropPath(skip=True): the same numbers as multiplying, without computing what is dropped."""

import math

import pytest
import torch

import dampen
from dampen import DropKey, DropPath, regularize
from tests.families import FAMILIES, output

X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def vit(depth=2):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 2, "classes": 3, "width": 16, "heads": 2, "mlp": 16}
    return dampen.models.ViT(depth=depth, **sizes)


class Multiplying(DropPath):
    """The oracle: every branch computed for all samples, and multiplied by the mask that the
    skipping form draws."""

    def __init__(self, rate):
        super().__init__(rate, skip=True)
        self.skips_samples = False

    def branch(self, b, call):
        count = math.ceil((1 - self.rate.item()) * len(b) - 1e-6)
        kept = torch.randperm(len(b))[:count]
        mask = torch.zeros(len(b), 1, 1)
        mask[kept] = len(b) / count
        return b * mask


def step(model, method, **inputs):
    reg = regularize(model, method)
    torch.manual_seed(7)
    out = output(model(**inputs))
    model.zero_grad()
    out.square().mean().backward()
    return (
        out.detach(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        reg,
    )


@pytest.mark.parametrize("name", ["own_vit", "timm_vit", "hf_llama", "hf_bert", "hf_vit"])
def test_equals_multiplying_values_and_gradients(name):
    family = FAMILIES[name]
    inputs = {k: torch.cat([v, v, v[:1]]) for k, v in family.inputs.items()}
    ours = step(family.model(), DropPath(0.5, skip=True), **inputs)
    expected = step(family.model(), Multiplying(0.5), **inputs)
    torch.testing.assert_close(ours[0], expected[0])
    for parameter, gradient in expected[1].items():
        torch.testing.assert_close(ours[1][parameter], gradient, msg=parameter)


def test_sublayers_see_the_kept_samples_alone():
    model, seen = vit(), []
    for module in (model.blocks[1].attn, model.blocks[1].mlp):
        module.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    inner = model.blocks[1].mlp.fc1
    inner.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    reg = regularize(model, DropPath(0.4, skip=True))
    model(X)
    assert seen[-1] == 3
    assert "DropPath(rate=0.4, skip)" in repr(reg)
    reg.remove()
    model.eval()(X)
    assert seen[-1] == 5


def test_it_computes_everything_beside_another_method_and_says_so():
    model, seen = vit(), []
    model.blocks[1].mlp.fc1.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    reg = regularize(model, [DropPath(0.4, skip=True), DropKey(0.1)])
    torch.manual_seed(0)
    out = model(X)
    assert seen == [5]
    assert "nothing is skipped beside DropKey" in repr(reg)
    with reg.disable():
        assert not torch.equal(model(X), out)


def test_rate_0_and_one_sample_compute_everything():
    model = vit()
    plain = model(X)
    reg = regularize(model, DropPath([0.0, 0.1], skip=True))
    torch.testing.assert_close(model(X[:1]), plain[:1])  # one sample always stays
    reg.remove()
    regularize(model, DropPath(0.0, skip=True))
    torch.testing.assert_close(model(X), plain)
