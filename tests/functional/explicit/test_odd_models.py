"""Explicit Dropout where a careless reading of the model would go wrong in silence: adapters, chunks, sequence-first
decoders, a feed-forward before the attention, shared key heads."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import AroraDropout, ExplicitDropout, regularize
from tests.oracles.explicit_layer import Case


class Lora(nn.Module):
    """The shape of peft's LoRA: a base map and two small ones beside it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict(
            {"default": nn.Linear(base.in_features, 2, bias=False).to(base.weight)}
        )
        self.lora_B = nn.ModuleDict(
            {"default": nn.Linear(2, base.out_features, bias=False).to(base.weight)}
        )
        self.weight = base.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_beside_a_map_are_refused_where_they_would_be_left_out():
    layer, inputs = Case().build()
    layer.attn.v_proj = Lora(layer.attn.v_proj)
    with pytest.raises(ValueError, match=r"the map v at .* is W \+ B A \(LoRA\)"):
        regularize(layer, ExplicitDropout(value=1.0))
    reg = regularize(
        layer, ExplicitDropout(ffn=1.0, query=1.0)
    )  # maps without adapters are as they were
    layer(**inputs)
    assert set(reg.penalties()) == {f"explicit_dropout.{t}" for t in ("query", "ffn1", "ffn2")}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (
            m(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for m in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(o.transpose(1, 2).flatten(2))


def test_the_divisor_of_chunked_queries_is_that_of_all(monkeypatch):
    """A left-padded sample whose padding fills whole chunks still counts."""
    x = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    visible = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    visible[1, :, :, :6] = False
    values = []
    for chunk, long in ((10**9, 10**9), (2 * 2 * 8 * 2, 1)):
        monkeypatch.setattr("dampen.kernels.kernel.CHUNK", chunk)
        monkeypatch.setattr("dampen.kernels.kernel.LONG", long)
        torch.manual_seed(1)
        attention = Attention().double().train()
        reg = regularize(attention, ExplicitDropout(attended_value=1.0, form="inverted"))
        attention(x, visible)
        values.append(reg.penalty())
        assert ("chunk" in repr(reg)) == (long == 1)
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("tokens", [5, 2])
def test_a_sequence_first_decoder_gives_the_penalties_of_a_batch_first_one(tokens):
    """With as many tokens as samples a transposed mask would pass in silence."""
    found = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        layer = (
            nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
            .double()
            .train()
        )
        x, memory = torch.randn(2, tokens, 8).double(), torch.randn(2, 4, 8).double()
        padding = torch.zeros(2, tokens, dtype=torch.bool)
        padding[1, 1:] = True
        reg = regularize(layer, ExplicitDropout(query=1.0, value=1.0, ffn=1.0))
        if not batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        layer(x, memory, tgt_key_padding_mask=padding)
        found.append(reg.penalties())
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], msg=name)


class Macaron(nn.Module):
    """Half a feed-forward before the attention (Conformer)."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attn = Attention()

    def forward(self, x, mask=None):
        x = x + self.fc2(F.relu(self.fc1(x)))
        return x + self.attn(x, mask)


def test_a_feed_forward_before_the_attention_cannot_know_padding():
    model = nn.Sequential(Macaron(), Macaron()).train()
    reg = regularize(model, ExplicitDropout(ffn=1.0))
    x = torch.randn(2, 4, 8)
    for _ in range(2):
        model(x)
        assert reg.penalty() > 0
    mask = torch.ones(2, 1, 1, 4, dtype=torch.bool)
    mask[1, ..., 2:] = False
    with pytest.raises(RuntimeError, match="runs before its attention"):
        model[0](x, mask)


class MultiQuery(nn.Module):
    """One head of keys and values, shown to all query heads by expand."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = (m(x).unsqueeze(1).expand(-1, 2, -1, -1) for m in (self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_one_head_of_keys_for_all_queries():
    torch.manual_seed(0)
    model, x = MultiQuery().double().train(), torch.randn(2, 5, 8).double()
    reg = regularize(model, ExplicitDropout(value=1.0, query=1.0, rate=0.2, reduction="sum"))
    model(x)
    terms = reg.penalties()
    v, q, k = (x @ m.weight.t() for m in (model.v_proj, model.q_proj, model.k_proj))
    torch.testing.assert_close(terms["explicit_dropout.value"], 0.02 * v.square().sum())
    pairs = torch.einsum("bihd,bjd->bhij", q.unflatten(-1, (2, 4)), k)
    torch.testing.assert_close(terms["explicit_dropout.query"], 0.02 * pairs.square().sum())


def test_a_shared_mask_with_detached_inputs():
    layer, inputs = Case().build()
    setting = {"query_key": 1.0, "shared_mask": True, "form": "exact", "detach_inputs": True}
    reg = dampen.regularize(layer, ExplicitDropout(**setting))
    layer(**inputs)
    assert reg.penalty() > 0


class Twice(nn.Module):
    """One projection, several attentions: the difference of two (DiffLlama), or one per image (Qwen-VL)."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (4, 4)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.how == "difference":
            halves = [torch.cat([h, h], dim=1) for h in v.chunk(2, dim=1)]
            first, second = (F.scaled_dot_product_attention(q, k, h) for h in halves)
            o = first - 0.3 * second
        else:
            parts = zip(*(t.split([2, 4], dim=2) for t in (q, k, v)), strict=True)
            o = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=2)
        return self.o_proj(o.transpose(1, 2).flatten(-2))


class TwiceBlock(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.self_attn = Twice(how)
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


@pytest.mark.parametrize("how", ["difference", "images"])
@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
def test_a_projection_that_several_attentions_read_is_penalized_once(how, form):
    torch.manual_seed(0)
    model = nn.Sequential(TwiceBlock(how)).train()
    x = torch.randn(3, 6, 16)
    maps = model[0].self_attn
    per_head = [f(x) - f.bias for f in (maps.q_proj, maps.k_proj, maps.v_proj)]
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in per_head)
    weight, p = maps.v_proj.weight, 0.2
    power = (x.square().sum((0, 1)) * weight.square().sum(0)).sum()
    factors = {"paper": (p * p, 0), "exact": (p * p, p * (1 - p)), "inverted": (0, p / (1 - p))}[
        form
    ]
    value = 0.5 * (factors[0] * v.square().sum() + factors[1] * power) / 18
    reg = dampen.regularize(
        model, [ExplicitDropout(value=1.0, query=1.0, form=form), AroraDropout(value=1.0, key=1.0)]
    )
    model(x)
    got = reg.penalties()
    assert got["explicit_dropout.value"].item() == pytest.approx(value.item(), rel=1e-4)
    assert got["arora_dropout.value"].item() == pytest.approx(
        (p / (1 - p) * power / 18).item(), rel=1e-4
    )
    if form == "paper":
        scores = (q @ k.transpose(-2, -1)).square().sum()
        assert got["explicit_dropout.query"].item() == pytest.approx(
            (0.5 * p * p * scores / (3 * 36)).item(), rel=1e-4
        )
