"""Which module is a layer, which of its parts is what, and that a method acts where the handle lists it, nowhere else.

What a method does is read from outside: by forward hooks on the model's own modules, not by what dampen found."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import (
    DropConnect,
    DropHead,
    DropKey,
    DropPath,
    ExplicitDropout,
    FeedForwardDropout,
    HiddenDropout,
    LayerDrop,
    ProjectionDropout,
    SkipAblation,
)
from dampen.regularizer import Regularizer
from tests.hooks.odd_layers import (
    Alternating,
    D,
    Dictionary,
    Hybrid,
    HybridWithoutMask,
    Paired,
    Softmax,
    Sparse,
)
from tests.hooks.odd_layers import Experts as ExpertModules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it scripts its helpers
    from vit_pytorch import SimpleViT, ViT
    from x_transformers import Decoder, Encoder

X = torch.randn(3, 5, D, generator=torch.Generator().manual_seed(0))


class NoBranch(Regularizer):
    """Takes every branch away, so that a block without post-norm is the identity."""

    stochastic = False

    def branch(self, b, call):
        return b * 0


def changed_linears(model, *inputs):
    """The linear layers whose output is not that of their input and weight, as hooks see both."""
    changed, hooks = set(), []

    def look(name):
        def hook(module, args, out):
            if not torch.allclose(F.linear(args[0], module.weight, module.bias), out, atol=1e-5):
                changed.add(name)

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(look(name)))
    model(*inputs)
    for hook in hooks:
        hook.remove()
    return changed


def named(model, *endings):
    return {
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and any(e in n for e in endings)
    }


FEEDING = {
    "alternating": (lambda: Alternating(), ("ff.",)),
    "alternating, eager": (lambda: Alternating(flash=False), ("ff.",)),
    "paired": (lambda: Paired(), ("ff.",)),
    "x_transformers": (lambda: Encoder(dim=D, depth=2, heads=2), ("ff.",)),
    "dictionary": (lambda: Dictionary(), ("linear0", "linear1")),
    "hybrid": (lambda: Hybrid(), ("mlp.",)),
}


@pytest.mark.parametrize("name", FEEDING)
@pytest.mark.parametrize(
    "method", [FeedForwardDropout(0.5), DropConnect(0.5)], ids=["dropout", "connect"]
)
def test_feed_forward_methods_change_feed_forward_layers_and_no_others(name, method):
    build, endings = FEEDING[name]
    torch.manual_seed(0)
    model = build().train()
    reg = dampen.regularize(model, method)
    assert changed_linears(model, X) == named(model, *endings)
    names = {id(m): n for n, m in model.named_modules()}
    assert {names[id(m)] for c in reg.clones for m, role in c.linears if role in c.roles} == named(
        model, *endings
    )


@pytest.mark.parametrize("name", FEEDING)
def test_projection_methods_change_the_output_projection_alone(name):
    torch.manual_seed(0)
    model = FEEDING[name][0]().train()
    dampen.regularize(model, ProjectionDropout(0.5))
    assert changed_linears(model, X) == named(model, "to_out", "W_out")


@pytest.mark.parametrize("name", FEEDING)
def test_value_and_feed_forward_penalties_are_those_of_the_hooked_inputs(name):
    build, endings = FEEDING[name]
    torch.manual_seed(0)
    model = build().train()
    values, feeds = named(model, "to_v", "W_v"), named(model, *endings)
    expected, hooks = {"value": 0.0, "feeds": 0.0}, []

    def add(part):
        def hook(module, args, out):
            bare = F.linear(args[0], module.weight)
            expected[part] += 0.5 * 0.2**2 * bare.square().sum().item() / bare[..., 0].numel()

        return hook

    for n in values | feeds:
        hooks.append(
            model.get_submodule(n).register_forward_hook(add("value" if n in values else "feeds"))
        )
    model(X)
    for hook in hooks:
        hook.remove()
    reg = dampen.regularize(model, ExplicitDropout(value=1.0, ffn=1.0))
    model(X)
    got = reg.penalties()
    assert got["explicit_dropout.value"].item() == pytest.approx(expected["value"], rel=1e-4)
    both = got["explicit_dropout.ffn1"] + got["explicit_dropout.ffn2"]
    assert both.item() == pytest.approx(expected["feeds"], rel=1e-4)


# --- layers that are no module: the model adds their residuals itself


class Inline(nn.Module):
    """An embedding with a residual of its own before the layers, more between them, a head after them."""

    def __init__(self):
        super().__init__()
        self.layers = Paired(depth=3).layers
        self.embed, self.position, self.between, self.head = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        x = x + self.position(x)
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
            x = x + self.between(x)
        return self.head(x)

    def without_branches(self, x):
        x = self.embed(x)
        x = x + self.position(x)
        for _ in self.layers:
            x = x + self.between(x)
        return self.head(x)


OWNED = {
    "dictionary": lambda: Dictionary(3),
    "paired": lambda: Paired(3),
    "alternating": lambda: Alternating(3),
    "alternating, eager": lambda: Alternating(3, flash=False),
}


@pytest.mark.parametrize("name", OWNED)
def test_branches_of_layers_that_are_no_module_are_seen(name):
    torch.manual_seed(0)
    model = OWNED[name]().train()
    reg = dampen.regularize(model, NoBranch())
    assert torch.equal(model(X), X)
    reg.remove()
    reg = dampen.regularize(model, NoBranch(), target_modules="!layers.0*")
    out = model(X)
    assert not torch.equal(out, X)
    reg.remove()
    assert not torch.equal(model(X), out)


@pytest.mark.parametrize("name", OWNED)
def test_skips_of_layers_that_are_no_module_are_taken_one_by_one(name):
    torch.manual_seed(0)
    model = OWNED[name]().train()
    x = X
    for layer in range(3):
        if name == "dictionary":
            parts = model.layers[layer]
            x = parts["attention"](parts["norm0"](x))
            x = parts["linear1"](F.relu(parts["linear0"](parts["norm1"](x))))
        elif name == "paired":
            attention, feed = model.layers[layer]
            x = feed(attention(x))
        else:
            for norm, part in list(model.layers)[2 * layer : 2 * layer + 2]:
                x = part(norm(x))
    dampen.regularize(model, SkipAblation(attention=True, ffn=True))
    torch.testing.assert_close(model(X), x)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("name", OWNED)
def test_branches_know_their_role(name, attention):
    """Without the attention (or feed-forward) branches the model is what its own modules make of the rest."""

    class Without(Regularizer):
        stochastic = False

        def branch(self, b, call):
            return b * 0 if (call.role == "attention") == attention else b

    torch.manual_seed(0)
    model = OWNED[name]().train()
    x = X
    for number in range(3):
        if name == "dictionary":
            parts = model.layers[number]
            if attention:
                x = x + parts["linear1"](F.relu(parts["linear0"](parts["norm1"](x))))
            else:
                x = x + parts["attention"](parts["norm0"](x))
        elif name == "paired":
            x = x + model.layers[number][int(attention)](x)
        else:
            norm, part = model.layers[2 * number + attention]
            x = x + part(norm(x))
    dampen.regularize(model, Without())
    torch.testing.assert_close(model(X), x)


def test_what_an_owner_computes_beside_its_layers_is_no_branch():
    torch.manual_seed(0)
    model = Inline().train()
    expected = model.without_branches(X)
    dampen.regularize(model, NoBranch())
    torch.testing.assert_close(model(X), expected)


def test_parts_that_run_outside_their_owner_are_an_error():
    model = Paired().train()
    dampen.regularize(model, DropPath(0.5))
    with pytest.raises(RuntimeError, match="ran outside the forward of ''"):
        model.layers[0][1](X)


def test_a_branch_that_is_not_added_is_an_error():
    class Gated(Paired):
        def forward(self, x):
            for attention, feed in self.layers:
                x = x + attention(x)
                x = x * feed(x)
            return x

    model = Gated().train()
    dampen.regularize(model, DropPath(0.5))
    with pytest.raises(RuntimeError, match="the feed-forward of 'layers.0'"):
        model(X)


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_paths_of_owned_layers_are_dropped_at_their_rate_per_sample(rate):
    torch.manual_seed(0)
    model = Paired(depth=1).train()
    reg = dampen.regularize(model, DropPath(rate))
    x = X[:1].expand(2000, -1, -1)
    feeds = []
    model.layers[0][1].register_forward_pre_hook(lambda m, args: feeds.append(args[0]))
    model(x)
    kept = (feeds[0] != x).flatten(1).any(1).float().mean().item()
    assert kept == pytest.approx(1 - rate, abs=4 * (rate * (1 - rate) / 2000) ** 0.5)
    assert reg.layers[0].site.name == "layers.0"


@pytest.mark.parametrize("build", [Dictionary, Paired, Alternating])
def test_whole_layers_that_are_no_module_are_refused(build):
    model = build().train()
    plain = model(X)
    with pytest.raises(ValueError, match="no module is the block"):
        dampen.regularize(model, LayerDrop(0.5))
    assert torch.equal(model(X), plain)


@pytest.mark.parametrize("name", ["vit", "simple_vit", "encoder", "decoder"])
@pytest.mark.parametrize(
    "method",
    [DropPath(0.5), HiddenDropout(0.5), SkipAblation(attention=True)],
    ids=lambda m: m.name,
)
def test_libraries_that_add_residuals_themselves(name, method):
    torch.manual_seed(0)
    sizes = {
        "image_size": 16,
        "patch_size": 8,
        "num_classes": 3,
        "dim": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
    }
    build = {
        "vit": lambda: ViT(**sizes),
        "simple_vit": lambda: SimpleViT(**sizes),
        "encoder": lambda: Encoder(dim=16, depth=2, heads=2),
        "decoder": lambda: Decoder(dim=16, depth=2, heads=2, cross_attend=True),
    }[name]
    model = build().eval()
    inputs = {"context": torch.randn(4, 6, 16)} if name == "decoder" else {}
    x = torch.randn(4, 3, 16, 16) if "vit" in name else torch.randn(4, 5, 16)
    plain = model(x, **inputs)
    reg = dampen.regularize(model, method)
    assert method.in_eval or torch.equal(model(x, **inputs), plain)
    out = model.train()(x, **inputs)
    out.square().mean().backward()
    assert not torch.allclose(out, plain)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    reg.remove()
    assert torch.equal(model.eval()(x, **inputs), plain)


# --- hybrids --------------------------------------------------------------------------------------


def test_methods_without_attention_act_in_every_layer_of_a_hybrid():
    torch.manual_seed(0)
    model = Hybrid().train()
    reg = dampen.regularize(model, NoBranch())
    assert torch.equal(model(X), X)
    assert [layer.site.name for layer in reg.layers] == [f"layers.{i}" for i in range(5)]
    reg.remove()
    reg = dampen.regularize(model, LayerDrop(0.9999))
    torch.manual_seed(0)
    assert torch.equal(model(X), X)
    assert "partial" not in str(reg)


def test_partial_coverage_is_printed():
    reg = dampen.regularize(
        Hybrid(), [DropKey(0.1), FeedForwardDropout(0.1), SkipAblation(attention=True)]
    )
    lines = str(reg).split("\n")
    assert "  (partial)  DropKey: attention in 2 of 5 layers" in lines
    assert "  (partial)  SkipAblation: blocks in 2 of 5 layers" in lines
    assert not any("FeedForwardDropout:" in line for line in lines)


def test_skip_ablation_takes_the_skip_of_attention_and_leaves_the_mixer_its_own():
    torch.manual_seed(0)
    model = Hybrid((0, 1)).train()
    first, second = model.layers
    x = first(X)
    attended = second.self_attn(second.norm1(x))
    expected = attended + second.mlp(second.norm2(attended))
    dampen.regularize(model, SkipAblation(attention=True))
    torch.testing.assert_close(model(X), expected)


def test_sites_choose_layers_without_attention_too():
    model = Hybrid()
    reg = dampen.regularize(model, FeedForwardDropout(0.1), target_modules="layers.[01]")
    assert [layer.site.name for layer in reg.layers] == ["layers.0", "layers.1"]
    assert changed_linears(model.train(), X) == named(model, "layers.0.mlp", "layers.1.mlp")


VALID = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])


@pytest.mark.parametrize("kinds", [(0, 0, 1), (1, 0)])
@pytest.mark.parametrize(
    "method", [ExplicitDropout(ffn=1.0), ExplicitDropout(ffn=1.0, form="inverted")]
)
def test_padding_counts_nowhere_in_layers_without_attention(kinds, method):
    """The recurrence is causal and padding stands at the end, so valid tokens do not see it."""
    torch.manual_seed(0)
    model = Hybrid(kinds).train()
    reg = dampen.regularize(model, method)
    values = []
    for fill in (0.0, 7.0):
        model(torch.where(VALID[..., None] > 0, X, torch.full_like(X, fill)), VALID)
        values.append(reg.penalty().item())
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_padding_that_comes_too_late_is_an_error():
    model = HybridWithoutMask((0, 1)).train()
    reg = dampen.regularize(model, ExplicitDropout(ffn=1.0))
    model(X, torch.ones(3, 5))
    reg.penalty()
    with pytest.raises(RuntimeError, match="'layers.0' has no attention that reports padding"):
        model(X, VALID)


def test_parts_add_up_where_layers_have_no_softmax():
    torch.manual_seed(0)
    model = Hybrid().train()

    def penalty(**terms):
        reg = dampen.regularize(model, ExplicitDropout(**terms))
        model(X)
        value = reg.penalty().item()
        reg.remove()
        return value

    assert penalty(value=1.0, ffn=1.0) == pytest.approx(penalty(value=1.0) + penalty(ffn=1.0))


def test_a_stack_of_blocks_beside_experts_is_not_one_layer():
    """Where every linear layer beside attention is a parameter of experts, each block is a layer all the same."""
    model = Sparse(lambda: ExpertModules(2))
    reg = dampen.regularize(model, DropKey(0.1))
    assert [layer.site.name for layer in reg.layers] == ["layers.0", "layers.1"]


class OneHead(Softmax):
    num_heads = 1

    def forward(self, x, mask=None):
        return self.W_out(
            F.scaled_dot_product_attention(
                *(f(x)[:, None] for f in (self.W_q, self.W_k, self.W_v))
            )[:, 0]
        )


def test_a_layer_with_one_head_is_not_counted_for_drop_head():
    model = Hybrid((1, 1))
    model.layers[0].self_attn, model.layers[1].self_attn.num_heads = OneHead(), 2
    reg = dampen.regularize(model.train(), DropHead(0.3))
    model(X)
    assert "(partial)  DropHead: attention in 1 of 2 layers" in str(reg)


class Pooled(nn.Module):
    """Layers, and a pooling by attention at the end, without a residual."""

    def __init__(self):
        super().__init__()
        self.layers = Hybrid((1, 1)).layers
        self.attn_pool = nn.MultiheadAttention(D, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.attn_pool(self.query.expand(len(x), -1, -1), x, x)[0]


def test_a_pooling_without_residual_is_left_out_of_methods_on_branches():
    torch.manual_seed(0)
    model = Pooled().train()
    reg = dampen.regularize(model, NoBranch())
    torch.testing.assert_close(model(X), model.attn_pool(model.query.expand(3, -1, -1), X, X)[0])
    assert "(partial)  NoBranch: blocks in 2 of 3 layers" in str(reg)


class TwoStreams(nn.Module):
    """Two feed-forwards in a list, one for each stream: no experts."""

    def __init__(self):
        super().__init__()
        self.self_attn = Softmax()
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D)) for _ in range(2)
        )

    def forward(self, streams):
        return [x + ff(x + self.self_attn(x)) for x, ff in zip(streams, self.ffs, strict=True)]


def test_feed_forwards_of_several_streams_are_no_experts():
    torch.manual_seed(0)
    model = TwoStreams().train()
    streams, given = [X, X[:, :2]], []
    hooks = [
        m.register_forward_pre_hook(lambda m, a: given.append((m, a[0])))
        for ff in model.ffs
        for m in (ff[0], ff[2])
    ]
    model(streams)
    expected = sum(0.02 * F.linear(x, m.weight).square().sum(-1).mean().item() for m, x in given)
    for hook in hooks:
        hook.remove()
    reg = dampen.regularize(nn.ModuleList([model])[0], ExplicitDropout(ffn=1.0))
    model(streams)
    assert reg.penalty().item() == pytest.approx(expected, rel=1e-4)


# --- what a message says


def test_sites_take_exclusions():
    model = Hybrid()
    reg = dampen.regularize(
        model, FeedForwardDropout(0.1), target_modules=["layers.*", "!layers.[13]"]
    )
    assert [layer.site.name for layer in reg.layers] == ["layers.0", "layers.2", "layers.4"]
    reg.remove()
    reg = dampen.regularize(model, DropKey(0.1), target_modules="!layers.2")
    assert [layer.site.name for layer in reg.layers if layer.reached] == ["layers.4"]
    reg.remove()
    reg = dampen.regularize(model, DropKey(0.1), target_modules=["!layers.2.self_attn"])
    assert reg.layers[-1].attentions == ["layers.4.self_attn"]
    with pytest.raises(ValueError, match="no attention of Hybrid matches"):
        dampen.regularize(Hybrid(), DropKey(0.1), target_modules=["layers.2", "!layers.*"])


class Odd(nn.Module):
    """Whose attention weights go somewhere else."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = OddAttention(), nn.Linear(D, D)

    def forward(self, x):
        return x + self.mlp(x + self.self_attn(x))


class OddAttention(Softmax):
    def forward(self, x, mask=None):
        a = (self.W_q(x) @ self.W_k(x).mT).softmax(-1)
        return self.W_out((a + a.flip(-1)) @ self.W_v(x))


def test_an_error_writes_the_pattern_that_leaves_the_layer_out():
    model = nn.Sequential(Odd(), *Hybrid((1,)).layers).train()
    reg = dampen.regularize(model, DropKey(0.1))
    with pytest.raises(RuntimeError) as error:
        model(X)
    pattern = re.search(r'target_modules="(!.*?)"', str(error.value))
    assert pattern is not None
    reg.remove()
    reg = dampen.regularize(model, DropKey(0.1), target_modules=pattern[1])
    model(X)
    assert list(reg.kernels()) == ["1.self_attn"]


class Mean(nn.Module):
    def forward(self, x):
        return x.softmax(-1) * x


class Gram(nn.Module):
    def forward(self, x):
        return x @ x.mT @ x


class GateAttention(nn.Module):
    def forward(self, x):
        return x.sigmoid() * x


def test_a_model_without_attention_is_told_what_was_looked_at():
    model = nn.Sequential(nn.Linear(D, D), Mean(), Gram(), GateAttention())
    with pytest.raises(ValueError, match="has no attention module") as error:
        dampen.regularize(model, DropKey(0.1))
    for line in (
        "'1' (Mean) has a softmax, but no product of two tensors",
        "'2' (Gram) multiplies two tensors, but has no softmax",
        "'3' (GateAttention) is named like attention, but has no linear layers",
    ):
        assert line in str(error.value)
    with pytest.raises(ValueError) as error:
        dampen.regularize(nn.Linear(D, D), DropKey(0.1))
    assert "Looked at" not in str(error.value)


class Convolved(nn.Module):
    """LeViT, CvT and NesT as vit-pytorch writes them: convolutions, and the softmax is a module."""

    def __init__(self):
        super().__init__()
        self.norm, self.fn = nn.GroupNorm(1, D), ConvolvedAttention()
        self.ff = nn.Sequential(nn.Conv2d(D, 24, 1), nn.GELU(), nn.Conv2d(24, D, 1))

    def forward(self, x):
        x = x + self.fn(self.norm(x))
        return x + self.ff(x)


class ConvolvedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 2
        self.to_qkv, self.attend = nn.Conv2d(D, 3 * D, 1, bias=False), nn.Softmax(dim=-1)
        self.to_out = nn.Sequential(nn.Conv2d(D, D, 1), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = (t.flatten(2).unflatten(1, (2, -1)).mT for t in self.to_qkv(x).chunk(3, 1))
        o = torch.einsum(
            "bhij,bhjd->bhid", self.attend(torch.einsum("bhid,bhjd->bhij", q, k) / 3), v
        )
        return self.to_out(o.mT.flatten(1, 2).view_as(x))


def test_attention_of_convolutions_with_a_softmax_module():
    torch.manual_seed(0)
    model = nn.Sequential(Convolved(), Convolved()).train()
    x = torch.randn(2, D, 3, 4)
    plain = model(x)
    reg = dampen.regularize(model, [DropKey(0.5), DropPath(0.5)])
    out = model(x)
    assert not torch.allclose(out, plain)
    assert set(reg.kernels()) == {"0.fn", "1.fn"}
    reg.remove()
    reg = dampen.regularize(model, ExplicitDropout(value=1.0))
    model(x)
    expected = 0.0
    y = x
    for block in model:
        v = block.fn.to_qkv(block.norm(y)).chunk(3, 1)[2]
        expected += 0.02 * v.square().sum().item() / 24
        y = block(y)
    reg.penalties()
    model(x)
    assert reg.penalty().item() == pytest.approx(expected, rel=1e-4)
