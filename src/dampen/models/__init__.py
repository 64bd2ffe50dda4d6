"""Small, readable, paper-shaped models in plain PyTorch. They know nothing of regularizers."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from torch import nn

from dampen.models.convmixer import ConvMixer
from dampen.models.encoder import FeatureEncoder
from dampen.models.language import LanguageModel
from dampen.models.mae import MaskedAutoencoder, Reconstruction
from dampen.models.seq2seq import Seq2Seq
from dampen.models.vit import ViT

__all__ = [
    "MODELS",
    "ConvMixer",
    "FeatureEncoder",
    "LanguageModel",
    "MaskedAutoencoder",
    "Reconstruction",
    "Seq2Seq",
    "ViT",
    "build_model",
]

MODELS: dict[str, type[nn.Module]] = {
    "vit": ViT,
    "encoder": FeatureEncoder,
    "seq2seq": Seq2Seq,
    "language": LanguageModel,
    "convmixer": ConvMixer,
    "mae": MaskedAutoencoder,
}


def build_model(name: str, **arguments: Any) -> nn.Module:
    """Build a model by its registry name.

    >>> build_model("vit", width=48, depth=2, heads=4, mlp=96).num_prefix_tokens
    1
    >>> build_model("vitt")
    Traceback (most recent call last):
    ...
    ValueError: Unknown model 'vitt'; did you mean 'vit'? Known: convmixer, encoder, language, mae, seq2seq, vit.
    """
    if name not in MODELS:
        raise ValueError(f"Unknown model {name!r}{_nearest(name, MODELS)} Known: {', '.join(sorted(MODELS))}.")
    cls = MODELS[name]
    known = inspect.signature(cls).parameters
    for argument in arguments:
        if argument not in known:
            hint = _nearest(argument, known)
            raise TypeError(f"Model {name!r} takes no argument {argument!r}{hint} It takes: {', '.join(known)}.")
    missing = [p.name for p in known.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise TypeError(f"Model {name!r} needs a value for {', '.join(missing)}: got {sorted(arguments) or 'nothing'}.")
    return cls(**arguments)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
