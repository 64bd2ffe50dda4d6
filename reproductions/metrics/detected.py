"""What a trained detector finds in a few test images, small enough to be kept with its result."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor

from reproductions.data.objects import Annotated, ObjectSplit
from reproductions.metrics.objects import best_detections

SHOWN = 0.3
"""Detections less certain than this are not drawn."""
LARGEST = 160
"""Pixels of the longer side of a picture in the record."""


def detected(
    model: Any, split: ObjectSplit, classes: list[str], count: int = 3
) -> list[dict[str, Any]]:
    """The first `count` images as small JPEG files, with true and found boxes as fractions of the
    image.

    `truth` holds [class, left, top, right, bottom], `found` [class, score, left, top, right,
    bottom]."""
    chosen = list(range(min(count, len(split))))
    device = next(model.parameters()).device
    training = model.training
    with torch.no_grad():
        output = model.eval()(*(x.to(device) for x in split.batch(chosen)["inputs"]))
    model.train(training)
    tables = torch.cat([output.logits, output.boxes], dim=-1).float().cpu()
    pictures = split.pixels(chosen)
    return [
        {
            "image": jpeg(picture),
            "truth": _truth(split.examples[i], classes),
            "found": _found(table, classes),
        }
        for i, picture, table in zip(chosen, pictures, tables, strict=True)
    ]


def _truth(example: Annotated, classes: list[str]) -> list[list[Any]]:
    scale = (example.width, example.height) * 2
    fractions = [
        [round(v / side, 3) for v, side in zip(box, scale, strict=True)] for box in example.boxes
    ]
    return [[classes[label], *box] for label, box in zip(example.labels, fractions, strict=True)]


def _found(table: Tensor, classes: list[str]) -> list[list[Any]]:
    best = best_detections(table, len(classes), torch.ones(4))
    rows = zip(
        best["labels"].tolist(), best["scores"].tolist(), best["boxes"].tolist(), strict=True
    )
    return [
        [classes[label], round(p, 3), *(round(v, 3) for v in box)]
        for label, p, box in rows
        if p >= SHOWN
    ]


def jpeg(pixels: Tensor) -> str:
    """Bytes (channels, height, width) as the data address of a JPEG file."""
    from PIL import Image

    picture = Image.fromarray(pixels.permute(1, 2, 0).squeeze(-1).numpy()).convert("RGB")
    picture.thumbnail((LARGEST, LARGEST))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
