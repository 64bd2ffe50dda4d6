"""`replace_attention=True`: equal to the same model by SDPA, and left alone where it is more."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen


class Attention(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.num_heads, self.way, self.drop = 2, way, nn.Dropout(0.0)
        self.bias = nn.Parameter(torch.zeros(2, 7, 7))

    def forward(self, x, valid=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        if valid is not None:
            causal = causal & valid[:, None, None]
        if self.way == "sdpa":
            o = F.scaled_dot_product_attention(q, k, v, causal)
        else:
            s = (q @ k.transpose(-2, -1)) * (1.0 / 8**0.5)
            if self.way == "bias":
                s = s + self.bias
            if self.way == "added mask":
                s = s + torch.zeros(()).masked_fill(~causal, -1e9)
            else:
                s = s.masked_fill(~causal, float("-inf"))
            a = self.drop(s.softmax(-1))
            if self.way == "gate":
                a = a * 0.5
            o = a @ v
        out = self.proj(o.transpose(1, 2).reshape(b, n, d))
        return (out, a) if self.way == "weights" else out


class Block(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.attn, self.norm = Attention(way), nn.LayerNorm(16)
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x, valid=None):
        out = self.attn(self.norm(x), valid)
        x = x + (out[0] if isinstance(out, tuple) else out)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))

    def forward(self, x, valid=None):
        for block in self.blocks:
            x = block(x, valid)
        return x


METHODS = {
    "drop_key": lambda: [dampen.DropKey(0.3)],
    "explicit": lambda: [dampen.ExplicitDropout(value=0.5, ffn=0.5)],
    "both": lambda: [dampen.DropKey(0.3), dampen.ExplicitDropout(value=0.5, ffn=0.5)],
    "drop_head": lambda: [dampen.DropHead(0.4)],
}


def losses_and_gradients(model, reg, x, valid):
    """Three steps, of which the first learns and the others are replaced."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        loss, _ = reg.loss(lambda: model(x, valid), lambda out: out.square().mean())
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    return found


def pair(way, method):
    torch.manual_seed(0)
    mine = Model(way).train()
    theirs = copy.deepcopy(mine)
    for block in theirs.blocks:
        block.attn.way = "sdpa"
    return mine, theirs, METHODS[method]()


@pytest.mark.parametrize("way", ["masked_fill", "added mask"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_same_as_the_model_by_sdpa(way, method, padded):
    mine, theirs, methods = pair(way, method)
    reg = dampen.regularize(mine, methods, replace_attention=True)
    other = dampen.regularize(theirs, methods)
    x = torch.randn(3, 7, 16)
    valid = torch.arange(7) < torch.tensor([[7], [5], [4]]) if padded else None
    ours = losses_and_gradients(mine, reg, x, valid)
    expected = losses_and_gradients(theirs, other, x, valid)
    for a, b in list(zip(ours, expected, strict=True))[1:]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(any(m.attn._dampen_attention.replaced.values()) for m in mine.blocks)
    reg.remove()
    assert not hasattr(mine.blocks[0].attn, "_dampen_attention")


@pytest.mark.parametrize("way", ["bias", "gate", "weights"])
def test_attention_that_is_more_stays_as_it_is(way):
    mine, _, _ = pair(way, "both")
    same = copy.deepcopy(mine)
    # a gate on the weights is no place for a method of the weights, which DropKey is none of
    methods = METHODS["explicit"]()
    reg = dampen.regularize(mine, methods, replace_attention=True)
    other = dampen.regularize(same, methods)
    x = torch.randn(3, 7, 16)
    ours, expected = (
        losses_and_gradients(mine, reg, x, None),
        losses_and_gradients(same, other, x, None),
    )
    torch.testing.assert_close(ours, expected)
    assert not any(any(m.attn._dampen_attention.replaced.values()) for m in mine.blocks)


def test_off_unless_asked_for():
    mine, _, methods = pair("masked_fill", "drop_key")
    dampen.regularize(mine, methods)
    mine(torch.randn(3, 7, 16))
    assert mine.blocks[0].attn._dampen_attention.replaced is None


def test_weights_that_are_returned_later_are_an_error():
    mine, _, methods = pair("masked_fill", "drop_key")
    dampen.regularize(mine, methods, replace_attention=True)
    x = torch.randn(3, 7, 16)
    for _ in range(2):
        mine(x)
    mine.blocks[0].attn.way = "weights"
    with pytest.raises(RuntimeError, match="returns its attention weights"):
        mine(x)


def test_another_shape_is_compared_first():
    mine, theirs, methods = pair("masked_fill", "drop_key")
    dampen.regularize(mine, methods, replace_attention=True)
    dampen.regularize(theirs, methods)
    for n in (7, 5, 7, 5):
        mine(torch.randn(3, n, 16))
    known = mine.blocks[0].attn._dampen_attention.replaced
    assert sorted(key[0][2] for key, agrees in known.items() if agrees) == [5, 7]
