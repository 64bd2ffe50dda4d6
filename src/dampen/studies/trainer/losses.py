"""The task's loss: the mean over the positions that count."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.studies.data.dataset import Dataset
from dampen.studies.metrics import TASKS


def loss_of(data: Dataset, output: Any, target: Tensor, valid: Tensor | None, smoothing: float = 0.0) -> Tensor:
    """The loss that a data set is made for: its task's own, or one of `task_loss`."""
    if data.loss != "task":
        return task_loss(output, target, valid, data.loss, smoothing)
    loss = TASKS[data.task].loss
    if loss is None:
        raise ValueError(f"{data.name} wants the loss of the task {data.task!r}, which has none. Give the Task a loss.")
    return loss(output, target)


def task_loss(logits: Any, target: Tensor, valid: Tensor | None, kind: str, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy over classes, or over independent yes/no questions (`kind="binary_cross_entropy"`).

    `logits` are (..., classes); `target` holds class numbers (...) or probabilities (..., classes); where `valid` (...)
    is False a position counts neither in the sum nor in the divisor.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 9.0]])
    >>> round(task_loss(logits, torch.tensor([0, 0]), torch.tensor([True, False]), "cross_entropy").item(), 4)
    0.1269
    """
    logits = logits.float()
    if kind == "binary_cross_entropy":
        target = target.float() * (1 - smoothing) + 0.5 * smoothing
        return _mean(F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1), valid)
    if target.is_floating_point():
        flat = F.cross_entropy(
            logits.flatten(0, -2), target.flatten(0, -2), label_smoothing=smoothing, reduction="none"
        )
        return _mean(flat.view(logits.shape[:-1]), valid)
    if valid is not None:
        target = target.masked_fill(~valid, -100)  # F.cross_entropy's own sign for 'does not count'
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=smoothing, ignore_index=-100)


def _mean(loss: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return loss.mean()
    return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=1)


class Meter:
    """Means of the loss terms over an epoch, and the place where a loss that is not finite is noticed.

    On the CPU each step is checked before its backward pass; on other devices every 50 steps, so as not to wait.
    """

    def __init__(self, device: torch.device):
        self.every = 1 if device.type == "cpu" else 50
        self.sums: dict[str, float] = {}
        self.count = 0
        self.latest: dict[str, float] = {}
        self._pending: list[tuple[int, list[str], Tensor]] = []

    def add(self, step: int, terms: dict[str, Tensor], share: float = 1.0) -> None:
        """Take the terms of one (part of a) step; `share` is that part's weight in the step."""
        if self.every == 1 and share == 1 and len(terms) == 1:
            self.count += 1
            self._read(step, {name: t.item() for name, t in terms.items()})
            return
        values = [t.detach() for t in terms.values()]
        together = values[0].view(1) if len(values) == 1 else torch.stack([v.float() for v in values])
        self._pending.append((step, list(terms), together if share == 1 else together * share))
        self.count += 1
        if len(self._pending) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Read the pending terms; raise NotFinite at the first one that is not a finite number."""
        pending, self._pending = self._pending, []
        for step, names, values in pending:
            self._read(step, dict(zip(names, values.tolist(), strict=True)))

    def _read(self, step: int, numbers: dict[str, float]) -> None:
        bad = [n for n, v in numbers.items() if not math.isfinite(v)]
        if bad:
            raise NotFinite(step, bad, self.latest)
        for name, value in numbers.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.latest = numbers

    def means(self, steps: int) -> dict[str, float]:
        """The mean of each term per step."""
        self.flush()
        return {name: value / max(1, steps) for name, value in self.sums.items()}

    def reset(self) -> None:
        self.sums, self.count = {}, 0


class NotFinite(ArithmeticError):
    """A term of the loss is NaN or infinite."""

    def __init__(self, step: int, names: list[str], before: dict[str, float]):
        super().__init__(step, names, before)
        self.step, self.names, self.before = step, names, before
