"""What the audio sets share: clips of feature tokens, one class each, cut into splits and normalized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dampen.studies.data.dataset import Dataset, DataSpec, Normalization
from dampen.studies.data.splits import SequenceSplit


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

    Clips longer than `window` tokens are cut, shorter ones padded; where all are full, the model gets no padding mask.
    """
    clips = [clip[:window] for clip in clips]
    lengths = torch.tensor([len(clip) for clip in clips])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
    frames = torch.cat(clips)
    owner = torch.repeat_interleave(torch.arange(len(clips)), lengths)
    normalization = feature_statistics(frames[torch.isin(owner, rows["train"])])
    padded = int(lengths.min()) < window
    train, valid, test = (
        SequenceSplit(frames, starts[i], lengths[i], labels[i], window, normalization, padded=padded)
        for i in (rows["train"], rows["valid"], rows["test"])
    )
    model_args = {"features": frames.shape[1], "classes": len(classes), "max_tokens": window, "per_token": False}
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
    """Mean and standard deviation of each feature over (frames, features); a constant feature is only shifted.

    With `one_scale` all features are divided by their root mean square deviation. Features of a network, and principal
    components above all, say by their size how much they matter: equal sizes would raise the noise.
    """
    frames = frames.double()
    std = frames.std(dim=0, correction=0)
    if one_scale:
        std = std.square().mean().sqrt().expand_as(std)
    return Normalization(frames.mean(dim=0).float(), torch.where(std > 1e-6, std, torch.ones_like(std)).float())
