"""The public names of dampen; `import dampen` brings them in on first use."""

from dampen import methods as _methods
from dampen import models
from dampen.attend import attention
from dampen.handle import Regularization, regularize
from dampen.methods import *  # noqa: F403
from dampen.regularizer import Call, LinearCall, Regularizer, Site
from dampen.schedules import constant, cosine, curriculum, early, late, linear, vshape, warmup

__all__ = [
    "Call",
    "LinearCall",
    "Regularization",
    "Regularizer",
    "Site",
    "attention",
    "constant",
    "cosine",
    "curriculum",
    "early",
    "late",
    "linear",
    "models",
    "regularize",
    "vshape",
    "warmup",
]
__all__ += _methods.__all__
