"""From frame scores to intervals, and the average precision of intervals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Interval:
    """An action in a video, in seconds; `score` ranks detections."""

    video: str
    label: int
    start: float
    end: float
    score: float = 1.0


def propose(video: str, scores: np.ndarray, rate: float, overlap: float = 0.5) -> list[Interval]:
    """Intervals from frame scores (frames, classes): runs above several levels, ranked by contrast,
    overlaps removed.

    A run's score is the mean score inside it minus the mean of its surroundings (a quarter of its
    length on each side, at least one frame), the outer-inner contrast of AutoLoc (Shou et al., ECCV
    2018). Of intervals that overlap by more than `overlap` (tIoU) only the best stays."""
    kept: list[Interval] = []
    for label in range(scores.shape[1]):
        column = scores[:, label]
        runs = sorted(
            {run for level in LEVELS if column.max() > level for run in _runs(column > level)}
        )
        if not runs:
            continue
        sums = np.concatenate([[0.0], column.cumsum()])
        contrast = np.array([_contrast(sums, *run) for run in runs])
        for run, score in _suppress(runs, contrast, overlap):
            kept.append(Interval(video, label, run[0] / rate, run[1] / rate, score))
    return kept


def _runs(above: np.ndarray) -> list[tuple[int, int]]:
    """Begin and end (exclusive) of each run of True.

    >>> _runs(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    change = np.flatnonzero(np.diff(np.concatenate([[0], above.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in change.reshape(-1, 2)]


def _contrast(sums: np.ndarray, begin: int, end: int) -> float:
    margin = max((end - begin) // 4, 1)
    left, right = max(begin - margin, 0), min(end + margin, len(sums) - 1)
    inner = (sums[end] - sums[begin]) / (end - begin)
    around = (right - left) - (end - begin)
    outer = (sums[begin] - sums[left] + sums[right] - sums[end]) / around if around else 0.0
    return float(inner - outer)


def _suppress(
    runs: list[tuple[int, int]], score: np.ndarray, overlap: float
) -> list[tuple[tuple[int, int], float]]:
    """Non-maximum suppression: best first, drop what overlaps it too much."""
    spans = np.array(runs, dtype=float)
    order = np.argsort(-score, kind="stable")
    kept = []
    while len(order):
        best = order[0]
        kept.append((runs[best], float(score[best])))
        order = order[1:][tiou(spans[best], spans[order[1:]]) <= overlap]
    return kept


def tiou(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Temporal intersection over union of a span (2,) with spans (n, 2).

    >>> tiou(np.array([0.0, 2.0]), np.array([[1.0, 3.0], [5.0, 6.0]])).round(3).tolist()
    [0.333, 0.0]
    """
    common = (np.minimum(one[1], many[:, 1]) - np.maximum(one[0], many[:, 0])).clip(min=0)
    union = (one[1] - one[0]) + (many[:, 1] - many[:, 0]) - common
    out: np.ndarray = common / np.maximum(union, 1e-12)
    return out


def interval_map(found: list[Interval], truth: list[Interval], threshold: float) -> float:
    """Mean over the classes of the truth of the average precision of detections at one tIoU
    threshold.

    As ActivityNet's evaluation does: detections by falling score, each takes the best-overlapping
    action of its video and class that no better one took; a hit overlaps by at least `threshold`.
    Precision is made non-increasing before it is summed over the steps of recall."""
    by_label: dict[int, tuple[list[Interval], list[Interval]]] = defaultdict(lambda: ([], []))
    for item in found:
        by_label[item.label][0].append(item)
    for item in truth:
        by_label[item.label][1].append(item)
    values = [_average_precision(f, t, threshold) for _, (f, t) in sorted(by_label.items()) if t]
    if not values:
        raise RuntimeError("There is no action to detect: mean average precision is not defined.")
    return sum(values) / len(values)


def _average_precision(found: list[Interval], truth: list[Interval], threshold: float) -> float:
    actions: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for item in truth:
        actions[item.video].append((item.start, item.end))
    spans = {video: np.array(items) for video, items in actions.items()}
    free = {video: np.ones(len(items), dtype=bool) for video, items in actions.items()}
    hits = np.zeros(len(found), dtype=bool)
    for rank, item in enumerate(sorted(found, key=lambda i: -i.score)):
        if item.video not in spans:
            continue
        overlap = np.where(
            free[item.video], tiou(np.array([item.start, item.end]), spans[item.video]), -1.0
        )
        best = int(overlap.argmax())
        if overlap[best] >= threshold:
            hits[rank], free[item.video][best] = True, False
    recalled = hits.cumsum()
    precision = recalled / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]  # what a lower cut could reach counts
    return float((precision * hits).sum() / len(truth))
