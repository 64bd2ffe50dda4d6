"""Residual branches in later forwards: the stream tells, and a block that adds otherwise is seen."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import dampen
from dampen import DropPath
from dampen.models.block import SelfAttention
from dampen.regularizer import Regularizer
from dampen.sockets.stream import Stream


class Double(Regularizer):
    """Doubles every branch and notes its role."""

    roles_seen: list[str]

    def branch(self, b, call):
        self.__dict__.setdefault("roles_seen", []).append(call.role)
        return 2 * b


class Block(nn.Module):
    def __init__(self, way="operator"):
        super().__init__()
        self.attn, self.norm = SelfAttention(8, 2), nn.LayerNorm(8)
        self.mlp, self.way = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), way

    def forward(self, x):
        if self.way == "reversed":
            x = self.attn(self.norm(x)) + x
        elif self.way == "function":
            x = torch.add(x, self.attn(self.norm(x)))
        else:
            x = x + self.attn(self.norm(x))
        if self.way == "positions":
            return x + self.mlp(x + 1.0)
        if self.way == "in place":
            x = x.clone()
            x += self.mlp(self.norm(x))
            return x
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, way="operator"):
        super().__init__()
        self.blocks = nn.ModuleList([Block(way), Block(way)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def doubled(model, x):
    """What the model gives with every branch doubled, written out."""
    for block in model.blocks:
        x = x + 2 * block.attn(block.norm(x))
        x = x + 2 * block.mlp(x + 1.0 if block.way == "positions" else block.norm(x))
    return x


@pytest.mark.parametrize("way", ["operator", "reversed", "function", "positions", "in place"])
def test_later_forwards_equal_the_first(way):
    torch.manual_seed(0)
    model, x = Model(way).train(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    reg = dampen.regularize(model, Double())
    for _ in range(3):
        out = model(x)
        torch.testing.assert_close(out, doubled(plain, x))
        assert type(out) is Tensor
        assert type(x) is Tensor
    assert all(c.roles_seen == ["attention", "ffn"] * 3 for c in reg.clones)
    mine = torch.autograd.grad(out.sin().sum(), list(model.blocks.parameters())[:4])
    theirs = torch.autograd.grad(doubled(plain, x).sin().sum(), list(plain.blocks.parameters())[:4])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    quick = reg.layers[0].residual_memory.by_operator
    assert quick == (way in ("operator", "reversed"))


def test_a_block_that_adds_otherwise_is_followed_or_refused():
    model, x = Model().train(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    dampen.regularize(model, Double())
    model(x)
    model.blocks[1].way = "function"  # goes past the stream's own addition
    with pytest.raises(RuntimeError, match="in another way than in the forward before"):
        model(x)
    assert type(x) is Tensor
    for _ in range(2):  # looked at anew
        torch.testing.assert_close(model(x), doubled(plain, x))


def test_a_compared_forward_that_departs_is_followed_from_its_start():
    model, x = Model("positions").train(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    dampen.regularize(model, Double())
    for way in ("positions", "positions", "function", "in place", "positions"):
        for block in (*model.blocks, *plain.blocks):
            block.way = way
        torch.testing.assert_close(model(x), doubled(plain, x))


def test_an_error_inside_leaves_plain_tensors():
    model, x = Model().train(), torch.randn(3, 5, 8)
    dampen.regularize(model, Double())
    model(x)
    model.blocks[0].mlp = nn.Sequential(nn.Linear(7, 8))
    with pytest.raises(RuntimeError):
        model(x)
    assert type(x) is Tensor
    assert not hasattr(x, "_dampen_stream")


def test_copies_and_checkpoints():
    model, x = Model().train(), torch.randn(3, 5, 8, requires_grad=True)
    dampen.regularize(model, DropPath(0.5))
    for _ in range(2):
        model(x)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.manual_seed(1)
    (mine,) = torch.autograd.grad(again(x).sum(), x)
    torch.manual_seed(1)
    h = x
    for block in model.blocks:
        h = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False)
    (theirs,) = torch.autograd.grad(h.sum(), x)
    torch.testing.assert_close(mine, theirs)


def test_a_stream_is_a_plain_tensor_but_for_additions():
    x = torch.randn(2, 3).as_subclass(Stream)
    assert type(x.sin()) is Tensor
    assert type(torch.nn.functional.layer_norm(x, (3,))) is Tensor
