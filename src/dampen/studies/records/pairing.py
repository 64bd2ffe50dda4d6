"""Which runs are pairs: the same seed on one path of kernels; the folds of a round are averaged first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from dampen.studies.records.logged_run import LoggedRun


def on_one_path(ours: LoggedRun, theirs: LoggedRun) -> bool:
    """Whether two runs may be paired: both on torch's kernels, or both on the native ones.

    A trial without methods uses none of these kernels, and an old record does not say which it used: both pair as they
    always did.
    """
    paths = {run.final.kernels for run in (ours, theirs) if run.final and run.final.kernels}
    return len(paths) < 2 or not ours.config.get("methods") or not theirs.config.get("methods")


def unpaired(ours: Mapping[str, LoggedRun], theirs: Mapping[str, LoggedRun], folds: int = 1) -> list[str]:
    """Seeds (or rounds of folds) of which a run and the reference's were on different kernels."""
    other = [int(s) // folds for s in ours if s in theirs and not on_one_path(ours[s], theirs[s])]
    return [str(n) for n in dict.fromkeys(other)]


def averaged_folds(values: Mapping[str, float], folds: int) -> dict[str, float]:
    """The mean of each whole round of cross-validation; seed = round x folds + fold. Folds alone are no repetitions.

    >>> averaged_folds({"0": 1.0, "1": 3.0, "2": 5.0}, 2)
    {'0': 2.0}
    """
    rounds: dict[int, list[float]] = {}
    for seed, value in values.items():
        rounds.setdefault(int(seed) // folds, []).append(value)
    return {str(n): statistics.fmean(found) for n, found in sorted(rounds.items()) if len(found) == folds}
