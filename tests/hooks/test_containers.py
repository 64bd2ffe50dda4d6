"""Whatever a module returns its tensors in comes back as what it was: at attentions, blocks,
embeddings and the model itself, for every method, in training and eval, in one pass and two."""

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

import dampen
from dampen.checking.subjects import with_companion, with_example
from dampen.containers import first_of, tensors_in, with_first, with_tensors
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel


class Named(NamedTuple):
    hidden: Any
    note: Any = None


@dataclasses.dataclass
class Data:
    hidden: Any
    note: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any
    note: Any = None


@dataclasses.dataclass
class Output(ModelOutput):
    hidden: Any = None
    note: Any = None


class Pair(tuple):
    """A subclass that takes its parts as one."""

    __slots__ = ()


class Mapped(OrderedDict):
    pass


KINDS = {
    "tuple": lambda hidden, note=None: (hidden, note),
    "list": lambda hidden, note=None: [hidden, note],
    "subclass of tuple": lambda hidden, note=None: Pair((hidden, note)),
    "NamedTuple": Named,
    "dict": lambda hidden, note=None: {"hidden": hidden, "note": note},
    "subclass of OrderedDict": lambda hidden, note=None: Mapped(hidden=hidden, note=note),
    "dataclass": Data,
    "frozen dataclass with slots": Frozen,
    "ModelOutput": Output,
    "SimpleNamespace": lambda hidden, note=None: SimpleNamespace(hidden=hidden, note=note),
    "nested": lambda hidden, note=None: Named((hidden, note), note),
}


def hidden_of(value, kind):
    """What a model's own code reads, in the way of the container; an error where it is another kind of thing."""
    assert type(value) is type(KINDS[kind](None)), type(value)
    inner = (
        value.hidden
        if hasattr(value, "hidden")
        else value["hidden"]
        if isinstance(value, dict)
        else value[0]
    )
    return inner[0] if kind == "nested" else inner


class Attention(nn.Module):
    def __init__(self, kind, eager):
        super().__init__()
        self.qkv, self.proj, self.kind, self.eager, self.num_heads = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            kind,
            eager,
            2,
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.eager:
            a = (q @ k.mT / 8**0.5).softmax(-1)
            o = a @ v
        else:
            a, o = None, F.scaled_dot_product_attention(q, k, v)
        return KINDS[self.kind](self.proj(o.transpose(1, 2).flatten(2)), a)


class Block(nn.Module):
    def __init__(self, kind, eager):
        super().__init__()
        self.attn, self.fc1, self.fc2 = Attention(kind, eager), nn.Linear(16, 24), nn.Linear(24, 16)
        self.kind = kind

    def forward(self, x):
        x = x + hidden_of(self.attn(x), self.kind)
        return KINDS[self.kind](x + self.fc2(F.gelu(self.fc1(x))), "a note")


class Embed(nn.Embedding):
    kind = "tuple"

    def forward(self, ids):
        return KINDS[self.kind](super().forward(ids), 3)


class Net(nn.Module):
    def __init__(self, kind, eager=False):
        super().__init__()
        self.embed = Embed(19, 16)
        self.embed.kind = self.kind = kind
        self.blocks = nn.ModuleList(Block(kind, eager) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        x = hidden_of(self.embed(ids), self.kind)
        for block in self.blocks:
            out = block(x)
            x = hidden_of(out, self.kind)
        return KINDS[self.kind](self.head(x), "a note")


IDS = torch.randint(0, 19, (3, 5), generator=torch.Generator().manual_seed(0))


def net(kind, eager=False):
    torch.manual_seed(0)
    return Net(kind, eager).train()


def run(kind, eager, make, training):
    """Output, penalties and gradients of one step of a model that holds its tensors in one kind of container."""
    model = net(kind, eager)
    reg = dampen.regularize(model, with_companion([make()]))
    model.train(training)
    seen = []
    for step in range(2):  # the second forward goes the remembered ways
        torch.manual_seed(step)
        model.zero_grad()
        loss, _ = reg.loss(
            lambda: seen.append(model(IDS)) or seen[-1],
            lambda out: hidden_of(out, kind).square().mean(),
            logits=lambda out: hidden_of(out, kind),
        )
        loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return (
        hidden_of(seen[-1], kind).detach(),
        loss.detach(),
        torch.cat([g.flatten() for g in grads]),
    )


@pytest.mark.parametrize("name", methods())
@pytest.mark.filterwarnings("ignore")
def test_every_method_gives_back_what_it_got(name):
    """The results are those of the model that returns plain tuples, to the bit."""
    make = with_example(methods()[name])
    for eager in (False, True):
        try:
            expected = run("tuple", eager, make, True)
        except UnsupportedModel:
            continue  # patches in a model of text
        in_eval = run("tuple", eager, make, False)[0]
        for kind in KINDS:
            for a, b in zip(run(kind, eager, make, True), expected, strict=True):
                assert torch.equal(a, b), kind
            assert torch.equal(run(kind, eager, make, False)[0], in_eval), kind


@pytest.mark.parametrize("kind", ["tuple", "NamedTuple", "dict", "dataclass", "ModelOutput"])
def test_in_graphs(kind):
    torch.compiler.reset()
    model = net(kind)
    dampen.regularize(
        model, [dampen.DropKey(0.3), dampen.LayerDrop(0.2), dampen.DropPath(0.3), dampen.NEFTune()]
    )
    torch.manual_seed(0)
    expected = hidden_of(model(IDS), kind)
    torch.manual_seed(0)
    got = hidden_of(torch.compile(model, fullgraph=True, backend="eager")(IDS), kind)
    torch.testing.assert_close(got, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_a_carried_penalty_leaves_the_container(kind):
    model = net(kind)
    reg = dampen.regularize(model, dampen.ExplicitDropout(value=1.0), attach_to_loss=1.0)
    out = model(IDS)
    hidden_of(out, kind).sum().backward()
    carried = model.blocks[0].attn.qkv.weight.grad.clone()
    plain = net(kind)
    reg = dampen.regularize(plain, dampen.ExplicitDropout(value=1.0))
    (hidden_of(plain(IDS), kind).sum() + reg.penalty()).backward()
    torch.testing.assert_close(carried, plain.blocks[0].attn.qkv.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_containers(kind):
    x, y, new = torch.ones(2), torch.arange(2), torch.zeros(2)
    value = KINDS[kind](x, y)
    assert first_of(value) is x
    assert next(tensors_in(value)) is x
    changed = with_first(value, new)
    assert hidden_of(changed, kind) is new
    assert hidden_of(value, kind) is x, "the given one is left alone"
    assert with_tensors(value, lambda t: t) is value


def test_what_holds_no_tensor_that_can_be_found_is_refused_in_words():
    class Own:
        def __init__(self, hidden):
            self.hidden = hidden

    class Odd(Block):
        def forward(self, x):
            return Own(super().forward(x)[0])

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Odd("tuple", False)])

        def forward(self, x):
            return self.blocks[0](x).hidden

    model = Around().train()
    dampen.regularize(model, dampen.LayerDrop(0.3))
    with pytest.raises(
        RuntimeError, match="returned a Own in which no tensor was found, so LayerDrop"
    ):
        model(torch.randn(2, 5, 16))
