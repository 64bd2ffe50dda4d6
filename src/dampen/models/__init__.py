"""Small, readable, paper-shaped models in plain PyTorch. They know nothing of regularizers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from dampen.extensions import from_packages
from dampen.models.caption import CaptionMatcher
from dampen.models.cnn import CNN
from dampen.models.convmixer import ConvMixer
from dampen.models.detr import DETR, Detections
from dampen.models.encoder import FeatureEncoder
from dampen.models.language import LanguageModel
from dampen.models.mae import MaskedAutoencoder, Reconstruction
from dampen.models.seq2seq import Seq2Seq
from dampen.models.text import TextEncoder
from dampen.models.vit import ViT
from dampen.names import nearest

__all__ = [
    "CNN",
    "DETR",
    "MODELS",
    "CaptionMatcher",
    "ConvMixer",
    "Detections",
    "FeatureEncoder",
    "LanguageModel",
    "MaskedAutoencoder",
    "Reconstruction",
    "Seq2Seq",
    "TextEncoder",
    "ViT",
    "build_model",
]

MODELS: dict[str, type[nn.Module]] = {
    "vit": ViT,
    "encoder": FeatureEncoder,
    "seq2seq": Seq2Seq,
    "language": LanguageModel,
    "text": TextEncoder,
    "convmixer": ConvMixer,
    "cnn": CNN,
    "mae": MaskedAutoencoder,
    "captions": CaptionMatcher,
    "detr": DETR,
    **from_packages("dampen.models"),
}
"""Models by name: ours, and those of installed packages (entry point `dampen.models`)."""


def build_model(name: str, **arguments: Any) -> nn.Module:
    """Build a model by its registry name.

    >>> build_model("vit", width=48, depth=2, heads=4, mlp=96).num_prefix_tokens
    1
    >>> build_model("vitt")
    Traceback (most recent call last):
    ...
    ValueError: Unknown model 'vitt'; did you mean 'vit'?
    """
    if name not in MODELS:
        raise ValueError(f"Unknown model {name!r}{nearest(name, MODELS)}")
    cls = MODELS[name]
    known = inspect.signature(cls).parameters
    for argument in arguments:
        if argument not in known:
            raise TypeError(f"Model {name!r} takes no argument {argument!r}{nearest(argument, known)}")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise TypeError(f"Model {name!r} needs a value for {', '.join(missing)}: got {sorted(arguments) or 'nothing'}.")
    return cls(**arguments)
