"""Attention weights against plain softmax and Hugging Face's own."""

import pytest
import torch

import dampen
from dampen.diagnostics import attention_entropy, attention_weights, head_similarity


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
