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


# --- more blocks whose stream tells --------------------------------------------------------------------


class Eager(nn.Module):
    """An attention that computes its scores itself."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Shaped(nn.Module):
    """The stream in two shapes, as Swin has it: (B, H, W, C) around attention and (B, N, C) after it."""

    def __init__(self):
        super().__init__()
        self.attn, self.norm, self.fc1 = SelfAttention(8, 2), nn.LayerNorm(8), nn.Linear(8, 8)
        self.drift = False

    def attend(self, x):
        return self.attn(self.norm(x).flatten(1, 2)).view(x.shape)

    def forward(self, x):
        shape = x.shape
        x = x + self.attend(x)
        x = x.reshape(shape[0], -1, shape[-1])
        x = x + 1.0 * self.fc1(self.norm(x))
        x = x.reshape(shape)
        return x + self.fc1(self.norm(x)) if self.drift else x

    def doubled(self, x):
        x = x + 2 * self.attend(x)
        return x + 2 * self.fc1(self.norm(x))


class Beside(Block):
    """A block that is given another stream, which it may add."""

    def forward(self, x, other, late=False):
        x = x + self.attn(self.norm(x))
        x = x + self.mlp(self.norm(x))
        return (x + other) if late else x


def test_the_stream_may_change_its_shape():
    torch.manual_seed(0)
    model, x = nn.Sequential(Shaped(), Shaped()).train(), torch.randn(3, 2, 3, 8)
    plain = copy.deepcopy(model)
    reg = dampen.regularize(model, Double())
    for _ in range(STEADY + 3):
        out = model(x)
        torch.testing.assert_close(out, plain[1].doubled(plain[0].doubled(x)))
        assert type(out) is type(x) is Tensor
    assert may_stream(reg.layers[0], x, 1)
    assert all(c.roles_seen == ["attention", "ffn"] * (STEADY + 3) for c in reg.clones)
    # a third sum, in a shape that the stream had before: run again and followed
    model[0].drift = True
    departed = reg.layers[0].residual_departures
    out = model[0](x)
    h = plain[0].doubled(x)
    torch.testing.assert_close(out, h + 2 * plain[0].fc1(plain[0].norm(h)))
    assert reg.layers[0].residual_departures > departed
    assert not may_stream(reg.layers[0], x, 1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Beside(), Beside()])
        self.late = False

    def forward(self, x, other):
        for layer in self.layers:
            x = layer(x, other, self.late)
        return x


def test_a_block_that_is_given_two_streams_may_tell_by_one():
    torch.manual_seed(0)
    model, x, other = Pair().train(), torch.randn(3, 5, 8), torch.randn(3, 6, 8)
    reg = dampen.regularize(model, Double())
    for _ in range(STEADY + 3):
        model(x, other)
    assert may_stream(reg.layers[0], x, 2)
    assert not may_stream(reg.layers[0], x, 1)
    assert all(c.roles_seen == ["attention", "ffn"] * (STEADY + 3) for c in reg.clones)


def test_a_second_stream_that_is_added_is_not_trusted():
    torch.manual_seed(0)
    model, x, other = Pair().train(), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    model.late = True
    reg = dampen.regularize(model, Double())
    for _ in range(STEADY + 3):
        model(x, other)
    assert not may_stream(reg.layers[0], x, 2)
    assert all(c.roles_seen == ["attention", "ffn"] * (STEADY + 3) for c in reg.clones)


@pytest.mark.parametrize("attention", [SelfAttention(8, 2), Eager()], ids=["sdpa", "eager"])
def test_what_methods_compute_is_no_function_of_the_block(attention):
    """However many methods act inside it, a block is compared with the same few functions."""
    torch.manual_seed(0)
    x, found = torch.randn(3, 5, 8), []
    path = DropPath(0.5)
    for methods in ([path], [dampen.DropKey(0.3), dampen.ExplicitDropout(ffn=0.1), path]):
        model = Model()
        for block in model.blocks:
            block.attn = copy.deepcopy(attention)
        reg = dampen.regularize(model.train(), methods)
        steady(model, x)
        reg.penalties()
        assert may_stream(reg.layers[1], x, 1)
        found.append([layer.residual_memory.functions for layer in reg.layers])
        assert [layer.residual_departures for layer in reg.layers] == [0, 0]
    assert found[0] == found[1]
    assert all(functions.count(None) == 1 for functions in found[0])
