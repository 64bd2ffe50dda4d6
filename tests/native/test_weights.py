"""The softmax of scores that a model computed itself, with keys hidden by the native kernel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import DropKey
from dampen.native.entry import NativeError, weights_of

SHAPES = [(2, 3, 17, 17), (3, 1, 1, 9), (1, 1, 30, 130)]


def seeded(seed):
    torch.manual_seed(seed)
    return torch.randint(2**63 - 1, ()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_softmax_of_the_keys_that_attention_keeps(built, shape, rate, masked):
    """The oracle: `dampen_kept`, which says what the attention kernel keeps under the same seed."""
    b, h, n, m = shape
    torch.manual_seed(0)
    s = (3 * torch.randn(shape)).requires_grad_()
    keep = (torch.rand(b, 1, n, m) < 0.6) if masked else None
    if masked:
        keep[..., 0] = True
    seen = s if keep is None else s.masked_fill(~keep, float("-inf"))
    q, k = torch.randn(b, h, n, 4), torch.randn(b, h, m, 4)
    settings = built.AttentionSettings(seeded(3), rate, False, 1.0, 1, 0, 0)
    expanded = None if keep is None else keep.expand(shape)
    kept = built.kept_keys(q, k, expanded, torch.empty(0), settings)
    torch.manual_seed(3)
    ours = built.weights(seen.contiguous(), keep, rate)
    expected = seen.masked_fill(~kept, float("-inf")).softmax(-1)
    torch.testing.assert_close(ours, expected)
    assert bool((ours[~kept] == 0).all())
    g = torch.randn(shape)
    mine, theirs = (torch.autograd.grad(o, s, g, retain_graph=True)[0] for o in (ours, expected))
    torch.testing.assert_close(mine, theirs)
    again = torch.autograd.grad(ours, s, g, create_graph=True)[0]
    two = torch.autograd.grad(again.square().sum(), s, retain_graph=True)[0]
    wanted = torch.autograd.grad(expected, s, g, create_graph=True)[0]
    torch.testing.assert_close(two, torch.autograd.grad(wanted.square().sum(), s)[0])


def test_a_row_that_the_mask_hides_whole_is_as_the_model_has_it(built):
    s = torch.full((1, 1, 2, 3), float("-inf"))
    s[..., 1, :] = 1.0
    keep = torch.tensor([[False] * 3, [True] * 3])[None, None]
    a = built.weights(s, keep, 0.5)
    assert bool(a[0, 0, 0].isnan().all())
    assert a[0, 0, 1].sum().item() == pytest.approx(1)


def test_what_it_cannot_read_is_refused(built):
    with pytest.raises(NativeError, match="rate"):
        weights_of(torch.zeros(1, 1, 2, 2), None, 0, 1.5)
    with pytest.raises(NativeError, match="float64"):
        weights_of(torch.zeros(1, 1, 2, 2, dtype=torch.float64), None, 0, 0.5)


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


def test_a_model_by_its_own_code_drops_what_one_by_sdpa_drops(built):
    """In its first forward, which learns the way of the scores, and in those after it."""
    models, x = both(), torch.randn(3, 7, 8)
    for step in range(3):
        outs = []
        for model in models:
            torch.manual_seed(step)
            out = model(x)
            outs.append((out, *torch.autograd.grad(out.sin().sum(), list(model.parameters()))))
        for mine, theirs in zip(*outs, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_mask_is_read_anew_when_its_numbers_change(built, monkeypatch):
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
