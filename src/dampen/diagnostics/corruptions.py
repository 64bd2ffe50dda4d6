"""Accuracy under simple corruptions: noise, blur and lost contrast, at five severities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.diagnostics.pixels import Pixels
from dampen.diagnostics.predictions import Data, device_of, flat, in_mode, move, run, split

# Severities 1 to 5, chosen for small images in the manner of Hendrycks and Dietterich (arXiv 1903.12261); accuracies
# under them are comparable with each other, not with published numbers of that benchmark.
CORRUPTIONS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),  # standard deviation, as a share of the pixels' range
    "blur": (0.4, 0.6, 0.8, 1.0, 1.5),  # standard deviation of the Gaussian, in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # what is left of the distance from each channel's mean
}


@dataclass(frozen=True)
class Corruptions:
    """Accuracy without corruption, and under each kind at severities 1 to 5."""

    n: int
    clean_accuracy: float
    accuracy: dict[str, list[float]]
    mean_accuracy: float  # over all kinds and severities
    settings: dict[str, tuple[float, ...]]
    seed: int


def add_noise(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise, drawn image by image so that the split into batches does not matter."""
    noise = torch.stack([torch.randn(images.shape[1:], generator=generator) for _ in range(len(images))])
    return images + amount * noise.to(images)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian cut at 4 sigma, repeating the border pixels."""
    radius = math.ceil(4 * sigma)
    x = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (x / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="replicate")
    across = F.conv2d(padded, kernel[:, :, None, :], groups=images.shape[1])
    return F.conv2d(across, kernel[:, :, :, None], groups=images.shape[1])


def lower_contrast(images: Tensor, factor: float) -> Tensor:
    """Pull every pixel toward the mean of its channel in its image."""
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + factor * (images - mean)


def corrupt(
    images: Tensor,
    kind: str,
    severity: int,
    bounds: tuple[float, float] = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Corrupt images (B, C, H, W) whose pixels lie in `bounds`; noise is drawn from `generator` (seed 0 if none).

    >>> corrupt(torch.rand(2, 3, 8, 8), "contrast", severity=5).shape
    torch.Size([2, 3, 8, 8])
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"Unknown corruption: got {kind!r}; known are {', '.join(CORRUPTIONS)}.")
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5: got {severity!r}.")
    low, high = bounds
    amount = CORRUPTIONS[kind][severity - 1]
    if kind == "noise":
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        images = add_noise(images, amount * (high - low), generator)
    elif kind == "blur":
        images = blur(images, amount)
    else:
        images = lower_contrast(images, amount)
    return images.clamp(low, high)


@torch.no_grad()
def measure_corruptions(
    model: nn.Module,
    data: Data,
    kinds: Sequence[str] = tuple(CORRUPTIONS),
    pixels: Pixels | None = None,
    seed: int = 0,
) -> Corruptions:
    """Accuracy of an image classifier under each corruption and severity, in one pass over `data`.

    The model runs in eval mode and its modes are restored. The noise of an image depends on `seed` and on its place
    in the data alone, and only its size grows with severity.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    >>> result = measure_corruptions(model, [(torch.rand(6, 1, 4, 4), torch.tensor([0, 1] * 3))])
    >>> {kind: len(accuracy) for kind, accuracy in result.accuracy.items()}
    {'noise': 5, 'blur': 5, 'contrast': 5}
    """
    for kind in kinds:
        if kind not in CORRUPTIONS:
            raise ValueError(f"Unknown corruption: got {kind!r}; known are {', '.join(CORRUPTIONS)}.")
    pixels, device = pixels or Pixels(), device_of(model)
    # One generator per severity from one seed: all draw the same noise, at different sizes.
    generators = {s: torch.Generator().manual_seed(seed) for s in range(1, 6)}
    clean = n = 0
    correct = {kind: [0] * 5 for kind in kinds}
    with in_mode(model):
        for batch in data:
            inputs, labels = split(batch)
            images, labels = pixels.from_data(move(inputs, device)), labels.to(device)
            clean += _correct(model, pixels.to_model(images), labels)
            n += len(labels)
            for kind in kinds:
                for s in range(1, 6):
                    changed = corrupt(images, kind, s, pixels.bounds, generators[s])
                    correct[kind][s - 1] += _correct(model, pixels.to_model(changed), labels)
    if not n:
        raise ValueError("There is nothing to corrupt: the data held no example. Was it an exhausted loader?")
    accuracy = {kind: [c / n for c in counts] for kind, counts in correct.items()}
    flat_list = [a for row in accuracy.values() for a in row]
    mean = sum(flat_list) / len(flat_list) if flat_list else math.nan
    return Corruptions(n, clean / n, accuracy, mean, {k: CORRUPTIONS[k] for k in kinds}, seed)


def _correct(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    logits, kept = flat(run(model, images), labels)
    if len(kept) != len(images):
        raise ValueError("Corruptions need one labeled prediction per image: some labels are missing or ignored.")
    return int((logits.argmax(dim=1) == kept).sum())
