"""One attention, softmax(q k^T) v, written in many ways: a method does the same in each of them.

The reference is the formula written out here, with the hidden keys, the head factors and the masks as in the spelling."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as attend_fused

import dampen
from dampen.regularizer import Regularizer

B, H, N, D = 2, 4, 6, 16
X = torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
HIDDEN = (torch.arange(H * N * N).reshape(1, H, N, N) * 7 % 5 < 2) & ~torch.eye(N, dtype=torch.bool)
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)


def softmax(s):
    return s.softmax(-1)


def by_sum(s):
    e = (s - s.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def by_sum_in_place(s):
    e = torch.exp(s)
    e = e.div(torch.sum(e, dim=-1, keepdim=True))
    return e


def by_logsumexp(s):
    return (s - s.logsumexp(-1, keepdim=True)).exp()


def by_log_softmax(s):
    return F.log_softmax(s, dim=-1).exp()


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def eager(q, k, v, normalize=softmax):
    s = (q @ k.transpose(-2, -1) / 2).masked_fill(CAUSAL, -1e9)
    return normalize(s) @ v


def permuted(q, k, v):
    """Weights turned by permute, for values^T weights^T."""
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    a = (torch.bmm(q, k.permute(0, 2, 1)) / 2).masked_fill(CAUSAL, -1e9).softmax(-1)
    return torch.bmm(v.permute(0, 2, 1), a.permute(0, 2, 1)).permute(0, 2, 1).unflatten(0, (B, H))


def turned_by_attribute(q, k, v):
    a = (q @ k.mT / 2).masked_fill(CAUSAL, -1e9).softmax(-1)
    return (v.mT @ a.mT).mT


def keys_first(q, k, v):
    a = (k @ q.mT / 2).masked_fill(CAUSAL.T, -1e9).softmax(-2)
    return a.transpose(-2, -1) @ v


def keys_first_on_the_right(q, k, v):
    a = (k @ q.mT / 2).masked_fill(CAUSAL.T, -1e9).softmax(-2)
    return (v.mT @ a).mT


def keys_first_by_einsum(q, k, v):
    s = torch.einsum("bhmd,bhnd->bhmn", k, q) / 2
    a = s.masked_fill(CAUSAL.T, -1e9).softmax(dim=2)
    return torch.einsum("bhmn,bhmd->bhnd", a, v)


EAGER = {f.__name__: partial(eager, normalize=f) for f in
         (softmax, by_sum, by_sum_in_place, by_logsumexp, by_log_softmax)}  # fmt: skip
SPELLINGS = EAGER | {
    f.__name__: f
    for f in (fused, permuted, turned_by_attribute, keys_first, keys_first_on_the_right,
              keys_first_by_einsum)
}  # fmt: skip


class Mixer(nn.Module):
    """An attention whose class is not named like one."""

    def __init__(self, spelling):
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.spelling = spelling

    def projected(self, x):
        return [t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1)]

    def forward(self, x):
        o = self.spelling(*self.projected(x))
        return self.to_out(o.transpose(1, 2).flatten(-2))


class SelfAttention(Mixer):
    """One that is."""


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Hide(Regularizer):
    """Hides known keys."""

    stochastic = False

    def mask(self, q, k, call):
        return HIDDEN.expand(q.shape[0], -1, -1, -1)


class Everything(Hide):
    """Hides known keys, changes q and v, halves the weights of one head and doubles the output of another."""

    def qkv(self, q, k, v, call):
        return q * 1.5, k, v + 0.25

    def probs(self, a, call):
        return a * torch.tensor([0.5, 1, 1, 1]).view(1, H, 1, 1)

    def heads(self, o, call):
        return o * torch.tensor([1.0, 1, 2, 1]).view(1, H, 1, 1)


def expected(block, everything):
    """The block with hidden keys, computed here."""
    q, k, v = block.attention.projected(X)
    q, v = (1.5 * q, v + 0.25) if everything else (q, v)
    s = (q @ k.mT / 2).masked_fill(HIDDEN | CAUSAL, -torch.inf)
    o = s.softmax(-1) @ v
    if everything:
        o = o * torch.tensor([0.5, 1, 2, 1]).view(1, H, 1, 1)
    x = X + block.attention.to_out(o.transpose(1, 2).flatten(-2))
    return x + block.mlp(x)


@pytest.mark.parametrize("method", [Hide, Everything])
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_method_does_the_same_in_every_spelling(name, method):
    torch.manual_seed(0)
    block = Block(SelfAttention(SPELLINGS[name])).train()
    plain = block(X)
    want = expected(block, method is Everything)
    grads = torch.autograd.grad(want.square().sum(), list(block.parameters()))
    reg = dampen.regularize(block, method())
    for _ in range(3):  # the second forward may take what the first has learned
        out = block(X)
        torch.testing.assert_close(out, want)
        got = torch.autograd.grad(out.square().sum(), list(block.parameters()))
        torch.testing.assert_close(got, grads, rtol=1e-4, atol=1e-4)
    assert torch.equal(block.eval()(X), plain)
    reg.remove()


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_penalty_reads_the_values_in_every_spelling(name):
    torch.manual_seed(0)
    block = Block(SelfAttention(SPELLINGS[name])).train()
    reg = dampen.regularize(block, dampen.ExplicitDropout(value=1.0, rate=0.2))
    block(X)
    v = block.attention.to_qkv(X)[..., 2 * D :]
    torch.testing.assert_close(reg.penalty(), 0.5 * 0.2**2 * v.square().sum(-1).mean())


class ByAlias(Mixer):
    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        o = attend_fused(*self.projected(x), is_causal=True)
        return self.to_out(o.transpose(1, 2).flatten(-2))


class OnTheModule(Mixer):
    def __init__(self):
        super().__init__(partial(F.scaled_dot_product_attention, is_causal=True))


class OnTheClass(Mixer):
    compute = staticmethod(partial(F.scaled_dot_product_attention, is_causal=True))

    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        o = self.compute(*self.projected(x))
        return self.to_out(o.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("cls", [ByAlias, OnTheModule, OnTheClass])
def test_fused_attention_under_another_name_is_found(cls):
    torch.manual_seed(0)
    block = Block(cls()).train()
    want = expected(block, everything=False)
    reg = dampen.regularize(block, Hide())
    torch.testing.assert_close(block(X), want)
    reg.remove()


class OverQueries(Mixer):
    """GroupViT: queries compete for each key."""

    def __init__(self):
        super().__init__(None)

    def forward(self, x):
        q, k, v = self.projected(x)
        o = (q @ k.mT).softmax(-2) @ v
        return self.to_out(o.transpose(1, 2).flatten(-2))


def test_a_softmax_over_queries_is_still_told_apart():
    torch.manual_seed(0)
    block = Block(OverQueries()).train()
    block.attention.__class__ = type("GroupAttention", (OverQueries,), {})
    plain = block(X)
    reg = dampen.regularize(block, dampen.DropKey(0.5))
    with pytest.raises(RuntimeError, match="softmax is over its queries"):
        block(X)
    reg.remove()
    assert torch.equal(block.eval()(X), plain)


# --- linear layers of other kinds ------------------------------------------------------------------


class SeparateAttention(nn.Module):
    """Its values come from a linear layer, or from a convolution in groups (SqueezeBERT)."""

    def __init__(self, value):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(D, D), nn.Linear(D, D), value

    def forward(self, x):
        v = self.value(x) if isinstance(self.value, nn.Linear) else self.value(x.mT).mT
        q, k, v = (
            t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (self.query(x), self.key(x), v)
        )
        return fused(q, k, v).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_a_projection_in_groups_has_the_penalty_of_its_block_matrix(form):
    torch.manual_seed(0)
    grouped, whole = nn.Conv1d(D, D, 1, groups=4), nn.Linear(D, D)
    with torch.no_grad():
        whole.weight.zero_()
        whole.bias.copy_(grouped.bias)
        for i in range(4):
            part = slice(4 * i, 4 * i + 4)
            whole.weight[part, part] = grouped.weight[part, :, 0]
    found = []
    block = Block(SeparateAttention(grouped)).train()
    for value in (grouped, whole):
        block.attention.value = value
        reg = dampen.regularize(
            block, dampen.ExplicitDropout(value=1.0, query_key=0.1, rate=0.2, form=form)
        )
        block(X)
        found.append(reg.penalty())
        reg.remove()
    torch.testing.assert_close(*found)


class LoRALinear(nn.Module):
    """torchtune's: the weight lies in the module, the adapter is added in its forward."""

    def __init__(self, ins, outs, rank=2, alpha=4.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outs, ins) * 0.2, requires_grad=False)
        self.bias, self.alpha, self.rank = None, alpha, rank
        self.lora_a, self.lora_b = (
            nn.Linear(ins, rank, bias=False),
            nn.Linear(rank, outs, bias=False),
        )
        self.disabled = self.merged = False

    def forward(self, x):
        out = F.linear(x, self.weight, self.bias)
        return out + self.alpha / self.rank * self.lora_b(self.lora_a(x))


def adapted_block():
    torch.manual_seed(0)
    block = Block(SelfAttention(fused))
    block.attention.to_qkv = LoRALinear(D, 3 * D)
    block.mlp = nn.Sequential(LoRALinear(D, 24), nn.GELU(), LoRALinear(24, D))
    return block.train()


def test_a_layer_that_holds_its_adapter_is_one_linear_layer():
    block = adapted_block()
    inputs = {}
    for i in (0, 2):
        block.mlp[i].register_forward_hook(lambda m, args, out, i=i: inputs.update({i: out}))
    reg = dampen.regularize(block, dampen.ExplicitDropout(value=1.0, ffn=1.0, rate=0.2))
    block(X)
    v = block.attention.to_qkv(X)[..., 2 * D :]
    outputs = [v, inputs[0], inputs[2]]
    want = sum(0.5 * 0.2**2 * y.square().sum(-1).mean() for y in outputs)
    got = reg.penalty()
    torch.testing.assert_close(got, want)
    got.backward()
    adapters = [p for n, p in block.named_parameters() if "lora" in n and "to_out" not in n]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in adapters[-1:])
    reg.remove()


def test_dropout_before_such_a_layer_reaches_weight_and_adapter():
    block = adapted_block()

    class Halve(Regularizer):
        roles = frozenset({"ffn_in", "ffn_out"})
        stochastic = False

        def operands(self, x, weight, call):
            return x * 0.5, weight

    def halved(x):
        x = x + block.attention(x)
        hidden = F.gelu(block.mlp[0](0.5 * x))
        return x + block.mlp[2](0.5 * hidden)

    want = halved(X)
    dampen.regularize(block, Halve())
    torch.testing.assert_close(block(X), want)


class Output(nn.Module):
    """LXMERT's `AttentionOutput`: named like attention, and none."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, o, x):
        return self.norm(self.dense(o) + x)


def test_what_comes_after_an_attention_is_none():
    class AttentionOutput(Output):
        pass

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.core, self.output = SelfAttention(EAGER["softmax"]), AttentionOutput()

        def forward(self, x):
            return self.output(self.core(x), x)

    torch.manual_seed(0)
    block = Block(Wrapped())
    reg = dampen.regularize(block, dampen.DropHead(0.5))
    assert [list(layer.attentions) for layer in reg.layers] == [["attention.core"]]
    block.train()(X)


class Pool(nn.Module):
    """timm's AttentionPoolLatent: an attention with a feed-forward of its own, at the top of the model."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(D, 24), "fc2": nn.Linear(24, D)})

    def forward(self, x):
        k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        q = self.q(x[:, :1]).unflatten(-1, (H, -1)).transpose(1, 2)
        o = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return o + self.mlp["fc2"](F.gelu(self.mlp["fc1"](o)))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block(SelfAttention(EAGER["softmax"])) for _ in range(2))
        self.attn_pool, self.head = Pool(), nn.Linear(D, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.attn_pool(x))


def test_a_pooling_head_with_a_feed_forward_is_a_layer_of_its_own():
    torch.manual_seed(0)
    model = Pooled().train()
    changed = set()

    class Mark(dampen.FeedForwardDropout):
        def operands(self, x, weight, call):
            changed.update(n for n, m in model.named_modules() if m is call.module)
            return x, weight

    reg = dampen.regularize(model, Mark(0.5))
    model(X)
    assert [layer.site.name for layer in reg.layers] == ["blocks.0", "blocks.1", "attn_pool"]
    mlps = {f"blocks.{i}.mlp.{n}" for i in range(2) for n in (0, 2)}
    assert changed == mlps | {"attn_pool.mlp.fc1", "attn_pool.mlp.fc2"}
