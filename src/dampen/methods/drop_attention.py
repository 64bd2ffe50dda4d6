"""DropAttention: drop attention weights after the softmax."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dampen.masks import bernoulli, dilate, drop, seed_rate, zero_and_rescale
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class DropAttention(Regularizer):
    """Drop attention weights after the softmax, singly, by column or in windows of keys (arXiv
    1907.11065).

    A' = A * M, then each row is divided by what it kept, sum_j A'_ij (`normalized=True`, the
    paper's), or by 1 - p (`normalized=False`, ordinary attention dropout). A window of w keys is
    dropped at each seed, drawn at 1 - (1-p)^(1/w).

    Dividing by the kept sum, with the sum differentiated, is the softmax over the kept keys: the
    normalized form *is* DropKey with the same mask, forward and backward (a test shows it). So it
    runs as a mask with the fused kernel, and comparisons should use `normalized=False` or
    `unit="column"`, or they compare DropKey with itself. A row that would lose all its weights
    keeps one, as in DropKey.

    Args:
        rate: probability to drop a weight.
        unit: element, or column (the same keys for all queries).
        window: neighboring keys that are dropped together.
        normalized: rescale by the kept sum (True) or by 1 - rate (False).

    >>> from dampen import DropAttention
    >>> sorted(DropAttention(0.1).stages), sorted(DropAttention(0.1, normalized=False).stages)
    (['mask'], ['probs'])"""

    per_sample = True
    rate: Tensor

    def __init__(
        self,
        rate: Value = 0.1,
        unit: Literal["element", "column"] = "element",
        window: int = 1,
        normalized: bool = True,
    ) -> None:
        super().__init__()
        if unit not in ("element", "column"):
            raise ValueError(f"DropAttention: unit must be 'element' or 'column', got {unit!r}.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"DropAttention: window is a number of keys, at least 1, got {window!r}."
            )
        self.scheduled("rate", rate)
        self.unit, self.window, self.normalized = unit, window, normalized
        self.per_query = unit != "column"
        self.stages = frozenset({"mask"} if normalized else {"probs"}) | (
            set() if self.per_query else {"qkv"}
        )

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        call.memory[self.serial] = self.draw((*q.shape[:2], 1, k.shape[2]), q.device)
        return q, k, v

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self._dropped((*q.shape[:3], k.shape[2]), q.device, call)

    def probs(self, a: Tensor, call: Call) -> Tensor:
        if self.per_query and self.window == 1:
            return drop(a, self.current("rate"))
        return zero_and_rescale(
            a, self._dropped(tuple(a.shape), a.device, call), self.current("rate")
        )

    def _dropped(self, shape: tuple[int, ...], device: torch.device, call: Call) -> Tensor:
        if self.per_query:
            return self.draw(shape, device)
        shared: Tensor = call.memory[self.serial]
        return shared

    def draw(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Which weights of a (B, H, N, M) matrix are dropped, windows and all."""
        if self.window == 1:
            rate = self.current("rate")
        else:
            rate = seed_rate(self.current("rate"), self.window)
        return dilate(bernoulli(shape, rate, device), self.window, -1)

    def weight_dropout(self) -> float | Tensor | None:
        if self.normalized or self.unit != "element" or self.window > 1:
            return None
        number = self.fixed("rate")
        return self.current("rate") if number is None else number

    def hiding_rate(self) -> float | Tensor | None:
        if self.window == 1:
            return self.current("rate")
        return None

    def native_hiding(self, keys: int) -> tuple[float | Tensor, None] | None:
        if self.window == 1 and self.unit == "element":
            return (self.current("rate"), None)
        return None

    def extra_repr(self) -> str:
        window = f", window={self.window}" if self.window > 1 else ""
        return f"{super().extra_repr()}, unit={self.unit}{window}, normalized={self.normalized}"
