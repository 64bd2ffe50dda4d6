"""The papers' formulations, written plainly: no speed, no cleverness. They are the oracles of the tests and the
other side of the benchmarks.

Shapes as in dampen.regularizer: q (B, H, N, D), k and v (B, H, M, D). Masks are given, not drawn, so that values and
gradients can be compared.
"""

import itertools
import math

import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q k^T / sqrt(D)."""
    return q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)


def drop_key(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Algorithm 1 of DropKey (arXiv 2208.02646): hidden scores become -inf (the paper adds -1e12) before the
    softmax."""
    return scores(q, k).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def drop_attention(
    q: Tensor, k: Tensor, v: Tensor, dropped: Tensor, rate: float | None = None
) -> Tensor:
    """DropAttention (arXiv 1907.11065): zero weights after the softmax, then divide by the kept sum, or by 1 - rate."""
    a = scores(q, k).softmax(-1) * ~dropped
    a = a / a.sum(-1, keepdim=True) if rate is None else a / (1 - rate)
    return a @ v


def block_hidden(seeds: Tensor, window: int) -> Tensor:
    """DropKey's block structure, by loops: each seed of a (rows, columns) grid hides the window around it."""
    rows, columns = seeds.shape
    hidden = torch.zeros_like(seeds)
    low, high = -((window - 1) // 2), window // 2
    for i, j in itertools.product(range(rows), range(columns)):
        if seeds[i, j]:
            for di, dj in itertools.product(range(low, high + 1), repeat=2):
                if 0 <= i + di < rows and 0 <= j + dj < columns:
                    hidden[i + di, j + dj] = True
    return hidden


def cross_hidden(seeds: Tensor, window: int) -> Tensor:
    """DropKey's cross structure, by loops: each seed hides `window` rows and `window` columns through it."""
    rows, columns = seeds.shape
    hidden = torch.zeros_like(seeds)
    low, high = -((window - 1) // 2), window // 2
    for i, j in itertools.product(range(rows), range(columns)):
        if seeds[i, j]:
            for d in range(low, high + 1):
                if 0 <= i + d < rows:
                    hidden[i + d, :] = True
                if 0 <= j + d < columns:
                    hidden[:, j + d] = True
    return hidden


def realized_rate(rate: float, keys: int) -> float:
    """The probability that a key is hidden when an emptied row gets one back, by enumeration of all masks."""
    total = 0.0
    for mask in itertools.product((False, True), repeat=keys):
        p = math.prod(rate if hidden else 1 - rate for hidden in mask)
        total += p * ((keys - 1) / keys if all(mask) else float(mask[0]))
    return total


def feed_forward_dropout(
    x: Tensor, w1: Tensor, w2: Tensor, m1: Tensor, m2: Tensor, rate: float
) -> Tensor:
    """Dropout on the input of both maps of a feed-forward with GELU; m1 and m2 are the masks of what is kept."""
    h = torch.nn.functional.gelu((x * m1 / (1 - rate)) @ w1.t())
    return (h * m2 / (1 - rate)) @ w2.t()
