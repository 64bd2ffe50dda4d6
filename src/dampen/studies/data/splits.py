"""The four kinds of split: images, feature sequences, sentence pairs, running text."""

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


class SequenceSplit(Split):
    """Windows of feature vectors, cut from one long (frames, features) tensor by start and length.

    `target` has one entry per window (a class number each), or with `per_token=True` one row per frame; then
    `counted` says which frames count in loss and metrics (ambiguous ones do not). Windows shorter than `window` are
    padded with zeros; with `padded=True` the model gets the padding mask (True where padded) as its second input.
    """

    def __init__(
        self,
        frames: Tensor,
        starts: Tensor,
        lengths: Tensor,
        target: Tensor,
        window: int,
        normalization: Normalization,
        *,
        padded: bool = True,
        per_token: bool = False,
        counted: Tensor | None = None,
    ):
        if len(starts) and (int(lengths.min()) < 1 or int(lengths.max()) > window):
            raise ValueError(f"Windows hold 1 to {window} frames: got {int(lengths.min())} to {int(lengths.max())}.")
        if not padded and len(starts) and int(lengths.min()) < window:
            raise ValueError("Without a padding mask every window must be full.")
        self.frames, self.starts, self.lengths, self.target = frames, starts, lengths, target
        self.window, self.normalization = window, normalization
        self.padded, self.per_token, self.counted = padded, per_token, counted

    def __len__(self) -> int:
        return len(self.starts)

    def gather(self, indices: Tensor) -> Batch:
        position = torch.arange(self.window)
        lengths = self.lengths[indices, None]
        rows = self.starts[indices, None] + torch.minimum(position, lengths - 1)  # (B, window)
        padding = position >= lengths
        x = (self.frames[rows].float() - self.normalization.mean) / self.normalization.std
        if not self.padded:
            return {"inputs": (x,), "target": self.target[indices]}
        x = x.masked_fill(padding[..., None], 0.0)
        if not self.per_token:
            return {"inputs": (x, padding), "target": self.target[indices]}
        valid = ~padding if self.counted is None else ~padding & self.counted[rows]
        return {"inputs": (x, padding), "target": self.target[rows], "valid": valid}


class PairSplit(Split):
    """Sentence pairs as token numbers, padded on the right; the model sees the target up to each token.

    Targets begin with the token `begin` and end with `end`: `inputs = (source, target[:-1])`, `target = target[1:]`.
    A batch is cut to its longest sentence, rounded up to a multiple of 8 so that few different shapes occur.
    `source_text` and `target_text` keep the sentences as they were, for BLEU.
    """

    def __init__(
        self,
        source: Tensor,
        target: Tensor,
        source_text: list[str],
        target_text: list[str],
        pad: int,
        multiple: int = 8,
    ):
        if not len(source) == len(target) == len(source_text) == len(target_text):
            raise ValueError(f"Sentence pairs must match one to one: got {len(source)} and {len(target)}.")
        self.source, self.target, self.pad, self.multiple = source, target, pad, multiple
        self.source_text, self.target_text = source_text, target_text

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Tensor) -> Batch:
        source = self._trim(self.source[indices], 0)
        target = self._trim(self.target[indices], 1).long()
        return {
            "inputs": (source.long(), target[:, :-1]),
            "target": target[:, 1:],
            "valid": target[:, 1:] != self.pad,
        }

    def _trim(self, tokens: Tensor, extra: int) -> Tensor:
        """Drop columns that hold padding alone; `extra` columns come on top of the multiple."""
        longest = int((tokens != self.pad).sum(dim=1).max()) if len(tokens) else 1
        steps = -(-max(longest - extra, 1) // self.multiple)
        return tokens[:, : steps * self.multiple + extra]


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
