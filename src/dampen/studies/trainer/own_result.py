"""What a user's function returned, read: test metrics, the one that judges, and errors that say what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dampen.studies.errors import LabError
from dampen.studies.metric import describe
from dampen.studies.result import FORMAT
from dampen.studies.trainer.losses import NotFinite
from dampen.studies.trainer.own_log import numbers

WANTED = 'return {"accuracy": 0.9} or {"test": {...}, "valid": {...}}, of the test part'
RETURNED = "returned "
"""How a metric that is no number is named among what went wrong."""
Metrics = dict[str, float]


def read_metrics(returned: Any, named: str) -> tuple[Metrics, Metrics]:
    """Test and validation metrics from what the function `named` returned."""
    if not isinstance(returned, Mapping) or not returned:
        raise LabError(f"{named} returned {returned!r} instead of test metrics: {WANTED}.")
    if isinstance(returned.get("test"), Mapping):
        parts = {k: returned.get(k) or {} for k in ("test", "valid")}
    else:
        parts = {"test": returned, "valid": {}}
    test, valid = (_group(k, parts[k], named) for k in ("test", "valid"))
    if not test:
        raise LabError(f"{named} returned no test metrics: got {returned!r}; {WANTED}.")
    percent = [k for k, v in test.items() if describe(k).percent and not -1.0 <= v <= 1.0 and math.isfinite(v)]
    if percent:
        told = f"{percent[0]} = {test[percent[0]]:g}"
        raise LabError(f"{named} returned {told}, but it is recorded as a fraction of 1: divide it by 100.")
    return test, valid


def _group(name: str, content: Any, named: str) -> Metrics:
    try:
        found = numbers(name, content)
    except TypeError as error:
        raise LabError(f"{named} returned metrics that are no numbers: {error} Instead, {WANTED}.") from error
    if not isinstance(found, dict):
        raise LabError(f"{named} returned {name!r} = {content!r}, which is no group of metrics: {WANTED}.")
    return found


def judged_by(test: Metrics, wanted: tuple[str, str] | None, named: str) -> tuple[str, str]:
    """The metric of the study and the way it improves, or the first that came back."""
    if wanted is None:
        name = next(iter(test))
        return name, guess_direction(name)
    if wanted[0] not in test:
        raise LabError(
            f"The study is judged by {wanted[0]!r}, but {named} returned only {', '.join(test)}. "
            "Return it, or name another metric."
        )
    return wanted


def guess_direction(metric: str) -> str:
    """'max' or 'min': which way a metric of this name improves, as far as its name tells.

    >>> guess_direction("accuracy"), guess_direction("valid_loss"), guess_direction("rmse")
    ('max', 'min', 'min')
    """
    known = describe(metric).better
    if known is not None:
        return known
    falling = ("loss", "nll", "error", "perplexity", "bpc", "ece", "brier", "mse", "mae", "rmse", "wer", "cer", "fid")
    return "min" if any(part in falling for part in metric.lower().replace("-", "_").split("_")) else "max"


def finished(id: str, test: Metrics, valid: Metrics, train: Metrics, judged: tuple[str, str]) -> dict[str, Any]:
    """The result of a trial that came to its end, but for its costs."""
    result: dict[str, Any] = {"id": id, "format": FORMAT, "status": "finished", "task": "own"}
    result |= {"primary": list(judged), "selection": list(judged)}
    return result | {"test": test, "valid": valid, "train": train, "data": {}}


def diverged(id: str, bad: NotFinite, judged: tuple[str, str] | None) -> dict[str, Any]:
    """The result of a trial whose loss, or whose test metric, is no number."""
    before = ", ".join(f"{k} {v:.4g}" for k, v in bad.before.items()) or "nothing yet"
    terms = " and ".join(map(repr, bad.names))
    reason = f"Training stopped at step {bad.step}: {terms} became NaN or infinite first (the step before: {before})."
    if bad.names[0].startswith(RETURNED):
        reason = f"After {bad.step} steps the function {bad.names[0]} (the last training loss: {before})."
    result: dict[str, Any] = {"id": id, "format": FORMAT, "status": "diverged", "task": "own", "reason": reason}
    result |= {"primary": list(judged or ("", "max")), "selection": list(judged or ("", "max"))}
    return result | {"terms": bad.names, "step": bad.step, "data": {}}
