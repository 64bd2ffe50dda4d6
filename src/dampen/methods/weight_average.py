"""WeightAverage: evaluate at an average of the weights of training."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from dampen._torch import placed_like, shared_until_written, whole_tensor
from dampen.hooks.weights import floating
from dampen.regularizer import Regularizer, StepCall

KINDS = ("ema", "swa", "lawa")


class WeightAverage(Regularizer):
    """Evaluate at an average of the weights that training passes through: exponential
    (as in mean teachers, arXiv 1703.01780), stochastic weight averaging (arXiv 1803.05407), or the
    latest weights (LAWA, arXiv 2209.14981).

    "ema": a <- b a + (1 - b) w after each step, b = min(decay, (1 + t) / (10 + t)). "swa": the mean
    of the weights from `start` of training on, every `every` steps. "lawa": the mean of the last
    `window` of them. Training itself does not change.

    Give it the optimizer once, `reg.attach_optimizer(optimizer)`, and evaluate inside `with
    reg.averaged():`, where the model carries the average. Statistics of batch norm are averaged
    along; `reg.averaged(loader)` computes them anew instead. `dampen compare` on the built-in
    trainer does so. The average is in `reg.state_dict()`. It takes the memory of the weights
    once more (16-bit weights in float32), and "lawa" of `window` of them.

    Args:
        kind: "ema", "swa" or "lawa".
        decay: b of "ema".
        start: share of training from which "swa" and "lawa" average.
        every: steps from one weight that counts to the next, for "swa" and "lawa".
        window: how many weights "lawa" keeps.

    >>> import torch, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.WeightAverage("ema", decay=0.99))
    >>> reg.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> with reg.averaged():
    ...     predictions = model(torch.randn(4, 3, 8, 8))
    """

    stochastic = False

    def __init__(
        self,
        kind: Literal["ema", "swa", "lawa"] = "ema",
        decay: float = 0.999,
        start: float = 0.5,
        every: int = 1,
        window: int = 5,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"WeightAverage: kind is one of {', '.join(KINDS)}, got {kind!r}.")
        if not (0 <= decay < 1 and 0 <= start < 1 and every >= 1 and window >= 1):
            raise ValueError(
                "WeightAverage: decay and start are in [0, 1), every and window are counts from 1, "
                f"got decay={decay!r}, start={start!r}, every={every!r}, window={window!r}."
            )
        self.kind, self.decay, self.start, self.every = kind, decay, start, every
        self.window = window if kind == "lawa" else 1
        self.count = self.seen = 0  # weights averaged, and steps that could have counted
        self.kept: list[dict[str, Tensor]] = []  # the average, or the window of "lawa"

    def prepare(self, model: nn.Module) -> None:
        live = floating(model)
        self.kept = [
            {n: shared_until_written(wide(t)) for n, t in live.items()} for _ in range(self.window)
        ]

    def after_step(self, call: StepCall) -> None:
        if self.kind != "ema" and self._progress < self.start:
            return
        self.seen += 1
        if self.kind != "ema" and (self.seen - 1) % self.every:
            return
        live, slot = floating(call.model), self.kept[self.count % self.window]
        if self.count < self.window or self.kind == "lawa":
            slot.update({n: wide(t).clone() for n, t in live.items()})
        else:
            into = [slot[n] for n in live]
            values = [t.detach().to(slot[n].dtype) for n, t in live.items()]
            if self.kind == "swa":
                get_swa_multi_avg_fn()(into, values, torch.tensor(self.count))
            else:
                decay = min(self.decay, (1 + self.count) / (10 + self.count))
                get_ema_multi_avg_fn(decay)(into, values, self.count)
        self.count += 1

    def averaged_weights(self) -> dict[str, Tensor]:
        """The average by name; empty where no step has counted so far."""
        slots = self.kept[: self.count]
        if len(slots) < 2:
            return slots[0] if slots else {}
        return {n: torch.stack([slot[n] for slot in slots]).mean(0) for n in slots[0]}

    def saved(self) -> dict[str, Tensor]:
        counts = {"count": torch.tensor([self.count, self.seen])}
        kept = enumerate(self.kept)
        return counts | {f"{i}.{n}": whole_tensor(t) for i, slot in kept for n, t in slot.items()}

    def restore(self, name: str, value: Tensor) -> None:
        if name == "count":
            self.count, self.seen = value.tolist()
            return
        slot, _, weight = name.partition(".")
        old = self.kept[int(slot)][weight]
        self.kept[int(slot)][weight] = placed_like(value, old).to(old.dtype, copy=True)

    def extra_repr(self) -> str:
        return f"kind={self.kind}"


def wide(weight: Tensor) -> Tensor:
    """A weight without gradient, one of 16 bits in float32: there the small steps of an average
    would be rounded away.

    Args:
        weight: floating-point.
    """
    narrow = weight.dtype.itemsize < torch.float32.itemsize
    return weight.detach().float() if narrow else weight.detach()
