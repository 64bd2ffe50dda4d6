"""SpecAugment: mask random bands and stretches of spectrograms (arXiv 1904.08779)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dampen.studies.plugins import Batch, Dataset


@dataclass(frozen=True)
class SpecAugment:
    """Set random bands and random stretches of time to the mean, without time warping.

    Each mask covers 0 to `band_width` mel bands, or 0 to `time_width` tokens; each example has its
    own. Where several frames make a token, a band is masked in all of them.
    """

    tasks: ClassVar = ("audio", "detection")
    bands: int = 2
    band_width: int = 8
    times: int = 2
    time_width: int = 10

    def __call__(self, batch: Batch, dataset: Dataset) -> Batch:
        x, *rest = batch["inputs"]
        b, n, features = x.shape
        count = dataset.extras.get("bands", features)
        hidden = torch.zeros(b, 1, count, dtype=torch.bool)
        for _ in range(self.bands):
            hidden |= _stretch(b, count, self.band_width)[:, None, :]
        hidden = hidden.repeat(1, 1, features // count)
        for _ in range(self.times):
            hidden = hidden | _stretch(b, n, self.time_width)[:, :, None]
        return batch | {"inputs": (x.masked_fill(hidden.to(x.device), 0.0), *rest)}


def _stretch(rows: int, length: int, widest: int) -> Tensor:
    """For each row 0 to `widest` positions at a random place, as (rows, length) of bool."""
    width = torch.randint(0, min(widest, length) + 1, (rows, 1))
    start = (torch.rand(rows, 1) * (length - width + 1)).floor()
    position = torch.arange(length)
    return (position >= start) & (position < start + width)
