"""Small, readable, paper-shaped models in plain PyTorch. They know nothing of regularizers.

The models of single papers (DETR, MAE, ConvMixer, ...) are in the folder `reproductions` of
dampen's repository.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from dampen.extensions import Registry, hint
from dampen.functional.grid import patchify
from dampen.models.block import (
    Block,
    Mlp,
    SelfAttention,
    SeparateAttention,
    check_padding,
    head_width,
    initialize,
    visible_keys,
)
from dampen.models.decoder import LanguageModel
from dampen.models.encoder import FeatureEncoder, TextEncoder
from dampen.models.vit import ConvStem, PatchEmbed, ViT
from dampen.names import moved_out, nearest

__all__ = [
    "MODELS",
    "Block",
    "ConvStem",
    "FeatureEncoder",
    "LanguageModel",
    "Mlp",
    "PatchEmbed",
    "SelfAttention",
    "SeparateAttention",
    "TextEncoder",
    "ViT",
    "build_model",
    "check_padding",
    "head_width",
    "initialize",
    "patchify",
    "visible_keys",
]

MODELS: Registry[type[nn.Module]] = Registry(
    "dampen.models",
    {"vit": ViT, "encoder": FeatureEncoder, "language": LanguageModel, "text": TextEncoder},
)
"""Models by name: dampen's own, and those that packages and plug-ins add."""

_MOVED = {
    "CNN": "cnn",
    "CaptionMatcher": "caption",
    "ConvMixer": "convmixer",
    "DETR": "detr",
    "Detections": "detr",
    "MaskedAutoencoder": "mae",
    "Reconstruction": "mae",
    "Seq2Seq": "seq2seq",
}
"""What was here until 0.2, and its module in `reproductions/models`."""


def build_model(name: str, **arguments: Any) -> nn.Module:
    """Build a model by its registry name.

    Args:
        name: registry name: vit, encoder, language, text, or what a plug-in adds.
        arguments: of the model's constructor.

    >>> build_model("vit", width=48, depth=2, heads=4, mlp=96).num_prefix_tokens
    1
    >>> build_model("vitt")
    Traceback (most recent call last):
    ...
    ValueError: Unknown model 'vitt'; did you mean 'vit'?
    """
    if name not in MODELS:
        raise ValueError(f"Unknown model {name!r}{hint('dampen.models', name, MODELS)}")
    cls = MODELS[name]
    known = inspect.signature(cls).parameters
    for argument in arguments:
        if argument not in known:
            raise TypeError(
                f"Model {name!r} takes no argument {argument!r}{nearest(argument, known)}"
            )
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise TypeError(
            f"Model {name!r} needs a value for {', '.join(missing)}: got "
            f"{sorted(arguments) or 'nothing'}."
        )
    return cls(**arguments)


def __getattr__(name: str) -> Any:
    moved_out(__name__, name, "models", _MOVED)
