"""What the metrics of all tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Metrics(ABC):
    """Accumulates over batches, then computes numbers by name. Make a new one for each pass.

    Nothing is exchanged between processes: a distributed run gathers logits before `update`, so that every rank may
    compute or one alone.
    """

    @abstractmethod
    def update(self, logits: Tensor, target: Tensor, valid: Tensor | None = None, index: Tensor | None = None) -> None:
        """Take in one batch; positions where `valid` is False do not count. `index` says which examples these are."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics of all batches so far."""

    def finish(self, model: nn.Module) -> None:  # noqa: B027
        """Measure what needs the model itself, after the last batch; nothing for most tasks."""


def require_batches(count: float) -> None:
    if not count:
        raise RuntimeError("No example has been counted yet: call update() with at least one batch before compute().")
