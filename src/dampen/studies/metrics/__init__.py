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

from dampen.extensions import from_packages
from dampen.names import nearest
from dampen.studies.data.dataset import Dataset, Split
from dampen.studies.metrics.base import Metrics
from dampen.studies.metrics.classification import ClassificationMetrics
from dampen.studies.metrics.detection import DetectionMetrics
from dampen.studies.metrics.language import LanguageMetrics
from dampen.studies.metrics.objects import ObjectMetrics
from dampen.studies.metrics.outside import with_others
from dampen.studies.metrics.reconstruction import ReconstructionMetrics
from dampen.studies.metrics.text import TextMetrics
from dampen.studies.metrics.translation import TranslationMetrics
from dampen.studies.records.metric import direction

__all__ = [
    "GIVES",
    "PRIMARY",
    "SELECTION",
    "ClassificationMetrics",
    "DetectionMetrics",
    "LanguageMetrics",
    "Metrics",
    "ObjectMetrics",
    "ReconstructionMetrics",
    "TextMetrics",
    "TranslationMetrics",
    "judged_by",
    "make_metrics",
    "not_measured",
]

_JUDGES = {
    "image": "accuracy",
    "text": "accuracy",
    "classification": "accuracy",
    "audio": "accuracy",
    "detection": "frame_map",
    "objects": "ap",
    "translation": "bleu",
    "language": "bpc",
    "reconstruction": "reconstruction",
}

PRIMARY: dict[str, tuple[str, str]] = {task: (name, direction(name)) for task, name in _JUDGES.items()}
"""The metric a task is judged by, and whether more or less of it is better."""

SELECTION: dict[str, tuple[str, str]] = PRIMARY | {"translation": ("nll", direction("nll"))}
"""The metric that chooses the best epoch: the primary one, except where that needs a search (BLEU)."""


_CLASSES = ("accuracy", "macro_f1", "nll", "ece", "brier")

GIVES: dict[str, tuple[str, ...]] = {
    "image": _CLASSES,
    "text": (*_CLASSES, "mcc"),
    "classification": _CLASSES,
    "audio": _CLASSES,
    "detection": ("frame_map", "nll", "interval_map"),
    "objects": ("ap", "ap50", "ap75"),
    "translation": ("bleu", "chrf", "nll", "perplexity", "accuracy"),
    "language": ("bpc", "nll", "perplexity", "accuracy"),
    "reconstruction": ("reconstruction",),
}
"""The test metrics of a task; `interval_map@0.5` and the like are variants of one."""


def not_measured(metric: str, task: str) -> str:
    """What is wrong with judging a task by this metric, or nothing.

    >>> not_measured("acuracy", "image")
    "'acuracy' is not measured here; did you mean 'accuracy'?"
    """
    others = [m.description.name for m in from_packages("dampen.metrics").values() if task in m.tasks]
    known = [*GIVES[task], *others]
    if metric.partition("@")[0] in known or metric.startswith("training_variance"):  # train.variance_every measures it
        return ""
    return f"{metric!r} is not measured here{nearest(metric, known)}"


def judged_by(task: str) -> dict[str, Any]:
    """The metric that judges the test and the one that chose the epoch, each with 'max' or 'min'."""
    return {"task": task, "primary": list(PRIMARY[task]), "selection": list(SELECTION[task])}


def make_metrics(dataset: Dataset, split: Split) -> Metrics:
    """A fresh accumulator for one pass over a split of a data set.

    Then for each batch `metrics.update(logits, batch["target"], batch.get("valid"), batch["index"])`; after the last,
    where the primary metric is wanted, `metrics.finish(model)` (it decodes translations, and does nothing for
    other tasks); then `metrics.compute()`.
    """
    return with_others(_own_metrics(dataset, split), dataset.task)


def _own_metrics(dataset: Dataset, split: Split) -> Metrics:
    if dataset.task == "text":
        return TextMetrics(len(dataset.classes))
    if dataset.task in ("image", "audio", "classification"):
        return ClassificationMetrics(len(dataset.classes))
    if dataset.task == "detection":
        return DetectionMetrics(split, len(dataset.classes), background=dataset.extras["background"])
    if dataset.task == "objects":
        return ObjectMetrics(split, dataset.classes)
    if dataset.task == "reconstruction":
        return ReconstructionMetrics()
    if dataset.task == "translation":
        return TranslationMetrics(split, dataset.extras["target_bpe"], dataset.extras["max_tokens"])
    return LanguageMetrics(dataset.extras["characters"])
