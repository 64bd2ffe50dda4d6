"""Penalties that are summed when they are taken.

In a small model a step is calls more than numbers, and a penalty of each map is many small ones. Such a method may give
`penalize` a `Later`: what it would sum, and who sums it. What waits under one name is put together, and when penalties
are taken, one call makes the sums of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Parts = tuple[Any, ...]
Sum = Callable[[Sequence[Parts]], Sequence[Tensor]]
"""From the parts of several penalties to their values."""


class Later:
    """A penalty that is not summed yet. It never changes: what is added to it makes another."""

    requires_grad = True  # what has no gradient is summed at once

    def __init__(self, parts: Parts, sum_up: Sum) -> None:
        self.parts, self.sum_up = parts, sum_up

    def now(self) -> Tensor:
        """Its value, alone."""
        return self.sum_up([self.parts])[0]


Penalty = Tensor | Later


def add(a: Penalty, b: Penalty) -> Penalty:
    """a + b, where the device of a is."""
    if isinstance(a, Later) and isinstance(b, Later) and a.sum_up is b.sum_up:
        return Later(a.parts + b.parts, a.sum_up)
    x, y = now(a), now(b)
    return x + y.to(x.device)


def now(value: Penalty) -> Tensor:
    """Its value."""
    return value.now() if isinstance(value, Later) else value


def settle(terms: Mapping[str, Penalty]) -> dict[str, Tensor]:
    """The values of all, those that one function sums in one call.

    >>> import torch
    >>> together = lambda penalties: [torch.tensor(float(sum(parts))) for parts in penalties]
    >>> both = settle({"a": add(Later((1, 2), together), Later((3,), together)), "b": torch.tensor(4.0)})
    >>> {name: value.item() for name, value in both.items()}
    {'a': 6.0, 'b': 4.0}
    """
    found = dict(terms)
    for sum_up in {value.sum_up: None for value in terms.values() if isinstance(value, Later)}:
        waiting = {n: v for n, v in terms.items() if isinstance(v, Later) and v.sum_up is sum_up}
        found.update(zip(waiting, sum_up([v.parts for v in waiting.values()]), strict=True))
    return found  # type: ignore[return-value]
