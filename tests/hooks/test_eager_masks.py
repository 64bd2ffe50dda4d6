"""Masks of attention that a model computes itself: read once, and anew when their numbers change."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropKey


class Attention(nn.Module):
    """nanoGPT's, by its own code or by SDPA."""

    def __init__(self, eager=True):
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.eager = (
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            2,
            eager,
        )
        self.register_buffer("seen", torch.ones(7, 7).tril())

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        if self.eager:
            s = (q @ k.mT * 0.5).masked_fill(self.seen[:n, :n] == 0, float("-inf"))
            o = F.softmax(s, dim=-1) @ v
        else:
            mask = self.seen[:n, :n] != 0
            o = F.scaled_dot_product_attention(q, k, v, mask[None, None])
        return x + self.proj(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, eager=True):
        super().__init__()
        self.attn, self.fc1 = Attention(eager), nn.Linear(8, 8)

    def forward(self, x):
        return self.fc1(self.attn(x))


def both():
    torch.manual_seed(0)
    eager = nn.Sequential(Block(), Block()).train()
    fused = copy.deepcopy(eager)
    for block in fused:
        block.attn.eager = False
    for model in (eager, fused):
        dampen.regularize(model, DropKey(0.4))
    return eager, fused


def test_a_mask_is_read_anew_when_its_numbers_change(monkeypatch):
    """What a forward has read of a mask stands for the next one as long as its numbers are the same."""
    from dampen.hooks.tracing import scores

    reads = []
    monkeypatch.setattr(scores, "hides", lambda *a, f=scores.hides: reads.append(1) or f(*a))
    models, x = both(), torch.randn(3, 7, 8)
    eager = models[0]
    for _ in range(3):
        eager(x)
    assert len(reads) == 2  # once for each layer
    for model in models:
        for block in model:
            block.attn.seen[3, :2] = 0
            block.attn.seen[2, 5] = 1
    outs = []
    for model in models:
        torch.manual_seed(5)
        outs.append(model(x))
    assert len(reads) == 4
    torch.testing.assert_close(*outs)
    eager(x[:, :5])  # another length
    assert len(reads) == 6


def test_a_mask_that_shows_every_key_counts_no_padding():
    """The penalty of a causal model is that of one without a mask; a padded key is still left out of it."""
    torch.manual_seed(0)
    model, x, found, handles = nn.Sequential(Block()).train(), torch.randn(3, 7, 8), [], []
    plain = copy.deepcopy(model)
    plain[0].attn.seen.fill_(1)
    for m in (model, plain):
        reg = dampen.regularize(m, dampen.ExplicitDropout(value=0.1))
        handles.append(reg)
        for _ in range(2):
            m(x)
            found.append(reg.penalty())
    for value in found[1:]:
        torch.testing.assert_close(value, found[0])
    model[0].attn.seen[:, 6] = 0  # no query sees the last key now
    model(x)
    v = model[0].attn.qkv(x)[..., 16:] - model[0].attn.qkv.bias[16:]
    expected = 0.1 * 0.2**2 / 2 * v[:, :6].square().sum() / (3 * 6)
    torch.testing.assert_close(handles[0].penalty(), expected)
