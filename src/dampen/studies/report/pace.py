"""How far a run is: trials done, what the running ones are at, the time left. Terminal and notebook show the same."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dampen.studies.records.events import Event


@dataclass
class Pace:
    """Takes the events of a run. `labels` are its trials, for people; `done` of them were recorded before it began."""

    labels: dict[str, str]
    done: int = 0
    at_start: int = 0
    began: float = field(default_factory=lambda: time.monotonic())
    shares: dict[str, float] = field(default_factory=dict)  # how much of each running trial is done
    latest: dict[str, str] = field(default_factory=dict)  # what each running trial said last

    def __post_init__(self) -> None:
        self.at_start = self.done

    def take(self, trial: str, event: Event) -> None:
        """Note one event of one trial."""
        if event.kind == "start":
            self.latest.setdefault(trial, "started")
        elif event.kind == "progress" and trial in self.latest:
            self.latest[trial] = f"{place_of(event)} {losses_of(event)}".rstrip()
            if event.steps:
                self.shares[trial] = event.step / event.steps
        elif event.kind == "outcome":
            self.done += 1
            self.shares.pop(trial, None)
            self.latest.pop(trial, None)

    @property
    def total(self) -> int:
        return len(self.labels)

    @property
    def moved(self) -> float:
        """Trials done, running ones counted by the part of them that is done."""
        return self.done + sum(self.shares.values())

    def left(self) -> str:
        """The time left at the pace so far; nothing while that is not known."""
        moved, open_ = self.moved - self.at_start, self.total - self.moved
        if moved < 0.2 or open_ <= 0:  # the first steps of a first trial are no pace yet
            return ""
        return f"about {spoken((time.monotonic() - self.began) / moved * open_)} left"

    def line(self) -> str:
        """All of it in one line."""
        running = "; ".join(f"{self.labels[trial]}: {told}" for trial, told in self.latest.items())
        left = f", {self.left() or 'time left not known yet'}" if self.done < self.total else ""
        return f"{self.done}/{self.total} trials done{left}" + (f"; {running}" if running else "")


def place_of(event: Event) -> str:
    """Where in its training a trial is."""
    return f"epoch {event.epoch:g}/{event.epochs}" if event.epochs and event.epoch else f"step {steps_of(event)}"


def steps_of(event: Event) -> int:
    """Steps taken; one's own training counts percent in `step`."""
    return event.step if event.count is None else event.count


def losses_of(event: Event) -> str:
    """The terms of the loss."""
    return "  ".join(f"{name} {value:.3g}" for name, value in event.terms.items() if value is not None)


def spoken(seconds: float) -> str:
    """A time as people say it.

    >>> spoken(42.4), spoken(200), spoken(8000)
    ('42 s', '3 min 20 s', '2 h 13 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
