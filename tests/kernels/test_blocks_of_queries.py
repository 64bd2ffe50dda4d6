"""Long sequences without a compiler: the Function over blocks of queries against dense attention."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey, HardMasking
from dampen.kernels import kernel as kernels
from dampen.kernels import long_sequences
from dampen.regularizer import Regularizer


class Fixed(Regularizer):
    """Hides what it was given."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def mask(self, q, k, call):
        return self.hidden if call.rows is None else self.hidden[:, :, call.rows]


class Priced(Regularizer):
    """Hides nothing and makes a penalty on the way."""

    def mask(self, q, k, call):
        self.penalize(q.square().mean())
        return torch.zeros(1, 1, 1, k.shape[2], dtype=torch.bool)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setenv("DAMPEN_NATIVE", "0")
    monkeypatch.setattr(kernels, "native_available", lambda: False)
    monkeypatch.setattr(kernels, "LONG", 8)
    monkeypatch.setattr(kernels, "PLAIN_BELOW", {})
    monkeypatch.setattr(long_sequences, "ROWS", 4)


def operands(n=11, m=11, heads=2, kv=2, dtype=torch.float64):
    torch.manual_seed(0)
    return [
        torch.randn(3, h, t, 8, dtype=dtype, requires_grad=True)
        for h, t in ((heads, n), (kv, m), (kv, m))
    ]


def gradients(out, tensors):
    return torch.autograd.grad(
        out, tensors, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    )


def counted(monkeypatch):
    """How often the Function ran."""
    runs, run = [], long_sequences._Blocks.apply
    monkeypatch.setattr(long_sequences._Blocks, "apply", lambda *a: runs.append(1) or run(*a))
    return runs


@pytest.mark.parametrize("model", ["bare", "causal", "padded", "biased", "grouped", "cross"])
def test_blocks_equal_dense_attention(model, monkeypatch):
    runs = counted(monkeypatch)
    q, k, v = operands(n=9 if model == "cross" else 11, heads=4 if model == "grouped" else 2)
    keep = torch.rand(3, q.shape[1], q.shape[2], 11) > 0.3
    keep[..., 0] = True  # no row is empty, so nothing is given back
    given, dense = {}, torch.zeros(1, dtype=q.dtype).masked_fill(~keep, float("-inf"))
    if model == "causal":
        given["is_causal"] = True
        dense = dense.masked_fill(~torch.ones(11, 11, dtype=torch.bool).tril(), float("-inf"))
    if model == "padded":
        given["attn_mask"] = (torch.arange(11) < torch.tensor([[11], [7], [3]]))[:, None, None]
        dense = dense.masked_fill(~given["attn_mask"], float("-inf"))
    if model == "biased":
        given["attn_mask"] = torch.randn(1, 2, 11, 11, dtype=q.dtype)
        dense = dense + given["attn_mask"]
    gqa = model == "grouped"
    ours = dampen.attention(q, k, v, **given, enable_gqa=gqa, regularizers=[Fixed(~keep)])
    theirs = F.scaled_dot_product_attention(q, k, v, dense, enable_gqa=gqa)
    assert runs
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "method", [DropKey(0.4), HardMasking(0.4, top=3)], ids=["drop_key", "hard_masking"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_draws_the_masks_of_the_forward(method, causal, monkeypatch):
    """The oracle is the checkpointed path with blocks of the same size, which computes every forward again."""
    q, k, v = operands()
    monkeypatch.setattr(kernels, "CHUNK", 3 * 2 * 11 * 4)
    torch.manual_seed(5)
    ours = dampen.attention(q, k, v, is_causal=causal, regularizers=[method])
    torch.rand(7)  # what is drawn before the backward changes nothing
    state = torch.get_rng_state()
    mine = gradients(ours, (q, k, v))
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(kernels, "fits_blocks", lambda *a: False)
    torch.manual_seed(5)
    theirs = dampen.attention(q, k, v, is_causal=causal, regularizers=[method])
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(mine, gradients(theirs, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_far_down_see_their_own_past(monkeypatch):
    """Offsets beyond 4,096: the last query of a causal model sees all, and its gradient reaches the first key."""
    monkeypatch.setattr(long_sequences, "ROWS", 2048)
    q, k, v = (torch.randn(1, 1, 4099, 4, requires_grad=True) for _ in range(3))
    hidden = torch.zeros(1, 1, 4099, 4099, dtype=torch.bool)
    hidden[..., 4098, 1:4098] = True
    out = dampen.attention(q, k, v, is_causal=True, regularizers=[Fixed(hidden)])
    weights = ((q[..., 4098:, :] * 0.5) @ k[..., [0, 4098], :].mT).softmax(-1)
    torch.testing.assert_close(out[..., 4098:, :], weights @ v[..., [0, 4098], :])
    (to_v,) = torch.autograd.grad(out[..., 4098, :].sum(), v)
    torch.testing.assert_close(to_v[0, 0, [0, 4098], 0], weights[0, 0, 0].detach())
    assert to_v[0, 0, 1:4098].abs().max() == 0


def test_inside_a_checkpoint():
    q, k, v = operands()

    def run(q, k, v):
        return dampen.attention(q, k, v, regularizers=[DropKey(0.4)])

    torch.manual_seed(3)
    plain = gradients(run(q, k, v), (q, k, v))
    torch.manual_seed(3)
    again = gradients(
        torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False), (q, k, v)
    )
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)


def test_a_penalty_made_in_a_mask_keeps_its_gradient(monkeypatch):
    runs, method = counted(monkeypatch), Priced()
    q, k, v = operands()
    dampen.attention(q, k, v, regularizers=[method])
    assert not runs
    assert all(p.requires_grad for p in method.take_penalties().values())


def test_a_learned_bias_keeps_its_gradient(monkeypatch):
    runs, bias = (
        counted(monkeypatch),
        torch.zeros(1, 2, 11, 11, dtype=torch.float64, requires_grad=True),
    )
    q, k, v = operands()
    dampen.attention(q, k, v, bias, regularizers=[DropKey(0.2)]).sum().backward()
    assert not runs
    assert bias.grad is not None
