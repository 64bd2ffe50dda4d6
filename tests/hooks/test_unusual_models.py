"""Models that nobody thought of, each with a fault that a newcomer's own probe found: an attention that no name tells,
projections under usual names that were unknown, a fused map of everything, layers that are no module beside attention,
a feed-forward before the attention."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen.hooks.discover.roles import feed_forward_roles
from dampen.hooks.discover.sites import find_attentions

WIDTH, HEADS = 16, 4
SIZE = WIDTH // HEADS
X = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def heads(t):
    return t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def attend(q, k, v, bias=0.0):
    """In the words of a textbook."""
    weights = torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5 + bias, dim=-1)
    return (weights @ v).transpose(1, 2).flatten(2)


class Cross(nn.Module):
    """The Perceiver's reading of its inputs. `names`: of the maps of queries, keys and values, and output."""

    def __init__(self, names=("q", "kv", "o")):
        super().__init__()
        self.names = names
        for name in names:
            width = 2 * WIDTH if name in ("kv", "both") else WIDTH
            self.add_module(name, nn.Linear(WIDTH, width))

    def forward(self, z, x):
        q, both, out = (getattr(self, n) for n in self.names)
        k, v = both(x).chunk(2, -1)
        return out(attend(heads(q(z)), heads(k), heads(v)))


class Perceiver(nn.Module):
    def __init__(self, names=("q", "kv", "o")):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, WIDTH))
        self.cross = Cross(names)
        self.selfs = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        z = self.latents.expand(len(x), -1, -1)
        z = z + self.cross(z, x)
        for layer in self.selfs:
            z = layer(z)
        return z


def changed(model, method, module):
    """Whether the output of a module differs from what it gives without the method."""
    kept = []
    hook = module.register_forward_hook(lambda m, i, out: kept.append(out.detach().clone()))
    model.train()(X)
    reg = dampen.regularize(model, method)
    model(X)
    report = str(reg)
    reg.remove()
    hook.remove()
    return not torch.equal(*kept), report


def test_an_attention_that_only_its_maps_and_its_code_tell_is_found_beside_others():
    model = Perceiver()
    assert list(find_attentions(model)) == ["cross", "selfs.0.self_attn", "selfs.1.self_attn"]
    assert changed(model, dampen.DropKey(0.9), model.cross)[0]
    assert changed(model, dampen.ProjectionDropout(0.9), model.cross)[0]


def test_an_attention_that_only_its_code_tells_is_said_beside_others():
    model = Perceiver(("first", "both", "last"))
    reached, report = changed(model, dampen.DropKey(0.9), model.cross)
    assert not reached
    line = "(outside)  DropKey: attention in 2 of 2 layers, and not in cross, which no layer holds"
    assert line in report
    found = Perceiver()
    assert "(outside)" not in changed(found, dampen.DropKey(0.9), found.cross)[1]


class SetBlock(nn.Module):
    """Lee et al., Set Transformer: https://arxiv.org/abs/1810.00825, with the names of its code."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        q, k, v, out = (getattr(self, n) for n in self.names)
        y = q(x) + attend(heads(q(x)), heads(k(x)), heads(v(x)))
        return y + F.relu(out(y))


class Palm(nn.Module):
    """One map makes queries, keys, values and the hidden layer of the feed-forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH + 24)
        self.attended, self.fed = nn.Linear(WIDTH, WIDTH), nn.Linear(24, WIDTH)

    def forward(self, x):
        q, k, v, hidden = self.fused(self.norm(x)).split((WIDTH, WIDTH, WIDTH, 24), -1)
        return x + self.attended(attend(heads(q), heads(k), heads(v))) + self.fed(F.silu(hidden))


UNTOLD = {
    "numbered": lambda: SetBlock(("fc_1", "fc_2", "fc_3", "fc_4")),
    "set": lambda: SetBlock(("fc_q", "fc_k", "fc_v", "fc_o")),
    "fused": Palm,
}


@pytest.mark.parametrize("name", UNTOLD)
@pytest.mark.parametrize(
    "method", [dampen.FeedForwardDropout(0.5), dampen.ExplicitDropout(ffn=1.0)], ids=["drop", "J"]
)
def test_no_projection_of_a_whole_block_is_taken_for_its_feed_forward(name, method):
    """FeedForwardDropout acted on the queries of the Set Transformer, and on PaLM's output projection."""
    with pytest.raises(ValueError, match=r"ffn_in|layer 1 of the feed-forward"):
        dampen.regularize(nn.Sequential(UNTOLD[name]()), method)


@pytest.mark.parametrize(
    "names",
    [
        ("fc_q", "fc_k", "fc_v", "fc_o"),
        ("W_query", "W_key", "W_value", "out_proj"),
        ("toqueries", "tokeys", "tovalues", "unifyheads"),
        ("query_projection", "key_projection", "value_projection", "out_projection"),
    ],
)
def test_names_of_textbooks_are_known(names):
    block = SetBlock(names).double()
    model, x = nn.Sequential(block), X.double()
    reg = dampen.regularize(model, dampen.ExplicitDropout(value=1.0, rate=0.2))
    model(x)
    values = x @ getattr(block, names[2]).weight.T
    expected = 0.5 * 0.2**2 * values.square().sum(-1).mean()
    torch.testing.assert_close(reg.penalty(), expected)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask=None):
        q, k, v = (heads(t) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(out.transpose(1, 2).flatten(2))


class Owner(nn.Module):
    """Layers that are no module: the model adds their branches itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attention": Attention(),
                    "feed": nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)),
                }
            )
            for _ in range(2)
        )

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + layer["attention"](x, mask)
            x = x + layer["feed"](x)
        return x


@pytest.mark.parametrize(
    "other",
    [dampen.DropKey(0.3), dampen.DropHead(0.5), dampen.ExplicitDropout(value=1.0)],
    ids=["keys", "heads", "penalty"],
)
def test_methods_of_attention_and_of_branches_meet_in_layers_that_are_no_module(other):
    """`OfLayer` did not know how attention reports its queries: an AttributeError for every pair of these."""
    model = Owner().train()
    dampen.regularize(model, [other, dampen.DropPath(0.9999)])
    torch.manual_seed(0)
    torch.testing.assert_close(model(X), X)  # every branch is dropped, in all layers


class FeedFirst(nn.Module):
    """A parallel block that computes its feed-forward first."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x, mask):
        h = self.norm(x)
        fed = self.fc2(F.gelu(self.fc1(h)))
        return x + fed + self.attn(h, mask)


class FeedFirstNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(FeedFirst() for _ in range(2))

    def forward(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_feed_forward_before_its_attention_is_refused_only_where_it_would_count_padding():
    causal = torch.ones(5, 5).tril().bool()
    padded = torch.ones(3, 1, 1, 5).bool()
    padded[1, ..., 3:] = False
    model = FeedFirstNet().train()
    reg = dampen.regularize(model, dampen.ExplicitDropout(ffn=1.0))
    model(X, causal)  # no token is padding
    assert reg.penalty().item() > 0
    with pytest.raises(RuntimeError, match="runs before its attention"):
        model(X, padded)
    reg.remove()
    dampen.regularize(model, [dampen.FeedForwardDropout(0.5), dampen.AttentionEntropy(0.1)])
    model(X, padded)  # of these two, what counts tokens does not act in the feed-forward


MERGED = {
    # Set Transformer, and the many codes after Kyubyong Park's Transformer (SASRec)
    "cat": (
        lambda t: torch.cat(t.split(SIZE, 2), 0),
        lambda o, batch: torch.cat(o.split(batch, 0), 2),
    ),
    # the first "attention is all you need" in PyTorch
    "permute": (
        lambda t: t.unflatten(2, (HEADS, SIZE)).permute(2, 0, 1, 3).reshape(-1, t.shape[1], SIZE),
        lambda o, batch: o.view(HEADS, batch, -1, SIZE).permute(1, 2, 0, 3).flatten(2),
    ),
    # BLOOM
    "batch first": (
        lambda t: t.unflatten(2, (HEADS, SIZE)).transpose(1, 2).flatten(0, 1),
        lambda o, batch: o.view(batch, HEADS, -1, SIZE).transpose(1, 2).flatten(2),
    ),
}


class MergedAttention(nn.Module):
    """Heads in the axis of the batch. Nothing but the way of the channels says in which order."""

    def __init__(self, merge=None):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.merge = merge

    def forward(self, x, keep):
        q, k, v = self.query(x), self.key(x), self.value(x)
        hide = torch.zeros(keep.shape).masked_fill(~keep, -1e9)
        if self.merge is None:
            return self.out(attend(heads(q), heads(k), heads(v), hide[:, None, None]))
        split, join = MERGED[self.merge]
        hide = split(hide[..., None].expand(-1, -1, WIDTH))[..., 0]
        scores = torch.bmm(split(q), split(k).transpose(1, 2)) / SIZE**0.5
        weights = torch.softmax(scores + hide[:, None], -1)
        return self.out(join(torch.bmm(weights, split(v)), len(x)))


class MergedNet(nn.Module):
    def __init__(self, merge=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = MergedAttention(merge)

    def forward(self, x, keep):
        return x + self.attention(x, keep)


def of_merged(merge, method):
    keep = torch.ones(3, 5, dtype=torch.bool)
    keep[1, 3:] = keep[2, 1:] = False
    model = MergedNet(merge).train()
    reg = dampen.regularize(model, method)
    outs = []
    for seed in range(3):  # the first forward, and those that remember it
        torch.manual_seed(seed)
        outs.append(model(X, keep).detach()[keep])
    return torch.cat(outs), reg.penalty()


@pytest.mark.parametrize("merge", MERGED)
@pytest.mark.parametrize(
    "method",
    [
        dampen.DropHead(0.5),
        dampen.HeadDiversity(1.0),
        dampen.AttentionEntropy(1.0, floor=1.0),
        dampen.ExplicitDropout(value=1.0, query=1.0),
    ],
    ids=lambda m: m.name,
)
def test_heads_merged_with_the_batch_are_told_in_either_order(merge, method):
    """Read as (batch, heads), (heads, batch) mixes samples: the padding of one counts in another."""
    got, expected = of_merged(merge, method), of_merged(None, method)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", [32, 64])
def test_what_joins_two_streams_is_no_part_of_the_feed_forward_after_it(hidden):
    """U-ViT's layers read a skip through a map of twice the width. The two maps after it changed their roles."""
    maps = {"0": nn.Linear(32, 16), "2.1": nn.Linear(16, hidden), "2.3": nn.Linear(hidden, 16)}
    assert feed_forward_roles(maps) == {"0": "other", "2.1": "ffn_in", "2.3": "ffn_out"}


def test_a_bottleneck_around_a_layer_is_no_feed_forward():
    """MobileBERT widens what its feed-forward gives by a map inside "output"."""
    maps = {
        "intermediate.dense": nn.Linear(4, 8),
        "output.dense": nn.Linear(8, 4),
        "output.bottleneck.dense": nn.Linear(4, 6),
    }
    assert list(feed_forward_roles(maps).values()) == ["ffn_in", "ffn_out", "other"]
