"""What the code of a model says before it runs: an attention that cannot be entered is told at `regularize`."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropKey, DropPath, ExplicitDropout
from dampen.hooks.discover.source import shows_no_softmax


def feature(x):
    return F.elu(x) + 1


def normalized(x):
    return feature(x) / math.sqrt(x.shape[-1])


def weights_of(scores):
    return torch.softmax(scores, -1)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(8, 24), nn.Linear(8, 8), 2

    def split(self, x):
        return (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )


class LinearKernelAttention(Base):
    """phi(q) (phi(k)^T v), which has no matrix of scores."""

    def forward(self, x):
        q, k, v = self.split(x)
        o = normalized(q) @ (normalized(k).transpose(-2, -1) @ v)
        return self.proj(o.transpose(1, 2).flatten(2))


class HelperAttention(Base):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj((weights_of(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class ModuleAttention(Base):
    def __init__(self):
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj((self.attend(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class KeptAttention(Base):
    """A function kept on the module might do anything."""

    def __init__(self):
        super().__init__()
        self.normalize = weights_of

    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj((self.normalize(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class ImportedAttention(Base):
    def forward(self, x):
        from torch.nn.functional import softmax as normalize

        q, k, v = self.split(x)
        return self.proj((normalize(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


class PropertyAttention(Base):
    @property
    def normalize(self):
        return lambda s: s.softmax(-1)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj((self.normalize(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn, self.norm1, self.norm2 = attention, nn.LayerNorm(8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


SOFTMAX = [HelperAttention, ModuleAttention, KeptAttention, ImportedAttention, PropertyAttention]


def test_code_without_softmax_is_refused_at_once():
    model = nn.Sequential(Block(HelperAttention()), Block(LinearKernelAttention())).train()
    before = [type(m) for m in model.modules()]
    for method in (DropKey(0.3), ExplicitDropout(query=0.1)):
        with pytest.raises(ValueError, match=r"LinearKernelAttention at '1.attn' has no softmax"):
            dampen.regularize(model, method)
        assert [type(m) for m in model.modules()] == before
    dampen.regularize(model, DropKey(0.3), target_modules="0.*")
    model(torch.randn(2, 5, 8))


def test_methods_that_stay_out_of_attention_are_not_refused():
    model = nn.Sequential(Block(LinearKernelAttention())).train()
    dampen.regularize(model, [DropPath(0.5), dampen.FeedForwardDropout(0.2)])
    model(torch.randn(2, 5, 8))


@pytest.mark.parametrize("kind", SOFTMAX, ids=lambda c: c.__name__)
def test_a_softmax_behind_anything_is_not_denied(kind):
    assert not shows_no_softmax(kind())
    model = nn.Sequential(Block(kind())).train()
    plain = model(x := torch.randn(2, 5, 8))
    dampen.regularize(model, DropKey(0.5))
    assert not torch.equal(model(x), plain)


def test_only_code_that_can_be_read_tells():
    assert shows_no_softmax(LinearKernelAttention())
    wrapped = LinearKernelAttention()
    wrapped.forward = lambda x: x
    assert not shows_no_softmax(wrapped)
    held = LinearKernelAttention()
    held.extra = nn.MultiheadAttention(8, 2)
    assert not shows_no_softmax(held)
