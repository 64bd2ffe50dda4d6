"""Attention that a model computes itself: every way of writing it gets the same stages, against a dense reference in
float64, values and gradients; what cannot be told is refused."""

import copy
import math

import pytest
import timm
import torch
import transformers as tr
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import BlurredAttention, DropAttention, DropHead, DropKey, ExplicitDropout, HardMasking
from dampen.regularizer import ATTENTION_STAGES, Regularizer
from tests.families import IMAGES, PADDING, TEXT, output

B, H, N, D = 2, 2, 5, 4
HIDDEN = (torch.arange(B * H * N * N).reshape(B, H, N, N) * 7 % 11) < 3
HIDDEN[..., torch.arange(N), torch.arange(N)] = False  # every query keeps itself


class Known(Regularizer):
    """A stage with a known, deterministic effect."""

    stochastic = False

    def __init__(self, stage="qkv"):
        super().__init__()
        self.stages = frozenset({stage})

    def qkv(self, q, k, v, call):
        return q * 0.9, k + 0.1 * k.roll(1, -2), v * 1.1 + 0.05

    def mask(self, q, k, call):
        assert q.shape[:3] == (B, H, q.shape[2])
        return HIDDEN[..., : q.shape[2], : k.shape[2]] & ~torch.eye(q.shape[2], dtype=torch.bool)

    def logits(self, s, call):
        return s * 1.5 - 0.2

    def probs(self, a, call):
        return a * 0.7 + 0.01

    def heads(self, o, call):
        return o * torch.tensor([0.3, 2.0], dtype=o.dtype)[None, :, None, None]


def reference(x, weights, bias, keep, stage):
    """The same by hand: softmax(q k^T / sqrt(d) + bias) v with one stage applied."""
    q, k, v = (x @ w.T for w in weights.chunk(3))
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in (q, k, v))
    known = Known(stage) if stage else None
    if stage == "qkv":
        q, k, v = known.qkv(q, k, v, None)
    s = q @ k.mT / math.sqrt(D) + bias
    if stage == "logits":
        s = known.logits(s, None)
    if keep is not None:
        s = s.masked_fill(~keep, float("-inf"))
    if stage == "mask":
        s = s.masked_fill(known.mask(q, k, None), float("-inf"))
    a = s.softmax(-1)
    a = known.probs(a, None) if stage == "probs" else a
    o = a @ v
    o = known.heads(o, None) if stage == "heads" else o
    return o.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """One attention, written in many ways."""

    def __init__(self, way):
        super().__init__()
        self.way, self.num_heads, self.drop = way, H, nn.Dropout(0.0)
        self.qkv = nn.Linear(H * D, 3 * H * D, bias=False)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, bias, keep=None):
        return getattr(self, self.way)(x, bias, keep)

    def _split(self, x):
        return (t.unflatten(-1, (H, D)) for t in self.qkv(x).chunk(3, -1))  # (B, N, H, D)

    def at(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        a = (q * D**-0.5) @ k.transpose(-2, -1) + bias
        if keep is not None:
            a = a.masked_fill(~keep, float("-inf"))
        return (self.drop(a.softmax(dim=-1)) @ v).transpose(1, 2).reshape(*x.shape)

    def matmul_added_mask(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        s = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
        s += bias
        if keep is not None:
            s = s + torch.zeros_like(s).masked_fill(~keep, torch.finfo(s.dtype).min)
        a = F.softmax(s, dim=-1, dtype=torch.float64).to(q.dtype)
        a = F.dropout(a, 0.0, self.training)
        return torch.matmul(a, v).transpose(1, 2).contiguous().view(*x.shape)

    def old_mask(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        s = torch.matmul(q / math.sqrt(D), k.mT) + bias
        if keep is not None:
            s = s + (1.0 - keep.to(s.dtype)) * -10000.0
        return torch.matmul(self.softmax(s), v).transpose(1, 2).reshape(*x.shape)

    def bmm(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2).reshape(-1, x.shape[1], D) for t in self._split(x))
        s = (
            torch.bmm(q, k.transpose(1, 2))
            .mul_(D**-0.5)
            .view(x.shape[0], H, x.shape[1], x.shape[1])
            + bias
        )
        s = s if keep is None else torch.where(keep, s, torch.tensor(float("-inf"), dtype=s.dtype))
        a = self.drop(torch.softmax(s, -1)).view(-1, x.shape[1], x.shape[1])
        return torch.bmm(a, v).view(x.shape[0], H, x.shape[1], D).transpose(1, 2).flatten(-2)

    def baddbmm(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2).reshape(-1, x.shape[1], D) for t in self._split(x))
        base = bias.expand(x.shape[0], H, x.shape[1], x.shape[1]).reshape(
            -1, x.shape[1], x.shape[1]
        )
        s = base.baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=D**-0.5)
        s = (
            s
            if keep is None
            else s.masked_fill(~keep.expand(len(x), H, x.shape[1], -1).flatten(0, 1), float("-inf"))
        )
        return (
            torch.bmm(s.softmax(-1), v)
            .view(x.shape[0], H, x.shape[1], D)
            .transpose(1, 2)
            .flatten(-2)
        )

    def einsum(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        s = torch.einsum("b h i d, b h j d -> b h i j", q, k) * D**-0.5 + bias
        s = s if keep is None else s.masked_fill(~keep, -torch.finfo(s.dtype).max)
        return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v).transpose(1, 2).flatten(-2)

    def einsum_tokens_first(self, x, bias, keep):
        q, k, v = self._split(x)
        s = torch.einsum("bnhd,bmhd->bhnm", q, k) / D**0.5 + bias
        s = s if keep is None else s.masked_fill(~keep, float("-inf"))
        return torch.einsum("bhnm,bmhd->bnhd", self.softmax(s), v).flatten(-2)

    def turned(self, x, bias, keep):
        """values^T weights^T, as convolutional models write it."""
        q, k, v = (t.transpose(1, 2).transpose(-2, -1) for t in self._split(x))  # (B, H, D, N)
        s = (q.transpose(-2, -1) @ k) * D**-0.5 + bias
        s = s if keep is None else s.masked_fill(~keep, float("-inf"))
        o = v @ self.drop(s.softmax(dim=-1)).transpose(-2, -1)
        return o.permute(0, 3, 1, 2).flatten(-2)

    def einsum_list(self, x, bias, keep):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        s = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * D**-0.5 + bias
        s = s if keep is None else s.masked_fill(~keep, float("-inf"))
        return torch.einsum("bhlt,bhtv->bhlv", [s.softmax(-1), v]).transpose(1, 2).flatten(-2)

    def decomposed_bias(self, x, bias, keep):
        """Scores taken apart by `view` and put together again, as relative positions of images do."""
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        s = (q * D**-0.5) @ k.mT
        s = (
            s.unsqueeze(-1).view(*s.shape[:2], x.shape[1], 1, x.shape[1]) + bias.unsqueeze(-2)
        ).view(s.shape)
        s = s if keep is None else s.masked_fill(~keep, float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(-2)


WAYS = [
    "at", "matmul_added_mask", "old_mask", "bmm", "baddbmm", "einsum", "einsum_tokens_first", "decomposed_bias",
    "turned", "einsum_list",
]  # fmt: skip


def set_up(way):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(way)).double().train()
    x = torch.randn(B, N, H * D, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, H, N, N, dtype=torch.float64, requires_grad=True)
    return model, x, bias


def padding_mask():
    return (
        torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()[:, None, None] | torch.eye(N).bool()
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["", *ATTENTION_STAGES])
@pytest.mark.parametrize("masked", [False, True])
def test_every_way_and_stage_equals_the_dense_reference(way, stage, masked):
    model, x, bias = set_up(way)
    keep = padding_mask() if masked else None
    expected = reference(x, model[0].qkv.weight, bias, keep, stage)
    wanted = torch.autograd.grad(expected.square().sum(), (x, model[0].qkv.weight, bias))
    reg = dampen.regularize(model, Known(stage) if stage else DropKey(0.0))
    got = model[0](x, bias, keep)
    gradients = torch.autograd.grad(got.square().sum(), (x, model[0].qkv.weight, bias))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients, wanted)
    if stage:  # a method at rate 0 is not run at all
        assert next(iter(reg.kernels().values())).startswith("eager")


@pytest.mark.parametrize("way", WAYS)
def test_rate_zero_and_eval_are_exact_to_the_bit(way):
    model, x, bias = set_up(way)
    plain = model[0](x, bias, padding_mask())
    keys = list(model.state_dict())
    reg = dampen.regularize(model, [DropKey(0.0), DropHead(0.0), ExplicitDropout(value=0.1)])
    assert torch.equal(model[0](x, bias, padding_mask()), plain)
    model.eval()
    assert torch.equal(model[0](x, bias, padding_mask()), plain)
    assert list(model.state_dict()) == keys
    reg.remove()
    assert type(model[0]) is Attention
    assert torch.equal(model[0](x, bias, padding_mask()), plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", [DropKey(0.6), HardMasking(0.5, top=0.8), DropAttention(0.6)])
def test_hidden_keys_stay_hidden(way, method):
    """Causal: a change of the last token changes nothing before it, even where a query loses all keys that it sees."""
    model, x, bias = set_up(way)
    causal = torch.ones(1, 1, N, N).tril().bool()
    dampen.regularize(model, method)
    changed = x.detach().clone()
    changed[:, -1] += 3.0
    for seed in range(20):
        results = []
        for values in (x, changed):
            torch.manual_seed(seed)
            results.append(model[0](values, bias, causal)[:, :-1])
        assert torch.equal(*results)
        assert torch.isfinite(results[0]).all()


def test_its_own_dropout_draws_as_without_us():
    """The module's dropout waits for the stages, and then draws what it would have drawn."""
    model, x, bias = set_up("at")
    model[0].drop.p = 0.5
    torch.manual_seed(5)
    plain = model[0](x, bias)
    dampen.regularize(model, Known("heads"))
    torch.manual_seed(5)
    scale = torch.tensor([0.3, 2.0], dtype=torch.float64).repeat_interleave(D)
    torch.testing.assert_close(model[0](x, bias), plain * scale)


def test_dropped_keys_have_the_rate():
    model, x, bias = set_up("at")
    seen = []

    class Look(Regularizer):
        stochastic = False

        def probs(self, a, call):
            seen.append(a.detach())
            return a

    dampen.regularize(model, [DropKey(0.3), Look()])
    for _ in range(200):
        model[0](x, bias)
    share = (torch.stack(seen) == 0).double().mean().item()
    assert abs(share - (0.3 - 0.3**N / N)) < 0.01


# --- the libraries: eager code against their own SDPA


def _hf(implementation, build):
    torch.manual_seed(0)
    model = build().double().train()
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


_SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
BOTH = {
    "bert": lambda: tr.BertModel(tr.BertConfig(vocab_size=50, **_SIZES)),
    "llama": lambda: tr.LlamaModel(tr.LlamaConfig(vocab_size=50, **_SIZES, num_key_value_heads=1)),
    "t5": lambda: tr.T5EncoderModel(tr.T5Config(vocab_size=50, d_model=8, d_kv=4, num_layers=2, num_heads=2, d_ff=16,
                                                dropout_rate=0.0)),
}  # fmt: skip


def _stay(implementation):
    """What keeps a training forward in the library's eager code, which would run as sdpa otherwise."""
    return {"output_attentions": True} if implementation == "eager" else {}


class Layers(Known):
    """The stages for any number of tokens."""

    def mask(self, q, k, call):
        n, m = q.shape[2], k.shape[2]
        return (torch.arange(n)[:, None] * 5 + torch.arange(m)) % 7 == 1


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("stage", ATTENTION_STAGES)
def test_transformers_eager_equals_its_sdpa(name, stage):
    results = []
    for implementation in ("sdpa", "eager"):
        model = _hf(implementation, BOTH[name])
        dampen.regularize(model, [Layers(stage), ExplicitDropout(query=0.3, value=0.2, ffn=0.1)])
        out = output(model(input_ids=TEXT, attention_mask=PADDING, **_stay(implementation)))[
            PADDING.bool()
        ]
        loss = out.square().mean()
        results.append(
            (out.detach(), torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        )
    torch.testing.assert_close(
        results[0], results[1], rtol=1e-3, atol=1e-6
    )  # their softmax is in float32


@pytest.mark.parametrize("name", BOTH)
def test_penalties_know_padding_in_eager_code(name):
    penalties = []
    for implementation in ("sdpa", "eager"):
        model = _hf(implementation, BOTH[name])
        reg = dampen.regularize(model, ExplicitDropout(query=0.3, value=0.2, ffn=0.1))
        model(input_ids=TEXT, attention_mask=PADDING, **_stay(implementation))
        penalties.append(reg.penalties())
    torch.testing.assert_close(penalties[0], penalties[1])


def test_weights_that_are_asked_for_are_the_regularized_ones():
    model = _hf("eager", BOTH["bert"])
    dampen.regularize(model, DropKey(0.5))
    weights = model(input_ids=TEXT, output_attentions=True).attentions
    assert all((w == 0).any() for w in weights)


def test_swin_v2_equals_a_reference():
    """Cosine attention with a learned scale, a bias of positions and window masks."""
    torch.manual_seed(0)
    attention = (
        timm.models.swin_transformer_v2.WindowAttention(8, (2, 2), 2, qkv_bias=True)
        .double()
        .train()
    )
    x = torch.randn(4, 4, 8, dtype=torch.float64)
    mask = torch.zeros(2, 4, 4, dtype=torch.float64)
    mask[1, :2, 2:] = mask[1, 2:, :2] = -100.0
    plain = copy.deepcopy(attention)
    dampen.regularize(attention, DropHead(0.0))
    assert torch.equal(attention(x, mask), plain(x, mask))

    class Half(Regularizer):
        stochastic = False

        def heads(self, o, call):
            assert o.shape == (4, 2, 4, 4)
            return o * torch.tensor([0.0, 1.0], dtype=o.dtype)[None, :, None, None]

    other = copy.deepcopy(plain)
    dampen.regularize(other, Half())
    with torch.no_grad():
        plain.proj.weight[:, :4] = 0.0
    torch.testing.assert_close(other(x, mask), plain(x, mask))


# --- compiled, checkpointed


@pytest.mark.parametrize("way", ["at", "matmul_added_mask", "einsum"])
def test_compiled_equals_eager_in_one_graph(way):
    model, x, bias = set_up(way)
    reg = dampen.regularize(model, [Known("heads"), Known("mask"), ExplicitDropout(value=0.1)])
    expected = model[0](x, bias, padding_mask())
    reg.penalties()
    got = torch.compile(model[0], fullgraph=True, backend="eager")(x, bias, padding_mask())
    torch.testing.assert_close(got, expected)


# --- refused


class Odd(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.num_heads = kind, H
        self.qkv = nn.Linear(H * D, 3 * H * D)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT
        if self.kind == "axis":
            return (s.softmax(1) @ v).transpose(1, 2).flatten(-2)
        if self.kind == "linear":
            return (q.softmax(-1) @ (k.softmax(-2).mT @ v)).transpose(1, 2).flatten(-2)
        a = s.softmax(-1)
        if self.kind == "sums":
            a = a / a.sum(-1, keepdim=True)
        if self.kind == "only weights":
            return a.mean(1) @ x
        return (a @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("axis", "softmax is over axis 1"),
        ("linear", "ran without calling"), ("sums", "also uses its attention weights in 'sum'"),
        ("only weights", "also uses its attention weights in 'mean'"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(kind, why):
    class OddAttention(Odd):
        pass

    model = nn.Sequential(OddAttention(kind)).train()
    dampen.regularize(model, DropKey(0.2))
    with pytest.raises(RuntimeError, match=why):
        model(torch.randn(B, N, H * D))


def test_gated_weights_of_timm_are_refused():
    model = timm.create_model("convit_tiny", depth=2, num_classes=5, img_size=32).train()
    dampen.regularize(model, DropKey(0.2))
    with pytest.raises(RuntimeError, match="also uses its attention weights in 'add'"):
        model(IMAGES)


class OverChannels(nn.Module):
    """Restormer, XCiT: scores of channels with channels, by convolutions or linear layers, in eager code or not."""

    def __init__(self, kind, tokens=False):
        super().__init__()
        self.kind, self.tokens, self.num_heads = kind, tokens, H
        self.qkv = (
            nn.Conv2d(H * D, 3 * H * D, 1) if "image" in kind else nn.Linear(H * D, 3 * H * D)
        )
        self.temperature = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x):
        rows = self.qkv(x).flatten(2) if "image" in self.kind else self.qkv(x).mT  # (B, 3 H D, N)
        q, k, v = (t.unflatten(1, (H, D)) for t in rows.chunk(3, 1))  # (B, H, D, N)
        if self.tokens:
            q, k, v = q.mT, k.mT, v.mT
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if "fused" in self.kind:
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            o = (q @ k.transpose(-2, -1) * self.temperature).softmax(-1) @ v
        o = (o.mT if self.tokens else o).flatten(1, 2)
        return o.view_as(x) if "image" in self.kind else o.mT


class ChannelAttention(OverChannels):
    """The name tells nothing: this one attends over tokens."""


class SeenKeys(DropKey):
    """Notes how many keys a query has."""

    def mask(self, q, k, call):
        self.seen = k.shape[2]
        return super().mask(q, k, call)


OVER = ["image", "image fused", "sequence", "sequence fused"]
SQUARE = D * D  # tokens; and with D of them, tokens and channels are equally many


@pytest.mark.parametrize("tokens", [SQUARE, D])
@pytest.mark.parametrize("kind", OVER)
def test_attention_over_channels_is_told_by_what_is_multiplied(kind, tokens):
    sizes = (H * D, D, tokens // D) if "image" in kind else (tokens, H * D)
    x = torch.randn(B, *sizes)
    stack = Stack(OverChannels(kind), ChannelAttention(kind, tokens=True)).train()
    reg = dampen.regularize(stack, SeenKeys(0.5))
    stack(x)
    assert "attends over channels" in reg.kernels()["first"]
    seen = {layer.site.name: getattr(layer.clones[0], "seen", None) for layer in reg.layers}
    assert seen == {"first": None, "second": tokens}
    assert "(partial)  SeenKeys: attention in 1 of 2 layers" in str(reg)
    torch.manual_seed(0)
    first = stack.first(x)
    torch.manual_seed(1)
    assert torch.equal(stack.first(x), first)


class Stack(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return x + self.second(x + self.first(x))


@pytest.mark.parametrize("kind", OVER)
def test_a_model_that_attends_over_channels_alone_is_refused(kind):
    x = torch.randn(B, H * D, D, D) if "image" in kind else torch.randn(B, SQUARE, H * D)
    model = nn.Sequential(OverChannels(kind)).train()
    dampen.regularize(model, DropKey(0.5))
    with pytest.raises(RuntimeError, match="left out .attends over channels, not over tokens"):
        model(x)
    compiled = nn.Sequential(OverChannels(kind)).train()
    reg = dampen.regularize(compiled, SeenKeys(0.5))
    torch.compile(compiled, backend="eager")(x)
    assert getattr(reg.clones[0], "seen", None) is None


def test_blur_acts_in_eager_code():
    model, x, bias = set_up("at")
    plain = model[0](x, bias)
    dampen.regularize(model, BlurredAttention(width=3, grid=(1, N)))
    assert not torch.allclose(model[0](x, bias), plain)


# --- heads in calls with three or five axes


class FiveAxes(nn.Module):
    """Nest and Hiera: (B, H, blocks, N, D), or Twins: (B, blocks, H, N, D)."""

    def __init__(self, heads_first, eager):
        super().__init__()
        self.num_heads, self.heads_first, self.eager = H, heads_first, eager
        self.qkv = nn.Linear(H * D, 3 * H * D)

    def forward(self, x):  # (B, blocks, N, C)
        order = (0, 3, 1, 2, 4) if self.heads_first else (0, 1, 3, 2, 4)
        q, k, v = (t.unflatten(-1, (H, D)).permute(order) for t in self.qkv(x).chunk(3, -1))
        o = (q @ k.mT).softmax(-1) @ v if self.eager else F.scaled_dot_product_attention(q, k, v)
        back = [order.index(i) for i in range(5)]
        return o.permute(back).flatten(-2)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_five_axes_drop_heads_and_nothing_else(heads_first, eager):
    class FiveAxesAttention(FiveAxes):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(FiveAxesAttention(heads_first, eager)).train()
    x = torch.randn(3, 6, N, H * D)
    plain = model(x)
    dampen.regularize(model, DropHead(0.5))
    dropped = model(x).unflatten(-1, (H, D)) == 0  # (B, blocks, N, H, D)
    by_head = dropped.all(-1).all(2)
    for b in range(3):
        for block in range(6):
            assert by_head[b, block].sum() <= 1
    assert (dropped == by_head[:, :, None, :, None]).all()
    assert by_head.any()
    assert (plain != 0).all()


def test_merged_heads_drop_heads():
    class MergedAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.qkv = H, nn.Linear(H * D, 3 * H * D)

        def forward(self, x):
            q, k, v = (
                t.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1)
                for t in self.qkv(x).chunk(3, -1)
            )
            return (
                F.scaled_dot_product_attention(q, k, v)
                .unflatten(0, (-1, H))
                .transpose(1, 2)
                .flatten(-2)
            )

    torch.manual_seed(0)
    model = nn.Sequential(MergedAttention()).train()
    dampen.regularize(model, DropHead(0.5))
    dropped = model(torch.randn(8, N, H * D)).unflatten(-1, (H, D)) == 0
    assert dropped.any()
    assert (dropped == dropped[:, :1, :, :1]).all()
    assert (dropped[:, 0, :, 0].sum(-1) <= 1).all()


def test_five_axes_that_nothing_tells_apart_are_refused():
    class BlindAttention(FiveAxes):
        pass

    model = nn.Sequential(BlindAttention(True, False)).train()
    del model[0].num_heads
    dampen.regularize(model, DropHead(0.5))
    model[0]._dampen_attention.follow = False  # as in a compiled graph without a forward before it
    with pytest.raises(RuntimeError, match="does not show which of them are the heads"):
        model(torch.randn(3, 6, N, H * D))


class Unfolding(nn.Module):
    """Values that go through F.unfold (im2col, floats only), which has the name of Tensor.unfold (ConvBERT)."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (m(x) for m in (self.q_proj, self.k_proj, self.v_proj))
        windows = F.unfold(v.transpose(1, 2).unsqueeze(-1), (3, 1), padding=(1, 0))  # (B, 8 * 3, N)
        v = windows.unflatten(1, (8, 3)).mean(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_values_that_go_through_unfold():
    torch.manual_seed(0)
    model = nn.Sequential(Unfolding()).train()
    x = torch.randn(2, 5, 8)
    plain = model(x)
    dampen.regularize(model, Known("heads"))
    expected = plain * torch.tensor([0.3, 2.0]).repeat_interleave(
        4
    )  # nothing follows the heads but their order
    torch.testing.assert_close(model(x), expected)


def test_heads_that_are_merged_with_the_batch_beside_blocks():
    """HaloNet's operands are (batch x heads, blocks, tokens, channels): blocks are no heads."""
    torch.manual_seed(0)
    attention = timm.layers.halo_attn.HaloAttn(16, num_heads=2, block_size=4, halo_size=1).train()
    x = torch.randn(3, 16, 8, 8)
    plain = attention(x)

    class OneHead(Regularizer):
        stochastic = False

        def heads(self, o, call):
            assert o.shape[:2] == (3 * 4, 2)  # samples and blocks, heads
            return o * torch.tensor([0.0, 1.0])[None, :, None, None]

    model = nn.Sequential(attention)
    dampen.regularize(model, OneHead())
    for _ in range(3):
        out = model(x)
        assert torch.equal(out[:, :8], torch.zeros(3, 8, 8, 8))
        torch.testing.assert_close(out[:, 8:], plain[:, 8:])


class ConvolvedAttention(Attention):
    """A convolution over the keys with its arguments by name, as Inkling writes it."""

    def __init__(self):
        super().__init__("at")
        self.kernel = nn.Parameter(torch.randn(3 * H * D, 1, 3))

    def _split(self, x):
        y = F.conv1d(input=self.qkv(x).mT, weight=self.kernel, padding=1, groups=3 * H * D).mT
        return (t.unflatten(-1, (H, D)) for t in y.chunk(3, -1))


def test_a_convolution_with_its_arguments_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(ConvolvedAttention()).train()
    x, bias = torch.randn(B, N, H * D), torch.zeros(1, H, N, N)
    plain = model[0](x, bias)
    dampen.regularize(model, DropKey(0.5))
    assert not torch.equal(model[0](x, bias), plain)
