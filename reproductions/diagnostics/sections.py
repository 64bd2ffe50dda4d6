"""What this plug-in adds to `dampen diagnose`: attacks, corruptions and attention maps.

Options of the attacks, with their defaults:

    dampen diagnose RUNS --set robustness.eps=1,2,4,8 --set robustness.examples=256 --set robustness.steps=10
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from dampen.studies.plugins import Section, Settings, Trained
from reproductions.diagnostics.pictures import attention_pictures
from reproductions.diagnostics.robustness import fgsm, measure_corruptions, pgd, pixels_of

MAPS = 4
"""Images with attention maps."""


def robustness(t: Trained, s: Settings) -> list[dict[str, Any]]:
    """FGSM, and PGD with steps of eps / 4, at each eps.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    sizes = [float(e) for e in s.options.get("robustness.eps", "1,2,4,8").split(",")]
    if not all(0 < e < math.inf for e in sizes):
        raise ValueError(f"robustness.eps: sizes of attacks are positive, got {sizes}")
    steps = int(s.options.get("robustness.steps", "10"))
    examples = int(s.options.get("robustness.examples", "256"))
    pixels, data = pixels_of(t), t.batches("test", examples)
    found = []
    for eps in (e / 255 for e in sizes):
        found.append(fgsm(t.model, data, eps, pixels=pixels, seed=s.seed))
        found.append(pgd(t.model, data, eps, step=eps / 4, steps=steps, pixels=pixels, seed=s.seed))
    return [asdict(one) for one in found]


def corruptions(t: Trained, s: Settings) -> dict[str, Any]:
    """Noise, blur and lost contrast at five severities.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    data = t.batches("test", s.examples)
    return asdict(measure_corruptions(t.model, data, pixels=pixels_of(t), seed=s.seed))


def attention_maps(t: Trained, s: Settings) -> dict[str, Any]:
    """Attention rollout of some test images, as pictures and as numbers.

    Args:
        t: the model with its data.
        s: how much to measure.
    """
    return attention_pictures(t, MAPS)


def _strongest(name: str) -> Any:
    """The text of a cell: accuracy under the strongest attack of a kind."""

    def cell(found: list[dict[str, Any]]) -> str:
        attack = max((a for a in found if a["attack"] == name), key=lambda a: a["eps"])
        return f"{100 * attack['accuracy']:.1f} %"

    return cell


ROBUSTNESS = Section(
    robustness, {"FGSM": _strongest("fgsm"), "PGD": _strongest("pgd")}, short=("PGD",)
)
CORRUPTIONS = Section(
    corruptions,
    {"corrupted": lambda found: f"{100 * found['mean_accuracy']:.1f} %"},
    short=("corrupted",),
)
ATTENTION_MAPS = Section(attention_maps)
