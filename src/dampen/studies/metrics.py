"""Metrics per task: `update(logits, target, valid)` per batch, `compute()` at the end.

>>> import torch
>>> from dampen.studies.data import load
>>> digits = load("digits")
>>> metrics = make_metrics(digits, digits.test)
>>> batch = digits.test.batch([0, 1, 2])
>>> metrics.update(torch.zeros(3, 10), batch["target"])
>>> sorted(metrics.compute())
['accuracy', 'brier', 'ece', 'macro_f1', 'nll']

A package adds metrics beside a task's own by the entry point `dampen.metrics`:

    class TopFive(dampen.studies.metrics.Metrics):
        description = Metric("top_five", "top-5 accuracy", percent=True, margin=0.5)  # in tables
        tasks = ("image",)  # where it applies

        def update(self, logits, target, valid=None, index=None): ...
        def compute(self): return {"top_five": ...}
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.extensions import Registry, from_plugins
from dampen.names import nearest
from dampen.studies.data.dataset import Dataset, Split
from dampen.studies.metric import direction

__all__ = [
    "TASKS",
    "ClassificationMetrics",
    "Metrics",
    "Task",
    "TextMetrics",
    "judged_by",
    "make_metrics",
    "not_measured",
    "primary",
    "require_batches",
    "selection",
]

BINS = 15
"""Of the calibration error."""


class Metrics(ABC):
    """Accumulates over batches, then computes numbers by name. Make a new one for each pass.

    Nothing is exchanged between processes: a distributed run gathers logits before `update`, so
    that every rank may compute, or one alone.
    """

    @abstractmethod
    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """Count one batch.

        Args:
            logits: the model's output.
            target: what it should be.
            valid: positions where it is False do not count.
            index: which examples these are.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The metrics of all batches so far."""

    def finish(self, model: nn.Module) -> None:  # noqa: B027 - nothing for most tasks
        """Measure what needs the model itself, after the last batch.

        Args:
            model: the trained model.
        """


@dataclass(frozen=True)
class Task:
    """A kind of problem: how it is measured and, unless by cross-entropy, how it is trained.

    Attributes:
        metrics: makes the accumulator for one pass over a split: `metrics(dataset, split)`.
        primary: the test metric a task is judged by.
        gives: the test metrics of the task; `interval_map@0.5` and the like are variants of one.
        selection: the validation metric that selects the epoch, where it is not the primary one.
        preset: model and training options of `dampen compare` for datasets without their own.
        classes: each example has one class, so probabilities can be averaged.
        loss: the loss of `(output, target)`, for datasets with `loss="task"`.
        rows: the model's output as one tensor with a row per example, `rows(output, examples)`:
            this is what metrics read and processes exchange.
        counted: how many items of a batch's target the loss is a mean over, where examples have
            different numbers.
        mirrors: flips may be used, because the datasets define how their targets move.
        record: what is stored with the result of a run beside its metrics,
            `record(model, dataset)`.
        saved_model: builds the task's model from a folder that Hugging Face saved,
            `saved_model(folder, arguments, from_data)`.
        missing: which package is missing to measure the task, in words; empty where none is.
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
    """Raise where nothing has been counted yet.

    Args:
        count: of examples.
    """
    if not count:
        raise RuntimeError(
            "No example has been counted yet: call update() "
            "with at least one batch before compute()."
        )


class ClassificationMetrics(Metrics):
    """`accuracy`, `macro_f1`, `nll` (mean negative log-likelihood, nats), `brier` and `ece`.

    `brier` is the mean squared distance between the predicted and the one-hot distribution. `ece`
    is the expected calibration error (arXiv 1706.04599) in 15 bins of equal width. Soft targets
    (mixup) count as their largest class.

    Args:
        classes: how many there are.
    """

    def __init__(self, classes: int):
        declare_torchvision_operators()
        from torchmetrics import MeanMetric
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassCalibrationError,
            MulticlassF1Score,
        )

        self.classes = classes
        self.accuracy = MulticlassAccuracy(classes, average="micro", sync_on_compute=False)
        self.f1 = MulticlassF1Score(classes, average="macro", sync_on_compute=False)
        self.calibration = MulticlassCalibrationError(
            classes, n_bins=BINS, norm="l1", sync_on_compute=False
        )
        self.nll = MeanMetric(sync_on_compute=False)
        self.brier = MeanMetric(sync_on_compute=False)
        self._count = 0

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.classes:
            raise ValueError(
                f"Logits must be (batch, {self.classes}): got shape {tuple(logits.shape)}."
            )
        logits, target = logits.detach().double().cpu(), target.detach().cpu()
        target = target.argmax(dim=-1) if target.is_floating_point() else target
        if valid is not None:
            logits, target = logits[valid.cpu()], target[valid.cpu()]
        if not len(target):
            return
        self._count += len(target)
        logs = logits.log_softmax(dim=-1)
        probability = logs.exp()
        one_hot = torch.nn.functional.one_hot(target, self.classes)
        # torchmetrics puts a confidence of exactly 1.0 into a bin of its own.
        below_one = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()
        self.accuracy.update(logits, target)
        self.f1.update(logits, target)
        self.calibration.update(probability.float().clamp(max=below_one), target)
        self.nll.update(-logs.gather(1, target[:, None]).float())
        self.brier.update((probability - one_hot).square().sum(dim=-1).float())

    def compute(self) -> dict[str, float]:
        require_batches(self._count)
        return {
            "accuracy": float(self.accuracy.compute()),
            "macro_f1": float(self.f1.compute()),
            "nll": float(self.nll.compute()),
            "ece": float(self.calibration.compute()),
            "brier": float(self.brier.compute()),
        }


class TextMetrics(ClassificationMetrics):
    """The metrics of `ClassificationMetrics`, and `mcc` (Matthews correlation)."""

    def __init__(self, classes: int):
        super().__init__(classes)
        from torchmetrics.classification import MulticlassMatthewsCorrCoef

        self.mcc = MulticlassMatthewsCorrCoef(classes, sync_on_compute=False)

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        super().update(logits, target, valid, index)
        kept = torch.ones(len(target), dtype=torch.bool) if valid is None else valid.cpu()
        answer = (target.argmax(dim=-1) if target.is_floating_point() else target).cpu()[kept]
        guess = logits.detach().cpu().argmax(dim=-1)[kept]
        if len(answer):
            self.mcc.update(guess, answer)

    def compute(self) -> dict[str, float]:
        return super().compute() | {"mcc": float(self.mcc.compute())}


class CombinedMetrics(Metrics):
    """A task's own metrics and those of plug-ins, as one accumulator.

    Args:
        metrics: the accumulators; no two may give a metric of the same name.
    """

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self.metrics = metrics

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        for metrics in self.metrics:
            metrics.update(logits, target, valid, index)

    def compute(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metrics in self.metrics:
            more = metrics.compute()
            if twice := sorted(set(more) & set(found)):
                raise ValueError(
                    f"{type(metrics).__name__} gives {', '.join(twice)}, which is measured already."
                )
            found |= more
        return found

    def finish(self, model: nn.Module) -> None:
        for metrics in self.metrics:
            metrics.finish(model)


def _classification(dataset: Dataset, split: Split) -> Metrics:
    return ClassificationMetrics(len(dataset.classes))


def _text(dataset: Dataset, split: Split) -> Metrics:
    return TextMetrics(len(dataset.classes))


_CLASSES = ("accuracy", "macro_f1", "nll", "ece", "brier")
_SEQUENCES: dict[str, Any] = {
    "model": {"name": "encoder", "width": 96, "depth": 2, "heads": 4, "mlp": 192},
    "train": {"epochs": 10, "batch_size": 32, "lr": 2e-3, "warmup": 1.0},
}
_IMAGES: dict[str, Any] = {  # of any size that patches of 4 divide
    "model": {"name": "vit", "patch_size": 4, "width": 96, "depth": 4, "heads": 6, "mlp": 192},
    "train": {"epochs": 20, "lr": 1e-3, "warmup": 2.0},
}
_TEXTS: dict[str, Any] = {
    "model": {"name": "text", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
    "train": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "warmup": 1.0, "clip": 1.0},
}
_SEQUENCE_TASK = Task(_classification, "accuracy", _CLASSES, preset=_SEQUENCES, classes=True)
TASKS: Registry[Task] = Registry(
    "dampen.tasks",
    {
        "image": Task(_classification, "accuracy", _CLASSES, preset=_IMAGES, classes=True),
        "audio": _SEQUENCE_TASK,
        "text": Task(_text, "accuracy", (*_CLASSES, "mcc"), preset=_TEXTS, classes=True),
        "classification": _SEQUENCE_TASK,
    },
)
"""The tasks by name: the built-in ones, and those that packages and plug-ins add."""


def primary(task: str) -> tuple[str, str]:
    """The metric a task is judged by, and whether more ("max") or less ("min") of it is better.

    Args:
        task: its name.
    """
    name = TASKS[task].primary
    return name, direction(name)


def selection(task: str) -> tuple[str, str]:
    """The metric that selects the best epoch: the primary one, unless that is too expensive.

    Args:
        task: its name.
    """
    name = TASKS[task].selection or TASKS[task].primary
    return name, direction(name)


def not_measured(metric: str, task: str) -> str:
    """What is wrong with judging a task by this metric; empty where nothing is.

    Args:
        metric: its name.
        task: the task's name.

    >>> not_measured("acuracy", "image")
    "'acuracy' is not measured here; did you mean 'accuracy'?"
    """
    others = [
        m.description.name for m in from_plugins("dampen.metrics").values() if task in m.tasks
    ]
    known = [*TASKS[task].gives, *others]
    if metric.startswith("training_variance"):  # measured with train.variance_every
        return ""
    if metric.partition("@")[0] in known:
        return ""
    return f"{metric!r} is not measured here{nearest(metric, known)}"


def judged_by(task: str) -> dict[str, Any]:
    """For a result: the metrics that judge the test and select the epoch, with their direction.

    Args:
        task: its name.
    """
    return {"task": task, "primary": list(primary(task)), "selection": list(selection(task))}


def make_metrics(dataset: Dataset, split: Split) -> Metrics:
    """A fresh accumulator for one pass over a split of a dataset.

    For each batch call `update(logits, batch["target"], batch.get("valid"), batch["index"])`. After
    the last call `finish(model)` where the primary metric is wanted (it decodes translations), then
    `compute()`.

    Args:
        dataset: the dataset.
        split: which of its splits.
    """
    metrics = TASKS[dataset.task].metrics(dataset, split)
    added = from_plugins("dampen.metrics").values()
    others = [make() for make in added if dataset.task in make.tasks]
    return CombinedMetrics([metrics, *others]) if others else metrics
