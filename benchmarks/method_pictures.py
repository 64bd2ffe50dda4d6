"""A small picture of what each method does, drawn by running it once on a small ViT: docs/images/methods/NAME.svg.

The method's own stage is recorded on its way: what goes in, what comes out. Attention masks are drawn as queries x
keys, everything else as the factor by which each entry was multiplied (dark: kept, pale: dropped), or as the change
where nothing is dropped. Penalties change nothing on the way, so they have no picture.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor

import dampen
from dampen.native.library import torch_only
from dampen.registry import methods
from dampen.regularizer import Regularizer

CELL, MOST = 9, 34
CAPTIONS = {
    "mask": "keys hidden from each query in one head (pale), by running it",
    "qkv": "how much of each key (column) enters each blurred key (row), by running it",
    "heads": "samples x heads: what each head's output was multiplied with",
    "branch": "samples x tokens: what the residual branch was multiplied with",
    "embeddings": "tokens x channels of one sample: what the embedding was multiplied with",
    "operands": "tokens x channels of one sample: what entered a feed-forward map",
    "tokens": "samples x tokens: which of them go on",
    "inputs": "one image before and after",
    "block": "samples x tokens: what the block's change was multiplied with",
}
OWN_CAPTIONS = {
    "hidden_dropout": "tokens x channels of one sample: what the residual branch was multiplied with",
    "nef_tune": "tokens x channels of one sample: the size of the noise that was added",
}


def picture(name: str) -> tuple[str, str] | None:
    """The SVG and its caption, or None for what leaves the forward as it is."""
    seen = _run(name)
    for stage in CAPTIONS:
        if stage in seen and (grid := _grid(name, stage, *seen[stage])) is not None:
            return _svg(grid), OWN_CAPTIONS.get(name, CAPTIONS[stage])
    return None


def _run(name: str) -> dict[str, tuple[Any, Any]]:
    """First input and output of each stage of the method, in one training forward."""
    seen: dict[str, tuple[Any, Any]] = {}
    cls = methods()[name]
    strong = {"drop_path": 0.4, "layer_drop": 0.5, "drop_connect": 0.3}.get(name, 0.3)
    regularizer = cls(strong) if next(iter(signature(cls).parameters), "") == "rate" else cls()
    recorded = type(
        cls.__name__,
        (cls,),
        {s: _recording(cls, s, seen) for s in regularizer.stages if s in CAPTIONS},
    )
    regularizer.__class__ = recorded
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=16, patch_size=4, channels=1, width=32, depth=2, heads=4, mlp=64
    )
    try:
        handle = dampen.regularize(model.train(), regularizer)
    except ValueError:  # a method that needs another beside it, or weights of its own
        return {}
    images = torch.linspace(-1, 1, 16)[None, :, None] * torch.linspace(-1, 1, 16)[
        None, None
    ] + 0.3 * torch.randn(8, 1, 16, 16)
    with torch.no_grad(), torch_only("pictures are the same everywhere"):
        handle.loss(lambda: model(images), lambda out: out.square().mean())
    return seen


def _recording(cls: type[Regularizer], stage: str, seen: dict[str, tuple[Any, Any]]) -> Any:
    own = getattr(cls, stage)

    def record(self: Any, *inputs: Any) -> Any:
        result = own(self, *inputs)
        seen.setdefault(stage, (inputs, result))
        return result

    return record


def _grid(name: str, stage: str, inputs: tuple[Any, ...], result: Any) -> Tensor | None:
    """Numbers between 0 (dropped) and 1 (kept), as a matrix."""
    if stage == "mask":
        return None if result is None else 1 - result.float().expand(-1, -1, 17, 17)[0, 0]
    if stage == "qkv":
        before, after = (
            k.movedim(-2, 0).flatten(1) for k in (inputs[1], result[1])
        )  # keys x everything else
        mixed = torch.linalg.lstsq(
            before.T.double(), after.T.double()
        ).solution.T  # after = mixed @ before
        return (mixed / mixed.max()).clamp(0, 1) if not torch.equal(before, after) else None
    if stage == "operands":
        before, after = inputs[0], result[0]
        return (
            _ratio(after[0], before[0])
            if after.shape == before.shape and not torch.equal(after, before)
            else None
        )
    if stage == "tokens":
        kept = torch.zeros(inputs[0].shape[:2])
        same = (inputs[0][:, :, None] - result[:, None]).abs().amax(-1) < 1e-6
        return kept.masked_fill(same.any(-1), 1.0)
    if stage == "inputs":
        pair = torch.cat([inputs[0][0, 0], result[0, 0]], 1)
        return (pair - pair.min()) / (pair.max() - pair.min())
    if stage == "block":
        return None
    before = inputs[0]
    if torch.equal(before, result):
        return None
    if stage == "heads":
        return _ratio(result.abs().mean((-1, -2)), before.abs().mean((-1, -2)))
    if stage == "branch" and name == "drop_path":
        return _ratio(result.abs().mean(-1), before.abs().mean(-1))
    if name == "nef_tune":
        return ((result - before)[0].abs() / (result - before).abs().max()).clamp(0, 1)
    return _ratio(result[0], before[0])


def _ratio(after: Tensor, before: Tensor) -> Tensor:
    ratio = (after / before.where(before != 0, torch.ones_like(before))).abs()
    return (ratio / ratio.max().clamp_min(1e-9)).clamp(0, 1)


def _svg(grid: Tensor) -> str:
    grid = grid[:MOST, : 2 * MOST]
    rows, columns = grid.shape
    size = f'width="{columns * CELL}" height="{rows * CELL}" viewBox="0 0 {columns * CELL} {rows * CELL}"'
    cells = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        '<rect width="100%" height="100%" fill="#e8edf2"/>',
    ]
    for i, row in enumerate(grid.tolist()):
        for j, value in enumerate(row):
            if (level := round(value * 8) / 8) > 0:
                place = f'x="{j * CELL}" y="{i * CELL}" width="{CELL - 1}" height="{CELL - 1}"'
                cells.append(f'<rect {place} fill="#0b6fa4" fill-opacity="{level:g}"/>')
    return "\n".join([*cells, "</svg>"]) + "\n"
