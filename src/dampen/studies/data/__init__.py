"""Real data sets, read from their official formats into memory, split by the papers' protocol.

>>> digits = load("digits")
>>> batch = digits.train.batch([0, 1, 2])
>>> batch["inputs"][0].shape, batch["target"].shape, digits.model_args
(torch.Size([3, 1, 8, 8]), torch.Size([3]), {'image_size': 8, 'channels': 1, 'classes': 10})
"""

from __future__ import annotations

from dampen.studies.data.augmentation import AUGMENTATIONS, Augment, augment
from dampen.studies.data.dataset import Batch, Dataset, DataSpec, Normalization, Split
from dampen.studies.data.errors import DamagedData, IncompleteData, MissingData
from dampen.studies.data.manage import check_data, get_data, list_data
from dampen.studies.data.sets import DATASETS, load, options

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
