"""What a worker tells while a trial runs, typed: it starts, moves, ends an epoch, warns, finishes; and how a job ended.

Workers send plain data through a pipe or a cluster, marked with `FORMAT`; who listens gets an `Event`. A field that a
kind of event does not have keeps its default, a field that this version does not know is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dampen.studies.errors import LabError

FORMAT = 1

Kind = Literal["start", "progress", "epoch", "warning", "finish", "outcome"]


class Event(msgspec.Struct, kw_only=True, frozen=True):
    """One thing that happened in one trial."""

    kind: Kind
    format: int = 0
    step: int = 0
    steps: int | None = None  # in all
    resumed: int = 0  # start: how often the trial was taken up again
    epoch: float | None = None
    epochs: int | None = None
    count: int | None = None  # steps taken, where `step` counts percent (one's own training)
    fraction: float | None = None
    terms: dict[str, float | None] = {}  # of the loss, by name
    eta: float | None = None  # seconds
    phase: str = ""  # "pretraining", or empty
    train: dict[str, float | None] = {}
    valid: dict[str, float | None] = {}
    test: dict[str, float | None] = {}
    status: str = ""  # finish and outcome
    reason: str = ""
    message: str = ""


def marked(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event as a worker sends it."""
    return {"format": FORMAT, **event}


def parse_event(content: Any) -> Event:
    """An event from what a worker sent; raises LabError with what is wrong.

    >>> parse_event({"kind": "warning", "message": "no space"}).message
    'no space'
    """
    if isinstance(content, Event):
        return content
    try:
        return msgspec.convert(content, Event)
    except msgspec.ValidationError as error:
        raise LabError(f"an event of a worker is not what was expected: {error}; got {content!r}") from error
