"""What `dampen compare` trains when only the data set is said: a model and options that suit it on two cores."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": {"name": "vit", "patch_size": 2, "width": 48, "depth": 3, "heads": 4, "mlp": 96},
        "train": {"epochs": 30, "lr": 3e-3, "warmup": 2.0},
    },
    "cifar10": {
        "data": {
            "limit": 6429
        },  # 4,500 to train on: the regime that overfits, in which regularizers tell themselves apart
        "model": {"name": "vit", "stem": "conv", "width": 96, "depth": 4, "heads": 6, "mlp": 192},
        "train": {"epochs": 20, "lr": 1e-3, "warmup": 1.0},
    },
    "gtzan": {
        "model": {"name": "encoder", "width": 96, "depth": 2, "heads": 4, "mlp": 192},
        "train": {"epochs": 40, "batch_size": 16, "lr": 1e-3, "warmup": 2.0},
    },
    "fsdd": {
        "model": {"name": "encoder", "width": 96, "depth": 2, "heads": 4, "mlp": 192},
        "train": {"epochs": 10, "batch_size": 32, "lr": 2e-3, "warmup": 1.0},
    },
    "thumos14": {
        "model": {"name": "encoder", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
        "train": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "warmup": 1.0},
    },
    "bccd": {
        "data": {"augment": ["flip", "vertical_flip"]},
        "model": {"name": "detr", "width": 64, "depth": 2, "decoder_depth": 2, "heads": 4, "mlp": 128, "queries": 48},
        "train": {"epochs": 80, "batch_size": 8, "lr": 2e-3, "warmup": 2.0, "clip": 1.0, "validate_every": 10},
    },
    "multi30k": {
        "data": {"limit": 8000},
        "model": {"name": "seq2seq", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
        "train": {"epochs": 8, "batch_size": 64, "lr": 2e-3, "warmup": 1.0, "label_smoothing": 0.1, "clip": 1.0},
    },
    "tinyshakespeare": {
        "model": {"name": "language", "width": 128, "depth": 3, "heads": 4, "mlp": 256},
        "train": {"epochs": 3, "batch_size": 32, "lr": 2e-3, "warmup": 0.2, "clip": 1.0},
    },
}
PRESETS["cifar100"] = PRESETS["cifar10"]
ANY_IMAGES: dict[str, Any] = {  # of any size that patches of 4 divide
    "model": {"name": "vit", "patch_size": 4, "width": 96, "depth": 4, "heads": 6, "mlp": 192},
    "train": {"epochs": 20, "lr": 1e-3, "warmup": 2.0},
}
BY_TASK = {
    "image": ANY_IMAGES,
    "audio": PRESETS["fsdd"],
    "detection": PRESETS["thumos14"],
    "objects": PRESETS["bccd"],
    "translation": PRESETS["multi30k"],
    "language": PRESETS["tinyshakespeare"],
    "text": {
        "model": {"name": "text", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
        "train": {"epochs": 10, "batch_size": 32, "lr": 1e-3, "warmup": 1.0, "clip": 1.0},
    },
    "classification": PRESETS["fsdd"],
}
"""The preset of a data set that has none of its own."""


def preset(name: str) -> dict[str, Any]:
    """The preset for a data set: its model and training options, and its limits where it has its own entry.

    >>> preset("digits")["model"]["name"]
    'vit'
    """
    if name in PRESETS:
        return PRESETS[name]
    from dampen.studies.data import DATASETS

    base = BY_TASK[DATASETS[name].task]
    return {"model": base["model"], "train": base["train"]}
