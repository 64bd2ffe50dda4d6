"""Metrics of other packages, computed beside a task's own: entry point `dampen.metrics`, a class with three things.

class TopFive(dampen.studies.metrics.Metrics):
    description = Metric("top_five", "top-5 accuracy", percent=True, margin=0.5)   # how tables show it
    tasks = ("image",)                                                             # where it applies
    def update(self, logits, target, valid=None, index=None): ...
    def compute(self): return {"top_five": ...}
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dampen.extensions import from_plugins
from dampen.studies.metrics.base import Metrics


class Together(Metrics):
    """A task's own metrics and others beside them, as one."""

    def __init__(self, own: Metrics, others: Sequence[Metrics]) -> None:
        self.own, self.others = own, list(others)

    def update(self, logits: Tensor, target: Tensor, valid: Tensor | None = None, index: Tensor | None = None) -> None:
        for metrics in (self.own, *self.others):
            metrics.update(logits, target, valid, index)

    def compute(self) -> dict[str, float]:
        found = self.own.compute()
        for metrics in self.others:
            more = metrics.compute()
            if twice := sorted(set(more) & set(found)):
                raise ValueError(f"{type(metrics).__name__} gives {', '.join(twice)}, which is measured already.")
            found |= more
        return found

    def finish(self, model: nn.Module) -> None:
        for metrics in (self.own, *self.others):
            metrics.finish(model)


def with_others(own: Metrics, task: str) -> Metrics:
    """The task's own metrics, with those of installed packages that apply to it."""
    others = [make() for make in from_plugins("dampen.metrics").values() if task in make.tasks]
    return Together(own, others) if others else own
