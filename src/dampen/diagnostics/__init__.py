"""Measurements on any model: calibration, gradient variance, generalization, conditioning,
attention.

Each is a function of a model and of batches (inputs, labels); none changes the model. Libraries
beyond torch are imported only when a function that needs them is called.
"""

from typing import Any

from dampen.diagnostics.attention import attention_entropy, attention_weights, head_similarity
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
    measure_conditioning,
)
from dampen.diagnostics.gradients import GradientVariance, gradient_variance
from dampen.diagnostics.predictions import predict
from dampen.functional.grid import grid_of
from dampen.names import moved_out

__all__ = [
    "Calibration",
    "Condition",
    "ConditionProbe",
    "Conditioning",
    "GeneralizationGap",
    "GradientVariance",
    "Reliability",
    "adaptive_calibration_error",
    "attention_entropy",
    "attention_weights",
    "calibration_of",
    "condition_of",
    "expected_calibration_error",
    "generalization_gap",
    "gradient_variance",
    "grid_of",
    "head_similarity",
    "measure_calibration",
    "measure_conditioning",
    "predict",
    "reliability",
    "wilson_interval",
]

_METRICS = {
    **dict.fromkeys(("ConsistencyBound", "consistency_bound"), "consistency_bound"),
    **dict.fromkeys(
        ("PacBayesBound", "pac_bayes_bound", "gaussian_kl", "binary_kl", "binary_kl_inverse"),
        "pac_bayes",
    ),
}
_DIAGNOSTICS = {
    **dict.fromkeys(("JacobianCondition", "estimate_condition", "measure_jacobian"), "jacobian"),
    **dict.fromkeys(("linear_attention_bound", "linear_attention_condition"), "attention_bound"),
    **dict.fromkeys(("rollout", "token_map", "overlay", "save_images"), "rollout"),
    **dict.fromkeys(("CORRUPTIONS", "Corruptions", "corrupt", "measure_corruptions"), "robustness"),
    **dict.fromkeys(("Pixels", "Robustness", "fgsm", "pgd"), "robustness"),
}
_MOVED = {**_METRICS, **_DIAGNOSTICS}
"""What was here until 0.3, and its module in `reproductions/metrics` and
`reproductions/diagnostics`."""


def __getattr__(name: str) -> Any:
    folder = "diagnostics" if name in _DIAGNOSTICS else "metrics"
    moved_out(__name__, name, folder, _MOVED)
