"""Splits of images and of running text."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.studies.data.dataset import Batch, Normalization, Split

KEPT_READY = 2**21
"""Pixels up to which a split keeps its images normalized (8 MB): for tiny models that takes its part of every step."""


class ImageSplit(Split):
    """Images as uint8 (n, channels, height, width) with one class number each.

    >>> unit = Normalization(torch.tensor([0.5]), torch.tensor([0.25]))
    >>> split = ImageSplit(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0, 1, 1]), unit)
    >>> batch = split.batch([2])
    >>> batch["inputs"][0].flatten().tolist(), batch["target"].tolist()
    ([2.0, 2.0, 2.0, 2.0], [1])
    """

    def __init__(self, images: Tensor, labels: Tensor, normalization: Normalization):
        if images.dtype != torch.uint8 or images.dim() != 4 or len(images) != len(labels):
            raise ValueError(
                f"Images come as uint8 (n, channels, height, width) with n labels: got {images.dtype} "
                f"{tuple(images.shape)} and {len(labels)} labels."
            )
        self.images, self.labels, self.normalization = images, labels.long(), normalization
        self._scale = (1 / (255 * normalization.std)).view(1, -1, 1, 1)
        self._shift = (normalization.mean / normalization.std).view(1, -1, 1, 1)
        self._ready: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, indices: Tensor) -> Batch:
        target = self.labels.index_select(0, indices)
        if self.images.numel() > KEPT_READY:
            return {"inputs": (self._normalized(self.images.index_select(0, indices)),), "target": target}
        if self._ready is None:
            self._ready = self._normalized(self.images)
        return {"inputs": (self._ready.index_select(0, indices),), "target": target}

    def _normalized(self, images: Tensor) -> Tensor:
        return images.float().mul_(self._scale).sub_(self._shift)  # (x / 255 - mean) / std


class TextSplit(Split):
    """Windows of running text: `context` tokens in, the same shifted by one as target.

    Windows start every `stride` tokens; the last one may be short and is then padded on the right, where no real token
    sees it, and `valid` is False there.

    >>> split = TextSplit(torch.arange(10), context=4, stride=4)
    >>> batch = split.batch([0, 2])
    >>> batch["inputs"][0].tolist(), batch["target"].tolist(), batch["valid"].sum(dim=1).tolist()
    ([[0, 1, 2, 3], [8, 8, 8, 8]], [[1, 2, 3, 4], [9, 9, 9, 9]], [4, 1])
    """

    def __init__(self, tokens: Tensor, context: int, stride: int):
        if context < 1 or stride < 1:
            raise ValueError(f"context and stride count tokens from 1: got {context} and {stride}.")
        self.tokens, self.context = tokens, context
        self.starts = torch.arange(0, max(len(tokens) - 1, 0), stride)
        if stride < context:  # a window all of whose targets the one before it already has teaches nothing new
            self.starts = self.starts[: max(-(-(len(tokens) - 1 - context) // stride) + 1, 1)]

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, indices: Tensor) -> Batch:
        rows = self.starts[indices, None] + torch.arange(self.context)
        last = len(self.tokens) - 2  # the last token that has a successor
        valid = rows <= last
        rows = rows.clamp(max=last)
        return {"inputs": (self.tokens[rows].long(),), "target": self.tokens[rows + 1].long(), "valid": valid}
