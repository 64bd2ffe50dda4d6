"""The seeds of a configuration as one model: the mean of their predictions, where the training
function returns them.

    return {"accuracy": accuracy, "predictions": probabilities, "targets": labels}

The seeds were trained anyway, so this costs nothing. An ensemble is one observation: it is shown
beside the mean of its members, without a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dampen.studies.errors import Refused

if TYPE_CHECKING:
    import numpy as np

    from dampen.studies.comparison import Comparison
    from dampen.studies.table import ResultTable

FILE = "predictions.npz"
RETURNED = ("predictions", "targets")


@dataclass(frozen=True)
class Ensemble:
    """The members' mean and the ensemble's value of one metric, as fractions."""

    name: str
    members: int
    metric: str
    alone: float
    together: float

    def in_words(self) -> str:
        """In a line.

        >>> Ensemble("drop_key", 8, "accuracy", 0.90, 0.931).in_words()
        'drop_key, ensemble of 8 seeds: accuracy 93.1 %, its members 90.0 % on average'
        """
        if self.metric != "accuracy":
            told = f"{self.together:.4g}, its members {self.alone:.4g} on average"
        else:
            told = f"{100 * self.together:.1f} %, its members {100 * self.alone:.1f} % on average"
        return f"{self.name}, ensemble of {self.members} seeds: {self.metric} {told}"


def take_predictions(returned: Any, named: str) -> tuple[Any, dict[str, np.ndarray]]:
    """What a function returned without its predictions, and these.

    Args:
        returned: by the training function.
        named: the function, for messages.
    """
    import numpy as np

    if not isinstance(returned, Mapping) or not any(key in returned for key in RETURNED):
        return returned, {}
    rest = {k: v for k, v in returned.items() if k not in RETURNED}
    wanted = "predictions of shape (examples,) or (examples, classes) and as many targets"
    if missing := [key for key in RETURNED if key not in returned]:
        raise Refused(f"{named} returned no {missing[0]!r}: an ensemble needs {wanted}.")
    arrays = {}
    for key in RETURNED:
        value = returned[key]
        value = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
        arrays[key] = value
    p, y = arrays["predictions"], arrays["targets"]
    if p.ndim not in (1, 2) or y.shape != p.shape[:1] or p.dtype.kind not in "fiu":
        raise Refused(
            f"{named} returned predictions of shape {p.shape} for "
            f"targets of shape {y.shape}: expected {wanted}."
        )
    if p.ndim == 2 and not (np.all(p >= 0) and np.allclose(p.sum(axis=1), 1, atol=1e-3)):
        raise Refused(
            f"{named} returned predictions that are no probabilities: "
            "apply softmax, so that each row sums to 1."
        )
    return rest, arrays


def ensembles(plan: Comparison, folder: Path) -> list[Ensemble]:
    """The ensemble of each configuration whose runs kept predictions for the same targets.

    Args:
        plan: the comparison.
        folder: of its runs.
    """
    return [
        found
        for config in plan.configs
        for setting in config.settings
        for found in _ensemble(config.name, [folder / id for id in setting.ids.values()])
    ]


def ensembles_in_words(table: ResultTable) -> str:
    """The ensemble of each method in the metric that judges, best first; empty where
    no predictions were kept.

    Args:
        table: the runs of a study, judged.
    """
    told = []
    for entry in (e for e in table.ranked() if not e.same_as):
        found = _ensemble(entry.name, [run.folder for run in entry.setting.finished().values()])
        judging = [one for one in found if one.metric == table.study.metric] or found[:1]
        told += [one.in_words() for one in judging]
    if not told:
        return ""
    return f"Ensembles of the seeds cost no further training, and have no test: {'; '.join(told)}."


def _ensemble(name: str, folders: Iterable[Path]) -> list[Ensemble]:
    """The ensemble of these runs in each metric; none where they share no targets."""
    import numpy as np

    kept = []
    for path in (p for folder in folders if (p := folder / FILE).exists()):
        with np.load(path, allow_pickle=False) as file:
            kept.append((file["predictions"], file["targets"]))
    # Seeds that draw a test set of their own have no example in common by its place.
    if len(kept) < 2 or not all(np.array_equal(kept[0][1], y) for _, y in kept[1:]):
        return []
    return _judged(name, [p for p, _ in kept], kept[0][1])


def _judged(name: str, predictions: list[np.ndarray], targets: np.ndarray) -> list[Ensemble]:
    import numpy as np

    def accuracy(p: np.ndarray) -> float:
        return float((p.argmax(axis=1) == targets).mean())

    def nll(p: np.ndarray) -> float:
        chosen = np.take_along_axis(p, targets.astype(int)[:, None], axis=1)
        return float(-np.log(np.maximum(chosen, 1e-12)).mean())

    def mse(p: np.ndarray) -> float:
        return float(((p - targets) ** 2).mean())

    metrics = {"accuracy": accuracy, "nll": nll} if predictions[0].ndim == 2 else {"mse": mse}
    together = np.mean(predictions, axis=0)
    return [
        Ensemble(
            name, len(predictions), metric, float(np.mean([f(p) for p in predictions])), f(together)
        )
        for metric, f in metrics.items()
    ]
