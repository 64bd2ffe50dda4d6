"""The public names of dampen; `import dampen` brings them in on first use."""

from dampen import methods as _methods
from dampen import models
from dampen.handle import Handle, regularize
from dampen.hooks.builtin_dropout import deterministic
from dampen.hooks.patch import remove
from dampen.kernels.attend import attention
from dampen.methods import *  # noqa: F403
from dampen.regularizer import Call, LinearCall, Regularizer, Site
from dampen.schedules import constant, cosine, curriculum, early, last, late, linear, vshape, warmup

__all__ = [
    "Call",
    "Handle",
    "LinearCall",
    "Regularizer",
    "Site",
    "attention",
    "constant",
    "cosine",
    "curriculum",
    "deterministic",
    "early",
    "last",
    "late",
    "linear",
    "models",
    "regularize",
    "remove",
    "vshape",
    "warmup",
]
__all__ += _methods.__all__
