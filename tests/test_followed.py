"""Channels followed to the attention: heads and rows told by the data and not by convention; talking heads; against
references written out by hand, values and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropHead, DropKey, ExplicitDropout
from dampen.regularizer import Regularizer, UnsupportedModel

B, H, W, N, D = 3, 2, 2, 4, 3  # as many windows as heads, on purpose
C = H * D


class Scale(Regularizer):
    """Each head times its own factor: tells which axis was taken for the heads."""

    stochastic = False

    def heads(self, o, call):
        assert o.shape[1] == H
        return o * torch.arange(1.0, H + 1, dtype=o.dtype)[None, :, None, None]


class WindowAttention(nn.Module):
    """Hiera ("bhwnd") and Twins ("bwhnd"): five axes, two of which are of the same size."""

    def __init__(self, order, fused, copies=False):
        super().__init__()
        self.order, self.fused, self.copies, self.num_heads = order, fused, copies, H
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x, factors=None):
        t = self.qkv(x).reshape(B, W, N, 3, H, D)
        t = t.permute(3, 0, 4, 1, 2, 5) if self.order == "bhwnd" else t.permute(3, 0, 1, 4, 2, 5)
        q, k, v = (s.contiguous() for s in t) if self.copies else t.unbind(0)
        if self.fused:
            o = F.scaled_dot_product_attention(q, k, v)
        else:
            o = (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1) @ v
        heads = 1 if self.order == "bhwnd" else 2
        if factors is not None:
            o = o * factors.view([-1 if i == heads else 1 for i in range(5)])
        return self.proj(o.movedim(heads, -2).reshape(B, W * N, C))


@pytest.mark.parametrize("order", ["bhwnd", "bwhnd"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("copies", [True, False])
def test_the_heads_are_where_the_channels_are_split(order, fused, copies):
    torch.manual_seed(0)
    model = nn.Sequential(WindowAttention(order, fused, copies)).double().train()
    x = torch.randn(B, W * N, C, dtype=torch.float64)
    expected = model[0](x, torch.arange(1.0, H + 1, dtype=torch.float64))
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    reg = dampen.regularize(model, Scale())
    got = model(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), list(model.parameters())), wanted
    )
    assert torch.equal(model.eval()(x), model[0](x))
    reg.remove()


class ConvAttention(nn.Module):
    """q, k and v of each head side by side in one convolution, after a norm: LeViT, LowFormer."""

    def __init__(self, norm=True, conv=True):
        super().__init__()
        self.conv, self.num_heads = conv, H
        self.qkv = nn.Conv2d(C, H * (4 + D), 1) if conv else nn.Linear(C, H * (4 + D))
        self.norm = (
            (nn.BatchNorm2d if conv else nn.Identity)(H * (4 + D)) if norm else nn.Identity()
        )
        self.proj = nn.Conv2d(C, C, 1) if conv else nn.Linear(C, C)

    def forward(self, x):
        y = self.norm(self.qkv(x))
        if self.conv:
            q, k, v = y.view(len(x), H, -1, N).split([2, 2, D], dim=2)
            o = v @ (q.transpose(-2, -1) @ k).softmax(-1).transpose(-2, -1)
            return self.proj(o.reshape(len(x), C, 2, 2))
        q, k, v = y.view(len(x), N, H, -1).split([2, 2, D], dim=3)
        q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
        return self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(len(x), N, C))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("form", ["paper", "exact"])
def test_the_rows_of_interleaved_values(norm, conv, form):
    """J_v of the rows that make v, picked by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(ConvAttention(norm, conv)).double().train()
    x = (
        torch.randn(B, C, 2, 2, dtype=torch.float64)
        if conv
        else torch.randn(B, N, C, dtype=torch.float64)
    )
    rows = [h * (4 + D) + 4 + d for h in range(H) for d in range(D)]
    weight = model[0].qkv.weight.flatten(1)[rows] if conv else model[0].qkv.weight[rows]
    tokens = x.flatten(2).transpose(1, 2) if conv else x
    p, expected = 0.2, 0.0
    expected = p * p * (tokens @ weight.T).square().sum()
    if form == "exact":
        expected = expected + p * (1 - p) * (tokens.square() @ weight.square().T).sum()
    expected = 0.5 * expected / (B * N)
    wanted = torch.autograd.grad(expected, model[0].qkv.weight)[0]
    plain = model(x)
    reg = dampen.regularize(model, ExplicitDropout(value=1.0, rate=p, form=form))
    got = model(x)
    torch.testing.assert_close(got, plain)
    penalty = reg.penalty()
    torch.testing.assert_close(penalty, expected)
    torch.testing.assert_close(torch.autograd.grad(penalty, model[0].qkv.weight)[0], wanted)
    reg.remove()


def test_a_usual_attention_is_followed_once():
    model = dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=8, mlp=8, depth=1, heads=2
    )
    reg = dampen.regularize(model, ExplicitDropout(value=0.1))
    model.train()(torch.randn(2, 3, 8, 8))
    sites = [m._dampen_attention for m in model.modules() if "_dampen_attention" in vars(m)]
    assert [s.follow for s in sites] == [False]
    reg.penalty()


class Hide(Regularizer):
    """Hides given keys."""

    stochastic = False

    def __init__(self):
        super().__init__()

    def mask(self, q, k, call):
        return hidden(q.shape[2])


def hidden(n):
    """(1, H, n, n): every head hides other keys, no query all of them."""
    grid = torch.arange(H * n * n).reshape(1, H, n, n) * 5 % 7 < 2
    return grid & ~torch.eye(n, dtype=torch.bool)


class TalkingHeads(nn.Module):
    """CaiT mixes heads by linear maps, EfficientFormerV2 by convolutions."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.num_heads = conv, H
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.before, self.after = (
            nn.Conv2d(H, H, 1) if conv else nn.Linear(H, H) for _ in range(2)
        )

    def mix(self, a, by):
        return by(a) if self.conv else by(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def forward(self, x, hide=None):
        q, k, v = self.qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4)
        s = self.mix(q @ k.transpose(-2, -1), self.before)
        if hide is not None:
            s = s.masked_fill(hide, float("-inf"))
        return self.proj((self.mix(s.softmax(-1), self.after) @ v).transpose(1, 2).reshape(B, N, C))


@pytest.mark.parametrize("conv", [True, False])
def test_keys_are_hidden_after_the_last_mixing(conv):
    torch.manual_seed(0)
    model = nn.Sequential(TalkingHeads(conv)).double().train()
    x = torch.randn(B, N, C, dtype=torch.float64)
    expected = model[0](x, hidden(N))
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    reg = dampen.regularize(model, Hide())
    got = model(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.square().sum(), list(model.parameters())), wanted
    )
    reg.remove()
    assert torch.equal(model(x), model[0](x))


class MixedKeys(TalkingHeads):
    """A map over the keys is no mixing of heads."""

    def __init__(self):
        super().__init__(False)
        self.before, self.after = nn.Linear(N, N), nn.Linear(N, N)

    def mix(self, a, by):
        return by(a)


class OverSamples(nn.Module):
    """timm's CSATv2 loses an axis, so that samples attend to samples."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x):
        q, k, v = self.qkv(x).mean(1).chunk(3, dim=-1)
        return x + self.proj((q @ k.T).softmax(-1) @ v)[:, None]


@pytest.mark.parametrize(
    ("make", "why"), [(MixedKeys, "go through 'linear'"), (OverSamples, "of one sample")]
)
def test_what_cannot_be_told_is_refused(make, why):
    model = nn.Sequential(make()).train()
    dampen.regularize(model, DropKey(0.5))
    with pytest.raises(RuntimeError, match=why):
        model(torch.randn(B, N, C))


def test_one_head_cannot_be_dropped():
    one = dampen.models.ViT(image_size=8, patch_size=4, classes=3, width=8, mlp=8, depth=1, heads=1)
    with pytest.raises(UnsupportedModel, match="every attention of ViT has one"):
        dampen.regularize(one, DropHead(0.5))
