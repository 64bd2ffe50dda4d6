"""DropPath(skip=True): the same numbers as multiplying, without computing what is dropped."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropKey, DropPath, regularize
from dampen.regularizer import BranchCall
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
        expected = (1 - self.rate.item()) * len(b)
        sure = math.ceil(expected - 1e-6) - 1
        order = torch.randperm(len(b))
        stay = sure + int(torch.rand(1) < expected - sure)
        mask = torch.zeros(len(b), *[1] * (b.ndim - 1))
        mask[order[:stay]] = 1 / (1 - self.rate.item())
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


def test_rate_0_computes_everything_unchanged():
    model = vit()
    plain = model(X)
    regularize(model, DropPath(0.0, skip=True))
    torch.testing.assert_close(model(X), plain)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("batch", [1, 2, 8, 9])
def test_the_mean_of_many_draws_is_the_plain_branch(batch, rate):
    """Each sample stays with the rate's probability, and as many in a draw as the rate says."""
    drop, draws = DropPath(rate, skip=True), 1500
    b = torch.ones(batch, 1, 1)
    torch.manual_seed(batch)
    out = torch.stack([drop.branch(b, BranchCall("ffn", b)) for _ in range(draws)]).flatten(1)
    deviation = math.sqrt(rate / (1 - rate) / draws)  # of the mean of a sample that stays or not
    assert ((out.mean(0) - 1).abs() < 4.5 * deviation).all()
    staying = (out != 0).sum(1)
    expected = (1 - rate) * batch
    assert set(staying.tolist()) <= {math.floor(expected + 1e-6), math.ceil(expected - 1e-6)}
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - rate)))


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_with_less_than_one_sample_to_keep_is_not_left_plain(batch):
    model = vit(1)
    plain = model(X[:batch])
    regularize(model, DropPath(0.9, skip=True))
    same = 0
    torch.manual_seed(0)
    for _ in range(50):
        same += int(torch.isclose(model(X[:batch]), plain, atol=1e-6).all(1).sum())
    # Both branches of a block dropped or both kept: neither is the plain model at rate 0.9
    assert same == 0


class Biased(nn.Module):
    """An attention whose second argument is added to its scores."""

    def __init__(self, names_heads):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        if names_heads:
            self.num_heads = 4

    def forward(self, x, bias):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(o.transpose(1, 2).flatten(2))


class BiasedBlock(nn.Module):
    def __init__(self, names_heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(16), Biased(names_heads)
        self.norm2 = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, bias):
        x = x + self.attn(self.norm1(x), bias)
        return x + self.mlp(self.norm2(x))


class BiasedModel(nn.Module):
    def __init__(self, names_heads):
        super().__init__()
        self.blocks = nn.ModuleList([BiasedBlock(names_heads) for _ in range(2)])

    def forward(self, x, bias):
        for block in self.blocks:
            x = block(x, bias)
        return x


def seen_of(model):
    """How many samples each run of the first attention's last map saw."""
    seen = []
    model.blocks[0].attn.proj.register_forward_hook(lambda m, args, out: seen.append(len(out)))
    return seen


BIASES = {  # shape for B samples, 4 heads and 6 tokens, and whether it can be told
    "by head": (lambda b: (4, 6, 6), False),
    "by sample": (lambda b: (b, 1, 6, 6), True),
    "by sample and head": (lambda b: (b, 4, 6, 6), True),
    "for all": (lambda b: (1, 4, 6, 6), True),
    "by token": (lambda b: (6, 6), True),
}


@pytest.mark.parametrize("names_heads", [True, False])
@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("kind", BIASES)
def test_what_an_argument_is_by_is_told_or_nothing_is_skipped(kind, batch, names_heads):
    torch.manual_seed(3)
    shape, told = BIASES[kind]
    told = told and (names_heads or kind != "by sample and head")
    inputs = {"x": torch.randn(batch, 6, 16), "bias": torch.randn(shape(batch))}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(BiasedModel(names_heads))
    seen = seen_of(models[0])
    ours = step(models[0], DropPath(0.75, skip=True), **inputs)
    expected = step(models[1], Multiplying(0.75), **inputs)
    torch.testing.assert_close(ours[0], expected[0])
    assert seen == [batch // 4 if told else batch]
    assert ("attention ran on all samples" in repr(ours[2])) != told


@pytest.mark.parametrize("batch", [2, 4])
@pytest.mark.parametrize("mask", ["none", "by token", "by sample and head", "padding"])
def test_torchs_encoder_runs_with_every_mask(mask, batch):
    causal = torch.ones(6, 6).triu(1).bool()
    masks = {
        "none": {},
        "by token": {"mask": causal},
        "by sample and head": {"mask": causal.expand(batch * 2, 6, 6)},
        "padding": {"src_key_padding_mask": torch.arange(6).expand(batch, 6) > 4},
    }
    inputs = {"src": torch.randn(batch, 6, 16), **masks[mask]}
    results = []
    for method in (DropPath(0.5, skip=True), Multiplying(0.5)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        results.append(step(model, method, **inputs))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert ("ran on all samples" in repr(results[0][2])) == (mask == "by sample and head")


def test_windows_are_no_samples():
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    x, results = torch.randn(4, 3, 32, 32), []
    for method in (DropPath(0.5, skip=True), Multiplying(0.5)):
        torch.manual_seed(0)
        model = timm.create_model(
            "swin_tiny_patch4_window7_224",
            **sizes,
            depths=(1, 2),
            num_heads=(2, 4),
            num_classes=3,
            drop_path_rate=0,
        )
        results.append(step(model, method, x=x))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert "windows" in repr(results[0][2])
