"""Measurements on any model: calibration, robustness, gradient variance, generalization.

Each is a function of a model and of batches (inputs, labels); none changes the model. Libraries beyond torch are
imported only when a function that needs them is called.
"""

from dampen.diagnostics.calibration import (
    Calibration,
    Reliability,
    adaptive_calibration_error,
    calibration_of,
    expected_calibration_error,
    measure_calibration,
    reliability,
    wilson_interval,
)
from dampen.diagnostics.corruptions import CORRUPTIONS, Corruptions, corrupt, measure_corruptions
from dampen.diagnostics.generalization import (
    GeneralizationGap,
    PacBayesBound,
    binary_kl,
    binary_kl_inverse,
    gaussian_kl,
    generalization_gap,
    pac_bayes_bound,
)
from dampen.diagnostics.gradients import GradientVariance, gradient_variance
from dampen.diagnostics.pixels import Pixels
from dampen.diagnostics.predictions import predict
from dampen.diagnostics.robustness import Robustness, fgsm, pgd

__all__ = [
    "CORRUPTIONS",
    "Calibration",
    "Corruptions",
    "GeneralizationGap",
    "GradientVariance",
    "PacBayesBound",
    "Pixels",
    "Reliability",
    "Robustness",
    "adaptive_calibration_error",
    "binary_kl",
    "binary_kl_inverse",
    "calibration_of",
    "corrupt",
    "expected_calibration_error",
    "fgsm",
    "gaussian_kl",
    "generalization_gap",
    "gradient_variance",
    "measure_calibration",
    "measure_corruptions",
    "pac_bayes_bound",
    "pgd",
    "predict",
    "reliability",
    "wilson_interval",
]
