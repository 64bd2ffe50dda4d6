"""Explicit Dropout's penalties as plain functions of tensors (arXiv 2604.20505), for
`ExplicitDropout` and for your own modules."""

from dampen.functional.explicit.convolution import (
    ConvolutionPenalties,
    convolution_penalty,
    regularize_convolutions,
)
from dampen.functional.explicit.layers import linear_penalty
from dampen.functional.explicit.reductions import FORMS, REDUCTIONS, author_weight

__all__ = [
    "FORMS",
    "REDUCTIONS",
    "ConvolutionPenalties",
    "author_weight",
    "convolution_penalty",
    "linear_penalty",
    "regularize_convolutions",
]
