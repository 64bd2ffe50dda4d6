"""Temporal action detection: per-frame mAP, and interval mAP at tIoU 0.3 to 0.7."""

from __future__ import annotations

import torch
from torch import Tensor

from dampen.studies.plugins import Metrics, Split
from reproductions.data.thumos import DetectionSplit
from reproductions.metrics.intervals import Interval, interval_map, propose

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7)


class DetectionMetrics(Metrics):
    """`frame_map`, `interval_map` (mean over tIoU 0.3 to 0.7), `interval_map@T` for each, and `nll`
    per frame.

    Frame mAP is the mean over classes of scikit-learn's average precision over all frames that
    count: neither padding nor ambiguous ones; the background class ranks nothing. Where windows
    overlap, scores of a frame are averaged. Intervals are runs of frames above several thresholds,
    see `dampen.studies.metrics.intervals`."""

    def __init__(self, split: Split, classes: int, *, background: bool):
        if not isinstance(split, DetectionSplit):
            raise TypeError(
                f"Detections are measured on a DetectionSplit: got {type(split).__name__}."
            )
        self.split, self.background = split, background
        self.actions = classes - background
        rows = len(split.frames)
        self.scores = torch.zeros(rows, self.actions, dtype=torch.float64)
        self.losses = torch.zeros(rows, dtype=torch.float64)
        self.seen = torch.zeros(rows, dtype=torch.float64)
        self._next = 0

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """Take in the windows `index` of the split; without it, batches must come in the split's
        order.
        """
        split = self.split
        if index is None:
            index = torch.arange(self._next, self._next + len(logits))
            self._next += len(logits)
            if self._next > len(split) or not torch.equal(
                split.batch(index)["target"], target.cpu()
            ):
                raise ValueError(
                    "Batches did not come in the split's order: pass index=batch['index'] to "
                    "update()."
                )
        index, logits = index.cpu(), logits.detach().double().cpu()
        length = split.lengths[index, None]
        position = torch.arange(split.window)
        inside = position < length
        rows = (split.starts[index, None] + position)[inside]
        logits, target = logits[inside], target.detach().double().cpu()[inside]
        if self.background:
            logs = logits.log_softmax(dim=-1)
            loss, score = -(target * logs).sum(dim=-1), logs.exp()[:, 1:]
        else:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, target, reduction="none"
            ).mean(dim=-1)
            score = logits.sigmoid()
        self.scores.index_add_(0, rows, score)
        self.losses.index_add_(0, rows, loss)
        self.seen.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))

    def compute(self) -> dict[str, float]:
        seen = self.seen
        rows = torch.cat(
            [torch.arange(line.first, line.first + line.frames) for line in self.split.timelines]
        )
        missed = int((seen[rows] == 0).sum())
        if missed:
            raise RuntimeError(
                f"{missed} of {len(rows)} frames were not predicted: average precision needs the "
                "whole split. "
                "Call update() with every batch before compute()."
            )
        scores = self.scores / seen.clamp(min=1)[:, None]
        counted = rows if self.split.counted is None else rows[self.split.counted[rows]]
        losses = self.losses[counted] / seen[counted]
        result = {
            "frame_map": frame_map(scores[counted], self._shown(counted)),
            "nll": float(losses.mean()),
        }
        truth, found = self._intervals(scores)
        at = {threshold: interval_map(found, truth, threshold) for threshold in THRESHOLDS}
        result["interval_map"] = sum(at.values()) / len(at)
        return result | {f"interval_map@{threshold}": value for threshold, value in at.items()}

    def _shown(self, rows: Tensor) -> Tensor:
        return self.split.target[rows][:, int(self.background) :] > 0

    def _intervals(self, scores: Tensor) -> tuple[list[Interval], list[Interval]]:
        truth, found = [], []
        for line in self.split.timelines:
            truth += [Interval(line.name, label, start, end) for label, start, end in line.actions]
            own = scores[line.first : line.first + line.frames].numpy()
            found += propose(line.name, own, line.rate)
        return truth, found


def frame_map(scores: Tensor, shown: Tensor) -> float:
    """Mean over classes of the average precision of frames (n, classes); classes that never occur
    are left out.

    >>> frame_map(torch.tensor([[0.9], [0.8], [0.1]]), torch.tensor([[True], [False], [True]]))
    0.8333333333333333
    """
    from sklearn.metrics import average_precision_score

    present = torch.nonzero(shown.any(dim=0)).flatten().tolist()
    if not present:
        raise RuntimeError(
            "No frame of the split shows any action: mean average precision is not defined."
        )
    values = [average_precision_score(shown[:, c].numpy(), scores[:, c].numpy()) for c in present]
    return float(sum(values) / len(values))
