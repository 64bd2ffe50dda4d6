"""Which settings a search tries: the axes of each row, and a Latin hypercube over
them that all rows share.

    [search]
    settings = 12                                            of every row, the baseline included
    "train.lr" = { low = 1e-3, high = 1e-2, log = true }     a dotted axis is one of every row
    "train.weight_decay" = { low = 0.01, high = 3, log = true }
    rate = { low = 0.05, high = 0.6 }                        of rows that say "$rate"; max = 0.8
    would bound it weight = [0.3, 1, 3]                                     a list is
    drawn from in equal shares

Setting number i has the same place on an axis in every row, so that rows share learning
rates and weight decays.

    strength_settings = 5                                    a second stage
    rate = { low = 0.05, high = 0.6, start = 0.2 }           `start`: the value in the first stage

With a second stage, the first varies the dotted axes alone, each strength at its `start` or the
middle of its range. The second varies the strengths at the best setting of the first. A row without
strengths tries as many further settings of its dotted axes around its best, so that all rows have
the same budget.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

SETTINGS = "settings"
"""The key of a search that is no axis: how many settings each row gets."""
STRENGTH_SETTINGS = "strength_settings"
"""How many more settings each row gets in a second stage, after the `settings` of the first."""
COUNTS = (SETTINGS, STRENGTH_SETTINGS)
NEAR = 0.5
"""Length of the range around the best setting in which a row without strengths searches on, as a
part of its range."""
PROBABILITIES = ("rate", "dropout", "label_smoothing", "ema", "momentum")
"""Names of arguments that must stay below 1, however far a search would go."""
MOST_PROBABLE = 0.95
BEYOND = 0.25
"""How far a range is extended, as a part of its own length."""
AXIS_KEYS = ("low", "high", "log", "min", "max", "start")
AxisValues = dict[str, Any]
"""A value for each axis of a row."""


@dataclass(frozen=True)
class Axis:
    """One value to choose: from a range (on a logarithmic scale where it spans orders of
    magnitude), or from a list.

    `least` and `most` bound what an extension of the range may reach. `first` is its value while
    other axes are chosen.
    """

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None
    first: float | None = None

    def table(self) -> Any:
        """The axis as a recipe writes it."""
        if self.choices:
            return list(self.choices)
        bounds = {"min": self.least, "max": self.most, "start": self.first}
        bounds = {k: v for k, v in bounds.items() if v is not None}
        return {"low": self.low, "high": self.high, "log": self.log, **bounds}

    @property
    def start(self) -> Any:
        """The value in the first of two stages.

        >>> Axis("weight", 0.1, 10, log=True).start, Axis("rate", 0.05, 0.6, first=0.2).start
        (1.0, 0.2)
        """
        return self.value(0.5) if self.first is None else self.first

    def near(self, value: Any) -> Axis:
        """The part of this range around a value, half as long and moved inside; a list stays whole.

        >>> near = Axis("lr", 1e-4, 1, log=True).near(1e-2)
        >>> near.low, near.high, Axis("rate", 0, 1).near(0.9).low
        (0.001, 0.1, 0.5)
        """
        if self.choices:
            return self
        low = min(max(self.place(value) - NEAR / 2, 0.0), 1 - NEAR)
        return replace(self, low=self.value(low), high=self.value(low + NEAR))

    @property
    def ordered(self) -> bool:
        """Whether it has two ends."""
        return all(_is_number(v) for v in self.choices) and list(self.choices) == sorted(
            self.choices
        )

    def value(self, place: float) -> Any:
        """What lies at a place between 0 and 1, or beyond them, in four digits.

        >>> Axis("lr", 1e-3, 1e-1, log=True).value(0.5), Axis("unit", choices=("a", "b", "c")).value(0.5)
        (0.01, 'b')
        """
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        if self.log:
            return _short(self.low * (self.high / self.low) ** place)
        return _short(self.low + place * (self.high - self.low))

    def place(self, value: Any) -> float:
        """Where a value lies: 0 at the lower end, 1 at the upper one."""
        if self.choices:
            index = (
                self.choices.index(value)
                if value in self.choices
                else -1
                if value < self.choices[0]
                else None
            )
            return (len(self.choices) if index is None else index) / (len(self.choices) - 1)
        if self.log:
            return float(math.log(value / self.low) / math.log(self.high / self.low))
        return float((value - self.low) / (self.high - self.low))

    def beyond(self, upwards: bool, count: int) -> list[Any]:
        """Values past one end, `count` of them in equal steps up to a quarter of the range; fewer,
        or none, where the axis is bounded. A list continues by one step like its last.

        >>> Axis("lr", 1e-3, 1e-2, log=True).beyond(True, 2)
        [0.01334, 0.01778]
        >>> Axis("rate", 0.1, 0.9, most=0.95).beyond(True, 2), Axis("weight", choices=(1, 3)).beyond(False, 2)
        ([0.925, 0.95], [0.3333])
        """
        if self.choices:
            return self._next(upwards)
        end = 1 + BEYOND if upwards else -BEYOND
        bound = self.most if upwards else self.least
        if bound is not None:
            end = min(end, self.place(bound)) if upwards else max(end, self.place(bound))
        room = end - 1 if upwards else -end
        if not room > 1e-9:
            return []
        steps = [room * (i + 1) / count for i in range(count)]
        return [self.value(1 + s if upwards else -s) for s in steps]

    def _next(self, upwards: bool) -> list[Any]:
        last, before = self.choices[::-1][:2] if upwards else self.choices[:2]
        positive = min(last, before) > 0
        value = last * last / before if positive else last + (last - before)
        if self.most is not None:
            value = min(value, self.most)
        if self.least is not None:
            value = max(value, self.least)
        whole = all(isinstance(v, int) for v in self.choices) and float(value).is_integer()
        value = int(value) if whole else _short(value)
        return [] if value in self.choices else [value]


def read_axis(key: str, given: Any, path: str) -> tuple[Axis, list[str]]:
    """An axis as a recipe writes it, and what is wrong with it.

    Args:
        key: the name of the axis.
        given: a range or a list, as a recipe has it.
        path: its place, for the messages.
    """
    where = f"{path}.{key}"
    if isinstance(given, list):
        if len(given) < 2 or any(v in given[:i] for i, v in enumerate(given)):
            return Axis(key), [f"{where}: expected at least two different values, got {given!r}"]
        numbers = all(_is_number(v) for v in given)
        return Axis(key, choices=tuple(sorted(given) if numbers else given)), []
    if not isinstance(given, Mapping):
        return Axis(key), [
            f"{where}: expected {{ low = 0.1, high = 0.5 }} or a list of values, got {given!r}"
        ]
    problems = [
        f"{where}.{k}: unknown key; known are {', '.join(AXIS_KEYS)}"
        for k in given
        if k not in AXIS_KEYS
    ]
    numbers_given = {k: given[k] for k in ("low", "high", "min", "max", "start") if k in given}
    problems += [
        f"{where}.{k}: expected a number, got {v!r}"
        for k, v in numbers_given.items()
        if not _is_number(v)
    ]
    problems += [f"{where}.{k}: missing" for k in ("low", "high") if k not in given]
    log = given.get("log", False)
    if not isinstance(log, bool):
        problems.append(f"{where}.log: expected true or false, got {log!r}")
    if problems:
        return Axis(key), problems
    low, high = float(given["low"]), float(given["high"])
    if not low < high:
        problems.append(f"{where}: low must be less than high, got {low:g} and {high:g}")
    if log is True and not low > 0:
        problems.append(f"{where}: a logarithmic range starts above 0, got low = {low:g}")
    least, most, first = given.get("min"), given.get("max"), given.get("start")
    if log is True and least is not None and not least > 0:
        problems.append(f"{where}: min of a logarithmic range lies above 0, got {least:g}")
    if (least is not None and least > low) or (most is not None and most < high):
        problems.append(
            f"{where}: min and max bound an extension of "
            "the range, so they lie outside low and high"
        )
    if first is not None and not low <= first <= high:
        problems.append(f"{where}: start must lie between low and high, got {first:g}")
    return Axis(key, low, high, log, (), least, most, first), problems


def axes_of_row(
    search: Mapping[str, Any], row: Mapping[str, Any], config: Mapping[str, Any]
) -> list[Axis]:
    """The axes that a row has: the dotted ones, and those that it mentions; its own `search` goes
    before the recipe's.

    `false` takes an axis from a row. `config` is the row with all that the base says. What fills a
    probability stays below 1, and what starts at 0 or above it does not become negative.
    """
    given = {k: v for k, v in {**search, **row.get(SEARCH, {})}.items() if k not in COUNTS}
    given = {k: v for k, v in given.items() if v is not False}
    axes = [
        read_axis(k, v, SEARCH)[0]
        for k, v in given.items()
        if "." in k or mentions(config, f"${k}")
    ]
    return [_bounded(axis, config) for axis in axes]


SEARCH = "search"


def _bounded(axis: Axis, config: Mapping[str, Any]) -> Axis:
    names = [axis.key.rsplit(".", 1)[-1], *_filled(config, f"${axis.key}")]
    first = min(axis.choices) if axis.choices and axis.ordered else axis.low
    if axis.most is None and any(name in PROBABILITIES for name in names):
        axis = replace(axis, most=max(MOST_PROBABLE, axis.high))
    if axis.least is None and axis.ordered and first >= 0:
        axis = replace(axis, least=0.0 if not axis.log else None)
    return axis


def _filled(value: Any, variable: str, name: str = "") -> list[str]:
    """Names of the arguments that a variable fills, inside schedules too."""
    if isinstance(value, Mapping):
        return [found for k, v in value.items() for found in _filled(v, variable, k)] + (
            [name] if name and mentions(value, variable) else []
        )
    if isinstance(value, list | tuple):
        return [found for v in value for found in _filled(v, variable, name)]
    return [name] if value == variable else []


def design(axes: Mapping[str, Sequence[Axis]], count: int) -> dict[str, list[AxisValues]]:
    """`count` settings for every row: centered Latin hypercube, its columns spread over each other,
    the same for all.

    Args:
        axes: of each configuration.
        count: settings for each.

    >>> found = design({"one": [Axis("lr", 1, 2)], "two": [Axis("lr", 1, 2), Axis("rate", 0, 1)]}, 4)
    >>> [s["lr"] for s in found["one"]] == [s["lr"] for s in found["two"]], sorted(s["rate"] for s in found["two"])
    (True, [0.125, 0.375, 0.625, 0.875])
    """
    from scipy.stats import qmc

    keys = list(dict.fromkeys(axis.key for own in axes.values() for axis in own))
    keys.sort(key=lambda key: "." not in key)  # those of all rows first
    if not keys:
        return {row: [{}] for row in axes}
    seed = zlib.crc32(" ".join(keys).encode())
    drawn = qmc.LatinHypercube(
        d=len(keys), scramble=False, optimization="random-cd", rng=seed
    ).random(count)
    places = dict(zip(keys, drawn.T.tolist(), strict=True))
    return {
        row: [{a.key: a.value(places[a.key][i]) for a in own} for i in range(count)]
        for row, own in axes.items()
    }


def first_stage(axes: Mapping[str, Sequence[Axis]], count: int) -> dict[str, list[AxisValues]]:
    """The settings of the first of two stages: learning rates and weight decays, with
    each strength at its start.

    >>> rate = Axis("rate", 0.1, 0.5, first=0.2)
    >>> found = first_stage({"one": [Axis("train.lr", 1, 2)], "two": [Axis("train.lr", 1, 2), rate]}, 2)
    >>> [s["train.lr"] for s in found["one"]] == [s["train.lr"] for s in found["two"]], found["two"][0]["rate"]
    (True, 0.2)
    """
    found = design({row: _split(own)[0] for row, own in axes.items()}, count)
    fixed = {row: {a.key: a.start for a in _split(own)[1]} for row, own in axes.items()}
    return {row: [s | fixed[row] for s in settings] for row, settings in found.items()}


def second_stage(
    axes: Mapping[str, Sequence[Axis]], best: Mapping[str, AxisValues], count: int
) -> dict[str, list[AxisValues]]:
    """`count` more settings for every row with a best one: its strengths vary, or else its axes
    close to the best.

    None of them is the best one again. Rows without a best one yet belong to the hypercube too, so
    that the settings of a row do not depend on the others.
    """
    varied = {}
    for row, own in axes.items():
        common, strengths = _split(own)
        varied[row] = strengths or [a.near(best[row][a.key]) if row in best else a for a in common]
    found: dict[str, list[AxisValues]] = {}
    for drawn in (
        count + 1,
        count,
    ):  # an even number has no setting in the middle, where the best one often lies
        for row, settings in design(varied, drawn).items():
            new = [s for s in settings if row in best and not _same(s, best[row], varied[row])]
            if len(new) >= count or (row in best and row not in found):
                found[row] = [best[row] | s for s in new[:count]]
    return found


def _same(one: AxisValues, other: AxisValues, axes: Sequence[Axis]) -> bool:
    """Whether two settings differ by less than a hundredth of each range."""
    return all(abs(a.place(one[a.key]) - a.place(other[a.key])) < 0.01 for a in axes)


def _split(axes: Sequence[Axis]) -> tuple[list[Axis], list[Axis]]:
    """What the first stage varies and what the second does; a row with one kind of
    axes has it in the first."""
    common = [a for a in axes if "." in a.key]
    return (common, [a for a in axes if "." not in a.key]) if common else (list(axes), [])


def mentions(value: Any, variable: str) -> bool:
    """Whether a variable such as "$rate" occurs anywhere in plain data."""
    if isinstance(value, Mapping):
        return any(mentions(v, variable) for v in value.values())
    if isinstance(value, list | tuple):
        return any(mentions(v, variable) for v in value)
    out: bool = value == variable
    return out


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# --------------------
# Choosing one of several settings by validation, on seeds of their own: means, ties, edges.
# The best mean over the tuning seeds wins. A setting that has no number on one of them cannot win
# unless all settings lack one. Settings with the same mean tie, and the one in the middle of them
# is taken, so that no order of writing decides. A choice at the end of its axis is reported,
# because a better one may lie beyond.


SAME = 1e-9
"""Means that differ by less, in parts of the larger, are the same: sums in another order."""


@dataclass
class Tried:
    """A setting with what validation said of it, by tuning seed; None where
    a run gave no number."""

    values: dict[str, Any]
    by_seed: dict[str, float | None]
    ids: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    extension: bool = False

    @property
    def numbers(self) -> list[float]:
        return [v for v in self.by_seed.values() if v is not None and math.isfinite(v)]

    @property
    def complete(self) -> bool:
        return bool(self.by_seed) and len(self.numbers) == len(self.by_seed)

    @property
    def mean(self) -> float | None:
        """Over the tuning seeds that gave a number."""
        return statistics.fmean(self.numbers) if self.numbers else None


@dataclass
class Selection:
    """The chosen setting, which others tie with it or lie within one standard error, and the axes
    at whose end it lies."""

    chosen: Tried
    tied: int  # settings with the best mean, the chosen one included
    # settings within one standard error of the chosen one, over tuning seeds, itself included
    alike: int
    edges: list[tuple[str, bool]]  # axes, and whether the choice lies at their upper end


def select(tried: Sequence[Tried], axes: Sequence[Axis], mode: str) -> Selection | None:
    """The choice among settings; None where no run of any gave a number.

    Args:
        tried: settings with their validation values.
        axes: that were searched.
        mode: 'max' or 'min'.
    """
    most = max((len(t.numbers) for t in tried), default=0)
    if not most:
        return None
    fit = [t for t in tried if t.complete] or [t for t in tried if len(t.numbers) == most]
    sign = 1 if mode == "max" else -1
    best = max(sign * t.mean for t in fit if t.mean is not None)
    tied = [
        t for t in fit if t.mean is not None and best - sign * t.mean <= SAME * max(1.0, abs(best))
    ]
    chosen = _middle(tied, axes)
    alike = sum(t is chosen or _alike(t, chosen) for t in fit)
    return Selection(chosen, len(tied), alike, _edges(chosen, tried, axes))


def _middle(tied: Sequence[Tried], axes: Sequence[Axis]) -> Tried:
    """The setting nearest to the median of the tied ones on every axis; of two as near, that nearer
    to the middle of the range, then the one further up."""
    places = [[_place(a, t) for a in axes] for t in tied]
    median = [statistics.median(column) for column in zip(*places, strict=True)]

    def order(i: int) -> tuple[float, float, float]:
        away = sum((p - m) ** 2 for p, m in zip(places[i], median, strict=True))
        outside = sum((p - 0.5) ** 2 for p in places[i])
        return round(away, 9), round(outside, 9), -sum(places[i])

    return tied[min(range(len(tied)), key=order)]


def _place(axis: Axis, tried: Tried) -> float:
    return axis.place(tried.values[axis.key])


def _alike(one: Tried, other: Tried) -> bool:
    """Whether the difference over shared seeds is at most its standard error: too little to
    separate them."""
    pairs = [(one.by_seed.get(s), v) for s, v in other.by_seed.items()]
    gaps = [
        a - b
        for a, b in pairs
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
    ]
    if len(gaps) < 2:
        return bool(gaps) and not any(gaps)
    return abs(statistics.fmean(gaps)) <= statistics.stdev(gaps) / math.sqrt(len(gaps))


def _edges(chosen: Tried, tried: Sequence[Tried], axes: Sequence[Axis]) -> list[tuple[str, bool]]:
    found = []
    for axis in axes:
        if not axis.ordered:
            continue
        values = sorted({t.values[axis.key] for t in tried})
        if len(values) > 1 and chosen.values[axis.key] in (values[0], values[-1]):
            found.append((axis.key, chosen.values[axis.key] == values[-1]))
    return found


def remarks(row: Mapping[str, Any]) -> list[str]:
    """What a reader must know of a row's selection, from its record, in words."""
    notes, count = [], row["tried"]
    if not row.get("axes"):
        notes.append("nothing to tune")
    if row.get("chosen") is None:
        return [*notes, "selection: no setting gave a number"] if row.get("axes") else notes
    if row.get("tied", 1) > 1:
        notes.append(f"selection: {row['tied']} of {count} settings tie; the middle one was taken")
    elif row.get("alike", 1) > 1:
        notes.append(
            f"selection: {row['alike']} of {count} settings are "
            "within one standard error of the chosen one"
        )
    for edge in row.get("edges", []):
        range_ = "range, which was extended once" if edge["extended"] else "range"
        notes.append(
            f"{edge['axis'].rsplit('.', 1)[-1]} {edge['value']:g} lies "
            f"at the {edge['end']} end of its {range_}"
        )
    left = [
        e
        for e in row.get("extended", [])
        if e["axis"] not in [edge["axis"] for edge in row.get("edges", [])]
    ]
    for one in left:
        notes.append(
            f"the range of {one['axis'].rsplit('.', 1)[-1]} was extended once to {one['to']:g}"
        )
    return notes
