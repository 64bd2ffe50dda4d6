"""Measurements on any model: calibration, robustness, gradient variance, generalization,
conditioning, attention.

Each is a function of a model and of batches (inputs, labels); none changes the model. Libraries
beyond torch are imported only when a function that needs them is called.
"""

from typing import Any

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
    GeneralizationGap,
    Reliability,
    adaptive_calibration_error,
    calibration_of,
    expected_calibration_error,
    generalization_gap,
    measure_calibration,
    reliability,
    wilson_interval,
)
from dampen.diagnostics.conditioning import (
    Condition,
    Conditioning,
    ConditionProbe,
    condition_of,
    linear_attention_bound,
    linear_attention_condition,
    measure_conditioning,
)
from dampen.diagnostics.gradients import GradientVariance, gradient_variance
from dampen.diagnostics.jacobian import JacobianCondition, estimate_condition, measure_jacobian
from dampen.diagnostics.predictions import predict
from dampen.diagnostics.robustness import (
    CORRUPTIONS,
    Corruptions,
    Pixels,
    Robustness,
    corrupt,
    fgsm,
    measure_corruptions,
    pgd,
)
from dampen.names import moved_out

__all__ = [
    "CORRUPTIONS",
    "Calibration",
    "Condition",
    "ConditionProbe",
    "Conditioning",
    "Corruptions",
    "GeneralizationGap",
    "GradientVariance",
    "JacobianCondition",
    "Pixels",
    "Reliability",
    "Robustness",
    "adaptive_calibration_error",
    "attention_entropy",
    "attention_weights",
    "calibration_of",
    "condition_of",
    "corrupt",
    "estimate_condition",
    "expected_calibration_error",
    "fgsm",
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
    "pgd",
    "predict",
    "reliability",
    "rollout",
    "save_images",
    "token_map",
    "wilson_interval",
]

_MOVED = {
    **dict.fromkeys(("ConsistencyBound", "consistency_bound"), "consistency_bound"),
    **dict.fromkeys(
        ("PacBayesBound", "pac_bayes_bound", "gaussian_kl", "binary_kl", "binary_kl_inverse"),
        "pac_bayes",
    ),
}
"""What was here until 0.3, and its module in `reproductions/metrics`."""


def __getattr__(name: str) -> Any:
    moved_out(__name__, name, "metrics", _MOVED)
