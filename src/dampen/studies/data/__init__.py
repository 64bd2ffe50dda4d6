"""Datasets for comparisons, read into memory and split by the papers' protocol.

>>> digits = load("digits")
>>> batch = digits.train.batch([0, 1, 2])
>>> batch["inputs"][0].shape, batch["target"].shape, digits.model_args
(torch.Size([3, 1, 8, 8]), torch.Size([3]), {'image_size': 8, 'channels': 1, 'classes': 10})
"""

from __future__ import annotations

from dampen.studies.data.augmentation import AUGMENTATIONS, Augment, augment
from dampen.studies.data.dataset import (
    Batch,
    DamagedData,
    Dataset,
    DataSpec,
    IncompleteData,
    MissingData,
    Normalization,
    Split,
)
from dampen.studies.data.sets import DATASETS, check_data, get_data, list_data, load, options

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "Augment",
    "Batch",
    "DamagedData",
    "DataSpec",
    "Dataset",
    "IncompleteData",
    "MissingData",
    "Normalization",
    "Split",
    "augment",
    "check_data",
    "get_data",
    "list_data",
    "load",
    "options",
]
