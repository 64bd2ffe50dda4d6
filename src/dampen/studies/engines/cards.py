"""GPUs for the workers of one machine: each worker sees its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What a process sees of the cards; ROCm heeds it too."""


def visible_gpus() -> list[str]:
    """The cards that this process may use, as `CUDA_VISIBLE_DEVICES` names them. Counting them does
    not initialize CUDA."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return []
    named = os.environ.get(VISIBLE)
    count = torch.cuda.device_count()
    if named is None:
        return [str(i) for i in range(count)]
    return [card.strip() for card in named.split(",") if card.strip()][:count]


def places(cards: Sequence[str], devices: int, per_gpu: int) -> list[str]:
    """Where workers run: for each the cards that it sees.

    Args:
        cards: of this machine.
        devices: how many a run trains on.
        per_gpu: workers that share a card; runs on several devices share none.

    >>> places(["0", "1"], 1, 2), places(["0", "1", "2"], 2, 1)
    (['0', '1', '0', '1'], ['0,1'])
    """
    if devices > 1:
        whole = len(cards) // devices * devices
        return [",".join(cards[i : i + devices]) for i in range(0, whole, devices)]
    return list(cards) * per_gpu


def least_used(places: Sequence[str], used: Iterable[str]) -> str:
    """The place with the fewest workers.

    Args:
        places: all of them.
        used: those of the workers that run now.

    >>> least_used(["0", "1"], ["0"])
    '1'
    """
    taken = Counter(used)
    return min(dict.fromkeys(places), key=lambda place: taken[place])
