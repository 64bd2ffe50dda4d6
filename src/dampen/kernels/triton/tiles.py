"""What a kernel is compiled for: what it draws, and how many queries and keys a tile holds, by
kernel, head size and size of a number.

Chosen ahead of time, from registers, spills and shared memory of the compiled kernels
(`python -m benchmarks.gpu_compile`); no GPU was timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING, HIDE_KEYS, DROP_WEIGHTS, HIDE_TOP = range(4)
"""What is drawn; `DRAWS` of the kernels."""
BY_NONE, BY_KEY, BY_QUERY, BY_BITS = range(4)
"""How keys are hidden from outside; `MASKED` of the kernels."""


class Form(NamedTuple):
    """A kind of attention for which the kernels are compiled."""

    dtype: torch.dtype
    size: int
    draws: int
    causal: bool = False
    masked: int = BY_NONE
    biased: bool = False

    @property
    def guards(self) -> tuple[bool, ...]:
        """Whether a query that loses all its keys is looked for: may differ between calls."""
        if self.draws not in (HIDE_KEYS, HIDE_TOP):
            return (False,)
        always = self.causal or self.masked != BY_NONE or self.draws == HIDE_TOP
        return (True,) if always else (False, True)

    def __str__(self) -> str:
        tf32 = self.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
        words = [
            str(self.dtype).removeprefix("torch."),
            "tf32" if tf32 else "",
            f"D{self.size}",
            ("plain", "hide keys", "drop weights", "hide top")[self.draws],
            "causal" if self.causal else "",
            ("", "mask by key", "mask by query", "bits")[self.masked],
            "bias" if self.biased else "",
        ]
        return " ".join(filter(None, words))


class Tile(NamedTuple):
    """Queries, keys, warps and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


LARGEST_HEAD = 128
SMALLEST_HEAD = 16


def padded(size: int) -> int:
    """The power of two that holds a head of `size` channels.

    Args:
        size: channels of a head.

    >>> padded(72), padded(16)
    (128, 16)
    """
    return max(SMALLEST_HEAD, 1 << (size - 1).bit_length())


_TILES = {
    # (kernel, head size above 64, products of whole warpgroups)
    ("attend", False, False): Tile(128, 64, 8, 2),
    ("attend", False, True): Tile(128, 64, 8, 2),
    ("attend", True, False): Tile(128, 64, 8, 2),
    ("attend", True, True): Tile(128, 64, 8, 2),
    ("to_queries", False, False): Tile(128, 32, 8, 2),
    ("to_queries", False, True): Tile(64, 64, 4, 2),
    ("to_queries", True, False): Tile(64, 64, 8, 2),
    ("to_queries", True, True): Tile(64, 64, 4, 2),
    ("to_keys", False, False): Tile(64, 32, 4, 1),
    ("to_keys", False, True): Tile(64, 64, 4, 2),
    ("to_keys", True, False): Tile(64, 64, 8, 1),
    ("to_keys", True, True): Tile(64, 32, 4, 1),
}
_HEAVY = {
    # instead of these, where mask, bias, thresholds or the guard take registers
    ("to_queries", False, True): Tile(64, 32, 4, 1),
    ("to_queries", False, False): Tile(32, 32, 4, 1),
    ("to_keys", False, False): Tile(32, 32, 4, 1),
    ("to_keys", False, True): Tile(64, 32, 4, 1),
}
WARPGROUPS = (9, 10)
"""Generations that multiply with whole warpgroups and keep sums out of the registers."""
CONSUMER_BLACKWELL = 12
"""The generation of sm_120, where other tiles spill than on the cards before it."""


def tile_of(
    kernel: str,
    size: int,
    itemsize: int,
    generation: int,
    draws: int,
    guard: bool,
    masked: int,
    biased: bool,
) -> Tile:
    """The tile of one kernel.

    Args:
        kernel: attend, to_queries or to_keys.
        size: channels of a head.
        itemsize: bytes of a number.
        generation: the first number of the compute capability; 0 where there is none.
        draws: what is drawn.
        guard: a query that loses all its keys gets one back.
        masked: how keys are hidden from outside.
        biased: something is added to the scores.
    """
    large, warpgroups = padded(size) > 64, generation in WARPGROUPS
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if large or kernel == "to_keys" else Tile(64, 32, 4, 1)
    plain = not biased and masked != BY_QUERY
    if kernel == "attend" and padded(size) <= 32:
        return Tile(64, 64, 4, 2) if plain and not guard else Tile(64, 32, 4, 1)
    if generation == CONSUMER_BLACKWELL and not large:
        if kernel == "attend" and guard and biased and masked == BY_QUERY:
            return Tile(32, 64, 4, 2)
        if kernel == "to_keys" and draws in (DROP_WEIGHTS, HIDE_TOP):
            return Tile(64, 32, 8, 1)
    if kernel == "attend" and guard and plain and warpgroups and not large:
        return Tile(128, 32, 8, 2)
    heavy = guard or not plain or draws in (DROP_WEIGHTS, HIDE_TOP)
    heavy |= masked == BY_BITS and kernel == "to_keys" and not warpgroups
    key = (kernel, large, warpgroups)
    return _HEAVY.get(key, _TILES[key]) if heavy else _TILES[key]
