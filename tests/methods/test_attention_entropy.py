"""Attention entropy: against the sum row by row, under masks, in chunks, and where weights are exactly zero."""

import pytest
import torch

import dampen
from dampen import AttentionEntropy
from dampen.kernels import kernel as kernels
from dampen.regularizer import Call
from tests.oracles.stochastic import attention_entropy

B, H, N, D = 2, 3, 7, 4


def operands(n=N):
    torch.manual_seed(0)
    return [(3 * torch.randn(B, H, n, D)).requires_grad_() for _ in range(3)]


def penalty(method):
    return method.take_penalties()["attention_entropy"]


def mask(kind, n=N):
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    padding = torch.ones(B, 1, 1, n, dtype=torch.bool)
    padding[1, ..., 4:] = False
    return {"none": None, "causal": causal, "padding": padding, "both": causal & padding}[kind]


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("floor", [0.3, 0.9])
def test_equals_the_slow_sum(kind, floor):
    q, k, v = operands()
    method = AttentionEntropy(0.5, floor)
    dampen.attention(q, k, v, mask(kind), regularizers=[method])
    s = q @ k.mT / D**0.5
    keep = torch.ones(1, dtype=torch.bool) if mask(kind) is None else mask(kind)
    a = s.masked_fill(~keep, float("-inf")).softmax(-1)
    valid = torch.ones(B, N, dtype=torch.bool)
    if kind in ("padding", "both"):
        valid[1, 4:] = False
    expected = attention_entropy(a, keep, valid, floor)
    assert expected > 0
    assert penalty(method).item() == pytest.approx(0.5 * expected, rel=1e-4)


def test_causal_flag_equals_causal_mask():
    q, k, v = operands()
    values = []
    for options in ({"is_causal": True}, {"attn_mask": mask("causal")}):
        method = AttentionEntropy(1.0, 0.9)
        dampen.attention(q, k, v, **options, regularizers=[method])
        values.append(penalty(method))
    torch.testing.assert_close(*values)


@pytest.mark.parametrize("kind", ["none", "causal", "padding"])
def test_chunks_add_up_to_the_whole(monkeypatch, kind):
    q, k, v = operands()
    results = []
    for chunk in (None, 2 * B * H * N):
        if chunk:
            monkeypatch.setattr(kernels, "LONG", 4)
            monkeypatch.setattr(kernels, "CHUNK", chunk)
        method = AttentionEntropy(1.0, 0.9)
        out = dampen.attention(q, k, v, mask(kind), regularizers=[method])
        loss = out.square().mean() + penalty(method)
        results.append((loss, *torch.autograd.grad(loss, (q, k, v))))
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, parts)


def test_zero_for_even_attention_and_largest_for_one_key():
    method = AttentionEntropy(1.0, 0.5)
    call = Call(shape=(1, 1, 2, 4))
    method.probs(torch.full((1, 1, 2, 4), 0.25), call)
    assert penalty(method).item() == 0
    method.probs(torch.eye(4)[:2].view(1, 1, 2, 4), call)
    assert penalty(method).item() == pytest.approx(0.5 * torch.tensor(4.0).log().item())


def test_gradient_is_finite_where_weights_are_exactly_zero():
    """DropKey beside it, and scores so far apart that the softmax underflows."""
    q, k, v = operands()
    method = AttentionEntropy(1.0, 0.9)
    dampen.attention(100 * q, k, v, regularizers=[dampen.DropKey(0.5), method])
    penalty(method).backward()
    assert torch.isfinite(q.grad).all()
    assert torch.isfinite(k.grad).all()


def test_descending_it_spreads_attention():
    torch.manual_seed(0)
    q, k = (3 * torch.randn(1, 1, 6, 4)).requires_grad_(), 3 * torch.randn(1, 1, 6, 4)
    method, values = AttentionEntropy(1.0, 0.9), []
    for _ in range(150):
        dampen.attention(q, k, k, regularizers=[method])
        loss = penalty(method)
        values.append(loss.item())
        (gradient,) = torch.autograd.grad(loss, q)
        with torch.no_grad():
            q -= 5.0 * gradient
    assert values[-1] < 0.5 * values[0]


@pytest.mark.parametrize("floor", [-0.1, 1.1, "half", True])
def test_bad_floor(floor):
    with pytest.raises(ValueError, match="largest entropy"):
        AttentionEntropy(0.1, floor)
