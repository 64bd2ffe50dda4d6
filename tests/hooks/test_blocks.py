"""Blocks of every shape: the branches that a method sees are those of the block, against the block written by hand."""

import copy

import pytest
import timm
import torch
import transformers as tr
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropHead, DropKey, DropPath, ExplicitDropout, LayerDrop, linear
from dampen.hooks.discover.sites import find_layers
from dampen.regularizer import Regularizer
from tests.families import IMAGES, TEXT, output

C = 16


class Scaled(Regularizer):
    """Multiplies the branches by known factors."""

    stochastic = False

    def __init__(self, attention=0.5, ffn=3.0, parallel=0.25):
        super().__init__()
        self.factors = {"attention": attention, "ffn": ffn, "parallel": parallel}

    def branch(self, b, call):
        return b * self.factors[call.role]


class OwnNorm(nn.Module):
    """A norm written out, as DeBERTa has it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(C)), nn.Parameter(torch.rand(C))

    def forward(self, x):
        mean = x.float().mean(-1, keepdim=True)
        variance = (x.float() - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-6)) + self.bias


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 2, nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Experts(nn.Module):
    """A mixture of experts whose maps are one bare parameter, with a shared expert beside them."""

    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(C, 3), nn.Parameter(torch.randn(3, C, C) * 0.2)
        self.shared = nn.Parameter(torch.randn(C, C) * 0.2)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        outs = torch.einsum("bnc,ecd->bned", x, self.weight)
        return (outs * share.unsqueeze(-1)).sum(-2) + x @ self.shared


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.attn = kind, Attention()
        self.mlp = (
            Experts()
            if "moe" in kind
            else nn.Sequential(nn.Linear(C, 24), nn.GELU(), nn.Linear(24, C))
        )
        self.norm1, self.norm2 = (
            OwnNorm() if "norm" in kind else nn.LayerNorm(C) for _ in range(2)
        )

    def forward(self, x, a=1.0, f=1.0, p=1.0):
        """The block, with its branches multiplied by hand; 1 is the block itself."""
        run, mlp = self.attn, self.mlp
        if self.kind in ("pre", "pre_moe"):
            x = x + run(self.norm1(x)) * a
            return x + mlp(self.norm2(x)) * f
        if self.kind == "post_norm":
            x = self.norm1(x + run(x) * a)
            return self.norm2(x + mlp(x) * f)
        if self.kind == "joint":  # GPT-NeoX, falcon
            h = self.norm1(x)
            return (run(h) + mlp(h)) * p + x
        if self.kind in ("chain", "chain_moe"):  # cohere, phi
            h = self.norm1(x)
            one, two = run(h), mlp(h)
            return x + one * a + two * f
        if self.kind == "flat":  # OPT
            x = x + run(self.norm1(x)) * a
            flat = x.reshape(-1, C)
            return (flat + mlp(self.norm2(flat)) * f).view(x.shape)
        if self.kind == "modulated":  # adaLN: the stream is shifted and scaled by something else
            x = x + run(self.norm1(x) * 1.2 + torch.ones(C)) * a
            return x + torch.sigmoid(torch.ones(C)) * mlp(self.norm2(x)) * f
        raise KeyError(self.kind)


KINDS = ["pre", "pre_moe", "post_norm", "joint", "chain", "chain_moe", "flat", "modulated"]


@pytest.mark.parametrize("kind", KINDS)
def test_branches_are_those_of_the_block(kind):
    """Values and gradients as with the factors written into the block by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind)).double().train()
    x = torch.randn(3, 5, C, dtype=torch.float64)
    expected = model[0](x, 0.5, 3.0, 0.25)
    wanted = torch.autograd.grad(
        expected.square().sum(), list(model.parameters()), allow_unused=True
    )
    reg = dampen.regularize(model, Scaled())
    got = model(x)
    torch.testing.assert_close(got, expected)
    gradients = torch.autograd.grad(got.square().sum(), list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(gradients, wanted)
    reg.remove()
    torch.testing.assert_close(model(x), model[0](x))


@pytest.mark.parametrize("kind", KINDS)
def test_drop_path_drops_whole_samples(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind)).train()
    x = torch.randn(64, 5, C)
    reg = dampen.regularize(model, DropPath(0.5))
    if kind != "post_norm":
        unchanged = (model(x) == x).flatten(1)
        assert (unchanged.all(1) == unchanged.any(1)).all()  # every token of a sample, or none
        assert 0 < unchanged.all(1).sum() < 40  # a quarter, or a half where one branch holds both
    reg.remove()


@pytest.mark.parametrize("kind", ["joint", "chain_moe", "post_norm"])
def test_compiled_in_one_graph(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind)).train()
    x = torch.randn(3, 5, C)
    dampen.regularize(model, Scaled())
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), expected)


class SequenceFirst(nn.Module):
    """Own code on (N, B, C)."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attn, self.mlp = (
            SequenceFirstAttention(),
            nn.Sequential(nn.Linear(C, 24), nn.GELU(), nn.Linear(24, C)),
        )

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm2(x))


class SequenceFirstAttention(Attention):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


def test_sequence_first_code_drops_samples_not_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(SequenceFirst()).train()
    x = torch.randn(5, 40, C)
    dampen.regularize(model, DropPath(0.5))
    unchanged = (model(x) == x).transpose(0, 1).flatten(1)
    assert (unchanged.all(1) == unchanged.any(1)).all()
    assert 0 < unchanged.all(1).sum() < 30


class Windows(nn.Module):
    """Adds its branches inside windows, so that the first axis is not the samples."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(C), Attention()
        self.mlp = nn.Sequential(nn.Linear(C, 24), nn.GELU(), nn.Linear(24, C))

    def forward(self, x):
        windows = x.reshape(-1, 2, C)
        windows = windows + self.attn(self.norm(windows))
        return (windows + self.mlp(windows)).view(x.shape)


class NoResidual(Windows):
    def forward(self, x):
        return self.mlp(x + self.attn(self.norm(x)))


class Listed(Windows):
    def forward(self, xs):
        x = torch.cat(xs, 1)
        x = x + self.attn(self.norm(x))
        return list((x + self.mlp(x)).chunk(len(xs), 1))


def test_what_cannot_be_dropped_is_refused():
    x = torch.randn(3, 4, C)
    for block, given, why in (
        (Windows(), x, "whose first axis is not its samples"), (NoResidual(), x, "ffn not among them"),
        (Listed(), [x, x], "takes a list of tensors"),
    ):  # fmt: skip
        model = nn.Sequential(block).train()
        reg = dampen.regularize(model, DropPath(0.5))
        with pytest.raises(RuntimeError, match=why):
            model(given)
        reg.remove()
    model = nn.Sequential(Listed()).train()  # attention inside it is another matter
    reg = dampen.regularize(model, [DropKey(0.5), ExplicitDropout(value=0.1, ffn=0.1)])
    model([x, x])
    assert reg.penalty() > 0


# --- the libraries


def _tiny(cls, config, **kw):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return cls(config(vocab_size=60, **{**sizes, **kw})).train()


LIBRARY = {
    "gpt_neox": (lambda: _tiny(tr.GPTNeoXModel, tr.GPTNeoXConfig), ["parallel"] * 2),
    "phi": (lambda: _tiny(tr.PhiModel, tr.PhiConfig), ["parallel"] * 2),
    "cohere": (lambda: _tiny(tr.CohereModel, tr.CohereConfig), ["attention", "ffn"] * 2),
    "apertus": (lambda: _tiny(tr.ApertusModel, tr.ApertusConfig), ["attention", "ffn"] * 2),  # b x + a x^2 inside
    "mixtral": (lambda: _tiny(tr.MixtralModel, tr.MixtralConfig, num_key_value_heads=2), ["attention", "ffn"] * 2),
    "opt": (lambda: tr.OPTModel(tr.OPTConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, ffn_dim=32,
            num_attention_heads=2, word_embed_proj_dim=16)).train(), ["attention", "ffn"] * 2),
    "distilbert": (lambda: tr.DistilBertModel(tr.DistilBertConfig(vocab_size=60, dim=16, n_layers=2, n_heads=2,
                   hidden_dim=32)).train(), ["attention", "ffn"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_library_blocks(name):
    build, expected = LIBRARY[name]
    roles = []

    class Look(Regularizer):
        stochastic = False

        def branch(self, b, call):
            roles.append(call.role)
            return b

    model = build()
    dampen.regularize(model, [Look(), DropPath(0.3), LayerDrop(0.2)])
    output(model(input_ids=TEXT)).square().mean().backward()
    assert roles == expected


def test_distilbert_has_both_feed_forward_maps():
    model = LIBRARY["distilbert"][0]()
    assert {"ffn_in", "ffn_out"} <= find_layers(model)[0].roles


def test_a_pooling_head_has_no_branch_to_drop():
    model = timm.create_model(
        "vit_base_patch16_siglip_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=5,
    ).train()
    reg = dampen.regularize(model, [DropPath(0.3), DropHead(0.3)])
    model(IMAGES).sum().backward()
    assert [len(layer.clones) for layer in reg.layers] == [2, 2, 1]


# --- depth


def test_encoder_and_decoder_each_have_their_own_depth():
    model = nn.Transformer(16, 2, 3, 2, 32, batch_first=True)
    reg = dampen.regularize(model, DropKey(linear(0.4, 0.0)))
    rates = [round(c.rate.item(), 4) for c in reg.clones]
    assert rates == [0.4, 0.2, 0.0, 0.4, 0.0]
    reg.remove()
    reg = dampen.regularize(model, DropKey(linear(0.4, 0.0)), depth="model")
    torch.testing.assert_close(
        torch.stack([c.rate for c in reg.clones]), torch.linspace(0.4, 0.0, 5)
    )
    reg.remove()
    reg = dampen.regularize(
        model, DropKey([0.1, 0.2, 0.3, 0.4, 0.5])
    )  # one value per layer counts all of them
    torch.testing.assert_close(
        torch.stack([c.rate for c in reg.clones]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    )
    reg.remove()
    with pytest.raises(ValueError, match="depth must be 'stack' or 'model', got 'both'"):
        dampen.regularize(model, DropKey(0.1), depth="both")


class Projected(nn.Module):
    """Blocks that change the size of the stream: a projected shortcut (Hiera), a remade stream (TinyViT, LeViT;
    EdgeNeXt by groups of its channels, inside of a branch)."""

    def __init__(self, kind):
        super().__init__()
        self.kind, wide = kind, 2 * C if kind == "shortcut" else C
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(wide)
        self.attn, self.mlp = (
            Attention(),
            nn.Sequential(nn.Linear(wide, 9), nn.GELU(), nn.Linear(9, wide)),
        )
        self.shortcut, self.widen, self.remake = (
            nn.Linear(C, 2 * C),
            nn.Linear(C, 2 * C),
            nn.Linear(C, C),
        )
        self.group = nn.Linear(C // 2, C // 2)

    def forward(self, x, a=1.0, f=1.0):
        if self.kind == "shortcut":
            h = self.norm1(x)
            x = self.shortcut(h)[:, ::3] + self.widen(self.attn(h))[:, ::3] * a
        elif self.kind == "remade":
            x = self.remake(x + self.attn(self.norm1(x)) * a)
        elif self.kind == "groups":
            first, second = x.chunk(2, -1)
            first = self.group(first)
            y = torch.cat((first, self.group(second)), -1) + torch.arange(6).view(1, 6, 1)
            y = y + self.attn(self.norm1(y)) * a
            return x + self.mlp(self.norm2(y)) * f
        else:  # downsampled: no residual goes around the attention
            x = self.attn(x)[:, ::2]
        return x + self.mlp(self.norm2(x)) * f


@pytest.mark.parametrize("kind", ["shortcut", "remade", "groups", "downsampled"])
def test_streams_that_change_their_size(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Projected(kind)).double().train()
    x = torch.randn(3, 6, C, dtype=torch.float64)
    expected = model[0](x, 0.5, 3.0)
    wanted = torch.autograd.grad(
        expected.square().sum(), list(model.parameters()), allow_unused=True
    )
    reg = dampen.regularize(model, Scaled())
    for _ in range(6):  # the first is followed, the others are compared with it
        got = model(x)
        torch.testing.assert_close(got, expected)
        gradients = torch.autograd.grad(
            got.square().sum(), list(model.parameters()), allow_unused=True
        )
        torch.testing.assert_close(gradients, wanted)
    memory = reg.layers[0].residual_memory
    assert memory is not None
    assert memory.roles == (("ffn",) if kind == "downsampled" else ("attention", "ffn"))
    assert reg.layers[0].residual_departures == 0
    reg.remove()


def test_streams_that_change_their_size_now_this_way_now_that():
    torch.manual_seed(0)
    model = nn.Sequential(Projected("remade")).train()
    plain = copy.deepcopy(model[0])
    reg = dampen.regularize(model, Scaled())
    for kind in ("remade", "remade", "downsampled", "downsampled", "remade", "downsampled"):
        for tokens in (6, 5):
            x = torch.randn(3, tokens, C)
            model[0].kind = plain.kind = kind
            torch.testing.assert_close(model(x), plain(x, 0.5, 3.0))
    reg.remove()


class Inner(Projected):
    """A feed-forward with a residual of its own, around its middle."""

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y = self.remake(self.norm2(x)).relu()
        return x + self.remake(y + self.remake(y))


@pytest.mark.parametrize("kind", ["remade", "inner"])
def test_a_residual_inside_a_branch_is_said(kind):
    model = nn.Sequential(Inner("remade") if kind == "inner" else Projected(kind)).train()
    reg = dampen.regularize(model, DropPath(0.5))
    for _ in range(3):
        model(torch.randn(3, 6, C))
    line = "(inner)  DropPath: branches as a whole, and no residual inside a branch of 0"
    assert (line in str(reg)) == (kind == "inner")


class TwoBranches(Projected):
    """Two branches of the stream's own size, and no stream: neither is the shortcut."""

    def __init__(self):
        super().__init__("remade")

    def forward(self, x):
        return self.attn(self.norm1(x)) + self.remake(x)


def test_an_addition_without_a_stream_is_refused():
    model = nn.Sequential(TwoBranches()).train()
    dampen.regularize(model, DropPath(0.5))
    with pytest.raises(RuntimeError, match="found 0 residual additions"):
        model(torch.randn(3, 6, C))


class Stage(nn.Module):
    """A stage of blocks without linear maps beside their attention (MobileNetV4)."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(ConvBlock() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return x + self.attn(x)


def test_the_blocks_of_a_stage_are_layers_with_their_own_depth():
    model = nn.Sequential(Stage(), Stage())
    reg = dampen.regularize(model, DropPath(dampen.linear(0.5, 0.0)))
    assert [layer.site.name for layer in reg.layers] == [
        f"{s}.blocks.{i}" for s in range(2) for i in range(3)
    ]
    assert [float(layer.clones[0].rate) for layer in reg.layers] == pytest.approx(
        [0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    )
    reg.remove()
