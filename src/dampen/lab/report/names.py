"""How things are called in tables, sentences and charts."""

from __future__ import annotations

from dampen.lab import summary

MEASURED = {
    "pgd_accuracy": "PGD accuracy",
    "fgsm_accuracy": "FGSM accuracy",
    "corrupted_accuracy": "corrupted accuracy",
    "adaptive_ece": "adaptive ECE",
    "gradient_variance": "gradient variance",
    "accuracy_gap": "train - test accuracy",
}
"""What dampen diagnose measures on a trained model, as single numbers."""

PERCENT = summary.PERCENT | {"fgsm_accuracy", "corrupted_accuracy", "adaptive_ece", "accuracy_gap", "interval_map"}
"""Metrics that are fractions in records and percent in tables."""


def unit(metric: str) -> float:
    """What a recorded value is multiplied with to be shown."""
    return 100.0 if metric in PERCENT or metric.startswith("interval_map@") else 1.0


def points(metric: str) -> str:
    """The unit of a difference.

    >>> points("accuracy"), points("bpc")
    (' points', '')
    """
    return " points" if metric in PERCENT else ""


LABELS = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL", "brier": "Brier score", "frame_map": "frame mAP"}
LABELS |= {"cost_ratio": "step cost / reference", "bpc": "bits per character", "bleu": "BLEU", "chrf": "chrF"}
LABELS |= {"interval_map": "interval mAP", "perplexity": "perplexity"} | MEASURED


def label(metric: str, with_unit: bool = False) -> str:
    """A metric's name as people write it.

    >>> label("ece", with_unit=True)
    'ECE (%)'
    """
    name = LABELS.get(metric, metric.replace("_", " "))
    return f"{name} (%)" if with_unit and metric in PERCENT else name


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "seed"), plural(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: list[str], most: int = 4) -> str:
    """Names in a sentence, not too many of them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    shown = names[:most]
    rest = len(names) - len(shown)
    if rest:
        return ", ".join(shown) + f" and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def shortened(name: str, most: int = 24) -> str:
    """A name that fits beside a point.

    >>> shortened("feed_forward_dropout (feed-forward)")
    'feed_forward_dropout (f…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"
