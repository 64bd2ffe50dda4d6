"""Hard masking where scores tie or nearly tie: its gradients have the mask of the forward, whatever rounding does."""

import pytest
import torch

from dampen import HardMasking
from dampen.kernels.attend import Needs, attend


def alike(kind: str, queries: int, keys: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and keys that one of them can hardly tell apart."""
    torch.manual_seed(keys * channels + queries)
    q, k = torch.randn(2, 2, queries, channels), torch.randn(2, 2, 1, channels)
    if kind == "scores near 0":  # though their terms are not
        q = q - (q * k).sum(-1, keepdim=True) * k / k.square().sum(-1, keepdim=True)
    k = k.repeat(1, 1, keys, 1)
    if kind == "apart by rounding":
        k += 1e-7 * torch.randn_like(k)
    if kind == "three of a kind":
        k = torch.randn(2, 2, -(-keys // 3), channels).repeat(1, 1, 3, 1)[:, :, :keys]
    return q, k


@pytest.mark.parametrize("kind", ["same", "scores near 0", "apart by rounding", "three of a kind"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "padded"])
def test_gradients_have_the_mask_of_the_forward(built, kind, order, mask):
    """With values that are the unit vectors the output tells the mask; float64 differentiates with that."""
    sizes = [(1, 33, 4), (1, 17, 64), (65, 65, 33), (31, 197, 64), (129, 300, 80), (130, 1025, 7)]
    for queries, keys, channels in sizes:
        causal, keep = mask == "causal", None
        if mask == "padded":
            keep = torch.arange(keys) < torch.tensor([keys, keys * 2 // 3]).view(2, 1, 1, 1)
        q, k = alike(kind, min(keys, 300) if causal else queries, keys, channels)
        v = torch.eye(keys).expand(2, 2, keys, keys)
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        method = HardMasking(0.5, top=0.3).train()
        out, _, kernel = attend(*inputs, keep, 0.0, causal, None, False, Needs([method]), None)
        assert getattr(kernel, "name", None) == "native"

        wide = [t.detach().double().requires_grad_() for t in inputs]
        scores = wide[0] @ wide[1].mT * channels**-0.5
        expected = scores.masked_fill(out == 0, float("-inf")).softmax(-1) @ wide[2]
        grad = torch.randn_like(out)
        ours = torch.autograd.grad(out, inputs, grad, create_graph=order == 2)
        theirs = torch.autograd.grad(expected, wide, grad.double(), create_graph=order == 2)
        if order == 2:
            ways = [torch.randn_like(t) for t in ours]
            ours += torch.autograd.grad(dot(ours, ways), inputs)
            theirs += torch.autograd.grad(dot(theirs, ways), wide)
        for a, e in zip(ours, theirs, strict=True):
            size = e.detach().abs().max().clamp(min=1)
            torch.testing.assert_close(a.double() / size, e / size, rtol=0, atol=1e-4)


def dot(tensors, others):
    return sum((t * u).sum() for t, u in zip(tensors, others, strict=True))


@pytest.mark.parametrize("where", ["padding", "future"])
def test_what_is_hidden_has_no_say_in_what_ties(built, where):
    """A hidden key of any length leaves a row's mask as it is."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 40, 48), torch.randn(1, 2, 40, 48)
    keep = torch.arange(40) < 39
    keep = None if where == "future" else keep.view(1, 1, 1, 40)
    found = []
    for last in (1.0, 1e12):
        k[:, :, -1] = last
        torch.manual_seed(1)
        v = torch.eye(40).expand(1, 2, 40, 40)
        needs = Needs([HardMasking(0.5, top=0.2).train()])
        out, *_ = attend(q, k, v, keep, 0.0, where == "future", None, False, needs, None)
        found.append(out[:, :, :39] == 0)
    assert torch.equal(*found)
