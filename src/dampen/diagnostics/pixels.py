"""What a model's image inputs mean: pixel bounds and normalization, for diagnostics that change pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """Bounds of valid pixels, and the normalization `(x - mean) / std` (per channel) that the model expects.

    `normalized=True` says that the data at hand are normalized already; they are brought back to pixels first.

    >>> pixels = Pixels(mean=[0.5], std=[0.25], normalized=True)
    >>> pixels.from_data(torch.zeros(1, 1, 2, 2)).unique()
    tensor([0.5000])
    """

    bounds: tuple[float, float] = (0.0, 1.0)
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    normalized: bool = False

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"bounds must be (low, high) with low < high: got {self.bounds}.")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"Every std must be positive: got {list(self.std)}.")
        if self.normalized and self.mean is None and self.std is None:
            raise ValueError("normalized=True needs the mean and std that the data were normalized with.")

    @property
    def range(self) -> float:
        """The width of the bounds."""
        return self.bounds[1] - self.bounds[0]

    def from_data(self, images: Any) -> Tensor:
        """Images of the data as pixels within the bounds."""
        if isinstance(images, Mapping) and len(images) == 1:  # {"pixel_values": ...}
            images = next(iter(images.values()))
        if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
            got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"Expected floating-point images (batch, channels, height, width): got {got}.")
        if self.normalized:
            mean, std = self._statistics(images)
            images = images * std + mean
        (low, high), tolerance = self.bounds, 1e-3 * self.range
        if images.numel() and (images.min() < low - tolerance or images.max() > high + tolerance):
            raise ValueError(
                f"The images leave the bounds [{low:g}, {high:g}]: they reach from {images.min():.4g} to "
                f"{images.max():.4g}. Give the right bounds, or, if the data are normalized, "
                "Pixels(mean=..., std=..., normalized=True)."
            )
        out: Tensor = images.clamp(low, high)  # rounding of the normalization only
        return out

    def to_model(self, pixels: Tensor) -> Tensor:
        """Pixels as the model expects them."""
        mean, std = self._statistics(pixels)
        return (pixels - mean) / std

    def preprocessing(self, like: Tensor) -> dict[str, Any]:
        """The same normalization as foolbox takes it."""
        mean, std = self._statistics(like)
        return {"mean": mean.flatten(), "std": std.flatten(), "axis": -3}

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        channels = like.shape[1]
        rows = []
        for name, values, default in (("mean", self.mean, 0.0), ("std", self.std, 1.0)):
            row = torch.tensor([default] if values is None else list(values), dtype=like.dtype, device=like.device)
            if len(row) not in (1, channels):
                raise ValueError(f"{name} must hold one number or one per channel ({channels}): got {len(row)}.")
            rows.append(row.expand(channels).reshape(1, channels, 1, 1))
        return rows[0], rows[1]
