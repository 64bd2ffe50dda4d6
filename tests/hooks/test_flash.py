"""Models that call flash_attn, torch's varlen_attn or xformers: stand-ins that compute densely."""

import copy
import io
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import BlurredAttention, DropAttention, DropHead, DropKey
from dampen.hooks import library_backends
from dampen.hooks.library_backends import widest

CALLS = []


def sdpa(q, k, v, p=0.0, scale=None, causal=False):
    """(B, N, H, D) attention, written without torch's function for it."""
    CALLS.append(q.shape)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        s = s.masked_fill(hidden, float("-inf"))
    return (F.dropout(s.softmax(-1), p) @ v).transpose(1, 2)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return sdpa(q, k, v, dropout_p, softmax_scale, causal)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    out = []
    for a, b in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = (t[a:b].unsqueeze(0) for t in (q, k, v))
        out.append(sdpa(*one, dropout_p, softmax_scale, causal)[0])
    return torch.cat(out)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    causal = window_size == (-1, 0)
    return flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, causal
    )


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    return sdpa(query, key, value, p, scale)


class FlashAttention3:
    """FA3 and FA4 have no dropout; FA4 also returns the logarithms of the sums."""

    @staticmethod
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(None, None),
        learnable_sink=None, softcap=0.0,
    ):  # fmt: skip
        return sdpa(q, k, v, 0.0, softmax_scale, causal), None


flash4 = FlashAttention3.flash_attn_func


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.qkv, self.proj = how, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, 8).unbind(2)
        starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32)
        if self.how == "flash_attn_func":
            o = flash_attn_func(q, k, v, causal=True)
        elif self.how == "flash4":
            o, _ = flash4(q, k, v, causal=True)
        elif self.how == "memory_efficient_attention":
            o = memory_efficient_attention(q, k, v)
        else:
            packed = (t.flatten(0, 1) for t in (q, k, v))
            sizes = (starts, starts, tokens, tokens)
            if self.how == "varlen_attn":
                o = varlen_attn(*packed, *sizes, window_size=(-1, 0))
            else:
                o = flash_attn_varlen_func(*packed, *sizes, causal=True)
        return self.proj(o.reshape(batch, tokens, 32))


class Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.attn, self.norm = Attention(how), nn.LayerNorm(32)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.fc2(F.gelu(self.fc1(x)))


HOW = ["flash_attn_func", "flash4", "flash_attn_varlen_func", "varlen_attn",
       "memory_efficient_attention"]  # fmt: skip


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def model(how):
    torch.manual_seed(0)
    CALLS.clear()
    return nn.Sequential(Block(how), Block(how)), torch.randn(3, 6, 32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "method", [DropHead(0.5), BlurredAttention(), DropKey(0.3, unit="column")], ids=repr
)
def test_the_function_stays(how, method):
    net, x = model(how)
    if method.name == "blurred_attention" and how != "memory_efficient_attention":
        method = DropHead(0.2)  # blur refuses causal attention
    plain = net(x)
    reg = dampen.regularize(net, method)
    CALLS.clear()
    out = net(x)
    assert len(CALLS) == (6 if "varlen" in how else 2)  # one a sample where they are packed
    assert not torch.allclose(out, plain)
    assert "of the model" in str(reg)
    out.sum().backward()
    net.eval()
    assert torch.equal(net(x), plain)
    reg.remove()
    net.train()
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved], ids=["copied", "saved"])
def test_copies_call_the_same_function(copied):
    net, x = model("flash_attn_func")
    dampen.regularize(net, DropHead(0.5))
    twin = copied(net)
    CALLS.clear()
    twin(x)
    assert len(CALLS) == 2
    assert twin[0].attn._dampen_attention.flash[0].namespace is globals()


def test_heads_too_wide_for_more_channels_switch():
    q = torch.empty(1, 2, 4, 256)
    assert not widest(q, q)
    assert widest(q[..., :248], q[..., :248])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("method", [DropKey(0.3), DropAttention(0.3, normalized=False)], ids=repr)
def test_what_needs_the_matrix_switches(how, method):
    net, x = model(how)
    reg = dampen.regularize(net, method)
    CALLS.clear()
    net(x).sum().backward()
    assert CALLS == []
    assert "instead of" in str(reg)


STAYS = "flash_attn_func of the model (no method needs a mask by query or the matrix"


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (DropHead(0.1), f"[attn: {STAYS})]"),
        (DropKey(0.1, unit="column"), f"[attn: {STAYS}, whole keys hidden by more channels)]"),
        (DropKey(0.1), "; instead of flash_attn_func]"),
    ],
    ids=repr,
)
def test_print_says_what_ran(method, line):
    net, x = model("flash_attn_func")
    reg = dampen.regularize(net, method)
    net(x)
    assert str(reg).splitlines()[1].endswith(line)


def test_a_causal_function_needs_no_mask_of_ours(monkeypatch):
    """Where there are as many keys as queries torch's flag says the same."""
    found = []
    plain = library_backends.attend

    def attend(q, k, v, mask, rate, causal, *rest):
        found.append((mask, causal))
        return plain(q, k, v, mask, rate, causal, *rest)

    monkeypatch.setattr(library_backends, "attend", attend)
    net, x = model("flash_attn_func")
    dampen.regularize(net, DropKey(0.3))
    net(x)
    assert found == [(None, True)] * 2


@pytest.mark.parametrize("how", HOW)
def test_rate_0_computes_the_same(how):
    """At a rate of nearly 0 both ways give what the model gives alone."""
    for method in (DropKey(1e-9), DropKey(1e-9, unit="column"), DropHead(1e-9)):
        net, x = model(how)
        plain = net(x)
        dampen.regularize(net, method)
        torch.testing.assert_close(net(x), plain, rtol=1e-5, atol=1e-5)


def test_whole_keys_are_hidden():
    """Beside dense attention with the same keys hidden, packed and not."""
    for how in ("flash_attn_func", "flash_attn_varlen_func"):
        net, x = model(how)
        block = net[0]
        reg = dampen.regularize(block, DropKey(0.4, unit="column"))
        hidden = []
        clone = reg.clones[0]
        mask = clone.mask
        clone.mask = lambda *a, m=mask, h=hidden: h.append(m(*a)) or h[-1]
        o = block.attn(x)
        q, k, v = (t.transpose(1, 2) for t in block.attn.qkv(x).view(3, 6, 3, 4, 8).unbind(2))
        keep = ~hidden[0] & torch.ones(6, 6, dtype=torch.bool).tril()
        lost = ~keep.any(-1, keepdim=True)  # such a query sees what it saw
        keep = keep | (lost & torch.ones(6, 6, dtype=torch.bool).tril())
        dense = F.scaled_dot_product_attention(q, k, v, keep)
        expected = block.attn.proj(dense.transpose(1, 2).reshape(3, 6, 32))
        torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)


def test_refused_where_dampen_would_compute_something_else(monkeypatch):
    net, x = model("flash_attn_func")
    here = sys.modules[__name__]
    plain = flash_attn_func
    monkeypatch.setattr(
        here, "flash_attn_func", lambda q, k, v, **_: plain(q, k, v, window_size=(4, 0))
    )
    net, x = model("flash_attn_func")

    def windowed(q, k, v, causal=False, window_size=(4, 0)):
        return plain(q, k, v, causal=causal)

    windowed.__name__ = "flash_attn_func"
    monkeypatch.setattr(here, "flash_attn_func", windowed)
    dampen.regularize(net, DropKey(0.3))
    with pytest.raises(RuntimeError, match="window_size"):
        net(x)


class GroupedAttention(Attention):
    """Two heads of keys and values for four of queries."""

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, 4, 8).unbind(2)
        k, v = k[:, :, :2], v[:, :, :2]
        if self.how == "flash_attn_func":
            o = flash_attn_func(q, k, v, causal=True)
        else:
            starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32)
            packed = (t.flatten(0, 1) for t in (q, k, v))
            o = flash_attn_varlen_func(*packed, starts, starts, tokens, tokens, causal=True)
        return self.proj(o.reshape(batch, tokens, 32))


@pytest.mark.parametrize("how", ["flash_attn_func", "flash_attn_varlen_func"])
@pytest.mark.parametrize(
    "method", [DropKey(1e-9), DropAttention(1e-9), DropKey(1e-9, unit="column")], ids=repr
)
def test_grouped_keys(how, method):
    net, x = model(how)
    for block in net:
        block.attn = GroupedAttention(how)
    plain = net(x)
    dampen.regularize(net, method)
    torch.testing.assert_close(net(x), plain)


def test_a_soft_cap_is_refused_where_whole_keys_are_hidden():
    """It would give hidden keys a weight again."""
    net, x = model("flash_attn_func")

    class Capped(Attention):
        def forward(self, x):
            batch, tokens, _ = x.shape
            q, k, v = self.qkv(x).view(batch, tokens, 3, 4, 8).unbind(2)
            return self.proj(flash_attn_func(q, k, v, softcap=2.0).reshape(batch, tokens, 32))

    for block in net:
        block.attn = Capped("flash_attn_func")
    dampen.regularize(net, DropKey(0.3, unit="column"))
    with pytest.raises(Exception, match="softcap"):
        net(x)
