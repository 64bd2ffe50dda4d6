"""The variance of the gradient over training, as tables show it."""

from __future__ import annotations

from collections.abc import Mapping

from dampen.studies.records.result import Result


def in_training(final: Result) -> dict[str, float | None]:
    """The variance over training, where it was measured: itself, and by the gradient's squared norm."""
    found = final.variance or {}
    names = {"training_variance": "trace", "training_variance_normalized": "normalized"}
    return {name: found[kind] for name, kind in names.items() if kind in found}


def ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """One row's variance against another's, by seed.

    >>> ratios({"0": 3.0, "1": 1.0}, {"0": 2.0})
    {'0': 1.5}
    """
    shared = sorted(ours.keys() & theirs.keys())
    return {seed: ours[seed] / theirs[seed] for seed in shared if theirs[seed]}
