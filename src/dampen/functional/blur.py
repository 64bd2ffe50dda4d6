"""A Gaussian blur of the attention scores along the keys, done on the keys themselves.

Blurring commutes with the product: conv(Q K^T) = Q conv(K)^T. So scores are blurred in O(N D
width), without the matrix of scores. Here live the neighbors of a key (on a line or on a patch
grid), which of them a mask lets in, the weights of the kernel, and its application."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dampen.functional.grid import MAX_PREFIX, grid_of
from dampen.regularizer import Call

DENSE_UP_TO = 256
"""Keys up to which the kernel is a banded (M, M) matrix: one matmul. Above, one weighted sum over
shifted keys."""
Edge = Literal["renormalize", "zero"]


class Neighbors(NamedTuple):
    """The T places around each of M keys that a kernel covers."""

    key: Tensor  # (M, T) which key is there; any key where there is none
    exists: Tensor  # (M, T) bool
    beyond: Tensor  # (M, T) bool, over the edge of the sequence or grid
    squared_distance: Tensor  # (T,)


def on_line(keys: int, width: int, device: torch.device) -> Neighbors:
    """Keys in a row: the width // 2 places on either side."""
    offset = torch.arange(-(width // 2), width // 2 + 1, device=device)
    index = torch.arange(keys, device=device).unsqueeze(-1) + offset
    exists = (index >= 0) & (index < keys)
    return Neighbors(index.clamp(0, keys - 1), exists, ~exists, offset.square())


def on_grid(
    keys: int,
    grid: tuple[int, int],
    width: int,
    device: torch.device,
    patches: tuple[int, int] | None = None,
) -> Neighbors:
    """Keys on a patch grid, row by row, after the prefix tokens, which have no neighbors but
    themselves."""
    rows, columns = grid_of(keys, grid, patches=patches)
    prefix = keys - rows * columns
    if prefix > MAX_PREFIX:
        raise ValueError(
            f"grid {grid} has {rows * columns} patches, but there are {keys} keys: {prefix} of "
            "them would be prefix "
            f"tokens (at most {MAX_PREFIX}). Give the grid of patches that this attention sees, "
            "(rows, columns)."
        )
    offset = torch.arange(-(width // 2), width // 2 + 1, device=device)
    down, right = (t.flatten() for t in torch.meshgrid(offset, offset, indexing="ij"))
    place = torch.arange(keys, device=device).unsqueeze(-1) - prefix
    patch = place >= 0
    row, column = place // columns + down, place % columns + right
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    center = (down == 0) & (right == 0)
    index = torch.where(patch, prefix + row * columns + column, place + prefix).clamp(0, keys - 1)
    return Neighbors(
        index, torch.where(patch, inside, center), patch & ~inside, down.square() + right.square()
    )


def seen_together(near: Neighbors, call: Call) -> Tensor:
    """Which neighbors count, (..., M, T): those that every query which sees the key sees too. So
    nothing leaks."""
    # query i sees keys up to i: exactly the earlier neighbors are seen with a key
    if call.is_causal:
        return near.exists & (
            near.key <= torch.arange(near.key.shape[0], device=near.key.device).unsqueeze(-1)
        )
    if call.mask is None:
        return near.exists
    seen = call.mask.view(torch.uint8)
    apart = [(seen > seen[..., index]).view(torch.uint8).amax(-2) for index in near.key.unbind(-1)]
    together = near.exists & (torch.stack(apart, dim=-1) == 0)
    # grouped queries share a key: it must be right for all of them
    if together.shape[1] not in (1, call.kv_heads):
        together = together.unflatten(1, (call.kv_heads, -1)).view(torch.uint8).amin(2).bool()
    return together


def kernel_weights(near: Neighbors, counts: Tensor, sigma: Tensor, edge: Edge) -> Tensor:
    """exp(-t^2 / (2 sigma^2)) over the neighbors that count, summing to 1: (..., M, T). At sigma 0
    the identity."""
    kernel = torch.exp(-near.squared_distance / (2 * sigma.square()).clamp(min=1e-12))
    weights = kernel * counts
    whole = weights if edge == "renormalize" else kernel * (counts | near.beyond)
    return weights / whole.sum(-1, keepdim=True)


def minus_squares(near: Neighbors) -> Tensor:
    """-t^2 between every two keys, (M, M), and -inf where one is no neighbor of the other."""
    keys = near.key.shape[0]
    distances = (
        -near.squared_distance.float()
        .expand_as(near.exists)
        .masked_fill(~near.exists, float("inf"))
    )
    out = torch.full((keys, keys), float("-inf"), dtype=torch.float32, device=near.key.device)
    # where there is none, `key` names any key, with -inf
    return out.scatter_reduce(1, near.key, distances, "amax")


def blur_all(k: Tensor, squares: Tensor, sigma: Tensor | float) -> Tensor:
    """Each key (B, H, M, D) as the weighted sum of its neighbors, where all of them count: the
    normalized Gaussian exp(-t^2 / (2 sigma^2)) is a softmax. `sigma` is a number, or one per head,
    (H, 1, 1)."""
    # which may be learned: its gradient must not meet the infinite distances
    if isinstance(sigma, Tensor):
        twice, far = (2 * sigma.square()).clamp(min=1e-12), squares.isinf()
        scores = (squares.masked_fill(far, 0.0) / twice).masked_fill(far, float("-inf"))
    else:
        scores = squares / max(2 * sigma * sigma, 1e-12)
    band = scores.softmax(-1).to(k.dtype)
    with torch.autocast(k.device.type, enabled=False):
        return _banded(k, band.reshape((1,) * (4 - band.ndim) + tuple(band.shape)))


def _banded(k: Tensor, band: Tensor) -> Tensor:
    """band (B or 1, H or 1, M, M) times the keys."""
    if band.shape[1] > 1:
        return band @ k
    batch, heads, keys, size = k.shape
    # (B, M, H D): one matrix for all heads
    merged = k.transpose(1, 2).flatten(2)
    return (
        torch.bmm(band[:, 0].expand(batch, -1, -1), merged)
        .view(batch, keys, heads, size)
        .transpose(1, 2)
    )


def apply_kernel(k: Tensor, weights: Tensor, near: Neighbors) -> Tensor:
    """Each key (B, H, M, D) becomes the weighted sum of its neighbors."""
    weights = weights.to(k.dtype)
    weights = weights.reshape((1,) * (4 - weights.ndim) + tuple(weights.shape))
    with torch.autocast(k.device.type, enabled=False):
        if k.shape[2] > DENSE_UP_TO:
            blurred = weights[..., :1] * k[:, :, near.key[:, 0]]
            for t in range(1, near.key.shape[1]):
                blurred = blurred + weights[..., t : t + 1] * k[:, :, near.key[:, t]]
            return blurred
        band = k.new_zeros(*weights.shape[:3], k.shape[2])
        return _banded(k, band.scatter_add(-1, near.key.expand_as(weights), weights))
