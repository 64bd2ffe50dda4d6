"""Images with boxes around objects: what every reader hands over, the split that holds it, and the
data set.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dampen.studies.plugins import (
    Batch,
    DamagedData,
    Dataset,
    Normalization,
    Request,
    Split,
    channel_statistics,
    damaged,
    file_sha256,
    joint_sha256,
    read_file,
    read_image,
    split_rows,
)

FORMATS = ("JPEG", "PNG", "BMP")
IN_MEMORY = 2 * 2**30
"""Resized images are kept in memory up to so many bytes; larger sets are decoded batch by batch."""
SAMPLED = 1000
"""Training images from which mean and spread of the channels are taken, where not all are in
memory.
"""


@dataclass(frozen=True)
class Annotated:
    """One image: its file, its size in pixels, and its objects as class numbers and (left, top,
    right, bottom).

    `ignored` objects (crowds of COCO, 'difficult' ones of Pascal VOC) are neither learned nor
    counted as missed."""

    path: Path
    width: int
    height: int
    labels: tuple[int, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    ignored: tuple[bool, ...]


def checked_box(
    box: Sequence[float], width: int, height: int, where: str
) -> tuple[float, float, float, float]:
    """A box in pixels that lies within its image, cut at the border where it passes it by at most
    one pixel (rounding).

    >>> checked_box([0, 0, 10.4, 5], 10, 5, "a.xml, line 3")
    (0.0, 0.0, 10.0, 5.0)
    """
    left, top, right, bottom = map(float, box)
    if not all(math.isfinite(v) for v in box):
        raise DamagedData(f"{where}: the box {list(box)} is not finite. Correct or remove it.")
    if min(left, top) < -1 or right > width + 1 or bottom > height + 1:
        raise DamagedData(
            f"{where}: the box {list(box)} passes the border of its image of {width} x {height}. "
            "Correct it."
        )
    cut = (max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height)))
    if cut[2] <= cut[0] or cut[3] <= cut[1]:
        raise DamagedData(
            f"{where}: the box {list(box)} (left, top, right, bottom) has no area. Correct or "
            "remove it."
        )
    return cut[0], cut[1], cut[2], cut[3]


class ObjectSplit(Split):
    """Images of one size with a varying number of objects each.

    `inputs` are normalized images; `target` is (B, T, 5): class number, then center and size as
    fractions of the image, with class -1 where an image has fewer objects than the fullest one of
    the batch. Images come as they are resized, each way by its own factor: boxes are fractions, so
    they move along."""

    def __init__(
        self,
        examples: list[Annotated],
        size: tuple[int, int],
        channels: int,
        memory: int = IN_MEMORY,
    ):
        self.examples, self.size, self.channels = examples, size, channels
        self.objects = [_target(example) for example in examples]
        self.normalization = Normalization(torch.zeros(channels), torch.ones(channels))
        held = len(examples) * channels * size[0] * size[1] <= memory
        self.images = (
            torch.stack([self._read(i) for i in range(len(examples))])
            if held and examples
            else None
        )

    def __len__(self) -> int:
        return len(self.examples)

    def pixels(self, indices: Sequence[int]) -> Tensor:
        """The resized images as bytes (B, channels, height, width)."""
        if self.images is not None:
            return self.images[torch.as_tensor(indices)]
        return torch.stack([self._read(i) for i in indices])

    def gather(self, indices: Tensor) -> Batch:
        chosen = indices.tolist()
        mean, std = (v.view(1, -1, 1, 1) for v in (self.normalization.mean, self.normalization.std))
        x = (self.pixels(chosen).float() / 255 - mean) / std
        found = [self.objects[i] for i in chosen]
        target = torch.full((len(chosen), max(1, *(len(t) for t in found)), 5), -1.0)
        for row, own in zip(target, found, strict=True):
            row[: len(own)] = own
        return {"inputs": (x,), "target": target}

    def _read(self, index: int) -> Tensor:
        from PIL import Image

        example = self.examples[index]
        picture = read_image(
            example.path, read_file(example.path), FORMATS, "RGB" if self.channels == 3 else "L"
        )
        if picture.size != (example.width, example.height):
            raise damaged(example.path, "as size", picture.size, (example.width, example.height))
        small = picture.resize((self.size[1], self.size[0]), Image.Resampling.BILINEAR)
        pixels = np.array(small, dtype=np.uint8).reshape(*self.size, self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def _target(example: Annotated) -> Tensor:
    """The objects to learn, (n, 5)."""
    rows = []
    for label, (left, top, right, bottom), ignored in zip(
        example.labels, example.boxes, example.ignored, strict=True
    ):
        if not ignored:
            center = [(left + right) / 2 / example.width, (top + bottom) / 2 / example.height]
            rows.append(
                [label, *center, (right - left) / example.width, (bottom - top) / example.height]
            )
    return torch.tensor(rows).reshape(-1, 5)


def object_dataset(
    ask: Request,
    parts: Mapping[str, list[Annotated]],
    classes: list[str],
    facts: dict[str, Any],
    root: Path,
    *,
    size: Sequence[int],
    channels: int,
    test_fraction: float,
    test_limit: int | None,
) -> Dataset:
    """Draw what is missing among train, valid and test, read the images, normalize by the training
    part.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (gray) or 3 (RGB): got {channels}.")
    if len(size) != 2 or min(size) < 1:
        raise ValueError(
            f"size is the height and the width that images get, in pixels: got {size}."
        )
    height, width = size
    counts = Counter(label for example in parts["train"] for label in example.labels)
    strata = {part: _strata(own, counts) for part, own in parts.items()}
    rows = split_rows(strata, **ask.cuts, test_fraction=test_fraction, test_limit=test_limit)
    chosen = {
        part: [parts[source][i] for i in index.tolist()]
        for part, (source, index) in rows.rows.items()
    }
    splits = {
        part: ObjectSplit(examples, (height, width), channels) for part, examples in chosen.items()
    }
    train = splits["train"]
    normalization = channel_statistics(
        train.pixels(range(min(len(train), SAMPLED if train.images is None else 10**9)))
    )
    for split in splits.values():
        split.normalization = normalization
    hashes = {
        e.path.relative_to(root).as_posix(): file_sha256(e.path)
        for own in parts.values()
        for e in own
    }
    info = facts | {
        "sha256": facts["sha256"] | {"images": joint_sha256(hashes)},
        "objects": {k: sum(len(t) for t in split.objects) for k, split in splits.items()},
        "departures": [*facts.get("departures", []), *rows.notes],
        "partial": facts.get("partial", False),
        "drawn": rows.drawn,
        **ask.cuts,
        "options": {
            "size": list(size),
            "channels": channels,
            "test_fraction": test_fraction,
            "test_limit": test_limit,
        },
        "normalization": normalization.facts(),
    }
    model: dict[str, Any] = {
        "image_size": height if height == width else (height, width),
        "channels": channels,
    }
    model |= {"classes": len(classes), "task": ask.spec.task}
    made = (splits["train"], splits["valid"], splits["test"])
    return Dataset(
        ask.spec.name,
        ask.spec.task,
        *made,
        classes,
        info,
        model,
        "task",
        normalization=normalization,
        root=root,
        mirror=mirrored_boxes,
    )


def mirrored_boxes(target: Tensor, mirrored: Tensor, axis: int) -> Tensor:
    """The targets (B, T, 5) of a batch whose images `mirrored` (B,) were flipped along `axis` (-1
    or -2).
    """
    moved = target.clone()
    column = 1 if axis == -1 else 2  # class, center x, center y, width, height
    here = moved[..., column]  # rows of class -1 are no boxes: nothing reads their places
    moved[..., column] = torch.where(mirrored[:, None], 1 - here, here)
    return moved


def _strata(examples: list[Annotated], counts: Counter[int]) -> Tensor:
    """The stratum of each image: the class in it that the training part shows least; -1 without any
    object.
    """
    return torch.tensor(
        [min(set(e.labels), key=lambda label: (counts[label], label), default=-1) for e in examples]
    )
