"""The tasks of the papers that dampen itself does not have: detection in time, objects,
translation, reconstruction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dampen.studies.plugins import Dataset, Metrics, Split, Task
from reproductions.data.parallel import PRESET as TRANSLATION
from reproductions.data.voc import PRESET as OBJECTS
from reproductions.metrics.detected import detected
from reproductions.metrics.detection import DetectionMetrics
from reproductions.metrics.language import LanguageMetrics
from reproductions.metrics.objects import ObjectMetrics, missing_packages
from reproductions.metrics.reconstruction import ReconstructionMetrics
from reproductions.metrics.translation import TranslationMetrics
from reproductions.models.saved_detector import saved_detector
from reproductions.models.set_loss import set_loss


def _frames(dataset: Dataset, split: Split) -> Metrics:
    return DetectionMetrics(split, len(dataset.classes), background=dataset.extras["background"])


def _objects(dataset: Dataset, split: Split) -> Metrics:
    return ObjectMetrics(split, dataset.classes)


def _translation(dataset: Dataset, split: Split) -> Metrics:
    return TranslationMetrics(split, dataset.extras["target_bpe"], dataset.extras["max_tokens"])


def _reconstruction(dataset: Dataset, split: Split) -> Metrics:
    return ReconstructionMetrics()


def _count_objects(target: Tensor) -> Tensor:
    return (target[..., 0] >= 0).sum()


def _detections(output: Any, examples: int) -> Tensor:
    return torch.cat([output.logits, output.boxes], dim=-1)


def _error_per_image(output: Any, examples: int) -> Tensor:
    """The error of each image: the mean of those that were evaluated together."""
    error: Tensor = output.loss.expand(examples)
    return error


def _own_loss(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _drawn(model: nn.Module, dataset: Dataset) -> dict[str, Any]:
    split: Any = dataset.test  # an ObjectSplit, as every set of this task has
    return {"detections": detected(model, split, dataset.classes)}


def _language(dataset: Dataset, split: Split) -> Metrics:
    return LanguageMetrics(dataset.extras["characters"])


LANGUAGE = Task(
    _language,
    "bpc",
    ("bpc", "nll", "perplexity", "accuracy"),
    preset={
        "model": {"name": "language", "width": 128, "depth": 3, "heads": 4, "mlp": 256},
        "train": {"epochs": 3, "batch_size": 32, "lr": 2e-3, "warmup": 0.2, "clip": 1.0},
    },
)
DETECTION = Task(
    _frames,
    "frame_map",
    ("frame_map", "nll", "interval_map"),
    preset={
        "model": {"name": "encoder", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
        "train": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "warmup": 1.0},
    },
)
OBJECT_DETECTION = Task(
    _objects,
    "ap",
    ("ap", "ap50", "ap75"),
    preset={key: OBJECTS[key] for key in ("model", "train")},
    loss=set_loss,
    rows=_detections,
    counted=_count_objects,
    mirrors=True,
    record=_drawn,
    saved_model=saved_detector,
    missing=missing_packages,
)
TRANSLATE = Task(
    _translation,
    "bleu",
    ("bleu", "chrf", "nll", "perplexity", "accuracy"),
    selection="nll",  # BLEU needs a search
    preset={key: TRANSLATION[key] for key in ("model", "train")},
)
RECONSTRUCTION = Task(
    _reconstruction, "reconstruction", ("reconstruction",), loss=_own_loss, rows=_error_per_image
)
