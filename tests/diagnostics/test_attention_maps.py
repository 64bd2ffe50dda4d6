"""Attention weights against plain softmax and Hugging Face's own, rollout against a product by hand."""

import pytest
import torch

import dampen
from dampen.diagnostics.attention_maps import (
    attention_entropy,
    attention_weights,
    head_similarity,
    overlay,
    rollout,
    save_images,
    token_map,
)


def vit(depth=2):
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=16, patch_size=4, width=12, depth=depth, heads=2, mlp=16)


def images(n=3):
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_weights_are_the_softmax_of_the_scores():
    model = vit()
    found = attention_weights(model, images())
    model.eval()
    x = torch.cat(
        [(model.cls_token + model.pos_embed[:, :1]).expand(3, -1, -1), model.embed(images())], dim=1
    )
    for i, b in enumerate(model.blocks):
        q, k, _ = b.attn.qkv(b.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        torch.testing.assert_close(found[f"blocks.{i}"], (q @ k.mT / 6**0.5).softmax(-1))
        x = b(x)


def test_weights_agree_with_hugging_face():
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertModel(BertConfig(**sizes, vocab_size=19)).eval()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    inputs = {"input_ids": torch.randint(1, 19, (2, 7)), "attention_mask": mask}
    found = attention_weights(model, inputs)
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    for ours, theirs in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert ours[1, :, :, 4:].eq(0).all()


@pytest.mark.parametrize("norm_first", [True, False])
def test_weights_of_torch_layers(norm_first):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(12, 2, 16, norm_first=norm_first, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x = torch.randn(2, 5, 12)
    inner = model.layers[0]
    read = inner.norm1(x) if norm_first else x
    expected = inner.eval().self_attn(
        read, read, read, need_weights=True, average_attn_weights=False
    )[1]
    inner.train()
    (found,) = attention_weights(model, x).values()
    torch.testing.assert_close(found, expected)
    assert inner.training


def test_regularized_model_gives_its_eval_weights_and_stays_as_it_was():
    model = vit()
    plain = attention_weights(model, images())
    classes = [type(m) for m in model.modules()]
    reg = dampen.regularize(model, dampen.DropKey(0.5), target_modules="blocks.0*")
    rng, printed = torch.get_rng_state(), str(reg)
    found = attention_weights(model.train(), images())
    assert torch.equal(torch.get_rng_state(), rng)
    assert str(reg) == printed
    for name, weights in plain.items():
        torch.testing.assert_close(found[name], weights)
    reg.remove()
    assert [type(m) for m in model.modules()] == classes


def test_long_sequences_come_whole():
    model = dampen.models.FeatureEncoder(
        features=4, classes=2, width=8, depth=1, heads=2, mlp=8, max_tokens=3000
    )
    (weights,) = attention_weights(model, torch.randn(1, 3000, 4)).values()
    assert weights.shape == (1, 2, 3000, 3000)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3000))


def test_entropy_and_similarity():
    eye, flat = torch.eye(4).expand(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.25)
    both = torch.cat([eye, flat], dim=1)
    torch.testing.assert_close(
        attention_entropy(both), torch.tensor([0.0, torch.tensor(4.0).log().item()])
    )
    assert head_similarity(both) == pytest.approx(0.25)  # cos of one-hot and uniform over 4 is 1/2
    assert head_similarity(torch.cat([eye, eye.roll(1, -1)], dim=1)) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="compares heads"):
        head_similarity(eye)


def test_rollout_by_hand():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(1, 2, 3, 3, generator=generator).softmax(-1) for _ in range(2))
    eye = torch.eye(3)
    first, second = (0.5 * eye + 0.5 * w[0].mean(0) for w in (a, b))
    torch.testing.assert_close(rollout({"first": a, "second": b})[0], second @ first)
    torch.testing.assert_close(rollout([a, b], residual=0.0)[0], b[0].mean(0) @ a[0].mean(0))
    for heads, reduce in (("max", torch.amax), ("min", torch.amin)):
        mixed = [0.5 * eye + 0.5 * reduce(w[0], 0) for w in (a, b)]
        first, second = (m / m.sum(-1, keepdim=True) for m in mixed)
        torch.testing.assert_close(rollout([a, b], heads=heads)[0], second @ first)


def test_rollout_rows_are_distributions_and_become_an_image(tmp_path):
    total = rollout(attention_weights(vit(), images()))
    torch.testing.assert_close(total.sum(-1), torch.ones(3, 17))
    maps = token_map(total, size=(16, 16))
    assert maps.shape == (3, 16, 16)
    assert maps.min() >= 0
    assert maps.max() <= 1
    small = token_map(total)
    assert small.shape == (3, 4, 4)
    torch.testing.assert_close(small.flatten(1).argmax(1), total[:, 0, 1:].argmax(1))
    path = save_images(overlay(images(), maps), tmp_path / "maps.png")

    from PIL import Image

    with Image.open(path) as image:
        assert image.size == (48, 16)
    assert save_images(small, tmp_path / "grid.png").stat().st_size > 0


def test_errors_say_what_to_do():
    a = torch.rand(1, 2, 4, 4)
    with pytest.raises(ValueError, match="at least one layer"):
        rollout([])
    with pytest.raises(ValueError, match="window attention"):
        rollout([a, torch.rand(1, 2, 3, 3)])
    with pytest.raises(ValueError, match="residual"):
        rollout([a], residual=1.0)
    with pytest.raises(ValueError, match="heads"):
        rollout([a], heads="median")
    with pytest.raises(ValueError, match="size="):
        overlay(images(), torch.rand(3, 4, 4))
