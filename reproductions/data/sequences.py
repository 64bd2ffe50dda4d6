"""What the audio sets share: clips of feature tokens, one class each, cut into splits and
normalized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.studies.plugins import Batch, Dataset, DataSpec, Normalization, Split


class SequenceSplit(Split):
    """Windows of feature vectors, cut from one long (frames, features) tensor by start and length.

    `target` has one entry per window (a class number each), or with `per_token=True` one row per
    frame; then `counted` says which frames count in loss and metrics (ambiguous ones do not).
    Windows shorter than `window` are padded with zeros; with `padded=True` the model gets the
    padding mask (True where padded) as its second input."""

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
            raise ValueError(
                f"Windows hold 1 to {window} frames: got {int(lengths.min())} to "
                f"{int(lengths.max())}."
            )
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


def clip_dataset(
    spec: DataSpec,
    clips: list[Tensor],
    labels: Tensor,
    rows: dict[str, Tensor],
    classes: list[str],
    window: int,
    info: dict[str, Any],
    *,
    extras: dict[str, Any] | None = None,
    root: Path | None = None,
) -> Dataset:
    """Wrap clips of tokens (T, F) as a set; `rows` says which clips are train, valid and test.

    Clips longer than `window` tokens are cut, shorter ones padded; where all are full, the model
    gets no padding mask."""
    clips = [clip[:window] for clip in clips]
    lengths = torch.tensor([len(clip) for clip in clips])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    frames = torch.cat(clips)
    owner = torch.repeat_interleave(torch.arange(len(clips)), lengths)
    normalization = feature_statistics(frames[torch.isin(owner, rows["train"])])
    padded = int(lengths.min()) < window
    train, valid, test = (
        SequenceSplit(
            frames, starts[i], lengths[i], labels[i], window, normalization, padded=padded
        )
        for i in (rows["train"], rows["valid"], rows["test"])
    )
    model_args = {
        "features": frames.shape[1],
        "classes": len(classes),
        "max_tokens": window,
        "per_token": False,
    }
    return Dataset(
        spec.name,
        spec.task,
        train,
        valid,
        test,
        classes,
        info,
        model_args,
        normalization=normalization,
        root=root,
        extras=extras or {},
    )


def feature_statistics(frames: Tensor, *, one_scale: bool = False) -> Normalization:
    """Mean and standard deviation of each feature over (frames, features); a constant feature is
    only shifted.

    With `one_scale` all features are divided by their root mean square deviation. Features of a
    network, and principal components above all, say by their size how much they matter: equal sizes
    would raise the noise."""
    frames = frames.double()
    std = frames.std(dim=0, correction=0)
    if one_scale:
        std = std.square().mean().sqrt().expand_as(std)
    return Normalization(
        frames.mean(dim=0).float(), torch.where(std > 1e-6, std, torch.ones_like(std)).float()
    )
