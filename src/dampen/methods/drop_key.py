"""DropKey: drop keys before the softmax."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from dampen.functional.grid import check_grid, exact_seed_rate, grid_of, model_grid
from dampen.masks import Rate, any_in_row, bernoulli, dilate, seed_rate
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value

Unit = Literal["element", "column", "block", "cross"]
UNITS = ("element", "column", "block", "cross")


class DropKey(Regularizer):
    """Hide random keys from the queries before the softmax, which renormalizes over the keys that
    stay.

    L_ij = -inf with probability p, independently per sample, head, query and key (Algorithm 1 of
    arXiv 2208.02646). The paper's best schedule falls with depth: `DropKey(linear(0.3, 0.0))`.
    `unit="block"` hides w x w windows of the patch grid around random seeds, `unit="cross"` w-wide
    stripes through them, `unit="column"` the same keys from all queries (HiddenKey, arXiv
    2403.00812), which needs no N x N mask.

    Differences from the paper: acts in training only (the published code has no such guard); a
    query that would lose all its keys gets one of them back, so the realized rate is p - p^m / m
    for m visible keys; seeds are drawn at the rate that hides each place with probability p away
    from borders (1 - (1-p)^(1/w^2) for blocks, 1 - (1-p)^(1/(w (gh+gw) - w^2)) for crosses), which
    hides less than p of a small grid (0.217 for p = 0.3, w = 3 on 4 x 4), or with `exact_rate=True`
    at the rate gamma for which the mean over the grid of 1 - (1 - gamma)^c_ij is p, c_ij the number
    of seeds that reach a place, so that structures are compared at equal strength; prefix tokens
    (CLS) are dropped singly.

    The paper's argument, that this adds a Lagrange term which smooths the attention, is checked in
    numbers in docs/drop_key_argument.md, with where it stops to hold.

    The paper's two remedies for the gap between training and test: `DropKey(early(0.3, until=0.9))`
    fine-tunes without it, and `reg.mc_average(lambda: model(x))` averages over random masks at test
    time.

    Args:
        rate: probability to hide a key. 0.3 suits CIFAR, 0.05 to 0.1 ImageNet.
        unit: element, column, block or cross.
        window: w, for block and cross.
        grid: (rows, columns) of the patch grid, for block and cross; by default the largest square,
            with at most 8 prefix tokens.
        exact_rate: whether block and cross hide a share p of the grid on average, not only of its
            middle.

    >>> from dampen import DropKey, linear
    >>> DropKey(linear(0.3, 0.0))
    DropKey(rate=0.3, unit=element)"""

    per_sample = True
    rate: Tensor

    def __init__(
        self,
        rate: Value = 0.1,
        unit: Unit = "element",
        window: int = 1,
        grid: tuple[int, int] | None = None,
        exact_rate: bool = False,
    ) -> None:
        super().__init__()
        if unit not in UNITS:
            raise ValueError(f"DropKey: unit must be one of {', '.join(UNITS)}, got {unit!r}.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"DropKey: window is a number of patches, at least 1, got {window!r}.")
        if window > 1 and unit in ("element", "column"):
            raise ValueError(
                f"DropKey: window={window} needs unit='block' or 'cross', got unit={unit!r}."
            )
        if exact_rate and unit in ("element", "column"):
            raise ValueError(
                f"DropKey: exact_rate is for unit='block' and 'cross'; unit={unit!r} hides p as it "
                "is."
            )
        self.scheduled("rate", rate)
        self.exact_rate = exact_rate
        self.unit, self.window, self.grid = unit, window, None if grid is None else check_grid(grid)
        # the grid that the model makes, if it is known
        self.patches: tuple[int, int] | None = None
        self.per_query = unit != "column"
        self.stages = frozenset({"mask"} if self.per_query else {"qkv", "mask"})

    def inspect_model(self, model: nn.Module) -> None:
        self.patches = model_grid(model)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        call.memory[self.serial] = bernoulli(
            (*q.shape[:2], 1, k.shape[2]), self.current("rate"), q.device
        )
        return q, k, v

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        if self.unit == "column":
            out: Tensor = call.memory[self.serial]
            return out
        rate = self.current("rate")
        if self.unit == "element":
            return bernoulli((batch, heads, queries, keys), rate, q.device)
        rows, columns = grid_of(keys, self.grid, patches=self.patches)
        places = (batch, heads, queries, rows, columns)
        on_grid = block_mask if self.unit == "block" else cross_mask
        unit: Literal["block", "cross"] = "block" if self.unit == "block" else "cross"
        if not self.exact_rate:
            seeds = None
        else:
            seeds = exact_seed_rate(rate, rows, columns, self.window, unit)
        hidden = on_grid(places, rate, self.window, q.device, seeds).flatten(-2)
        prefix = bernoulli((batch, heads, queries, keys - rows * columns), rate, q.device)
        return torch.cat([prefix, hidden], dim=-1)

    def hiding_rate(self) -> float | Tensor | None:
        if self.unit in ("element", "column"):
            return self.current("rate")
        return None

    def native_hiding(self, keys: int) -> tuple[float | Tensor, None] | None:
        if self.unit == "element":
            return (self.current("rate"), None)
        return None

    def extra_repr(self) -> str:
        if self.unit in ("block", "cross"):
            window = f", window={self.window}"
        else:
            window = ""
        exact = ", exact_rate=True" if self.exact_rate else ""
        return f"{super().extra_repr()}, unit={self.unit}{window}{exact}"


def block_mask(
    shape: tuple[int, ...], rate: Rate, window: int, device: torch.device, gamma: Rate | None = None
) -> Tensor:
    """Hide the window x window patches around random seeds of the (..., rows, columns) grid.

    `gamma` is the rate of seeds; by default the one that hides a place away from borders with
    probability `rate`.

    Args:
        shape: (..., rows, columns).
        rate: share of the grid to hide.
        window: width of what a seed hides; odd.
        device: of the result.
        gamma: rate of the seeds; None: from `rate`.
    """
    seeds = bernoulli(shape, seed_rate(rate, window * window) if gamma is None else gamma, device)
    return dilate(dilate(seeds, window, -1), window, -2)


def cross_mask(
    shape: tuple[int, ...], rate: Rate, window: int, device: torch.device, gamma: Rate | None = None
) -> Tensor:
    """Hide window-wide horizontal and vertical stripes through random seeds of the (..., rows,
    columns) grid.

    Args:
        shape: (..., rows, columns).
        rate: share of the grid to hide.
        window: width of what a seed hides; odd.
        device: of the result.
        gamma: rate of the seeds; None: from `rate`.
    """
    rows, columns = shape[-2:]
    covered = window * (rows + columns) - window * window
    seeds = bernoulli(shape, seed_rate(rate, covered) if gamma is None else gamma, device)
    horizontal = dilate(any_in_row(seeds), window, -2)
    # on bytes: `any` over bools is slow on a CPU
    any_in_column = seeds.view(torch.uint8).amax(-2, keepdim=True).bool()
    return horizontal | dilate(any_in_column, window, -1)
