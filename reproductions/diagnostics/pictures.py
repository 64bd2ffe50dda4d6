"""Attention rollout of some test images, as pictures and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.diagnostics import attention_weights, grid_of
from dampen.diagnostics.predictions import in_mode, run
from dampen.studies.plugins import Trained
from reproductions.diagnostics.robustness import pixels_of
from reproductions.diagnostics.rollout import overlay, rollout, save_images, token_map

LARGEST = 64
"""Images are no larger than this in the record; a page holds many."""


def attention_pictures(t: Trained, count: int) -> dict[str, Any]:
    """Label, image, rollout map and prediction of the first test images of different classes.

    Args:
        t: the model with its data.
        count: how many images.
    """
    pixels = pixels_of(t)
    batch = t.data.test.batch(_of_different_classes(t.data.test, count))
    inputs, target = batch["inputs"][0], batch["target"]
    images = pixels.from_data(inputs)
    with torch.no_grad(), in_mode(t.model):
        predicted = run(t.model, inputs).argmax(-1)
    weights = attention_weights(t.model, inputs)
    relevance = rollout(weights)
    rows, columns = grid_of(relevance.shape[-1], None)
    if rows * columns == relevance.shape[-1]:  # no class token: what all patches look at
        relevance = relevance.mean(1, keepdim=True).expand_as(relevance)
    maps = token_map(relevance)
    names = t.data.classes
    examples = [
        {
            "label": names[label],
            "predicted": names[said],
            "image": _rgb(image),
            "map": _rounded(found),
        }
        for label, said, image, found in zip(
            target.tolist(), predicted.tolist(), images, maps, strict=True
        )
    ]
    result: dict[str, Any] = {
        "what": "attention rollout, what the class token looks at",
        "examples": examples,
    }
    if t.picture is not None:
        size = (max(64, images.shape[-2]), max(64, images.shape[-1]))
        large = F.interpolate(images, size=size, mode="nearest").expand(-1, 3, -1, -1)
        strip = torch.cat([large, overlay(large, token_map(relevance, size=size))], dim=-2)
        result["file"] = save_images(strip, t.picture).name
        heads = head_maps(weights, large[0], size)
        result["heads_file"] = save_images(
            heads, t.picture.with_stem(f"{t.picture.stem}-heads")
        ).name
    return result


def head_maps(weights: Mapping[str, Tensor], image: Tensor, size: tuple[int, int]) -> Tensor:
    """What each head of each layer looks at in the first image: (heads, 3, layers * height, width), a layer per row.

    Args:
        weights: attention weights by layer.
        image: the first image.
        size: height and width of a map.
    """
    rows = []
    most = max(a.shape[1] for a in weights.values())
    for a in weights.values():
        seen = overlay(image.expand(a.shape[1], -1, -1, -1), token_map(a[0], size=size))
        rows.append(F.pad(seen, (0, 0, 0, 0, 0, 0, 0, most - a.shape[1]), value=1.0))
    return torch.cat(rows, dim=-2)


def _of_different_classes(split: Any, count: int) -> Tensor:
    """The first examples of as many classes as asked for, in order."""
    labels = split.batch(torch.arange(min(len(split), 1000)))["target"]
    first = torch.stack([(labels == c).nonzero()[0, 0] for c in labels.unique()])
    return first.sort().values[:count]


def _rgb(image: Tensor) -> list[list[list[int]]]:
    """Pixels in [0, 1] (C, H, W) as rows of RGB bytes, made smaller where they are many."""
    if max(image.shape[-2:]) > LARGEST:
        factor = LARGEST / max(image.shape[-2:])
        size = tuple(max(1, round(factor * side)) for side in image.shape[-2:])
        image = F.interpolate(image.unsqueeze(0), size=size, mode="area")[0]
    color = image if len(image) == 3 else image.mean(0, keepdim=True).expand(3, -1, -1)
    return (255 * color).round().clamp(0, 255).int().permute(1, 2, 0).tolist()


def _rounded(values: Tensor) -> list[list[float]]:
    return [[round(v, 4) for v in row] for row in values.tolist()]
