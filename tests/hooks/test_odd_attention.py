"""Attention, layers and branches written in ways that the sweep over libraries met: each with a stand-in of its own.

What a method does is compared with the formula written out here, or read by hooks on the model's own modules."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropHead, DropKey, DropPath, ExplicitDropout, FeedForwardDropout
from dampen.hooks.discover.roles import feed_forward_roles
from dampen.regularizer import Regularizer
from tests.hooks.odd_layers import FeedForward

B, H, N, D = 2, 4, 6, 16
X = torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
HIDDEN = (torch.arange(H * N * N).reshape(1, H, N, N) * 7 % 5 < 2) & ~torch.eye(N, dtype=torch.bool)


class Hide(Regularizer):
    """Hides known keys."""

    stochastic = False

    def mask(self, q, k, call):
        return HIDDEN[..., : q.shape[2], : k.shape[2]].expand(q.shape[0], -1, -1, -1)


class NoBranch(Regularizer):
    """Takes every branch away."""

    stochastic = False

    def branch(self, x, call):
        return x * 0.0


class HeadsOnly(Regularizer):
    """Changes what heads return, and nothing about scores or weights."""

    stochastic = False

    def heads(self, o, call):
        return o * 2.0


def split(t):
    return t.unflatten(-1, (H, -1)).transpose(1, 2)


class MixedByMatrix(nn.Module):
    """Talking heads by a matrix that is a parameter (CaiT of vit-pytorch), and a norm over the heads (DeepViT)."""

    def __init__(self, norm=False):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.before, self.after = (nn.Parameter(torch.randn(H, H)) for _ in range(2))
        self.norm = nn.LayerNorm(H) if norm else None

    def forward(self, x, hidden=None):
        q, k, v = map(split, self.to_qkv(x).chunk(3, -1))
        s = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5
        s = torch.einsum("b h i j, h g -> b g i j", s, self.before)
        if hidden is not None:
            s = s.masked_fill(hidden, -math.inf)
        a = s.softmax(-1)
        a = torch.einsum("b h i j, h g -> b g i j", a, self.after)
        if self.norm is not None:
            a = self.norm(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        o = torch.einsum("b h i j, b h j d -> b h i d", a, v)
        return self.to_out(o.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A block around an attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.feed_forward = attention, FeedForward()

    def forward(self, x, **kwargs):
        x = x + self.attention(x, **kwargs)
        return x + self.feed_forward(x)


@pytest.mark.parametrize("norm", [False, True])
def test_heads_mixed_by_a_matrix_equal_the_formula(norm):
    torch.manual_seed(0)
    model = Block(MixedByMatrix(norm)).train()
    plain = model(X, hidden=HIDDEN)
    want = torch.autograd.grad(plain.square().sum(), model.attention.before)[0]
    reg = dampen.regularize(model, Hide())
    out = model(X)
    got = torch.autograd.grad(out.square().sum(), model.attention.before)[0]
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(got, want)
    reg.remove()


class Gated(nn.Module):
    """ConViT: the weights of the softmax are mixed with others."""

    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = map(split, self.to_qkv(x).chunk(3, -1))
        a = (q @ k.mT).softmax(-1)
        a = 0.5 * a + 0.5 * torch.eye(a.shape[-1])
        return self.to_out((a @ v).transpose(1, 2).flatten(-2))


def test_mixed_weights_stop_only_methods_about_scores_and_weights():
    torch.manual_seed(0)
    model = Block(Gated()).train()
    attention = model.attention
    normal = attention(X)
    reg = dampen.regularize(model, HeadsOnly())
    torch.testing.assert_close(
        attention(X) - attention.to_out.bias, 2 * (normal - attention.to_out.bias)
    )
    reg.remove()
    reg = dampen.regularize(model, DropKey(0.5))
    with pytest.raises(RuntimeError, match="also uses its attention weights in 'add'"):
        model(X)
    reg.remove()


class Kept(nn.Module):
    """A softmax in a Sequential with a dropout (SepViT), in a class that no name tells."""

    def __init__(self):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.attend = nn.Sequential(nn.Softmax(dim=-1), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = map(split, self.to_qkv(x).chunk(3, -1))
        return self.to_out((self.attend(q @ k.mT) @ v).transpose(1, 2).flatten(-2))


def test_a_softmax_kept_in_a_sequential_is_found():
    reg = dampen.regularize(Block(Kept()), DropKey(0.5))
    assert [layer.attentions for layer in reg.layers] == [["attention"]]


class Pooling(nn.Module):
    """CLIP's pooling: F.multi_head_attention_forward with the weights of its own layers."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, hidden=None):
        x = x.transpose(0, 1)
        bias = torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])
        mask = None if hidden is None else hidden.expand(B, -1, -1, -1).flatten(0, 1)
        out, _ = F.multi_head_attention_forward(
            x, x, x, D, H, torch.empty([0]), bias, None, None, False, 0.0, self.c_proj.weight, self.c_proj.bias,
            training=self.training, need_weights=False, attn_mask=mask, use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight,
        )  # fmt: skip
        return out.transpose(0, 1)


def test_the_function_of_torch_for_many_heads_is_entered():
    torch.manual_seed(0)
    model = Block(Pooling()).train()
    plain = model(X, hidden=HIDDEN)
    want = torch.autograd.grad(plain.square().sum(), model.attention.v_proj.weight)[0]
    reg = dampen.regularize(model, Hide())
    out = model(X)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), model.attention.v_proj.weight)[0], want
    )
    reg.remove()
    reg = dampen.regularize(model, ExplicitDropout(value=1.0, rate=0.2))
    model(X)
    v = X @ model.attention.v_proj.weight.T
    torch.testing.assert_close(reg.penalty(), 0.5 * 0.2**2 * v.square().sum(-1).mean())
    reg.remove()


class Memory(nn.Module):
    """Keys and values that belong to no token stand before those of the tokens."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.memory = nn.Parameter(torch.randn(2, 1, H, 3, D // H))

    def forward(self, x, keep=None):
        q, k, v = (split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        k, v = (
            torch.cat([m.expand(len(x), -1, -1, -1), t], 2)
            for m, t in zip(self.memory, (k, v), strict=True)
        )
        keep = torch.ones(len(x), N, dtype=torch.bool) if keep is None else keep
        s = (q @ k.mT).masked_fill(~F.pad(keep, (3, 0), value=True)[:, None, None], -1e9)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def test_more_keys_than_tokens_are_no_padding_where_all_are_seen():
    torch.manual_seed(0)
    model = Block(Memory()).train()
    inputs = []
    handle = model.feed_forward.ff[2].register_forward_pre_hook(
        lambda _, given: inputs.append(given[0].detach())
    )
    reg = dampen.regularize(model, ExplicitDropout(ffn2=1.0, rate=0.2))
    model(X)
    y = inputs[0] @ model.feed_forward.ff[2].weight.T
    torch.testing.assert_close(reg.penalty(), 0.5 * 0.2**2 * y.square().sum(-1).mean())
    keep = torch.ones(B, N, dtype=torch.bool)
    keep[0, -2:] = False
    with pytest.raises(RuntimeError, match="does not show which of its tokens are padding"):
        model(X, keep=keep)
    handle.remove()
    reg.remove()


class Attend(nn.Module):
    """An attention function kept as a module, with a parameter (x-transformers' talking heads)."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(H, H, 1, bias=False)

    def forward(self, q, k, v):
        return self.mix(q @ k.mT).softmax(-1) @ v


class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.attention = Attend()

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(self.attention(q, k, v).transpose(1, 2).flatten(-2))


class CallingAttention(Calling):
    """The same under a name that tells."""


def test_projections_beside_an_attention_function_with_parameters_are_its_own():
    torch.manual_seed(0)
    model = Block(CallingAttention()).train()
    reg = dampen.regularize(model, ExplicitDropout(value=1.0, rate=0.2))
    model(X)
    v = X @ model.attention.to_v.weight.T
    torch.testing.assert_close(reg.penalty(), 0.5 * 0.2**2 * v.square().sum(-1).mean())
    reg.remove()


class OwnResidual(nn.Module):
    """An attention that adds its residual itself (the autoencoders of diffusers)."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        return x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class OwnResidualAttention(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), OwnResidual())


def test_an_attention_that_adds_its_residual_is_its_own_block():
    torch.manual_seed(0)
    model = OwnResidualAttention().train()
    reg = dampen.regularize(model, NoBranch(), target_modules="1")
    torch.testing.assert_close(model(X), model[0](X))
    reg.remove()


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x) + x


class Stage(nn.Sequential):
    """MaxViT of vit-pytorch: a convolution that changes the stream stands before attention and feed-forward."""

    def __init__(self):
        super().__init__(
            nn.Sequential(
                nn.Conv1d(N, N, 3, padding=1),
                nn.GELU(),
                nn.Conv1d(N, N, 3, padding=1),
                nn.Linear(D, D),
            ),
            *(
                Residual(make())
                for make in (CallingAttention, FeedForward, CallingAttention, FeedForward)
            ),
        )


def test_a_convolution_before_the_first_attention_is_no_part_of_its_layer():
    torch.manual_seed(0)
    model = nn.Sequential(Stage()).train()
    reg = dampen.regularize(model, NoBranch())
    torch.testing.assert_close(model(X), model[0][0](X))
    reg.remove()


class Wrapped(nn.Module):
    """CrossViT: maps around an attention, to the width of another branch and back."""

    def __init__(self, width=D):
        super().__init__()
        self.project_in, self.fn, self.project_out = (
            nn.Linear(D, width),
            CallingAttention(),
            nn.Linear(width, D),
        )

    def forward(self, x):
        return self.project_out(self.fn(self.project_in(x)))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Wrapped(), FeedForward()])])

    def forward(self, x):
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
        return x


def test_maps_around_an_attention_are_no_feed_forward():
    torch.manual_seed(0)
    model = Pair().train()
    reg = dampen.regularize(model, NoBranch())
    torch.testing.assert_close(model(X), X)
    reg.remove()
    reg = dampen.regularize(model, FeedForwardDropout(0.5))
    roles = {name: role for layer in reg.layers for c in layer.clones for name, role in c.linears}
    around = [roles[m] for m in (model.layers[0][0].project_in, model.layers[0][0].project_out)]
    assert not {"ffn_in", "ffn_out"} & set(around)
    reg.remove()


class InTwoLists(nn.Module):
    """XLM: attentions in one list, feed-forwards in another."""

    def __init__(self):
        super().__init__()
        self.attentions = nn.ModuleList([CallingAttention() for _ in range(2)])
        self.ffns = nn.ModuleList([Named() for _ in range(2)])

    def forward(self, x):
        for attention, feed in zip(self.attentions, self.ffns, strict=True):
            x = x + attention(x)
            x = x + feed(x)
        return x


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x):
        return self.lin2(F.gelu(self.lin1(x)))


def test_attention_and_feed_forward_in_two_lists_are_one_layer():
    torch.manual_seed(0)
    model = InTwoLists().train()
    reg = dampen.regularize(model, NoBranch())
    torch.testing.assert_close(model(X), X)
    reg.remove()
    zeros = []
    model.ffns[1].lin2.register_forward_hook(lambda m, given, out: zeros.append(out))
    reg = dampen.regularize(model, ExplicitDropout(ffn=1.0, rate=0.2))
    model(X)
    assert reg.penalty() > 0
    assert "feed-forward in" not in str(reg)
    reg.remove()


class WithStem(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Residual(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)))
        self.block = Block(CallingAttention())
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.block(self.stem(x)))


@pytest.mark.parametrize("method", [DropPath(0.5), FeedForwardDropout(0.5)], ids=lambda m: m.name)
def test_what_no_layer_holds_is_said(method):
    reg = dampen.regularize(WithStem(), method)
    line = next(line for line in str(reg).splitlines() if "(outside)" in line)
    assert "1 of 1 layers, and not in stem, which no layer holds" in line
    assert "head" not in line


class Slots(nn.Module):
    """An assignment: the queries compete for each key (GroupViT)."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(((q @ k.mT).softmax(-2) @ v).transpose(1, 2).flatten(-2))


class SlotAttention(Slots):
    """The same under a name that tells."""


def test_a_softmax_over_queries_is_left_out_and_said():
    torch.manual_seed(0)
    model = nn.Sequential(Block(CallingAttention()), Block(SlotAttention())).train()
    plain = model[1](X)
    reg = dampen.regularize(model, DropKey(0.5))
    model(X)
    torch.testing.assert_close(model[1](X), plain)
    assert not torch.equal(model[0](X), model[0](X))
    assert "over its queries" in str(reg)
    assert "attention in 1 of 2 layers" in str(reg)
    reg.remove()


class TokensFirst(nn.Module):
    """FSMT: (tokens, batch, channels) inside, with scores of its own."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.num_heads = H

    def forward(self, x, keep):
        n, b, _ = x.shape
        q, k, v = (
            f(x).view(n, b * H, D // H).transpose(0, 1) for f in (self.to_q, self.to_k, self.to_v)
        )
        s = torch.bmm(q, k.transpose(1, 2)).view(b, H, n, n).masked_fill(~keep[:, None, None], -1e9)
        o = torch.bmm(s.view(b * H, n, n).softmax(-1), v)
        return self.to_out(o.transpose(0, 1).reshape(n, b, D))


class TokensFirstAttention(TokensFirst):
    """The same under a name that tells."""


def test_padding_is_known_where_tokens_come_first():
    torch.manual_seed(0)
    model = Block(TokensFirstAttention()).train()
    keep = torch.ones(B, N, dtype=torch.bool)
    keep[1, -2:] = False
    inputs = []
    model.feed_forward.ff[2].register_forward_pre_hook(
        lambda _, given: inputs.append(given[0].detach())
    )
    reg = dampen.regularize(model, ExplicitDropout(ffn2=1.0, rate=0.2))
    model(X.transpose(0, 1), keep=keep)
    squares = (inputs[0] @ model.feed_forward.ff[2].weight.T).square().sum(-1).transpose(0, 1)
    torch.testing.assert_close(reg.penalty(), 0.5 * 0.2**2 * squares[keep].mean())
    reg.remove()


class Swiglu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 24), nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_the_gate_of_a_feed_forward_belongs_to_it():
    model = nn.Module()
    model.attention, model.ff = CallingAttention(), Swiglu()
    maps = {n: m for n, m in model.ff.named_modules() if isinstance(m, nn.Linear)}
    assert feed_forward_roles(maps) == {"gate": "ffn_in", "up": "ffn_in", "down": "ffn_out"}
    maps["gate"] = nn.Linear(D, 3)  # a router
    assert feed_forward_roles(maps)["gate"] == "other"


class Laser(nn.Module):
    """x-transformers' LASER: log(A exp(v))."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        o = ((q @ k.mT).softmax(-1) @ v.exp()).log()
        return self.to_out(o.transpose(1, 2).flatten(-2))


def test_heads_in_logarithms_are_not_dropped():
    model = Block(Laser()).train()
    reg = dampen.regularize(model, DropHead(0.5))
    with pytest.raises(RuntimeError, match="exponentials"):
        model(X)
    reg.remove()
    reg = dampen.regularize(model, DropKey(0.5))
    assert torch.isfinite(model(X)).all()
    reg.remove()


class Mixed(nn.Module):
    """A feed-forward of convolutions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(N, 24, 1), nn.GELU(), nn.Conv1d(24, N, 1))

    def forward(self, x):
        return self.net(x)


def test_a_stage_of_several_attentions_without_linear_layers_is_not_one_layer():
    torch.manual_seed(0)
    parts = (CallingAttention, Mixed, CallingAttention, Mixed)
    stage = nn.Sequential(*(Residual(make()) for make in parts))
    model = nn.Sequential(nn.Sequential(stage, nn.Linear(D, 3))).train()
    reg = dampen.regularize(model, NoBranch())
    assert [layer.site.name for layer in reg.layers] == ["0.0.0", "0.0.2"]
    torch.testing.assert_close(model(X), model[0][1](stage[3](stage[1](X))))
    assert "0.0.1, 0.0.3, which no layer holds" in str(reg)
    reg.remove()


class TwoWidths(nn.Module):
    """LTX2: a block with two streams of different widths, each with branches of its own."""

    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = MixedByMatrix(), nn.MultiheadAttention(8, 2, batch_first=True)
        self.ff1, self.ff2 = (
            nn.Sequential(nn.Linear(d, 24), nn.GELU(), nn.Linear(24, d)) for d in (D, 8)
        )

    def forward(self, x, y):
        x = x + self.attn1(x)
        y = y + self.attn2(y, y, y)[0]
        return x + self.ff1(x), y + self.ff2(y)


def test_the_branches_of_a_stream_of_another_width_are_found():
    torch.manual_seed(0)
    y = torch.randn(B, 3, 8)
    dampen.regularize(model := TwoWidths().train(), NoBranch())
    for got, given in zip(model(X, y), (X, y), strict=True):
        torch.testing.assert_close(got, given)


class Keeps(nn.Module):
    """ATS: an attention that gives out which tokens it keeps."""

    def __init__(self):
        super().__init__()
        self.inner = MixedByMatrix()

    def forward(self, x):
        o = self.inner(x)
        kept = o.norm(dim=-1).topk(4, dim=1).indices
        return o.gather(1, kept[..., None].expand(-1, -1, D)), kept


class KeepsTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Keeps(), FeedForward()]) for _ in range(2))

    def forward(self, x):
        for attention, feed_forward in self.layers:
            o, kept = attention(x)
            x = x.gather(1, kept[..., None].expand(-1, -1, D)) + o
            x = x + feed_forward(x)
        return x


def test_a_stream_of_the_tokens_that_an_attention_keeps_is_one_still():
    torch.manual_seed(0)
    dampen.regularize(model := KeepsTokens().train(), NoBranch())
    out = model(X)
    assert out.shape == (B, 4, D)
    assert all((X[b] == row).all(-1).any() for b in range(B) for row in out[b])


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
def test_generating_in_train_mode_without_gradients_needs_no_penalty(form):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    reg = dampen.regularize(model, ExplicitDropout(attended_value=0.1, form=form))
    ids = torch.randint(1, 50, (2, 5))
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0)
    assert out.shape == (2, 8)
    assert float(reg.penalty()) == 0.0
