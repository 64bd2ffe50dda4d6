"""Per task, an accumulator of metrics: `update(logits, target, valid)` per batch, `compute()` at the end.

>>> import torch
>>> from dampen.studies.data import load
>>> digits = load("digits")
>>> metrics = make_metrics(digits, digits.test)
>>> batch = digits.test.batch([0, 1, 2])
>>> metrics.update(torch.zeros(3, 10), batch["target"])
>>> sorted(metrics.compute())
['accuracy', 'brier', 'ece', 'macro_f1', 'nll']
"""

from __future__ import annotations

from typing import Any

from dampen.extensions import Registry, from_plugins
from dampen.names import nearest
from dampen.studies.data.dataset import Dataset, Split
from dampen.studies.metric import direction
from dampen.studies.metrics import Metrics, Task
from dampen.studies.metrics.classification import ClassificationMetrics
from dampen.studies.metrics.language import LanguageMetrics
from dampen.studies.metrics import with_others
from dampen.studies.metrics.classification import TextMetrics

__all__ = [
    "TASKS",
    "ClassificationMetrics",
    "LanguageMetrics",
    "Metrics",
    "Task",
    "TextMetrics",
    "judged_by",
    "make_metrics",
    "not_measured",
    "primary",
    "selection",
]

_CLASSES = ("accuracy", "macro_f1", "nll", "ece", "brier")


def _classification(dataset: Dataset, split: Split) -> Metrics:
    return ClassificationMetrics(len(dataset.classes))


def _text(dataset: Dataset, split: Split) -> Metrics:
    return TextMetrics(len(dataset.classes))


def _language(dataset: Dataset, split: Split) -> Metrics:
    return LanguageMetrics(dataset.extras["characters"])


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
_RUNNING_TEXT: dict[str, Any] = {
    "model": {"name": "language", "width": 128, "depth": 3, "heads": 4, "mlp": 256},
    "train": {"epochs": 3, "batch_size": 32, "lr": 2e-3, "warmup": 0.2, "clip": 1.0},
}
TASKS: Registry[Task] = Registry(
    "dampen.tasks",
    {
        "image": Task(_classification, "accuracy", _CLASSES, preset=_IMAGES, classes=True),
        "audio": Task(_classification, "accuracy", _CLASSES, preset=_SEQUENCES, classes=True),
        "text": Task(_text, "accuracy", (*_CLASSES, "mcc"), preset=_TEXTS, classes=True),
        "classification": Task(_classification, "accuracy", _CLASSES, preset=_SEQUENCES, classes=True),
        "language": Task(_language, "bpc", ("bpc", "nll", "perplexity", "accuracy"), preset=_RUNNING_TEXT),
    },
)
"""The kinds of problems by name: dampen's own, and those that packages and plug-ins add."""


def primary(task: str) -> tuple[str, str]:
    """The metric a task is judged by, and whether more ("max") or less ("min") of it is better."""
    name = TASKS[task].primary
    return name, direction(name)


def selection(task: str) -> tuple[str, str]:
    """The metric that chooses the best epoch: the primary one, except where that needs a search (BLEU)."""
    name = TASKS[task].selection or TASKS[task].primary
    return name, direction(name)


def not_measured(metric: str, task: str) -> str:
    """What is wrong with judging a task by this metric, or nothing.

    >>> not_measured("acuracy", "image")
    "'acuracy' is not measured here; did you mean 'accuracy'?"
    """
    others = [m.description.name for m in from_plugins("dampen.metrics").values() if task in m.tasks]
    known = [*TASKS[task].gives, *others]
    if metric.partition("@")[0] in known or metric.startswith("training_variance"):  # train.variance_every measures it
        return ""
    return f"{metric!r} is not measured here{nearest(metric, known)}"


def judged_by(task: str) -> dict[str, Any]:
    """The metric that judges the test and the one that chose the epoch, each with 'max' or 'min'."""
    return {"task": task, "primary": list(primary(task)), "selection": list(selection(task))}


def make_metrics(dataset: Dataset, split: Split) -> Metrics:
    """A fresh accumulator for one pass over a split of a data set.

    Then for each batch `metrics.update(logits, batch["target"], batch.get("valid"), batch["index"])`; after the last,
    where the primary metric is wanted, `metrics.finish(model)` (it decodes translations, and does nothing for
    other tasks); then `metrics.compute()`.
    """
    return with_others(TASKS[dataset.task].metrics(dataset, split), dataset.task)
