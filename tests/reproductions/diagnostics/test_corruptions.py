"""Corruptions: what they do to pixels, and accuracy under them."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import nn

from reproductions.diagnostics.robustness import (
    CORRUPTIONS,
    Pixels,
    add_noise,
    blur,
    corrupt,
    measure_corruptions,
)


def test_blur_matches_scipy():
    images = torch.rand(2, 3, 9, 7, dtype=torch.double)
    for sigma in (0.5, 1.0, 1.5):
        expected = gaussian_filter(
            images.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=int(np.ceil(4 * sigma))
        )
        np.testing.assert_allclose(blur(images, sigma).numpy(), expected, atol=1e-12)


def test_noise_has_the_stated_size():
    gray = torch.full((40, 3, 16, 16), 5.0)
    for severity, amount in enumerate(CORRUPTIONS["noise"], start=1):
        noise = add_noise(gray, amount, torch.Generator().manual_seed(0)) - gray
        assert noise.mean().item() == pytest.approx(0, abs=0.02 * amount)
        assert noise.std().item() == pytest.approx(amount, rel=0.02)
        # The amount is a share of the range, and what leaves the bounds is cut.
        expected = (gray + 20 * noise).clamp(-5, 15)
        torch.testing.assert_close(
            corrupt(gray, "noise", severity, bounds=(-5.0, 15.0)), expected, atol=1e-4, rtol=0
        )


def test_contrast_keeps_the_mean_and_scales_the_rest():
    images = torch.rand(4, 3, 8, 8)
    for severity, factor in enumerate(CORRUPTIONS["contrast"], start=1):
        changed = corrupt(images, "contrast", severity)
        torch.testing.assert_close(changed.mean(dim=(2, 3)), images.mean(dim=(2, 3)))
        torch.testing.assert_close(changed.std(dim=(2, 3)), factor * images.std(dim=(2, 3)))


@pytest.mark.parametrize("kind", sorted(CORRUPTIONS))
def test_severity_grows_and_pixels_stay_in_bounds(kind):
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    changed = [corrupt(images, kind, s) for s in range(1, 6)]
    distance = [(c - images).square().mean().item() for c in changed]
    assert distance == sorted(distance)
    assert distance[0] > 0
    assert all(c.min() >= 0 and c.max() <= 1 for c in changed)
    assert all(torch.equal(c, corrupt(images, kind, s)) for s, c in enumerate(changed, start=1))


class Bright(nn.Module):
    """Calls an image bright if its center is brighter than its mean; dropout shows whether eval mode holds."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.99)

    def forward(self, x):
        score = self.drop(x[:, :, 3:5, 3:5].mean(dim=(1, 2, 3)) - x.mean(dim=(1, 2, 3)))
        return torch.stack([-score, score], dim=1)


def test_accuracy_follows_by_hand():
    """Lowering the contrast never changes which is brighter: accuracy stays; heavy noise must change some."""
    generator = torch.Generator().manual_seed(0)
    images = 0.4 + 0.2 * torch.rand(200, 1, 8, 8, generator=generator)
    model = Bright()
    with torch.no_grad():
        labels = model.eval()(images).argmax(dim=1)
    labels[:20] = 1 - labels[:20]
    model.train()
    result = measure_corruptions(model, [(images[:90], labels[:90]), (images[90:], labels[90:])])
    assert model.drop.training
    assert result.n == 200
    assert result.clean_accuracy == pytest.approx(0.9)
    assert result.accuracy["contrast"] == pytest.approx([0.9] * 5)
    assert result.accuracy["noise"][4] < 0.8
    numbers = [a for row in result.accuracy.values() for a in row]
    assert result.mean_accuracy == pytest.approx(sum(numbers) / 15)
    # Neither the split into batches nor the global random state matters.
    torch.manual_seed(5)
    assert measure_corruptions(model, [(images, labels)]) == result
    assert (
        measure_corruptions(model, [(images, labels)], seed=1).accuracy["noise"]
        != result.accuracy["noise"]
    )


def test_normalized_data_give_the_same_answer():
    images, labels = (
        torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(1)),
        torch.arange(50) % 2,
    )
    model = Bright()  # its decision is unchanged by one shift and scale of all pixels
    raw = measure_corruptions(model, [(images, labels)])
    pixels = Pixels(mean=[0.5], std=[0.5], normalized=True)
    assert measure_corruptions(model, [((images - 0.5) / 0.5, labels)], pixels=pixels) == raw


def test_errors():
    images = torch.rand(1, 1, 4, 4)
    with pytest.raises(ValueError, match="got 'fog'; known are noise, blur, contrast"):
        corrupt(images, "fog", 1)
    with pytest.raises(ValueError, match="severity must be 1, 2, 3, 4 or 5: got 6"):
        corrupt(images, "blur", 6)
    with pytest.raises(ValueError, match="got 'fog'"):
        measure_corruptions(Bright(), [], kinds=["fog"])
    with pytest.raises(ValueError, match="nothing to corrupt"):
        measure_corruptions(Bright(), [])
