"""Attention rollout (Abnar and Zuidema, arXiv 2005.00928), and its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.diagnostics import grid_of


def rollout(
    weights: Mapping[str, Tensor] | Sequence[Tensor],
    residual: float = 0.5,
    heads: Literal["mean", "max", "min"] = "mean",
) -> Tensor:
    """Attention rollout (Abnar and Zuidema, arXiv 2005.00928): how much each input token counts in
    each output token, (B, N, N).

    A' = residual I + (1 - residual) A per layer, rows normalized, multiplied from the first layer
    to the last. `residual=0` for a model without skips around attention. `heads` says how the heads
    of a layer become one matrix.

    Args:
        weights: by layer, as `attention_weights` returns them.
        residual: share of the skip connection in each layer.
        heads: how heads are joined: "mean", "max" or "min".

    >>> rollout([torch.full((1, 2, 3, 3), 1 / 3)]).sum(-1)
    tensor([[1., 1., 1.]])
    """
    if isinstance(weights, Mapping):
        layers = list(weights.values())
    else:
        layers = list(weights)
    if not layers:
        raise ValueError("attention rollout needs the weights of at least one layer: got none.")
    if not 0 <= residual < 1:
        raise ValueError(f"residual is the skip's share of a token, in [0, 1): got {residual}.")
    if heads not in ("mean", "max", "min"):
        raise ValueError(f"heads must be 'mean', 'max' or 'min': got {heads!r}.")
    shape = (layers[0].shape[0], layers[0].shape[-1], layers[0].shape[-1])
    total = torch.eye(shape[-1], device=layers[0].device).expand(shape)
    for a in layers:
        one = a.mean(1) if heads == "mean" else a.amax(1) if heads == "max" else a.amin(1)
        if one.shape != shape:
            raise ValueError(
                f"rollout multiplies self-attention over the same {shape[-1]} tokens "
                f"of {shape[0]} samples: got weights of shape {tuple(a.shape)}. It is "
                "not defined for window attention, cross-attention or dropped tokens."
            )
        mixed = residual * torch.eye(shape[-1], device=one.device) + (1 - residual) * one
        total = (mixed / mixed.sum(-1, keepdim=True)) @ total
    return total


def token_map(
    relevance: Tensor,
    query: int = 0,
    grid: tuple[int, int] | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """What one query looks at as images (B, rows, columns) in [0, 1]: from rollout, or one head's
    weights, (B, N, N).

    Tokens before the patch grid (CLS) are cut off; `size` enlarges to pixels.

    Args:
        relevance: (B, N, N), or one head's weights.
        query: index of the token that looks.
        grid: (rows, columns) of patches; None: a square.
        size: (height, width) to scale up to; None: one pixel a patch.

    >>> token_map(torch.rand(2, 17, 17), size=(32, 32)).shape
    torch.Size([2, 32, 32])
    """
    rows, columns = grid_of(relevance.shape[-1], grid)
    values = relevance[:, query, relevance.shape[-1] - rows * columns :].unflatten(
        -1, (rows, columns)
    )
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    scaled = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    if size is None:
        out: Tensor = scaled
        return out
    return (
        F.interpolate(scaled.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
        .squeeze(1)
        .clamp(0, 1)
    )


def overlay(images: Tensor, maps: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] darkened where a map (B, H, W) is low: (B, 3, H, W).

    Args:
        images: (B, C, H, W) in [0, 1].
        maps: (B, H, W) in [0, 1].
    """
    if images.shape[-2:] != maps.shape[-2:] or len(images) != len(maps):
        raise ValueError(
            f"images and maps must be of one size: got {tuple(images.shape)} "
            f"and {tuple(maps.shape)}. Give token_map a size=."
        )
    if images.shape[1] == 3:
        color = images
    else:
        color = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return color * (0.2 + 0.8 * maps.unsqueeze(1))


def save_images(images: Tensor, path: Path | str) -> Path:
    """Write images (B, 3, H, W) or maps (B, H, W) in [0, 1] side by side into one PNG file.

    Args:
        images: (B, 3, H, W) or (B, H, W), in [0, 1].
        path: of the PNG file; its folder must exist.
    """
    from PIL import Image

    if images.dim() == 4:
        strip = images
    else:
        strip = images.unsqueeze(1).expand(-1, 3, -1, -1)
    pixels = (
        (torch.cat(list(strip), dim=-1).clamp(0, 1) * 255)
        .round()
        .byte()
        .permute(1, 2, 0)
        .cpu()
        .numpy()
    )
    path = Path(path)
    Image.fromarray(pixels).save(path, format="PNG")
    return path
