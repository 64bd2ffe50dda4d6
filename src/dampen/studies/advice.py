"""`dampen audit RUNS`: the curves of a study or a file of losses judged, and what our own results
suggest to try.

The suggestions come from `advice.json`, which `python -m reproductions.pages.advice` writes from
studies in which the baseline was tuned like every method.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dampen.auditing.overfitting import ANSWERS, Fit, curve_of, judge, read_curve
from dampen.studies.errors import LabError

FILE = "advice.json"
SCHEMA = 1
LOSSES = (".csv", ".json", ".jsonl")
"""Files that may hold losses."""
TRY_AT_MOST = 4
"""Methods that are suggested."""
COMPARE = "dampen compare train.py:train"


@dataclass(frozen=True)
class Curves:
    """The runs of one configuration, or one file of losses."""

    name: str
    baseline: bool
    fits: tuple[Fit, ...]
    unknown: int = 0  # runs without both curves, or with too few points

    @property
    def answer(self) -> str:
        """What most runs say; "unknown" where none can be judged."""
        found = Counter(fit.answer for fit in self.fits)
        return found.most_common(1)[0][0] if found else "unknown"

    def median(self, name: str) -> float | None:
        """The median of a figure over the runs.

        Args:
            name: an attribute of `Fit`.
        """
        values = [getattr(fit, name) for fit in self.fits]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `dampen audit --json` prints it."""
        return {
            "name": self.name,
            "baseline": self.baseline,
            "answer": self.answer,
            "runs": [fit.to_json() for fit in self.fits],
            "unknown": self.unknown,
        }


@dataclass(frozen=True)
class Overfitting:
    """The answer to "am I overfitting?", and what to try."""

    source: str
    configurations: tuple[Curves, ...]
    suggestions: tuple[str, ...] = field(default=())

    @property
    def judged(self) -> Curves:
        """The configuration that the answer is about: the baseline, else the first."""
        return next((c for c in self.configurations if c.baseline), self.configurations[0])

    def to_json(self) -> dict[str, Any]:
        """Plain data, as `dampen audit --json` prints it (docs/json.md)."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "answer": self.judged.answer,
            "configurations": [c.to_json() for c in self.configurations],
            "suggestions": list(self.suggestions),
            "exit_code": 0,
        }

    def __str__(self) -> str:
        lines = [explained(self.judged)]
        if len(self.configurations) > 1:
            lines += ["", *_table(self.configurations)]
        return "\n".join([*lines, "", *self.suggestions])


def examine(
    path: Path, train: str | None = None, valid: str | None = None, command: str = ""
) -> Overfitting:
    """Judge the curves in a folder of runs or a file of losses.

    Args:
        path: a folder that `dampen` wrote, or a file, see `read_curve`.
        train: column of the training loss; default: recognized by its name.
        valid: column of the validation loss; default: recognized by its name.
        command: a comparison to suggest, up to its methods; default: one with train.py:train.
    """
    if path.is_dir():
        found = _of_folder(path, train, valid)
    else:
        try:
            fit = judge(read_curve(path, train, valid))
        except (ValueError, UnicodeDecodeError) as error:
            raise LabError(str(error)) from error
        found = [Curves(path.name, True, (fit,) if fit else (), 0 if fit else 1)]
    result = Overfitting(str(path), tuple(found))
    told = suggestions(result.judged.answer, load_table(), command)
    return Overfitting(result.source, result.configurations, tuple(told))


def _of_folder(folder: Path, train: str | None, valid: str | None) -> list[Curves]:
    from dampen.studies.report import make_report

    found = []
    for table in make_report([folder], split=True).tables:
        for entry in table.entries:
            fits, unknown = [], 0
            for run in entry.setting.logged.values():
                lines = [
                    {"epoch": line.at, "train": line.train, "valid": line.valid}
                    for line in run.lines()
                ]
                by_epoch = any(line.epoch is not None for line in run.lines())
                try:
                    curve = curve_of(lines, str(run.folder), train, valid)
                except ValueError as error:
                    if train or valid:
                        raise LabError(str(error)) from error
                    unknown += 1
                    continue
                fit = judge(replace(curve, axis="epoch" if by_epoch else "step"))
                fits += [fit] if fit else []
                unknown += fit is None
            found.append(Curves(entry.name, entry.config.baseline, tuple(fits), unknown))
    if not any(c.fits for c in found):
        raise LabError(
            f"{folder} holds no curves of a training and a "
            "validation loss with enough points. Log both: "
            "trial.log(epoch=epoch, train=terms, valid={'nll': loss}), or give a CSV file."
        )
    return found


# --- sentences


def explained(curves: Curves) -> str:
    """The answer about a configuration in two or three sentences.

    Args:
        curves: of its runs.
    """
    n = len(curves.fits)
    if not n:
        return (
            f"{curves.name}: {ANSWERS['unknown']}. It needs a training and a validation loss at 6 "
            "points or more."
        )
    axis, answer = curves.fits[0].axis, curves.answer
    agree = sum(fit.answer == answer for fit in curves.fits)
    runs = "" if n == 1 else f" ({agree} of {n} runs)"
    figures = {name: curves.median(name) for name in Fit.__dataclass_fields__ if name not in ("answer", "axis")}  # fmt: skip
    told = {key: f"{value:.4g}" for key, value in figures.items() if value is not None}
    sentences = [
        f"{curves.name}: {ANSWERS[answer]}{runs}.",
        _SENTENCES[answer].format(axis=axis, **told),
    ]
    if figures["gap"] is not None:
        sentences.append(f"The gap at the end is {told['gap']}{_trend(curves)}.")
    sentences.append(_STOP[answer].format(axis=axis, **told))
    return " ".join(sentences)


_SENTENCES = {
    "overfits": "Validation is best at {axis} {best} "
    "({valid_best}) and clearly worse at {axis} {last} "
    "({valid_last}), while training goes from {train_best} to {train_last}.",
    "memorizes": "Training ends at {train_last}, less than "
    "half of validation's {valid_last}, which no "
    "longer improves.",
    "improves": "Validation still improves at {axis} {last} ({valid_last}).",
    "flat": "Training ends at {train_last} and validation at "
    "{valid_last}, and neither differs enough "
    "to call it overfitting.",
    "diverges": "Both losses are worse at {axis} {last} than at {axis} {best}: training went from "
    "{train_best} to {train_last}.",
}
"""What was measured, for each answer."""
_STOP = {
    "overfits": "Stop at {axis} {best}, or keep the weights from there.",
    "memorizes": "Stopping at {axis} {best} loses nothing.",
    "improves": "Train longer before you add a regularizer.",
    "flat": "A larger model, another learning rate or more data come first.",
    "diverges": "Lower the learning rate, or clip the gradient, before anything else.",
}
"""Where to stop, for each answer."""


def _trend(curves: Curves) -> str:
    """How the gap develops over the last third, where most runs show it."""
    clear = [fit for fit in curves.fits if fit.trend_is_clear]
    if 2 * len(clear) <= len(curves.fits):
        return " and steady over the last third"
    trend = statistics.median(fit.trend for fit in clear if fit.trend is not None)
    word = "grows" if trend > 0 else "shrinks"
    return f" and {word} by {abs(trend):.2g} per {clear[0].axis}"


def _table(found: Sequence[Curves]) -> list[str]:
    rows = [("method", "runs", "overfit", "best at", "gap at the end")]
    for c in found:
        fits, best, gap = len(c.fits), c.median("best"), c.median("gap")
        over = sum(fit.answer in ("overfits", "memorizes") for fit in c.fits)
        at = f"{c.fits[0].axis} {best:g}" if fits and best is not None else "-"
        rows.append((c.name, str(fits), str(over), at, "-" if gap is None else f"{gap:.3g}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def load_table() -> list[dict[str, Any]]:
    """The studies of `advice.json`, each with its methods and their verdicts."""
    content = json.loads(Path(__file__).with_name(FILE).read_text(encoding="utf-8"))
    studies: list[dict[str, Any]] = content["studies"]
    return studies


def suggestions(answer: str, studies: Sequence[Mapping[str, Any]], command: str = "") -> list[str]:
    """What our own results suggest to do, as lines.

    Args:
        answer: one of `ANSWERS`.
        studies: as in `advice.json`.
        command: a comparison, up to its methods; default: one with train.py:train.
    """
    if answer in ("unknown", "diverges"):
        return []
    over = answer in ("overfits", "memorizes")
    fitting = [s for s in studies if s["overfits"] == over]
    if not fitting:
        return []
    better = _better(fitting)[:TRY_AT_MOST]
    told = ["What our own results suggest (small models and little data, on a CPU):"]
    found = [m["verdict"] == "better" for s in fitting for m in s["methods"]]
    studied = f"{len(fitting)} {'study' if len(fitting) == 1 else 'studies'}"
    compared = f"Significantly better than a tuned baseline in {sum(found)} of {len(found)} comparisons ({studied})"
    if not over:
        told.append("  Where the model does not overfit, a regularizer has little to prevent.")
        return [
            *told,
            f"  {compared}{':' if better else '.'}",
            *(f"    {_line(s, m)}" for s, m in better),
        ]
    gains = [
        f"{gain[0]:.1f} {s['unit']} ({gain[1]:.1f} to {gain[2]:.1f}) on {s['data']}"
        for s in fitting
        if (gain := s["tuned_weight_decay"])
    ]
    told.append("  Tune the learning rate and the weight decay first.")
    if gains:
        told.append(f"  Tuning the usual weight decay changed the result by {' and '.join(gains)}.")
    told.append(f"  Then compare methods. {compared}, the best of them:")
    told += [f"    {_line(s, m)}" for s, m in better]
    texts = ", ".join(m["tune"] for _, m in better)
    return [*told, f'  {command or COMPARE} --methods "{texts}" --tune 8 --seeds 8']


Found = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A study, and one of its methods."""


def _better(studies: Sequence[Mapping[str, Any]]) -> list[Found]:
    """Methods that were significantly better: the best of each study, then the
    second of each, and so on."""
    ranked = [
        [
            (s, m)
            for m in sorted(s["methods"], key=lambda m: -abs(m["difference"][0]))
            if m["verdict"] == "better"
        ]
        for s in studies
    ]
    found: dict[str, Found] = {}
    for of_rank in zip_longest(*ranked):
        for entry in of_rank:
            if entry is not None:
                found.setdefault(entry[1]["name"], entry)
    return list(found.values())


def _line(s: Mapping[str, Any], m: Mapping[str, Any]) -> str:
    d, *ends = (abs(x) for x in m["difference"])
    digits = 1 if s["unit"] == "points" else 3
    interval = f"{min(ends):.{digits}f} to {max(ends):.{digits}f}"
    return f"{m['name']}: by {d:.{digits}f} {s['unit']} ({interval}) on {s['data']}"
