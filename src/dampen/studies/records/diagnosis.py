"""What `dampen diagnose` leaves in a trial's folder (diagnose.json), typed.

A section holds the fields of the measurement of `dampen.diagnostics` that it is named after. Files from before the
format was written have format 0; fields that they do not have take their defaults.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from dampen.studies.errors import LabError

FORMAT = 1

Section = dict[str, Any]


class Diagnosis(msgspec.Struct, kw_only=True):
    """The measurements of one trained model; a section that was not measured is empty, and `skipped` may say why."""

    format: int = 0
    name: str = ""
    trial: str | None = None
    data: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    measured_with: dict[str, dict[str, Any] | None] = {}  # the settings of each section
    calibration: Section = {}
    robustness: list[Section] = []  # one per attack and eps
    corruptions: Section = {}
    gradient_variance: Section = {}
    attention: Section = {}
    conditioning: list[Section] = []  # one per layer and branch
    attention_maps: Section = {}
    generalization: Section = {}
    consistency: Section = {}
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    environment: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return any(self.section(name) for name in SECTIONS)

    def section(self, name: str) -> Any:
        """A section by its name; empty where it was not measured."""
        return getattr(self, name)


SECTIONS = (
    "calibration", "robustness", "corruptions", "gradient_variance", "attention", "conditioning", "attention_maps",
    "generalization", "consistency",
)  # fmt: skip


def parse_diagnosis(content: Any) -> Diagnosis:
    """A diagnosis from plain data; raises LabError with what is wrong.

    >>> parse_diagnosis({"calibration": {"ece": 0.1}}).calibration["ece"], bool(parse_diagnosis({}))
    (0.1, False)
    """
    try:
        return msgspec.convert(content, Diagnosis)
    except msgspec.ValidationError as error:
        raise LabError(f"diagnose.json is not what was expected: {error}") from error


def diagnosed(measured: Diagnosis) -> dict[str, float]:
    """The single numbers of a diagnosis: the strongest attacks, mean corruption, calibration, gradients, the gap,
    and how widely attention is spread, as a mean over the layers.
    """
    found: dict[str, Any] = {}
    for attack in ("pgd", "fgsm"):
        own = [a for a in measured.robustness if a["attack"] == attack]
        if own:
            found[f"{attack}_accuracy"] = max(own, key=lambda a: a["eps"])["accuracy"]
    found["corrupted_accuracy"] = measured.corruptions.get("mean_accuracy")
    found["adaptive_ece"] = measured.calibration.get("adaptive_ece")
    found["gradient_variance"] = measured.gradient_variance.get("normalized")
    found["averaged_brier_bound"] = measured.consistency.get("bound")
    found["accuracy_gap"] = measured.generalization.get("accuracy_gap")
    if spread := [a["entropy_share"] for a in measured.attention.get("layers", []) if "entropy_share" in a]:
        found["attention_entropy"] = statistics.fmean(spread)
    return {k: v for k, v in found.items() if v is not None}
