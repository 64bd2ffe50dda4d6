"""Later forwards of a module that computes its attention itself: the way of the first is remembered and checked."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropHead, DropKey
from tests.hooks.test_eager import (
    WAYS,
    Attention,
    B,
    D,
    H,
    Known,
    N,
    padding_mask,
    reference,
    set_up,
)


class Softmaxes(TorchFunctionMode):
    """How many softmaxes are computed while it is open."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") == "softmax"
        return func(*args, **(kwargs or {}))


def softmaxes(run):
    with Softmaxes() as seen:
        run()
    return seen.count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", ["qkv", "mask", "logits", "probs", "heads"])
@pytest.mark.parametrize("masked", [False, True])
def test_later_forwards_equal_the_dense_reference(way, stage, masked):
    model, x, bias = set_up(way)
    keep = padding_mask() if masked else None
    expected = reference(x, model[0].qkv.weight, bias, keep, stage)
    wanted = torch.autograd.grad(expected.square().sum(), (x, model[0].qkv.weight, bias))
    dampen.regularize(model, Known(stage))
    for _ in range(3):
        got = model[0](x, bias, keep)
        gradients = torch.autograd.grad(got.square().sum(), (x, model[0].qkv.weight, bias))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_later_forwards_compute_one_softmax(way):
    model, x, bias = set_up(way)
    dampen.regularize(model, DropHead(0.5))
    later = (
        2 if way == "baddbmm" else 1
    )  # heads merged into the batch are told by following channels every time
    assert [softmaxes(lambda: model[0](x, bias)) for _ in range(3)] == [2, later, later]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masks", [(True, False, True, False), (False, True, True, False)])
def test_a_mask_that_comes_and_goes(way, masks):
    """With a mask the way is longer: it is followed, and the draws are where they would be."""
    model, x, bias = set_up(way)
    dampen.regularize(model, Known("mask"))
    for masked in masks:
        keep = padding_mask() if masked else None
        torch.testing.assert_close(
            model[0](x, bias, keep), reference(x, model[0].qkv.weight, bias, keep, "mask")
        )


def test_its_own_dropout_draws_as_in_the_first_forward():
    model, x, bias = set_up("at")
    model[0].drop.p = 0.5
    dampen.regularize(model, DropKey(0.4))
    results = []
    for _ in range(3):
        torch.manual_seed(5)
        results.append(model[0](x, bias))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_checkpoint_recomputes_the_way_that_it_went():
    """Its recompute must save as many tensors, whatever was remembered in between."""
    model, x, bias = set_up("at")
    dampen.regularize(model, DropKey(0.4))
    plain = copy.deepcopy(model)
    for _ in range(3):
        gradients = []
        for attention, run in (
            (model[0], lambda f: checkpoint(f, x, bias, use_reentrant=False)),
            (plain[0], lambda f: f(x, bias)),
        ):
            torch.manual_seed(3)
            first, second = run(attention), run(attention)
            gradients.append(torch.autograd.grad((first + second).square().sum(), x)[0])
        torch.testing.assert_close(*gradients)


def test_copies_and_pickles_go_on():
    model, x, bias = set_up("bmm")
    dampen.regularize(model, DropKey(0.4))
    model[0](x, bias)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(1)
        expected = model[0](x, bias)
        torch.manual_seed(1)
        assert torch.equal(twin[0](x, bias), expected)


class Sometimes(Attention):
    """It uses its weights once more when it is told to, before or after the product with the values."""

    when = ""

    def forward(self, x, bias, keep=None):
        q, k, v = (t.transpose(1, 2) for t in self._split(x))
        a = ((q * D**-0.5) @ k.mT + bias).softmax(-1)
        more = a.mean() if self.when == "before" else 0.0
        o = a @ v
        more = a.mean() if self.when == "after" else more
        return o.transpose(1, 2).flatten(-2) + more


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_a_later_forward_uses_elsewhere_are_refused(when):
    torch.manual_seed(0)
    model = nn.Sequential(Sometimes("at")).double().train()
    x, bias = (
        torch.randn(B, N, H * D, dtype=torch.float64),
        torch.zeros(1, H, N, N, dtype=torch.float64),
    )
    dampen.regularize(model, DropKey(0.4))
    for _ in range(2):
        model[0](x, bias)
    model[0].when = when
    with pytest.raises(RuntimeError, match="also uses its attention weights in 'mean'"):
        model[0](x, bias)
    model[0].when = ""
    model[0](x, bias)


class Sinks(nn.Module):
    """Scores with a learned column that belongs to no key, as gpt-oss has them."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv = H, nn.Linear(H * D, 3 * H * D, bias=False)
        self.sinks = nn.Parameter(torch.randn(H))

    def forward(self, x, cut=True):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        s = q @ k.mT * D**-0.5
        s = torch.cat(
            [s, self.sinks.reshape(1, -1, 1, 1).expand(len(x), -1, x.shape[1], -1)], dim=-1
        )
        a = (s - s.max(dim=-1, keepdim=True).values).softmax(-1)
        v = v if cut else torch.cat([v, v[:, :, :1]], 2)
        return ((a[..., :-1] if cut else a) @ v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("stage", ["qkv", "mask", "logits", "probs", "heads"])
def test_attention_sinks(stage):
    torch.manual_seed(0)
    attention = Sinks().double().train()
    x = torch.randn(B, N, H * D, dtype=torch.float64, requires_grad=True)
    known = Known(stage)
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1))
    q, k, v = known.qkv(q, k, v, None) if stage == "qkv" else (q, k, v)
    s = q @ k.mT / D**0.5
    s = known.logits(s, None) if stage == "logits" else s
    s = s.masked_fill(known.mask(q, k, None), float("-inf")) if stage == "mask" else s
    sink = attention.sinks[None, :, None].exp()
    a = s.exp() / (s.exp().sum(-1) + sink)[..., None]
    a = known.probs(a, None) if stage == "probs" else a
    o = known.heads(a @ v, None) if stage == "heads" else a @ v
    expected = o.transpose(1, 2).flatten(-2)
    wanted = torch.autograd.grad(expected.square().sum(), (x, attention.sinks))
    model = nn.Sequential(attention)
    dampen.regularize(model, Known(stage))
    for _ in range(2):
        got = attention(x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), (x, attention.sinks)), wanted
        )
    with pytest.raises(RuntimeError, match="not multiplied with one value per key"):
        attention(x, cut=False)


@pytest.mark.parametrize("before", [0, 3])
def test_compiled_once_whatever_ran_before(before):
    """What plain forwards have remembered is not part of a graph."""
    torch._dynamo.reset()
    model, x, bias = set_up("at")
    dampen.regularize(model, DropKey(0.4))
    for _ in range(before):
        model[0](x, bias)
    counter = CompileCounter()
    run = torch.compile(model[0], backend=counter, fullgraph=True)
    for _ in range(3):
        run(x, bias).sum().backward()
        model[0](x, bias)
    assert counter.frame_count == 1
    torch._dynamo.reset()
