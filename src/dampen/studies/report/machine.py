"""The document that `dampen compare --json` prints, typed and versioned, for programs.

`VERSION` rises when a field is renamed or removed or changes its meaning. New fields
come without a new version.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dampen.studies.files import finite
from dampen.studies.report.settings import regularize_line, settings_text
from dampen.studies.report.summary import advise

if TYPE_CHECKING:
    from dampen.studies.engines.runner import ComparisonResult

VERSION = 1


class Interval(msgspec.Struct):
    """A difference from the baseline with its interval, in the unit of the metric."""

    difference: float | None
    low: float | None
    high: float | None
    level: float | None  # the interval covers the true difference with probability 1 - level
    n: int  # seeds that both have
    p: float | None  # before the correction
    corrected: float | None  # after Holm's correction over all methods
    verdict: str
    needed: int | None  # seeds at which the comparison would be conclusive with 80 % power
    needed_from: int | None  # seeds at which half of such studies would be conclusive
    detectable: float | None  # the smallest difference that these seeds detect with 80 % power
    margin: float | None  # the equivalence margin
    test: str
    shrunk: float | None = None  # a significant difference without the optimism of its selection


class StepCost(msgspec.Struct):
    """The time of a training step relative to the baseline's."""

    ratio: float | None
    low: float | None  # the 95 % interval, with at least 3 seeds
    high: float | None
    step_seconds: float | None
    differs: bool  # the interval leaves out 1


class Method(msgspec.Struct):
    """One line of the table."""

    name: str
    baseline: bool
    methods: list[dict[str, Any]]
    settings: str
    code: str  # the line of Python that uses it
    # reference, better, worse, equal, "better where it trained", inconclusive, no gain, ...
    verdict: str
    mean: float | None
    sd: float | None
    n: int
    planned: int
    values: dict[str, float | None]  # by seed
    comparison: Interval | None  # None for the baseline
    cost: StepCost
    same_as: str | None
    diverged: int
    unfinished: int


class Failure(msgspec.Struct):
    """A run without a result."""

    method: str
    reason: str


class Answers(msgspec.Struct):
    """The three answers of the page in words."""

    which: str
    cost: str
    trust: str
    pick: str | None  # the recommended method
    code: str  # the line of Python that uses it
    more_seeds: str  # the command that adds seeds to inconclusive methods
    best: list[str] = []  # the set that holds the best configuration: it and its equals


class Document(msgspec.Struct):
    """What is printed."""

    schema: int
    folder: str
    page: str | None  # the report
    metric: str
    mode: str  # max or min
    test: str  # fixed, or sequential where seeds were added after a look
    margin: float | None
    reference: str | None
    trials: dict[str, int]  # runs by how they ended
    answers: Answers
    methods: list[Method]
    failures: list[Failure]
    messages: list[str]
    exit_code: int


def document(run: ComparisonResult, page: Path | None = None) -> dict[str, Any]:
    """The whole document as plain data, without infinite numbers. The
    fields of 0.2 stand beside it.

    Args:
        run: a comparison that ended.
        page: its report, where one was written.
    """
    table, advice = run.table, advise(run.table)
    reference = table.main_reference
    rows = []
    for entry in table.entries:
        low, high = entry.cost.interval
        cost = {"ratio": entry.cost.ratio, "low": low, "high": high}
        cost |= {"step_seconds": entry.cost.step_seconds, "differs": entry.cost.differs}
        told = {
            "settings": settings_text(entry, reference),
            "code": regularize_line(entry, reference),
        }
        rows.append({**entry.to_dict(), **told, "cost": cost})
    failures = [
        {"method": entry.name, "reason": reason}
        for entry in table.entries
        for reason in entry.problems
    ]
    answers: dict[str, Any] = {k: _words(getattr(advice, k)) for k in ("which", "cost", "trust")}
    answers |= {"pick": advice.pick, "code": advice.code, "more_seeds": advice.seeds}
    answers["best"] = [entry.name for entry in table.contenders()]
    plain = run.to_dict() | {
        "schema": VERSION,
        "page": str(page) if page is not None else None,
        "metric": table.study.metric,
        "mode": table.study.mode,
        "reference": reference.name if reference else None,
        "answers": answers,
        "methods": rows,
        "failures": failures,
    }
    out: dict[str, Any] = finite(plain)
    return out


def _words(answer: Any) -> str:
    return " ".join([f"{answer.headline}.", *answer.details])
