"""Loss, optimizer, learning-rate schedule and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dampen.studies.data.dataset import Dataset
from dampen.studies.metrics import TASKS
from dampen.studies.run import TrainOptions
from dampen.studies.trainer.distributed import in_pieces_like, whole


def loss_of(
    data: Dataset, output: Any, target: Tensor, valid: Tensor | None, smoothing: float = 0.0
) -> Tensor:
    """The loss that a data set is made for: its task's own, or one of `task_loss`."""
    if data.loss != "task":
        return task_loss(output, target, valid, data.loss, smoothing)
    loss = TASKS[data.task].loss
    if loss is None:
        raise ValueError(
            f"{data.name} wants the loss of the task {data.task!r}, which has none. Give the Task "
            "a loss."
        )
    return loss(output, target)


def task_loss(
    logits: Any, target: Tensor, valid: Tensor | None, kind: str, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy over classes, or over independent yes/no questions
    (`kind="binary_cross_entropy"`).

    `logits` are (..., classes); `target` holds class numbers (...) or probabilities (..., classes);
    where `valid` (...) is False a position counts neither in the sum nor in the divisor.

    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 9.0]])
    >>> target, valid = torch.tensor([0, 0]), torch.tensor([True, False])
    >>> round(task_loss(logits, target, valid, "cross_entropy").item(), 4)
    0.1269
    """
    logits = logits.float()
    if kind == "binary_cross_entropy":
        target = target.float() * (1 - smoothing) + 0.5 * smoothing
        return _mean(
            F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1), valid
        )
    if target.is_floating_point():
        flat = F.cross_entropy(
            logits.flatten(0, -2),
            target.flatten(0, -2),
            label_smoothing=smoothing,
            reduction="none",
        )
        return _mean(flat.view(logits.shape[:-1]), valid)
    if valid is not None:
        target = target.masked_fill(~valid, -100)  # F.cross_entropy's own sign for 'does not count'
    return F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), label_smoothing=smoothing, ignore_index=-100
    )


def _mean(loss: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return loss.mean()
    return torch.where(valid, loss, 0.0).sum() / valid.sum().clamp(min=1)


class Meter:
    """Means of the loss terms over an epoch, and the place where a loss that is not finite is
    noticed.

    On the CPU each step is checked before its backward pass; on other devices every 50 steps, so as
    not to wait."""

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
        together = (
            values[0].view(1) if len(values) == 1 else torch.stack([v.float() for v in values])
        )
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


def make_optimizer(
    model: nn.Module, extra: Iterable[nn.Parameter], options: TrainOptions
) -> torch.optim.Optimizer:
    """The optimizer over the model's weights and the regularizers' own parameters.

    Weight decay is for matrices: norms, biases and what a regularizer learns are not pulled to
    zero."""
    learned = list(extra)
    theirs = {id(p) for p in learned}
    own = [p for p in model.parameters() if p.requires_grad and id(p) not in theirs]
    groups = [
        {"params": [p for p in own if p.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in own if p.ndim < 2] + learned, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    # One fused kernel for all tensors; with a gradient scaler Fabric could not clip, so fp16 goes
    # without.
    fused = options.precision != "fp16" and {p.device.type for p in own} <= {"cpu", "cuda"}
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=fused)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=options.lr, betas=(options.betas[0], options.betas[1]), fused=fused)


def learning_rate(step: int, total: int, per_epoch: int, options: TrainOptions) -> float:
    """The learning rate of step `step` (from 0) out of `total`: a linear warm-up, then cosine,
    steps, or constant.

    >>> options = TrainOptions(lr=1.0, warmup=1.0)
    >>> [round(learning_rate(s, 40, 4, options), 3) for s in (0, 3, 4, 22, 39)]
    [0.25, 1.0, 1.0, 0.5, 0.002]
    """
    warmup = options.warmup * per_epoch
    if step < warmup:
        return options.lr * min(1.0, (step + 1) / warmup)
    if options.schedule == "constant":
        return options.lr
    if options.schedule == "step":
        return options.lr * options.step_factor ** math.floor(
            step / (options.step_every * per_epoch)
        )
    t = (step - warmup) / max(1.0, total - warmup)
    return options.lr * (
        options.final_lr + (1 - options.final_lr) * 0.5 * (1 + math.cos(math.pi * t))
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class MovingAverage:
    """An exponential moving average of all floating-point weights and buffers, to evaluate with.

    Early on it averages over what there is: the decay is min(decay, (1 + step) / (10 + step)).
    torch's `AveragedModel` would copy the model, which sharded (FSDP) models refuse, and a copy has
    hooks of its own; so torch's average moves tensors that are kept here.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.steps = decay, 0
        self.names = [n for n, t in model.state_dict().items() if t.is_floating_point()]
        self.shadow = [t.detach().clone() for t in self._live(model)]

    def _live(self, model: nn.Module) -> list[Tensor]:
        state = model.state_dict()
        return [state[n] for n in self.names]

    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights after one optimizer step."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        get_ema_multi_avg_fn(decay)(self.shadow, self._live(model), self.steps)
        self.steps += 1

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model carries the average; afterwards its own weights, bit for bit."""
        own = [t.clone() for t in self._live(model)]
        _copy(self._live(model), self.shadow)
        try:
            yield
        finally:
            _copy(self._live(model), own)

    def state_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "shadow": {n: whole(t) for n, t in zip(self.names, self.shadow, strict=True)},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        shadow, steps = state["shadow"], state["steps"]
        if not isinstance(shadow, dict) or not isinstance(steps, int):
            raise ValueError(
                "the moving average of this checkpoint cannot be read; delete the checkpoint to "
                "start over."
            )
        self.steps = steps
        _copy(
            self.shadow,
            [in_pieces_like(shadow[n], t) for n, t in zip(self.names, self.shadow, strict=True)],
        )


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(
        into, values, strict=True
    ):  # one by one: sharded tensors have no fused copy
        tensor.copy_(value)
