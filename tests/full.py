"""What `make full` adds to `make test`: DAMPEN_FULL=1 runs every combination of a product of parameters."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

FULL = bool(os.environ.get("DAMPEN_FULL"))


def product(first: Iterable[Any], *others: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination in `make full`. Otherwise each value of the first with the last of the others, and each value
    of the others once."""
    axes = [list(first), *(list(o) for o in others)]
    if FULL:
        return list(itertools.product(*axes))
    found = [(value, *(o[-1] for o in axes[1:])) for value in axes[0]]
    for i, axis in enumerate(axes[1:], 1):
        found += [tuple(v if j == i else a[-1] for j, a in enumerate(axes)) for v in axis[:-1]]
    return found
