"""Token Graying against an SVD, scipy's DCT and what the paper claims, on real CIFAR images where they are at hand."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import fft
from torch import nn

import dampen
from dampen.checking import check_regularizer
from dampen.functional.graying import (
    GrayImages,
    dct_matrix,
    gray_dct,
    gray_images,
    gray_svd,
    gray_tokens,
)
from dampen.functional.grid import patchify
from dampen.methods.token_graying import find_patch_size
from dampen.regularizer import UnsupportedModel
from reproductions.models.mae import MaskedAutoencoder
from tests.oracles import skips as reference

REAL = os.environ.get("DAMPEN_TEST_DATA")


@pytest.fixture(scope="module")
def images():
    """500 normalized CIFAR-10 images; without DAMPEN_TEST_DATA SYNTHETIC ones with a natural spectrum stand in."""
    if REAL:
        rows = np.fromfile(
            Path(REAL) / "cifar-10-batches-bin" / "data_batch_1.bin", np.uint8, count=500 * 3073
        )
        pixels = (
            torch.from_numpy(
                rows.reshape(500, 3073)[:, 1:].reshape(500, 3, 32, 32).astype("float32")
            )
            / 255
        )
    else:
        print("DAMPEN_TEST_DATA is not set: synthetic images stand in")
        noise = torch.randn(500, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        y, x = torch.fft.fftfreq(32)[:, None], torch.fft.fftfreq(32)
        power = 1 / (
            1 / 32 + torch.sqrt(x**2 + y**2)
        )  # amplitude falls as 1 / frequency, as in photographs
        smooth = torch.fft.ifft2(torch.fft.fft2(noise) * power).real
        pixels = (0.47 + 0.25 * smooth / smooth.std()).clamp(0, 1)
        pixels[:3] = 0.5
    return (pixels - 0.47) / 0.25


def tokens_of(images, dtype=torch.float64):
    return patchify(images, 4).to(dtype)


def kappa(x):
    s = torch.linalg.svdvals(x.double())
    return s[..., 0] / s[..., -1]


@pytest.mark.parametrize("eps", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("restore_scale", [True, False])
def test_condition_number_is_raised_to_eps(images, eps, restore_scale):
    x = tokens_of(images)
    before = kappa(x)
    full = before < 1e5
    assert full.sum() > 400
    after = kappa(gray_svd(x[full], eps, restore_scale))
    torch.testing.assert_close(after, before[full] ** eps, rtol=1e-6, atol=0)


@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("shape", [(64, 48), (16, 48), (48, 48)])
def test_svd_agrees_with_torch(shape, restore_scale):
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = reference.gray_svd(x, 0.6, restore_scale)
    torch.testing.assert_close(gray_svd(x, 0.6, restore_scale), expected, rtol=1e-9, atol=1e-9)


def test_svd_agrees_with_torch_on_images(images):
    x = tokens_of(images[:64])
    expected = reference.gray_svd(x, 0.7)
    torch.testing.assert_close(
        gray_svd(x, 0.7), expected, rtol=0, atol=1e-6 * expected.abs().max().item()
    )
    single = gray_svd(x.float(), 0.7)
    assert single.dtype == torch.float32
    torch.testing.assert_close(
        single.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item()
    )


def test_scale_is_restored_or_one(images):
    x = tokens_of(images[5:9])
    top = torch.linalg.svdvals(x)[:, 0]
    torch.testing.assert_close(torch.linalg.svdvals(gray_svd(x, 0.7))[:, 0], top)
    torch.testing.assert_close(
        torch.linalg.svdvals(gray_svd(x, 0.7, False))[:, 0], torch.ones_like(top)
    )


@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("eps", [0.95, 0.5])
def test_dct_agrees_with_scipy(eps, restore_scale):
    x = torch.randn(5, 64, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = reference.gray_dct(x, eps, restore_scale)
    torch.testing.assert_close(gray_dct(x, eps, restore_scale), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("eps", [0.95, 0.5])
def test_dct_agrees_with_scipy_on_images(images, eps):
    """Coefficient by coefficient; an image's many tiny ones are left where they are by the floor."""
    x = tokens_of(images[3:67])  # behind the flat ones of the synthetic stand-in
    before, expected, after = (
        torch.stack([torch.from_numpy(fft.dctn(m.numpy(), norm="ortho")) for m in matrices])
        for matrices in (x, reference.gray_dct(x, eps), gray_dct(x, eps))
    )
    large = before.abs() > 2e-6 * before.abs().amax(dim=(1, 2), keepdim=True)
    assert large.double().mean() > 0.99
    torch.testing.assert_close(after[large], expected[large], rtol=1e-8, atol=0)
    single = gray_dct(x.float(), eps).double()
    torch.testing.assert_close(single, gray_dct(x, eps), rtol=0, atol=2e-3 * x.abs().max().item())


def test_dct_matrix_is_orthonormal_and_scipys():
    for n in (1, 2, 7, 64):
        c = dct_matrix(n)
        torch.testing.assert_close(c @ c.mT, torch.eye(n, dtype=torch.float64))
        expected = fft.dct(np.eye(n), axis=0, norm="ortho")
        torch.testing.assert_close(c, torch.from_numpy(expected))


def test_dct_lowers_the_condition_number_of_images(images):
    """The paper's point for the cheap form. Not on every image: the claim is about the typical one."""
    x = tokens_of(images)
    before, after = kappa(x), kappa(gray_dct(x, 0.95))
    full = before < 1e5
    assert (after[full] < before[full]).double().mean() > 0.9
    assert after[full].log().mean() < before[full].log().mean()


@pytest.mark.parametrize("kind", ["svd", "dct"])
@pytest.mark.parametrize("eps", [1.0, 0.7, 0.05])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_degenerate_images_stay_finite(kind, eps, dtype):
    zero, constant = torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.37)
    rank_one = torch.linspace(-1, 1, 8).outer(torch.linspace(0, 1, 8)).expand(3, 8, 8)
    half = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))
    half[:, :4] = 0
    tiny, huge = 1e-6 * half, 1e3 * half
    batch = torch.stack([zero, constant, rank_one, half, tiny, huge]).to(dtype)
    for restore_scale in (True, False):
        out = gray_images(batch, 2, kind, eps, restore_scale)
        assert out.dtype == dtype
        assert out.shape == batch.shape
        assert torch.isfinite(out).all()
        assert out[0].eq(0).all()
    restored = gray_images(batch.double(), 2, kind, eps)
    # a constant image has one singular value and one coefficient: nothing to flatten
    torch.testing.assert_close(restored[1], batch[1].double(), rtol=1e-6, atol=1e-9)


def test_rank_deficient_images_keep_their_rank(images):
    x = tokens_of(images[3:4]).clone()
    x[..., 40:] = 0  # rank at most 40 of 48
    s = torch.linalg.svdvals(gray_svd(x, 0.7))[0]
    expected = torch.linalg.svdvals(x)[0]
    torch.testing.assert_close(
        s[:40], expected[0] * (expected[:40] / expected[0]) ** 0.7, rtol=1e-6, atol=0
    )
    assert s[40:].max() < 1e-5 * s[0]


@pytest.mark.parametrize("restore_scale", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (3, 5)])
def test_gradient_of_svd(shape, restore_scale):
    x = torch.randn(
        2,
        *shape,
        generator=torch.Generator().manual_seed(3),
        dtype=torch.float64,
        requires_grad=True,
    )
    assert torch.autograd.gradcheck(lambda x: gray_svd(x, 0.6, restore_scale), x)


@pytest.mark.parametrize("restore_scale", [True, False])
def test_gradient_of_dct(restore_scale):
    x = torch.randn(
        2, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda x: gray_dct(x, 0.6, restore_scale), x)


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_gradient_is_finite_where_the_spectrum_coincides_or_vanishes(kind):
    """An attack on the pixels meets constant images too; the gradient of eigh itself would be NaN here."""
    x = (
        torch.stack([torch.zeros(6, 4), torch.ones(6, 4), torch.eye(6, 4)])
        .double()
        .requires_grad_()
    )
    gray_tokens(x, kind, 0.7).sin().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad[2].abs().sum() > 0


def test_gradient_of_equal_singular_values_is_the_limit():
    """At U diag(s, s) V^T the derivative along X itself is that of a scaling: Y is homogeneous of degree 1."""
    x = torch.eye(4, 3, dtype=torch.float64).requires_grad_()
    y = gray_svd(x, 0.5)
    (along,) = torch.autograd.grad(y, x, grad_outputs=y.detach())
    torch.testing.assert_close((along * x).sum(), y.square().sum())


@pytest.mark.parametrize("kind", ["svd", "dct"])
def test_regularizer_grays_patches_in_training_and_eval(images, kind):
    torch.manual_seed(0)
    model = dampen.models.ViT(patch_size=4, width=16, depth=1, heads=2, mlp=16)
    x = images[:3]
    gray = {"svd": reference.gray_svd, "dct": reference.gray_dct}[kind]
    tokens = torch.stack([reference.patches(image, 4) for image in x.double()])
    grayed = gray(tokens, {"svd": 0.7, "dct": 0.95}[kind]).float()
    with torch.no_grad():
        expected = (
            model.patch_embed.proj.weight.flatten(1) @ grayed.mT
            + model.patch_embed.proj.bias[:, None]
        )
    seen = []
    model.patch_embed.register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    reg = dampen.regularize(model, dampen.TokenGraying(kind))
    for training in (True, False):
        model.train(training)(x)
        torch.testing.assert_close(seen.pop(), expected.mT, rtol=1e-4, atol=1e-4)
    reg.remove()
    model(x)
    torch.testing.assert_close(seen.pop(), model.patch_embed(x))


def test_loader_transform_equals_regularizer(images):
    torch.manual_seed(0)
    model = dampen.models.ViT(patch_size=4, width=16, depth=1, heads=2, mlp=16).eval()
    once = torch.stack([GrayImages(4, "svd", 0.6)(image) for image in images[:4]])
    expected = model(once)
    dampen.regularize(model, dampen.TokenGraying("svd", 0.6))
    torch.testing.assert_close(model(images[:4]), expected, rtol=1e-5, atol=1e-5)


def test_pixel_values_are_found_by_name(images):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=8,
    )
    model = ViTForImageClassification(config).eval()
    expected = model(pixel_values=gray_images(images[:2], 8, "svd")).logits
    dampen.regularize(model, dampen.TokenGraying("svd"))
    torch.testing.assert_close(model(pixel_values=images[:2]).logits, expected)
    torch.testing.assert_close(model(images[:2]).logits, expected)
    with pytest.raises(RuntimeError, match="without it"):
        model(labels=torch.tensor([0, 1]))


class TwoInputs(nn.Module):
    """Images come second, as in contrastive language-image models."""

    def __init__(self):
        super().__init__()
        self.vit = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=8)

    def forward(self, input_ids, pixel_values):
        return self.vit(pixel_values) + input_ids.sum()


def test_the_input_may_come_second():
    model = TwoInputs().eval()
    ids, x = torch.ones(2), torch.rand(2, 3, 8, 8)
    expected = model(ids, gray_images(x, 4))
    dampen.regularize(model, dampen.TokenGraying())
    torch.testing.assert_close(model(ids, x), expected)
    torch.testing.assert_close(model(ids, pixel_values=x), expected)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny_patch16_224", (16, 16)),
        ("swin_tiny_patch4_window7_224", (4, 4)),
        ("cait_xxs24_224", (16, 16)),
        ("pvt_v2_b0", (4, 4)),
    ],
)
def test_patch_size_of_timm_models(name, size):
    import timm

    assert find_patch_size(timm.create_model(name)) == size


def test_patch_size_is_refused_where_nothing_tells_it():
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 4, stride=4))
    with pytest.raises(UnsupportedModel, match=r"patch_size="):
        find_patch_size(stem)
    with pytest.raises(UnsupportedModel, match="no convolution"):
        find_patch_size(nn.Linear(3, 3))
    linear = nn.Linear(48, 8)
    linear.patch_size = 4
    assert find_patch_size(linear) == (4, 4)


def test_tokens_instead_of_pixels():
    model = dampen.models.FeatureEncoder(
        features=6, classes=3, width=8, heads=2, mlp=8, max_tokens=10
    ).eval()
    x = torch.randn(2, 10, 6)
    expected = model(gray_svd(x, 0.7))
    dampen.regularize(model, dampen.TokenGraying("svd", patch_size="tokens"))
    torch.testing.assert_close(model(x), expected)


def test_masked_autoencoder_sees_and_guesses_the_grayed_image(images):
    torch.manual_seed(0)
    mae = MaskedAutoencoder(
        width=16,
        depth=1,
        heads=2,
        mlp=16,
        decoder_width=8,
        decoder_depth=1,
        decoder_heads=2,
        decoder_mlp=8,
    )
    noise = torch.rand(2, 64)
    expected = mae(gray_images(images[:2], 4, "svd"), noise)
    dampen.regularize(mae, dampen.TokenGraying("svd"))
    torch.testing.assert_close(mae(images[:2], noise).loss, expected.loss)


def test_attack_reaches_the_pixels(images):
    model = dampen.models.ViT(patch_size=4, width=16, depth=1, heads=2, mlp=16).eval()
    dampen.regularize(model, dampen.TokenGraying("svd"))
    x = images[:4].clone().requires_grad_()
    model(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad.flatten(1).abs().sum(1) > 0).all()


@pytest.mark.slow
def test_svd_keeps_the_contracts():
    contracts = [
        "identity",
        "shapes_and_dtypes",
        "gradients_finite",
        "copies",
        "compiled",
        "remove",
        "exported",
    ]
    check_regularizer(lambda: dampen.TokenGraying("svd"), subjects=["vit"], contracts=contracts)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kind": "fft"}, ValueError, "'svd' or 'dct'"),
        ({"eps": 0.0}, ValueError, r"\(0, 1\]"),
        ({"eps": 1.5}, ValueError, r"\(0, 1\]"),
        ({"eps": "0.7"}, TypeError, "number"),
        ({"patch_size": 0}, ValueError, "patch_size"),
        ({"patch_size": (4, 4, 4)}, ValueError, "patch_size"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        dampen.TokenGraying(**arguments)


def test_wrong_inputs():
    with pytest.raises(TypeError, match="floating-point images"):
        gray_images(torch.zeros(3, 8, 8, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match="split evenly"):
        gray_images(torch.zeros(3, 9, 9), 4)
    with pytest.raises(RuntimeError, match="patch size"):
        dampen.TokenGraying().inputs(torch.zeros(1, 3, 8, 8))


def test_images_that_are_not_finite_are_refused_in_words():
    images = torch.full((2, 3, 8, 8), float("nan"))
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    dampen.regularize(model, dampen.TokenGraying("svd"))
    with pytest.raises(ValueError, match="the tokens hold NaN or infinity. Look at the images"):
        model(images)
