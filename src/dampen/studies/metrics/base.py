"""What the metrics of all tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from dampen.studies.data.dataset import Dataset, Split


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


@dataclass(frozen=True)
class Task:
    """A kind of problem: how it is measured and, where cross-entropy does not fit, how it is trained.

    Args:
        metrics: makes the accumulator for one pass over a split: `metrics(dataset, split)`.
        primary: the test metric a task is judged by.
        gives: the test metrics of the task; `interval_map@0.5` and the like are variants of one.
        selection: the validation metric that chooses the epoch, where it is not the primary one.
        preset: model and training options of `dampen compare` for data sets that have none of their own.
        classes: each example has one class, so labels can be made wrong and probabilities averaged.
        loss: the loss of `(output, target)`, for data sets with `loss="task"`.
        rows: the model's output as one tensor with a row per example, `rows(output, examples)`: this is what metrics
            read and processes exchange.
        counted: how many things of a batch's target the loss is a mean over, where examples have different numbers.
        mirrors: flips may be used, because the data sets say how their targets move.
        record: what is kept with the result of a run beside its metrics, `record(model, dataset)`.
        saved_model: builds the task's model from a folder that Hugging Face saved, `saved_model(folder, own,
            from_data)`.
        missing: what is not installed here and needed to measure the task, in words; empty where nothing is.
    """

    metrics: Callable[[Dataset, Split], Metrics]
    primary: str
    gives: tuple[str, ...]
    selection: str = ""
    preset: dict[str, Any] = field(default_factory=dict)
    classes: bool = False
    loss: Callable[[Any, Tensor], Tensor] | None = None
    rows: Callable[[Any, int], Tensor] | None = None
    counted: Callable[[Tensor], Tensor] | None = None
    mirrors: bool = False
    record: Callable[[nn.Module, Dataset], dict[str, Any]] | None = None
    saved_model: Callable[[str, dict[str, Any], dict[str, Any]], nn.Module] | None = None
    missing: Callable[[], str] = str


def require_batches(count: float) -> None:
    if not count:
        raise RuntimeError("No example has been counted yet: call update() with at least one batch before compute().")
