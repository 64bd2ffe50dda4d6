"""ViT, ConvMixer, the masked autoencoder, and the patches they share."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dampen.functional.grid import patchify, unpatchify
from dampen.models import ViT
from dampen.models.block import SelfAttention
from dampen.models.vit import PatchEmbed
from reproductions.models.cnn import CNN
from reproductions.models.convmixer import ConvMixer
from reproductions.models.mae import MaskedAutoencoder

SMALL = {
    "image_size": 8,
    "patch_size": 2,
    "channels": 1,
    "width": 16,
    "depth": 2,
    "heads": 4,
    "mlp": 24,
}
LIGHT = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "decoder_mlp": 24}


def test_paper_vit_has_the_expected_parameters():
    patch, token, positions = 4 * 4 * 3 * 384 + 384, 384, 65 * 384
    norms, attention, mlp = 2 * 2 * 384, 4 * (384 * 384 + 384), 2 * (384 * 384 + 384)
    expected = patch + token + positions + 7 * (norms + attention + mlp) + 2 * 384 + 384 * 10 + 10
    assert sum(p.numel() for p in ViT().parameters()) == expected == 6_268_810


def test_vit_shapes():
    assert ViT(classes=7, **SMALL)(torch.randn(3, 1, 8, 8)).shape == (3, 7)
    assert ViT(classes=0, **SMALL)(torch.randn(3, 1, 8, 8)).shape == (3, 16)
    wide = ViT(
        image_size=(4, 12), patch_size=(2, 3), channels=2, width=16, depth=1, heads=2, mlp=16
    )
    assert wide.patch_embed.grid_size == (2, 4)
    assert wide(torch.randn(3, 2, 4, 12)).shape == (3, 10)


def test_vit_sees_order_only_through_positions():
    torch.manual_seed(0)
    model = ViT(pool="mean", **SMALL).eval()
    tokens = model.embed(torch.randn(2, 1, 8, 8))
    shuffled = tokens[:, torch.randperm(16)]
    torch.testing.assert_close(model.encode(tokens)[:, 0], model.encode(shuffled)[:, 0])
    images = torch.randn(2, 1, 8, 8)
    assert not torch.allclose(model(images), model(images.flip(-1)), atol=1e-4)


def test_fused_attention_equals_the_formula():
    torch.manual_seed(0)
    attention, x = SelfAttention(12, 3).double(), torch.randn(2, 5, 12, dtype=torch.double)
    q, k, v = F.linear(x, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        a = torch.softmax(q[..., part] @ k[..., part].transpose(1, 2) / 4**0.5, dim=-1)
        heads.append(a @ v[..., part])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, dim=-1)))


def test_patch_embedding_is_a_linear_map_of_patchify():
    torch.manual_seed(0)
    embed, images = PatchEmbed(8, 2, 3, 5), torch.randn(2, 3, 8, 8)
    linear = F.linear(patchify(images, 2), embed.proj.weight.flatten(1), embed.proj.bias)
    torch.testing.assert_close(embed(images), linear)


def test_unpatchify_checks_its_input():
    with pytest.raises(ValueError, match="do not fill the image"):
        unpatchify(torch.zeros(1, 15, 4), 2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, r"width=16, heads=5.*1, 2, 4, 8, 16"),
        ({"heads": 0}, "heads=0"),
        ({"patch_size": 3}, r"image of 8 x 8 and patches of 3 x 3"),
        ({"pool": "max"}, "'max'; use 'cls' or 'mean'"),
    ],
)
def test_vit_refuses_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        ViT(**{**SMALL, **arguments})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 3, 8, 8), r"built for 1 channel\(s\): got images with 3"),
        ((2, 1, 8, 6), "images of 8 x 8: got 8 x 6"),
        ((1, 8, 8), r"\(batch, channels, height, width\): got shape \(1, 8, 8\)"),
    ],
)
def test_vit_refuses_bad_images(shape, message):
    with pytest.raises(ValueError, match=message):
        ViT(**SMALL)(torch.zeros(shape))


def test_convmixer_skip_is_the_only_difference():
    torch.manual_seed(0)
    plain = ConvMixer(width=8, depth=3, kernel=3, patch_size=4, skip=False).eval()
    skipping = ConvMixer(width=8, depth=3, kernel=3, patch_size=4).eval()
    skipping.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert not torch.allclose(plain(images), skipping(images))
    block, x = skipping.blocks[0], torch.randn(2, 8, 4, 4)
    with torch.no_grad():
        block.depthwise.weight.zero_()
        block.depthwise.bias.zero_()
    torch.testing.assert_close(block(x), block.norm2(block.act(block.pointwise(x))))


def test_convmixer_errors():
    with pytest.raises(ValueError, match="kernel must be odd"):
        ConvMixer(kernel=4)
    model = ConvMixer(width=8, depth=1, patch_size=4)
    with pytest.raises(ValueError, match="image of 10 x 10 and patches of 4 x 4"):
        model(torch.zeros(2, 3, 10, 10))
    with pytest.raises(ValueError, match="got images with 1"):
        model(torch.zeros(2, 1, 8, 8))


class TestMaskedAutoencoder:
    def build(self, **arguments):
        torch.manual_seed(0)
        return MaskedAutoencoder(**{**SMALL, **LIGHT, **arguments})

    def test_hidden_pixels_reach_the_loss_only_as_target(self):
        model = self.build()
        images, noise = torch.rand(3, 1, 8, 8), torch.rand(3, 16)
        _, patches, hidden = model(images, noise)
        assert hidden.sum(dim=1).tolist() == [12, 12, 12]
        assert torch.equal(hidden, noise >= noise.sort(dim=1).values[:, 4:5])
        cut = patchify(images, 2)
        changed = unpatchify(
            torch.where(hidden[..., None], cut + 1.7 * torch.rand_like(cut), cut), 2, 8
        )
        torch.testing.assert_close(model(changed, noise).patches, patches, rtol=0, atol=0)
        assert not torch.allclose(model(changed, noise).loss, model(images, noise).loss)

    def test_loss_is_the_mean_over_hidden_patches(self):
        model = self.build(normalize=False)
        images = torch.rand(3, 1, 8, 8)
        loss, patches, hidden = model(images)
        torch.testing.assert_close(loss, (patches - patchify(images, 2))[hidden].square().mean())

    def test_target_is_normalized_patch_by_patch(self):
        target = self.build().target(torch.rand(3, 1, 8, 8))
        torch.testing.assert_close(target.mean(dim=-1), torch.zeros(3, 16), atol=1e-5, rtol=0)
        torch.testing.assert_close(target.var(dim=-1), torch.ones(3, 16), atol=1e-2, rtol=0)

    def test_draws_follow_the_global_seed(self):
        model, images = self.build(), torch.rand(3, 1, 8, 8)
        torch.manual_seed(1)
        first = model(images).hidden
        assert not torch.equal(first, model(images).hidden)
        torch.manual_seed(1)
        assert torch.equal(first, model(images).hidden)

    def test_classifier_takes_the_encoder(self):
        model, images = self.build(), torch.rand(3, 1, 8, 8)
        classifier = model.to_classifier(5)
        features = classifier.encode(classifier.embed(images))
        assert torch.equal(features, model.encoder.encode(model.encoder.embed(images)))
        assert classifier(images).shape == (3, 5)
        assert isinstance(classifier.head, nn.Linear)
        with torch.no_grad():
            classifier.cls_token.add_(1)
        assert not torch.equal(classifier.cls_token, model.encoder.cls_token)

    @pytest.mark.parametrize("hide", [0.0, 1.0, 0.01])
    def test_refuses_to_hide_all_or_nothing(self, hide):
        with pytest.raises(ValueError, match="At least one patch must be hidden"):
            self.build(hide=hide)

    def test_refuses_noise_of_another_shape(self):
        with pytest.raises(ValueError, match=r"shape \(3, 16\): got \(3, 15\)"):
            self.build()(torch.rand(3, 1, 8, 8), torch.rand(3, 15))


def test_the_convolutional_stem_makes_one_token_per_8_pixels_and_refuses_what_does_not_fit():
    model = ViT(stem="conv", width=16, depth=1, heads=2, mlp=16)
    assert model(torch.rand(3, 3, 32, 32)).shape == (3, 10)
    assert model.patch_embed(torch.rand(3, 3, 32, 32)).shape == (3, 16, 16)
    with pytest.raises(ValueError, match="built for images of 32 x 32: got shape"):
        model(torch.rand(1, 3, 16, 16))
    with pytest.raises(ValueError, match="patches of 8 x 8"):
        ViT(stem="conv", image_size=12)
    with pytest.raises(ValueError, match="got 'con'; use 'patch' or 'conv'"):
        ViT(stem="con")


def test_cnn_skip_is_the_only_difference_and_it_pools_once():
    torch.manual_seed(0)
    plain, skipping = (CNN(width=8, depth=4, skip=skip).eval() for skip in (False, True))
    skipping.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 9, 9)
    assert not torch.allclose(plain(images), skipping(images))
    seen = []
    for block in plain.blocks:
        block.register_forward_hook(lambda m, i, out: seen.append(tuple(out.shape[2:])))
    plain(images)
    assert seen == [(9, 9), (9, 9), (5, 5), (5, 5)]
    block, x = skipping.blocks[0], torch.randn(2, 8, 4, 4)
    with torch.no_grad():
        block.conv.weight.zero_()
    torch.testing.assert_close(
        block(x), x
    )  # a branch of zeros: the norm's shift is 0 and so is GELU there


def test_cnn_errors():
    with pytest.raises(ValueError, match="kernel must be odd"):
        CNN(kernel=2)
