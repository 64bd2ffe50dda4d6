"""Residual branches in later forwards: the stream tells, and a block that adds otherwise is seen."""

import copy
import gc
import pickle

import pytest
import torch
from torch import Tensor, nn

import dampen
from dampen import DropPath
from dampen.hooks.block import LEARNING, STEADY, Stream, may_stream
from dampen.models.block import SelfAttention
from dampen.regularizer import Regularizer


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
        if self.way == "ffn first":
            x = x + self.mlp(self.norm(x))
            return x + self.attn(self.norm(x))
        if self.way == "scaled in place":
            x.mul_(1.5)
            x = torch.add(x, self.attn(self.norm(x)))
        elif self.way == "reversed":
            x = self.attn(self.norm(x)) + x
        elif self.way == "function":
            x = torch.add(x, self.attn(self.norm(x)))
        else:
            x = x + self.attn(self.norm(x))
        if self.way == "positions":
            return x + self.mlp(x + 1.0)
        if self.way == "in place on the sum":
            x += self.mlp(self.norm(x))
            return x
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
    for _ in range(STEADY + 3):
        out = model(x)
        torch.testing.assert_close(out, doubled(plain, x))
        assert type(out) is Tensor
        assert type(x) is Tensor
    assert all(c.roles_seen == ["attention", "ffn"] * (STEADY + 3) for c in reg.clones)
    mine = torch.autograd.grad(out.sin().sum(), list(model.blocks.parameters())[:4])
    theirs = torch.autograd.grad(doubled(plain, x).sin().sum(), list(plain.blocks.parameters())[:4])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert may_stream(reg.layers[0], x, 1) == (way in ("operator", "reversed"))


class Noisy(Regularizer):
    """Draws for every branch and makes a penalty of it."""

    def branch(self, b, call):
        self.penalize(b.square().mean(), "noisy")
        return b * torch.rand(b.shape[0], 1, 1)


def steady(model, x):
    """Forwards until the streams are trusted."""
    for _ in range(STEADY + 1):
        model(x)


@pytest.mark.parametrize(
    "way", ["function", "in place", "positions", "ffn first", "in place on the sum"]
)
def test_a_block_that_changes_late_is_run_again_and_followed(way):
    torch.manual_seed(0)
    model, x = Model().train(), torch.randn(3, 5, 8)
    fresh = copy.deepcopy(model)
    reg = dampen.regularize(model, Noisy())
    steady(model, x)
    assert may_stream(reg.layers[1], x, 1)
    model.blocks[1].way = fresh.blocks[1].way = way
    other = dampen.regularize(fresh, Noisy())  # the same, but followed from its first forward
    outs = []
    for m, r in ((model, reg), (fresh, other)):
        r.penalties()
        torch.manual_seed(1)
        outs.append((m(x), sum(r.penalties().values()), torch.rand(1)))
    assert outs[0][1] > 0
    torch.testing.assert_close(outs[0], outs[1])  # draws and penalties as if nothing had run twice
    assert type(x) is Tensor
    assert reg.layers[1].residual_departures > LEARNING
    assert may_stream(reg.layers[0], x, 1)
    for _ in range(STEADY + 2):
        model(x)
    assert not may_stream(reg.layers[1], x, 1)


def test_roles_follow_the_attention_that_ran():
    model, x = Model().train(), torch.randn(3, 5, 8)
    reg = dampen.regularize(model, Double())
    steady(model, x)
    model.blocks[1].way = "ffn first"
    model(x)
    assert reg.clones[1].roles_seen[-2:] == ["ffn", "attention"]


def test_a_block_that_alternates_runs_once_each_time():
    torch.manual_seed(0)
    model, x = Model().train(), torch.randn(3, 5, 8)
    plain = copy.deepcopy(model)
    runs = []
    model.blocks[1].mlp.register_forward_hook(lambda *_: runs.append(1))
    reg = dampen.regularize(model, Double())
    for i in range(2 * STEADY + 4):
        model.blocks[1].way = "function" if i % 2 else "operator"
        torch.testing.assert_close(model(x), doubled(plain, x))
        assert len(runs) == i + 1
    assert reg.clones[1].roles_seen == ["attention", "ffn"] * (2 * STEADY + 4)


def test_an_input_that_was_changed_in_place_cannot_be_run_again():
    model, x = Model().train(), torch.randn(3, 5, 8)
    dampen.regularize(model, Double())
    steady(model, x)
    model.blocks[1].way = "scaled in place"
    with pytest.raises(RuntimeError, match="changed its input in place"), torch.no_grad():
        model(x)
    assert type(x) is Tensor
    with torch.no_grad():
        model(x)


def test_a_block_with_a_state_of_its_own_is_never_run_again():
    model, x = Model().train(), torch.randn(3, 5, 8)
    for block in model.blocks:
        block.mlp = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5), nn.Linear(8, 8))
    reg = dampen.regularize(model, Double())
    steady(model, x)
    assert not may_stream(reg.layers[0], x, 1)


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
    steady(model, x)
    model.blocks[0].mlp = nn.Sequential(nn.Linear(7, 8))
    with pytest.raises(RuntimeError):
        model(x)
    assert type(x) is Tensor
    assert not hasattr(x, "_dampen_stream")


def test_copies_and_checkpoints():
    model, x = Model().train(), torch.randn(3, 5, 8, requires_grad=True)
    dampen.regularize(model, DropPath(0.5))
    steady(model, x)
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


class SideBySide(Block):
    def forward(self, x):
        h = self.norm(x)
        return x + self.attn(h) + self.mlp(h)


class LateSkip(Regularizer):
    """Takes the skip away, but not from the beginning."""

    late = False

    def branch(self, b, call):
        call.skip = not self.late
        return b


@pytest.mark.parametrize("forwards", [1, 2, STEADY + 2])
def test_branches_side_by_side_are_seen_in_later_forwards_too(forwards):
    model, x = nn.Sequential(SideBySide()).train(), torch.randn(3, 5, 8)
    reg = dampen.regularize(model, LateSkip())
    for _ in range(forwards):
        model(x)
    reg.clones[0].late = True
    with pytest.raises(RuntimeError, match="side by side"):
        model(x)


class Reads(Regularizer):
    """Adds what it reads of the stream to the branch for itself, as a measurement does."""

    def branch(self, b, call):
        self.__dict__.setdefault("sums", []).append((call.residual + b).detach())
        return b


def test_a_method_may_add_to_the_stream_that_it_reads():
    torch.manual_seed(0)
    model, x = Model().train(), torch.randn(2, 5, 8)
    plain = model(x)
    method = Reads()
    dampen.regularize(model, method)
    for _ in range(STEADY + 3):  # the last ones are streamed
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize(
    "method",
    [
        dampen.DropKey(0.2),
        dampen.HardMasking(0.2),
        dampen.DropPath(0.2),
        dampen.DropHead(0.2),
        dampen.BlurredAttention(3),
        dampen.FeedForwardDropout(0.2),
        dampen.DropAttention(0.2, normalized=False),
        dampen.ExplicitDropout(value=0.1, ffn=0.1),
    ],
    ids=lambda m: m.name,
)
def test_a_step_leaves_no_circle_of_references(method):
    """A circle keeps a step's tensors until Python looks for it, and the next step takes fresh memory."""
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16
    ).train()
    reg, x = dampen.regularize(model, method), torch.randn(2, 3, 8, 8)

    def step():
        reg.loss(lambda: model(x), lambda out: out.square().mean())[0].backward()

    for _ in range(STEADY + 2):
        step()
    found = []
    gc.disable()
    try:
        for _ in range(
            3
        ):  # a circle of a step is there after each; what a first import leaves behind, after one
            gc.collect()
            step()
            found.append(gc.collect())
    finally:
        gc.enable()
    assert min(found) == 0, found
