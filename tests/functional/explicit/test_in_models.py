"""Explicit Dropout in real models: the bare projections of every family, padding, gates, autocast, and clear errors."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import AroraDropout, ExplicitDropout
from tests.families import FAMILIES, PADDING, output

TERMS = {"query": 0.3, "key": 0.2, "value": 0.1, "ffn": 0.4}


class Bare(dampen.Regularizer):
    """Keeps what the linear maps of a layer saw, for an independent sum."""

    stochastic = False
    needs_valid = True
    roles = frozenset({"q", "k", "v", "qkv", "kv", "ffn_in", "ffn_out"})

    def __init__(self):
        super().__init__()
        self.maps, self.attentions = [], []

    def product(self, y, call):
        if call.role.startswith("ffn"):
            self.maps.append(call)
        return y

    def qkv(self, q, k, v, call):
        maps = {role: call.projection(role) for role in "qkv"}
        self.attentions.append((maps, call.valid, call.valid_keys, call.head_size))
        return q, k, v


def mean_square(x, weight, valid):
    """sum (x W^T)^2 / valid tokens, for tokens that are not padding."""
    y = (x.double() @ weight.double().t()).square().sum(-1)
    if valid is None:
        return y.sum() / y.numel()
    valid = valid.expand(y.shape)
    return (y * valid).sum() / valid.sum()


def mean_scores(maps, valid, valid_keys, size):
    """sum over heads of (q k^T)^2 / pairs of valid tokens, without bias."""
    q, k = (F.linear(maps[r].input.double(), maps[r].weight.double()) for r in "qk")
    q, k = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    squares = (q @ k.transpose(-2, -1)).square().sum(1)
    pairs = torch.ones_like(squares)
    if valid is not None:
        pairs = pairs * valid.expand(squares.shape[0], -1).unsqueeze(-1)
    if valid_keys is not None:
        pairs = pairs * valid_keys.expand(squares.shape[0], -1).unsqueeze(1)
    return (squares * pairs).sum() / pairs.sum()


@pytest.mark.parametrize(
    "name",
    ["own_vit", "own_language", "own_encoder", "encoder_post", "encoder_pre_seq_first", "decoder_post", "hf_vit",
     "hf_bert", "hf_gpt2", "hf_llama", "hf_t5", "hf_detr", "hf_wav2vec2", "timm_vit", "timm_eva", "timm_beit"],
)  # fmt: skip
def test_paper_form_from_the_maps_of_every_family(name):
    """p^2/2 times the squared norms of the bare products: no bias, no rotary, no scale, each map with its own input."""
    family = FAMILIES[name]
    model, rate = family.model(), 0.3
    bare = dampen.regularize(model, Bare())
    model(**family.inputs)
    expected = {"value": 0.0, "query": 0.0, "ffn1": 0.0, "ffn2": 0.0}
    for clone in bare.clones:
        for maps, valid, valid_keys, size in clone.attentions:
            expected["value"] += mean_square(maps["v"].input, maps["v"].weight, valid_keys)
            expected["query"] += mean_scores(maps, valid, valid_keys, size)
        for call in clone.maps:
            term = "ffn1" if call.role == "ffn_in" else "ffn2"
            expected[term] += mean_square(call.input, call.weight, call.valid)
    bare.remove()
    reg = dampen.regularize(
        model, ExplicitDropout(query=1.0, key=1.0, value=1.0, ffn=1.0, rate=rate)
    )
    model(**family.inputs)
    got = {key.split(".")[1]: value for key, value in reg.penalties().items()}
    torch.testing.assert_close(got["query"], got["key"])  # the same function
    for term, value in expected.items():
        assert got[term].item() == pytest.approx(rate**2 / 2 * value.item(), rel=2e-4), term


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("name", ["hf_llama", "hf_bert"])
def test_every_form_trains(form, name):
    family = FAMILIES[name]
    model = family.model()
    reg = dampen.regularize(
        model, ExplicitDropout(**TERMS, attended_value=0.1, query_key=0.1, form=form)
    )
    loss, terms = reg.loss(lambda: model(**family.inputs), lambda out: output(out).square().mean())
    loss.backward()
    assert set(terms) == {"task"} | {
        f"explicit_dropout.{t}"
        for t in ("query", "key", "value", "attended_value", "query_key", "ffn1", "ffn2")
    }
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
def test_padded_tokens_change_nothing(form):
    """Two padded ids are changed; every term and its gradient on the embedding of kept tokens stay."""
    family = FAMILIES["hf_bert"]
    model = family.model()
    reg = dampen.regularize(
        model, ExplicitDropout(**TERMS, attended_value=0.2, query_key=0.1, form=form)
    )
    seen = []
    for shift in (0, 7):
        ids = torch.where(
            PADDING.bool(), family.inputs["input_ids"], (family.inputs["input_ids"] + shift) % 50
        )
        model(input_ids=ids, attention_mask=PADDING)
        seen.append(reg.penalties())
    for name in seen[0]:
        torch.testing.assert_close(seen[0][name], seen[1][name])


def test_gated_feed_forward_counts_gate_and_up_as_layer_one():
    family = FAMILIES["hf_llama"]
    model = family.model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight.zero_()
    values = {}
    for zero_gate in (False, True):
        if zero_gate:
            for layer in model.model.layers:
                nn.init.zeros_(layer.mlp.gate_proj.weight)
        reg = dampen.regularize(model, ExplicitDropout(ffn=1.0))
        model(**family.inputs)
        values[zero_gate] = {k: v.item() for k, v in reg.penalties().items()}
        reg.remove()
    assert values[False]["explicit_dropout.ffn1"] > 0
    assert values[True] == {"explicit_dropout.ffn1": 0.0, "explicit_dropout.ffn2": 0.0}


def test_float32_under_autocast():
    """The penalty is summed in float32 whatever autocast does: close to the float32 model's."""
    family = FAMILIES["own_vit"]
    values = []
    for enabled in (False, True):
        model = family.model()
        reg = dampen.regularize(model, ExplicitDropout(**TERMS, form="exact"))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(**family.inputs)
        taken = reg.penalties()
        assert all(v.dtype == torch.float32 for v in taken.values())
        values.append(taken)
    for name in values[0]:
        torch.testing.assert_close(values[0][name], values[1][name], rtol=0.03, atol=1e-4)


def test_zero_weights_cost_nothing():
    """A term with the plain weight 0 opens no stage; a schedule that is 0 for a while stays open."""
    assert ExplicitDropout(value=0.1).stages == {"qkv"}
    assert ExplicitDropout(ffn=0.1).stages == {"product"}
    assert ExplicitDropout(ffn1=0.1).roles == {"ffn_in"}
    assert "qkv" in ExplicitDropout(value=dampen.linear(0.0, 0.1, along="progress"), ffn=0.1).stages


def test_one_weight_per_layer():
    family = FAMILIES["own_vit"]
    model = family.model()
    reg = dampen.regularize(model, ExplicitDropout(value=[0.0, 1.0], ffn=[1.0, 0.0]))
    model(**family.inputs)
    first, second = (c.take_penalties() for c in reg.clones)
    assert first["explicit_dropout.value"] == 0
    assert first["explicit_dropout.ffn1"] > 0
    assert second["explicit_dropout.value"] > 0
    assert second["explicit_dropout.ffn1"] == 0


def test_arora_on_a_linear_map():
    """p/(1-p) sum_j (mean_i x_ij^2) ||W_:j||^2 (arXiv 2003.03397), on the projection asked for."""
    family = FAMILIES["own_vit"]
    model, rate = family.model(), 0.3
    bare = dampen.regularize(model, Bare())
    model(**family.inputs)
    expected = 0.0
    for clone in bare.clones:
        v = clone.attentions[0][0]["v"]
        expected += (
            (v.input.double().square().mean((0, 1)) * v.weight.double().square().sum(0))
            .sum()
            .item()
        )
    bare.remove()
    reg = dampen.regularize(model, AroraDropout(value=1.0, rate=rate))
    model(**family.inputs)
    assert reg.penalty().item() == pytest.approx(rate / (1 - rate) * expected, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ExplicitDropout(value=-0.1), ValueError, "finite number >= 0, got -0.1"),
        (lambda: ExplicitDropout(value=math.nan), ValueError, "got nan"),
        (lambda: ExplicitDropout(form="approximate"), ValueError, "paper, exact, inverted"),
        (lambda: ExplicitDropout(reduction="max"), ValueError, "got 'max'"),
        (lambda: ExplicitDropout(heads="all"), ValueError, "got 'all'"),
        (lambda: ExplicitDropout(attended="both"), ValueError, "got 'both'"),
        (lambda: ExplicitDropout(outputs=0.1), TypeError, "outputs"),
        (lambda: ExplicitDropout(rate=1.0), ValueError, "probability"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_feed_forward_asked_of_a_model_without_one():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    with pytest.raises(ValueError, match="ffn"):
        dampen.regularize(model, ExplicitDropout(ffn=0.1))
