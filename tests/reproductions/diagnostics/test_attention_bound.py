"""Proposition 4.1 of Always Skip Attention: the bound on attention without softmax, against numpy."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import dampen
from reproductions.diagnostics.attention_bound import (
    linear_attention_bound,
    linear_attention_condition,
    measure_bound,
)
from tests.diagnostics.untouched import assert_unchanged, images, small_vit, snapshot
from tests.oracles import skips as reference


@pytest.mark.parametrize(("n", "d"), [(20, 6), (6, 6), (4, 9)])
def test_bound_of_linear_attention_holds(n, d):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for scale in (0.0, 1.0, 3.0):
        x = draw(50, n, d) * torch.logspace(0, -scale, d, dtype=torch.float64)
        wq, wk, wv = draw(d, d), draw(d, d), draw(d, d)
        kappa, bound = (
            linear_attention_condition(x, wq, wk, wv),
            linear_attention_bound(x, wq, wk, wv),
        )
        slow = np.linalg.cond(reference.linear_attention(x, wq, wk, wv).numpy())
        near = slow < 1e11  # beyond, float64 rounds differently in the two
        np.testing.assert_allclose(kappa.numpy()[near], slow[near], rtol=1e-2)
        assert (kappa <= bound * (1 + 1e-6)).all()
        if n >= d:  # then the constant is at most the proposition's
            constant = np.prod([np.linalg.cond(w.numpy()) for w in (wq, wk, wv)])
            assert (bound.numpy() <= constant * np.linalg.cond(x.numpy()) ** 3 * (1 + 1e-6)).all()


def test_bound_is_tight_and_the_skip_brings_kappa_back():
    """With orthogonal weights kappa is kappa(X)^3 exactly; the sum with X is again near kappa(X) (proposition 4.2)."""
    x = torch.diag(torch.tensor([10.0, 3.0, 1.0], dtype=torch.float64))
    eye = torch.eye(3, dtype=torch.float64)
    assert linear_attention_condition(x, eye, eye, eye).item() == pytest.approx(1000)
    assert linear_attention_bound(x, eye, eye, eye).item() == pytest.approx(1000)
    small = 1e-3 * reference.linear_attention(x, eye, eye, eye)
    assert np.linalg.cond((x + small).numpy()) < 11.1


def models():
    import timm
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=20, image_size=16, patch_size=4)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
    layer = nn.TransformerEncoderLayer(12, 2, 20)  # (N, B, D), with dropout
    return {
        "own": (small_vit(), images(2)),
        "timm": (timm.create_model("vit_tiny_patch16_224", **sizes), images(2)),
        "transformers": (ViTModel(config), {"pixel_values": images(2)}),
        "torch": (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            torch.randn(7, 2, 12),
        ),
    }


@pytest.mark.parametrize("family", ["own", "timm", "transformers", "torch"])
def test_bound_by_layer(family):
    torch.manual_seed(0)
    model, inputs = models()[family]
    before = snapshot(model)
    found, notes = measure_bound(model, inputs)
    assert_unchanged(model, before)
    assert len(found) >= 2
    assert notes == ()
    for layer in found.values():
        linear, bound = layer["linear_attention"], layer["bound"]
        assert all(
            1 < k <= b * (1 + 1e-6) for k, b in zip(linear.numbers, bound.numbers, strict=True)
        )


def test_bound_by_layer_reads_the_layers_own_weights():
    model = small_vit(image_size=8)  # fewer tokens than channels: LayerNorm's rows sum to zero
    block, seen = model.blocks[0], []
    block.attn.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    found, _ = measure_bound(model, images(side=8))
    q, k, v = (w.mT for w in block.attn.qkv.weight.detach().chunk(3))
    expected = np.linalg.cond(
        reference.linear_attention(*(t.double() for t in (seen[0], q, k, v))).numpy()
    )
    np.testing.assert_allclose(found["blocks.0"]["linear_attention"].numbers, expected, rtol=1e-3)


def test_numbers_at_the_ceiling_are_marked():
    """Tokens behind a fresh LayerNorm have mean zero: with as many tokens as channels their matrix is singular."""
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    (layer,) = measure_bound(model, torch.randn(3, 3, 16, 16))[0].values()
    assert layer["linear_attention"].capped == layer["bound"].capped == 3
    assert layer["bound"].to_json()["capped"] == 3


def test_where_there_is_no_bound_it_says_why():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 16)
    found, notes = measure_bound(layer, (x, x))
    assert found == {}
    assert re.fullmatch(
        r"no bound for .*: it is for self-attention .*no cross-attention\)", notes[0]
    )
    encoder = dampen.models.FeatureEncoder(
        features=4, width=16, depth=1, heads=2, mlp=16, classes=2
    )
    padding = torch.zeros(2, 6, dtype=torch.bool)
    _, notes = measure_bound(encoder, (torch.randn(2, 6, 4), padding), valid=~padding)
    assert notes == ("no bound: it is for batches without padding",)
