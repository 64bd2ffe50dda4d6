"""Am I overfitting? Training and validation losses of one run, read from a file and judged.

Both curves are averaged in blocks, and a change counts where it is larger than the noise of the
curve. The noise is estimated from second differences, which a smooth trend leaves alone.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ANSWERS = {
    "overfits": "Yes, it overfits",
    "memorizes": "Yes, it memorizes, and validation does not suffer yet",
    "improves": "No, and validation still improves",
    "flat": "No, and validation no longer improves",
    "diverges": "No, training itself gets worse",
    "unknown": "No answer",
}
"""Every answer about a run, in words."""
FEWEST = 6
"""Points of validation below which there is no answer."""
BLOCKS = 20
"""Parts in which a long curve is averaged."""
LEAST_CHANGE = 0.01
"""Share of a loss below which a change counts as none, whatever the noise."""
SIGNIFICANT = 4.0
"""Standard errors that a change must exceed. The best of many noisy points lies two
below the curve by chance."""
AXES = ("epoch", "step", "global_step", "iteration", "iter")
_LOSS = r"(task|loss|nll|ce|cross_entropy|mse)"
TRAIN = (rf"^train(ing)?[ ./_-]?{_LOSS}(_epoch)?$", rf"^train\w*[ ./_-]\w*{_LOSS}", r"^loss$")
VALID = (
    rf"^(val|valid|validation|dev|eval)[ ./_-]?{_LOSS}(_epoch)?$",
    rf"^(val|valid|validation|dev|eval)\w*[ ./_-]\w*{_LOSS}",
)
SCORES = (r"^(val|valid|validation|dev|eval)\w*[ ./_-]\w*(acc|f1|auc|map)",)
"""Names of columns, the best first. A score is larger where it is better, and has no gap to the
training loss."""


@dataclass(frozen=True)
class Curve:
    """The losses of one run.

    Attributes:
        train: (position, loss) of training.
        valid: (position, loss) of validation.
        axis: what positions count.
        score: whether validation is a score, larger where better.
        names: of the two columns.
    """

    train: tuple[tuple[float, float], ...]
    valid: tuple[tuple[float, float], ...]
    axis: str = "epoch"
    score: bool = False
    names: tuple[str, str] = ("train", "valid")


@dataclass(frozen=True)
class Fit:
    """What the curves of one run say.

    Attributes:
        answer: one of `ANSWERS`.
        axis: what positions count.
        best: where validation is best, which is where to stop.
        last: where the curves end.
        train_best: training loss there.
        valid_best: validation loss there.
        train_last: training loss at the end.
        valid_last: validation loss at the end.
        gap: validation loss minus training loss at the end; None for a score.
        trend: how the gap changes with each epoch or step over the last third; None for a score.
        trend_is_clear: whether that is more than noise.
    """

    answer: str
    axis: str
    best: float
    last: float
    train_best: float
    valid_best: float
    train_last: float
    valid_last: float
    gap: float | None = None
    trend: float | None = None
    trend_is_clear: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def judge(curve: Curve) -> Fit | None:
    """Whether a run overfits, and where to stop. None for fewer than `FEWEST` points.

    Args:
        curve: its losses.

    >>> losses = [(t, 2.0 * 0.8**t) for t in range(40)]
    >>> fit = judge(Curve(tuple(losses), tuple((t, y + 0.01 * t) for t, y in losses)))
    >>> fit.answer, fit.best, round(fit.trend, 3)
    ('overfits', 17, 0.01)
    """
    at = [t for t, _ in curve.valid]
    raw = [-y if curve.score else y for _, y in curve.valid]
    train = _aligned(curve.train, at)
    if len(at) < FEWEST or not train:
        return None
    blocks, train_blocks = _blocks(raw), _blocks(train)
    end = max(1, len(blocks) // 10)
    best = min(range(len(blocks)), key=blocks.__getitem__)
    limit, train_limit = _limit(raw, blocks[best]), _limit(train, train_blocks[best])
    last, train_last = statistics.fmean(blocks[-end:]), statistics.fmean(train_blocks[-end:])
    earlier = statistics.fmean(blocks[-3 * end : -2 * end])
    if best < len(blocks) - end and last - blocks[best] > limit:
        worse = train_last - train_blocks[best] > train_limit
        answer = "diverges" if worse else "overfits"
    elif earlier - last > limit:
        answer = "improves"
    elif not curve.score and 0 <= train_last <= last / 2:
        answer = "memorizes"
    else:
        answer = "flat"
    stop = _lowest(raw, best, len(blocks))
    sign = -1.0 if curve.score else 1.0
    fit = Fit(
        answer, curve.axis, at[stop], at[-1],
        train_blocks[best], sign * blocks[best], train_last, sign * last,
    )  # fmt: skip
    if curve.score:
        return fit
    third = max(FEWEST, len(at) // 3)
    gaps = [v - t for v, t in zip(raw, train, strict=True)]
    trend, error = _slope(at[-third:], gaps[-third:])
    clear = abs(trend) * (at[-1] - at[-third]) > LEAST_CHANGE * abs(last)
    clear = clear and abs(trend) > SIGNIFICANT * error
    return Fit(**{**asdict(fit), "gap": last - train_last, "trend": trend, "trend_is_clear": clear})


def _aligned(curve: Sequence[tuple[float, float]], at: Sequence[float]) -> list[float]:
    """Training losses at the positions of validation: the mean since the last
    one, else the nearest."""
    found, before = [], -math.inf
    for position in at:
        since = [y for t, y in curve if before < t <= position]
        if not since and curve:
            since = [min(curve, key=lambda point: abs(point[0] - position))[1]]
        if since:
            found.append(statistics.fmean(since))
        before = position
    return found


def _blocks(values: Sequence[float]) -> list[float]:
    """Means of at most `BLOCKS` neighboring parts of a curve, all of the same
    length but for one value."""
    n = len(values)
    edges = [i * n // min(n, BLOCKS) for i in range(min(n, BLOCKS) + 1)]
    return [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]


def _lowest(values: Sequence[float], block: int, blocks: int) -> int:
    """Where a curve is lowest, in or beside its lowest block, after a running
    mean of a block's length."""
    n, half = len(values), len(values) // (2 * blocks)
    near = range(max(0, (block - 1) * n // blocks), min(n, (block + 2) * n // blocks))
    means = {i: statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in near}
    return min(near, key=means.__getitem__)


def _limit(values: Sequence[float], near: float) -> float:
    """The change between two blocks that is more than noise and large enough to matter."""
    second = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    noise = 1.4826 * statistics.median(second) / math.sqrt(6)  # of one value
    of_block = noise * math.sqrt(min(len(values), BLOCKS) / len(values))
    return max(SIGNIFICANT * of_block, LEAST_CHANGE * abs(near))


def _slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of a line through points by least squares, and its standard error."""
    mx, my = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - mx) ** 2 for a in x)
    if not spread:
        return 0.0, math.inf
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - my - slope * (a - mx)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / max(len(x) - 2, 1) / spread)


# --- files of losses


def read_curve(path: Path | str, train: str | None = None, valid: str | None = None) -> Curve:
    """Losses from a CSV file (Lightning's metrics.csv, Keras' CSVLogger), trainer_state.json of
    Hugging Face, or JSON lines.

    Args:
        path: the file.
        train: column of the training loss; default: recognized by its name.
        valid: column of the validation loss; default: recognized by its name.
    """
    path = Path(path)
    return curve_of(_rows(path), str(path), train, valid)


def _rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        if path.suffix == ".json":
            content = json.loads(text)
            rows = content.get("log_history") if isinstance(content, dict) else content
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}. Give a file that is whole.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} holds no losses: expected a list of objects, "
            "or trainer_state.json with a log_history."
        )
    return rows


def curve_of(
    rows: Iterable[Mapping[str, Any]], what: str, train: str | None = None, valid: str | None = None
) -> Curve:
    """The losses among logged values, found by the names of their columns.

    Args:
        rows: what was logged, oldest first. Groups ({"train": {"loss":
            1.0}}) count as "train/loss".
        what: where they come from, for messages.
        train: column of the training loss; default: recognized by its name.
        valid: column of the validation loss; default: recognized by its name.
    """
    table = [_numbers(row) for row in rows]
    columns = list(dict.fromkeys(name for row in table for name in row))
    a = _column(columns, train, TRAIN, what)
    b = _column(columns, valid, VALID, what) or _column(columns, None, SCORES, what)
    missing = [name for name, found in (("training", a), ("validation", b)) if found is None]
    if missing:
        raise ValueError(
            f"{what}: no column of the {' and the '.join(missing)} loss was recognized among "
            f"{', '.join(columns) or 'none'}. Name it: --train COLUMN --valid COLUMN."
        )
    assert a is not None  # both were found
    assert b is not None
    axis = _axis(table, columns, b)
    points = [
        (row[axis] if axis else float(i), row)
        for i, row in enumerate(table)
        if axis in row or not axis
    ]
    return Curve(
        tuple((at, row[a]) for at, row in points if a in row),
        tuple((at, row[b]) for at, row in points if b in row),
        axis or "row",
        score=valid is None and _matches(b, SCORES),
        names=(a, b),
    )  # fmt: skip


def _numbers(row: Mapping[str, Any], group: str = "") -> dict[str, float]:
    """The finite numbers of a row by name; groups by group/name."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{group}{name}/")
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):  # an empty cell, a text
            continue
        if math.isfinite(number):
            found[f"{group}{name}".strip()] = number
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name.lower()) for pattern in patterns)


def _column(
    columns: Sequence[str], named: str | None, patterns: Sequence[str], what: str
) -> str | None:
    if named is not None:
        if named not in columns:
            raise ValueError(f"{what} has no column {named!r}. It has: {', '.join(columns)}.")
        return named
    for pattern in patterns:
        fitting = [name for name in columns if re.search(pattern, name.lower())]
        if fitting:  # Lightning logs a loss per step and per epoch
            return min(fitting, key=lambda name: name.endswith("_step"))
    return None


def _axis(table: Sequence[Mapping[str, float]], columns: Sequence[str], valid: str) -> str | None:
    """The first column that counts something and differs at each validation."""
    by_name = {name.lower(): name for name in columns}
    for name in AXES:
        column = by_name.get(name)
        if column is None:
            continue
        at = [row.get(column) for row in table if valid in row]
        if None not in at and len(set(at)) == len(at):
            return column
    return None
