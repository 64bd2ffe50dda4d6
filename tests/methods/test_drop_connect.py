"""DropConnect: thinned weights, untouched parameters."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropConnect, regularize
from dampen.masks import drop
from dampen.regularizer import LinearCall


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    )


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_equals_a_linear_map_with_a_masked_weight():
    weight, x = torch.randn(4, 6), torch.randn(5, 6)
    torch.manual_seed(2)
    same_x, thinned = DropConnect(0.25).operands(x, weight, LinearCall("ffn_in", x, weight, None))
    assert same_x is x
    kept = thinned != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(thinned[kept], weight[kept] / 0.75)
    torch.manual_seed(2)
    torch.testing.assert_close(F.linear(x, thinned), F.linear(x, drop(weight, torch.tensor(0.25))))


def test_one_mask_per_forward_for_all_samples_and_tokens():
    model = vit()
    regularize(model, DropConnect(0.5))
    model.blocks[0].norm1 = model.blocks[0].norm2 = torch.nn.Identity()
    x = torch.randn(1, 5, 16).expand(4, -1, -1)
    y = model.blocks[0](x)
    torch.testing.assert_close(y[0], y[3])
    assert not torch.allclose(y, model.blocks[0](x))


def test_unbiased_and_the_stated_rate():
    torch.manual_seed(0)
    weight = torch.ones(300, 300)
    thinned = DropConnect(0.3).operands(weight, weight, LinearCall("ffn_in", weight, weight, None))[
        1
    ]
    assert abs((thinned == 0).double().mean().item() - 0.3) < 4 * (0.21 / 90000) ** 0.5
    assert thinned.mean().item() == pytest.approx(1.0, abs=4 * (0.3 / 0.7 / 90000) ** 0.5)


def test_gradients_reach_the_parameters_and_only_the_kept_weights():
    model = vit()
    before = dict(model.named_parameters())
    regularize(model, DropConnect(0.5))
    model(X).sum().backward()
    after = dict(model.named_parameters())
    assert all(after[n] is p for n, p in before.items())
    zero = (model.blocks[0].mlp.fc1.weight.grad == 0).double().mean().item()
    assert 0.3 < zero < 0.7
    assert (model.blocks[0].attn.qkv.weight.grad == 0).double().mean().item() < 0.05


@pytest.mark.parametrize(
    ("targets", "roles"),
    [
        ("ffn", {"ffn_in", "ffn_out"}),
        ("attention", {"q", "k", "v", "qkv", "kv", "out"}),
        (["out", "ffn_out"], {"out", "ffn_out"}),
        (["qkv", "ffn"], {"qkv", "ffn_in", "ffn_out"}),
    ],
)
def test_targets(targets, roles):
    assert DropConnect(0.1, targets).roles == roles


@pytest.mark.parametrize("targets", ["mlp", [], ["q", "w"]])
def test_unknown_targets(targets):
    with pytest.raises(ValueError, match="roles among"):
        DropConnect(0.1, targets)


def test_a_role_that_the_layer_does_not_have_raises():
    with pytest.raises(ValueError, match="has only"):
        regularize(vit(), DropConnect(0.1, targets="kv"))


def test_attention_targets_reach_a_fused_projection():
    model = vit()
    regularize(model, DropConnect(0.5, targets="attention"))
    assert not torch.allclose(model(X), model(X))


def test_the_output_map_alone_of_torchs_own_attention():
    """nn.MultiheadAttention reads out_proj.weight without calling the module."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train()
    x = torch.randn(2, 4, 8)
    plain = layer(x)
    regularize(layer, DropConnect(0.5, targets="out"))
    assert not torch.allclose(layer(x), plain)
