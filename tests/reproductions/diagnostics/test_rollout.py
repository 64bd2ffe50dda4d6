"""Attention rollout against a product by hand, and its pictures."""

import pytest
import torch

import dampen
from dampen.diagnostics import attention_weights
from reproductions.diagnostics.rollout import overlay, rollout, save_images, token_map


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=16, patch_size=4, width=12, depth=2, heads=2, mlp=16)


def images(n=3):
    return torch.rand(n, 3, 16, 16, generator=torch.Generator().manual_seed(1))


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
