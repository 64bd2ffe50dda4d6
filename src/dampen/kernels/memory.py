"""How much of the N x M matrix one attention may hold at once on a GPU.

A GPU loses time with every small chunk, so there the free memory of the card decides. It is looked
up once per process and card: a checkpoint's recompute must cut the queries as its forward did, or
it would draw other masks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dampen._torch import constant_in_graphs

KEPT_SHARE = 1 / 64
"""Of the free memory, what one attention may keep for its backward before it is chunked."""
CHUNK_SHARE = 1 / 8
"""Of the free memory, what one chunk may take while it is computed."""
MASK_BYTES, MATRIX_BYTES = 3, 14
"""Bytes per score: a bool mask and the 16-bit one that SDPA makes of it; or scores, weights and
their gradients."""

_free: dict[int, int] = {}


def exceeds_memory(q: Tensor, keys: int, matrix: bool) -> bool:
    """Whether the queries of an attention are taken in chunks, each computed again in the backward.

    Args:
        q: (B, H, N, d), on a GPU.
        keys: M.
        matrix: the whole matrix of weights is built, not only a mask.
    """
    entries = q.shape[0] * q.shape[1] * q.shape[2] * keys
    return entries * (MATRIX_BYTES if matrix else MASK_BYTES) > KEPT_SHARE * free_bytes(q)


def rows_in_memory(q: Tensor, keys: int, matrix: bool) -> int:
    """How many queries a chunk holds.

    Args:
        q: (B, H, N, d), on a GPU.
        keys: M.
        matrix: as in `exceeds_memory`.
    """
    per_row = max(1, q.shape[0] * q.shape[1] * keys) * (MATRIX_BYTES if matrix else MASK_BYTES)
    return max(1, int(CHUNK_SHARE * free_bytes(q)) // per_row)


def free_bytes(q: Tensor) -> int:
    """The memory of a card that was free, or held by torch without use, when it was first asked.

    Args:
        q: a tensor on it.
    """
    found: int = _free_bytes(q.device.index or 0)
    return found


@constant_in_graphs
def _free_bytes(card: int) -> int:
    if card not in _free:
        unused = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
        _free[card] = torch.cuda.mem_get_info(card)[0] + unused
    return _free[card]
