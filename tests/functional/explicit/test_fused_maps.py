"""Fused maps whose columns are not all of q, then k, then v: read in the right columns, or refused in words."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dampen import AroraDropout, ExplicitDropout, regularize

D, H, S = 16, 4, 4
NAMES = ("in_proj", "query_key_value")


class Interleaved(nn.Module):
    """One map with [q0 k0 v0 q1 k1 v1 ...], as in DeBERTa (q and v with biases of their own), bloom and GPT-NeoX."""

    def __init__(self, way, name):
        super().__init__()
        self.way, self.name = way, name
        self.add_module(name, nn.Linear(D, 3 * D, bias=False))
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(H, 1, S)) for _ in range(2))
        self.out_proj = nn.Linear(D, D)

    def forward(self, x):
        y = getattr(self, self.name)(x)
        q, k, v = y.unflatten(-1, (H, 3 * S)).transpose(1, 2).chunk(3, dim=-1)
        if self.way == "biases":
            q, v = q + self.q_bias, v + self.v_bias
        elif self.way == "rotary":
            turn = torch.linspace(0, 1, x.shape[1])[:, None]
            q, k = (
                t * turn.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * turn.sin()
                for t in (q, k)
            )
        elif self.way == "lost":
            v = torch.einsum("bhts->bhts", v) + self.v_bias
        elif self.way == "queries lost":
            q = torch.einsum("bhts->bhts", q) + self.q_bias
        o = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(o.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, way, name):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), Interleaved(way, name)

    def forward(self, x):
        return x + self.attn(self.norm(x))


def model_of(way, name="in_proj"):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(way, name) for _ in range(2)))


def columns(role):
    return [h * 3 * S + "qkv".index(role) * S + i for h in range(H) for i in range(S)]


def parts_of(model, x, role):
    """What the map of each block gives in the columns of a role, by the code of the model alone."""
    for block in model:
        yield (
            getattr(block.attn, block.attn.name)(block.norm(x))[..., columns(role)],
            block.norm(x),
            block.attn,
        )
        x = block(x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["plain", "biases", "rotary"])
def test_columns_interleaved_by_heads_are_learned(way, name):
    model, x = model_of(way, name), torch.randn(2, 5, D)
    weights = [getattr(block.attn, name).weight for block in model]
    expected = sum(0.5 * 0.04 * y.square().sum() / 10 for y, _, _ in parts_of(model, x, "v"))
    wanted = torch.autograd.grad(expected, weights)
    reg = regularize(model, ExplicitDropout(value=1.0, rate=0.2))
    for _ in range(2):
        model(x)
        penalty = reg.penalty()
        torch.testing.assert_close(penalty, expected)
    torch.testing.assert_close(torch.autograd.grad(penalty, weights), wanted)


@pytest.mark.parametrize("way", ["biases", "rotary"])
def test_queries_and_keys_are_read_in_their_columns(way):
    model, x = model_of(way), torch.randn(2, 5, D)
    pairs = [
        [y.unflatten(-1, (H, S)).transpose(1, 2) for y in (q, k)]
        for (q, _, _), (k, _, _) in zip(
            parts_of(model, x, "q"), parts_of(model, x, "k"), strict=True
        )
    ]
    expected = sum(0.5 * 0.04 * (q @ k.mT).square().sum() / (2 * 5 * 5) for q, k in pairs)
    reg = regularize(model, ExplicitDropout(query=1.0, rate=0.2))
    model(x)
    torch.testing.assert_close(reg.penalty(), expected)


def test_the_penalty_of_arora_reads_the_same_columns():
    model, x = model_of("biases"), torch.randn(2, 5, D)
    expected = 0.0
    for _, given, attn in parts_of(model, x, "v"):
        weight = attn.in_proj.weight[columns("v")]
        expected = expected + 0.25 * (given.square().mean((0, 1)) * weight.square().sum(0)).sum()
    reg = regularize(model, AroraDropout(value=1.0, rate=0.2))
    model(x)
    torch.testing.assert_close(reg.penalty(), expected)


@pytest.mark.parametrize(("way", "term"), [("lost", "value"), ("queries lost", "query")])
def test_columns_that_cannot_be_learned_are_refused(way, term):
    model = model_of(way)
    regularize(model, ExplicitDropout(**{term: 1.0}))
    for _ in range(2):  # also once the module is no longer followed
        with pytest.raises(RuntimeError, match="which columns make"):
            model(torch.randn(2, 5, D))
