"""Values that change over depth and over training: f(depth, progress), both in [0, 1].

Anything that takes a rate or a weight takes a number, one of these schedules (or any callable of
the same form), or a list with one value per layer. `depth` is 0 in the first layer and 1 in the
last; `progress` is what `Handle.progress` was given."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Schedule = Callable[[float, float], float]
Value = float | Schedule | Sequence[float]
"""What a rate or a weight may be: a number, a schedule, or one number per layer."""


@dataclass(frozen=True)
class constant:
    """The same value everywhere, always.

    Args:
        value: returned everywhere.

    >>> constant(0.1)(0.5, 0.9)
    0.1
    """

    value: float

    def __call__(self, depth: float, progress: float) -> float:
        return self.value


@dataclass(frozen=True)
class linear:
    """From `start` to `end`, over depth or over training. DropKey's decreasing schedule is
    `linear(p, 0.0)`.

    Args:
        start: the first value.
        end: the last value.
        along: `"depth"` of the layer, or `"progress"` of training.

    >>> linear(0.3, 0.0)(0.5, 0.0)
    0.15
    """

    start: float
    end: float
    along: Literal["depth", "progress"] = "depth"

    def __post_init__(self) -> None:
        _check_axis(self.along)

    def __call__(self, depth: float, progress: float) -> float:
        t = depth if self.along == "depth" else progress
        return self.start + (self.end - self.start) * t


@dataclass(frozen=True)
class cosine:
    """From `start` to `end` along half a cosine, over training or over depth.

    Args:
        start: the first value.
        end: the last value.
        along: `"depth"` of the layer, or `"progress"` of training.

    >>> round(cosine(0.4, 0.0)(0.0, 0.5), 6)
    0.2
    """

    start: float
    end: float
    along: Literal["depth", "progress"] = "progress"

    def __post_init__(self) -> None:
        _check_axis(self.along)

    def __call__(self, depth: float, progress: float) -> float:
        t = depth if self.along == "depth" else progress
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * t))


@dataclass(frozen=True)
class early:
    """`value` until the fraction `until` of training, then nothing: early dropout (arXiv
    2303.01500).

    With `until` near 1 it is the fine-tune phase without DropKey (arXiv 2208.02646).

    Args:
        value: a number, or another schedule.
        until: the fraction of training in which it acts.

    >>> early(0.1, until=0.5)(0.0, 0.4), early(0.1, until=0.5)(0.0, 0.5)
    (0.1, 0.0)
    """

    value: float | Schedule
    until: float = 0.5

    def __post_init__(self) -> None:
        _check_fraction("until", self.until)

    def __call__(self, depth: float, progress: float) -> float:
        if progress < self.until:
            return _inner(self.value, depth, progress)
        return 0.0


@dataclass(frozen=True)
class late:
    """Nothing until the fraction `start` of training, then `value`: late dropout (arXiv
    2303.01500).

    Args:
        value: a number, or another schedule.
        start: the fraction of training after which it acts.

    >>> late(0.1, start=0.5)(0.0, 0.4), late(0.1, start=0.5)(0.0, 0.5)
    (0.0, 0.1)
    """

    value: float | Schedule
    start: float = 0.5

    def __post_init__(self) -> None:
        _check_fraction("start", self.start)

    def __call__(self, depth: float, progress: float) -> float:
        if progress >= self.start:
            return _inner(self.value, depth, progress)
        return 0.0


@dataclass(frozen=True)
class curriculum:
    """Rises from 0 towards `value` as 1 - exp(-gamma t): curriculum dropout (arXiv 1703.06229),
    with t = progress.

    Args:
        value: what it approaches: a number, or another schedule.
        gamma: how fast.

    >>> curriculum(0.5, gamma=10.0)(0.0, 0.0)
    0.0
    """

    value: float | Schedule
    gamma: float = 10.0

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"curriculum: gamma must be positive, got {self.gamma}.")

    def __call__(self, depth: float, progress: float) -> float:
        return _inner(self.value, depth, progress) * -math.expm1(-self.gamma * progress)


@dataclass(frozen=True)
class warmup:
    """Rises linearly from 0 to `value` over the first fraction `until` of training, then stays.

    Args:
        value: a number, or another schedule.
        until: the fraction of training in which it rises.

    >>> warmup(0.2, until=0.5)(0.0, 0.25)
    0.1
    """

    value: float | Schedule
    until: float = 0.1

    def __post_init__(self) -> None:
        _check_fraction("until", self.until)

    def __call__(self, depth: float, progress: float) -> float:
        return _inner(self.value, depth, progress) * (
            min(1.0, progress / self.until) if self.until else 1.0
        )


@dataclass(frozen=True)
class vshape:
    """Falls linearly from `start` to 0 at the fraction `bottom` of training, then rises to `end`:
    scheduled DropHead (arXiv 2004.13342).

    Args:
        start: the value at first.
        end: the value at the end.
        bottom: the fraction of training at which it is 0.

    >>> vshape(0.2, 0.2)(0.0, 0.5)
    0.0
    """

    start: float
    end: float
    bottom: float = 0.5

    def __post_init__(self) -> None:
        _check_fraction("bottom", self.bottom)

    def __call__(self, depth: float, progress: float) -> float:
        if progress < self.bottom:
            return self.start * (1 - progress / self.bottom)
        return self.end * ((progress - self.bottom) / (1 - self.bottom) if self.bottom < 1 else 1.0)


@dataclass(frozen=True)
class last:
    """`value` in the last layer, `rest` in all others: the layer before the head often wants a rate
    of its own.

    The only layer of a model is its last. For any other pattern give a list with one value per
    layer.

    Args:
        value: of the last layer: a number, or another schedule.
        rest: of all other layers: a number, or another schedule.

    >>> last(0.3, rest=0.1)(1.0, 0.0), last(0.3, rest=0.1)(0.5, 0.0)
    (0.3, 0.1)
    """

    value: float | Schedule
    rest: float | Schedule = 0.0

    def __call__(self, depth: float, progress: float) -> float:
        return _inner(self.value if depth == 1 else self.rest, depth, progress)


@dataclass(frozen=True)
class per_layer:
    """One value per layer, in the order of the layers. A plain list becomes this."""

    values: tuple[float, ...]

    def __call__(self, depth: float, progress: float) -> float:
        return self.values[round(depth * (len(self.values) - 1))]


def as_only_layer(schedule: Schedule) -> Schedule:
    """A schedule as it runs in a model's only layer, whose depth is 0 although it is the last.

    Args:
        schedule: as `as_schedule` returns it.
    """
    if not isinstance(schedule, last):
        return schedule
    if callable(schedule.value):
        return schedule.value
    return constant(schedule.value)


def always_zero(schedule: Schedule, depth: float) -> bool:
    """Whether a schedule is 0 at this depth for the whole of training, by construction. A callable
    of one's own might be anything, so it is not.

    Args:
        schedule: as `as_schedule` returns it.
        depth: of the layer, 0 to 1.

    >>> always_zero(linear(0.0, 0.3), 0.0), always_zero(late(0.1), 0.0)
    (True, False)
    """
    if isinstance(schedule, early | late | curriculum | warmup):
        inner = schedule.value
        if callable(inner):
            return always_zero(inner, depth)
        return inner == 0
    if isinstance(schedule, last):
        inner = schedule.value if depth == 1 else schedule.rest
        if callable(inner):
            return always_zero(inner, depth)
        return inner == 0
    if isinstance(schedule, linear | cosine) and schedule.along == "progress":
        return schedule.start == schedule.end == 0
    if isinstance(schedule, vshape):
        return schedule.start == schedule.end == 0
    return (
        isinstance(schedule, constant | per_layer | linear | cosine) and schedule(depth, 0.0) == 0
    )


def as_schedule(value: Value, what: str, high: float = 1.0) -> Schedule:
    """A number, a schedule or a list as a schedule, with errors in the user's own words.

    Args:
        value: a number, a schedule, or a list with one entry per layer.
        what: the argument's name, for errors.
        high: the value must be below this.
    """
    if callable(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ValueError(
                f"{what} is an empty list. Give one value per layer, or one number for all."
            )
        return per_layer(
            tuple(check_value(v, f"{what}, layer {i}", high) for i, v in enumerate(value))
        )
    return constant(check_value(value, what, high))


def check_value(value: Any, what: str, high: float = 1.0) -> float:
    """`value` as a float in [0, high), or an error that says what was got and what to give.

    Args:
        value: a number, a schedule, or a list with one entry per layer.
        what: the argument's name, for errors.
        high: the value must be below this.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{what} must be a number, a schedule f(depth, progress) or a list of numbers, "
            f"got {value!r} of type {type(value).__name__}."
        )
    if math.isnan(value) or not 0 <= value < high:
        ranges = {1.0: "a probability in [0, 1)", math.inf: "a finite number >= 0"}
        expected = ranges.get(high, f"in [0, {high})")
        raise ValueError(f"{what} must be {expected}, got {value}.")
    return float(value)


def _inner(value: float | Schedule, depth: float, progress: float) -> float:
    if callable(value):
        return value(depth, progress)
    return value


def _check_axis(along: str) -> None:
    if along not in ("depth", "progress"):
        raise ValueError(f"a schedule runs along 'depth' or 'progress', got along={along!r}.")


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is a fraction of training in [0, 1], got {value}.")


def check_progress(t: object) -> float:
    """How far training is, as a number in [0, 1]; raises for anything else.

    Args:
        t: share of training that is done.

    >>> check_progress(1)
    1.0
    """
    if isinstance(t, bool) or not isinstance(t, int | float):
        raise TypeError(f"progress takes a number in [0, 1], got {t!r}.")
    if not 0 <= t <= 1:  # NaN too
        raise ValueError(
            f"progress is the fraction of training done, in [0, 1], got {t}. Give step / steps."
        )
    return float(t)
