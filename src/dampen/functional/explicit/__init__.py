"""Explicit Dropout's penalties as plain functions of tensors (arXiv 2604.20505), for `ExplicitDropout` and for your
own modules."""

from dampen.functional.explicit.appendix_b import AppendixB, appendix_b, r_arora, r_cross
from dampen.functional.explicit.convolution import ConvolutionPenalties, convolution_penalty, regularize_convolutions
from dampen.functional.explicit.forms import FORMS
from dampen.functional.explicit.linear import linear_penalty
from dampen.functional.explicit.reductions import REDUCTIONS, author_weight

__all__ = [
    "FORMS",
    "REDUCTIONS",
    "AppendixB",
    "ConvolutionPenalties",
    "appendix_b",
    "author_weight",
    "convolution_penalty",
    "linear_penalty",
    "r_arora",
    "r_cross",
    "regularize_convolutions",
]
