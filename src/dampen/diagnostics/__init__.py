"""Measurements on any model: calibration, robustness, gradient variance, generalization, conditioning, attention.

Each is a function of a model and of batches (inputs, labels); none changes the model. Libraries beyond torch are
imported only when a function that needs them is called.
"""

from dampen.diagnostics.attention_maps import (
    attention_entropy,
    attention_weights,
    head_similarity,
    overlay,
    rollout,
    save_images,
    token_map,
)
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
from dampen.diagnostics.conditioning import Condition, Conditioning, ConditionProbe, condition_of, measure_conditioning
from dampen.diagnostics.consistency_bound import ConsistencyBound, consistency_bound
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
from dampen.diagnostics.jacobian import JacobianCondition, estimate_condition, measure_jacobian
from dampen.diagnostics.linear_attention import linear_attention_bound, linear_attention_condition
from dampen.diagnostics.pixels import Pixels
from dampen.diagnostics.predictions import predict
from dampen.diagnostics.robustness import Robustness, fgsm, pgd

__all__ = [
    "CORRUPTIONS",
    "Calibration",
    "Condition",
    "ConditionProbe",
    "Conditioning",
    "ConsistencyBound",
    "Corruptions",
    "GeneralizationGap",
    "GradientVariance",
    "JacobianCondition",
    "PacBayesBound",
    "Pixels",
    "Reliability",
    "Robustness",
    "adaptive_calibration_error",
    "attention_entropy",
    "attention_weights",
    "binary_kl",
    "binary_kl_inverse",
    "calibration_of",
    "condition_of",
    "consistency_bound",
    "corrupt",
    "estimate_condition",
    "expected_calibration_error",
    "fgsm",
    "gaussian_kl",
    "generalization_gap",
    "gradient_variance",
    "head_similarity",
    "linear_attention_bound",
    "linear_attention_condition",
    "measure_calibration",
    "measure_conditioning",
    "measure_corruptions",
    "measure_jacobian",
    "overlay",
    "pac_bayes_bound",
    "pgd",
    "predict",
    "reliability",
    "rollout",
    "save_images",
    "token_map",
    "wilson_interval",
]
