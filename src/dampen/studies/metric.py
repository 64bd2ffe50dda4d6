"""What a number is: its label, its unit, which way it improves, and how large a difference matters.

A metric is described here and nowhere else; adding one is one entry of `METRICS`. Records hold
fractions, tables show percent where `percent` says so: `scale` converts between the two, and
margins are in the unit of the table.

>>> accuracy = describe("accuracy")
>>> accuracy.title, accuracy.scale, accuracy.points, accuracy.better
('accuracy (%)', 100.0, ' points', 'max')
>>> describe("nll").margin_at(2.0)  # 1 % of the reference's
0.02
>>> describe("interval_map@0.5").label, describe("my_score").better
('interval mAP@0.5', None)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dampen.extensions import from_plugins

Direction = Literal["max", "min"]


@dataclass(frozen=True)
class Metric:
    """One metric. `margin` is a difference in the unit of tables, `margin_share` a share of the
    reference's mean; a metric without a known direction is shown and never judged."""

    name: str
    label: str
    better: Direction | None = "max"
    percent: bool = False
    margin: float | None = None
    margin_share: float | None = None
    digits: int = 3
    diagnosed: bool = False  # by `dampen diagnose`, on the trained model
    # layer by layer in a figure of the page, whose tables leave it out: paper is only so wide
    drawn: bool = False
    noisy_by_count: bool = (
        False  # a share of test examples: their number alone gives a standard error
    )

    @property
    def scale(self) -> float:
        """What a recorded value is multiplied with to be shown."""
        return 100.0 if self.percent else 1.0

    @property
    def title(self) -> str:
        """The label with its unit, for headings."""
        return f"{self.label} (%)" if self.percent else self.label

    @property
    def points(self) -> str:
        """The unit of a difference, with the space before it."""
        return " points" if self.percent else ""

    def margin_at(self, reference: float) -> float | None:
        """The default margin, in the unit of tables, given the reference's mean;
        None where there is none."""
        if self.margin is not None:
            return self.margin
        return (
            None
            if self.margin_share is None or reference != reference
            else self.margin_share * abs(reference)
        )


def _share(name: str, label: str, better: Direction = "max", **more: bool) -> Metric:
    return Metric(name, label, better, percent=True, margin=0.5, digits=2, **more)


def _loss(name: str, label: str) -> Metric:
    return Metric(name, label, "min", margin_share=0.01)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _share("accuracy", "accuracy", noisy_by_count=True),
        _share("macro_f1", "macro F1"),
        _share("f1", "F1"),
        Metric("mcc", "Matthews correlation", margin=0.005),
        _share("frame_map", "frame mAP"),
        _share("interval_map", "interval mAP"),
        _share("ap", "AP"),
        _share("ap50", "AP50"),
        _share("ap75", "AP75"),
        _share("ece", "ECE", "min"),
        _loss("nll", "NLL"),
        _loss("brier", "Brier score"),
        _loss("bpc", "bits per character"),
        _loss("perplexity", "perplexity"),
        _loss("reconstruction", "reconstruction error"),
        Metric("bleu", "BLEU", margin=0.3, digits=2),
        Metric("chrf", "chrF", margin=0.3, digits=2),
        Metric("cost_ratio", "step cost / reference", "min"),
        _share("pgd_accuracy", "PGD accuracy", diagnosed=True),
        _share("fgsm_accuracy", "FGSM accuracy", diagnosed=True),
        _share("corrupted_accuracy", "corrupted accuracy", diagnosed=True),
        _share("adaptive_ece", "adaptive ECE", "min", diagnosed=True),
        Metric("gradient_variance", "gradient variance", None, diagnosed=True),
        Metric("averaged_brier_bound", "Brier bound, averaged", None, diagnosed=True),
        Metric("training_variance", "gradient variance over training", "min", margin_share=0.02),
        Metric(
            "training_variance_normalized",
            "gradient variance / squared norm over training",
            "min",
            margin_share=0.02,
        ),
        Metric("variance_ratio", "gradient variance / reference", None),
        replace(
            _share("accuracy_gap", "train - test accuracy", diagnosed=True),
            better=None,
            margin=None,
        ),
        Metric(
            "attention_entropy",
            "attention entropy / largest",
            None,
            percent=True,
            digits=2,
            diagnosed=True,
            drawn=True,
        ),
    )
}


def describe(name: str) -> Metric:
    """The metric of this name. `base@0.5` is a variant of `base`; an unknown one has
    no unit and no direction.

    Args:
        name: of a metric, with or without a variant such as `@0.5`.
    """
    if name in METRICS:
        return METRICS[name]
    base, at, variant = name.partition("@")
    if at and base in METRICS:
        return replace(METRICS[base], name=name, label=f"{METRICS[base].label}@{variant}")
    outside = {m.description.name: m.description for m in from_plugins("dampen.metrics").values()}
    return outside.get(name) or Metric(name, name.replace("_", " "), better=None)


def direction(name: str, recorded: str | None = None) -> Direction:
    """Which way a metric improves: as recorded with the runs, else as described, else upwards."""
    return "min" if (recorded or describe(name).better) == "min" else "max"
