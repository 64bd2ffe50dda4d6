"""A linear map with a low-rank adapter beside it, W' = W + s B A (LoRA, arXiv 2106.09685): what penalties read of it.

    output     x W'^T = x W^T + s (x A^T) B^T                  a path of rank r of its own, without LoRA's dropout
    columns    sum_o W'_oj^2 = sum_o W_oj^2 + 2 s sum_r A_rj (B^T W)_rj + s^2 A_:j^T (B^T B) A_:j

Neither builds the merged matrix; `merged` does, for the terms that need all of it (query and key in the exact forms).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dampen.functional.explicit.precision import wide
from dampen.functional.explicit.squares import column_power
from dampen.regularizer import LinearCall


@dataclass(frozen=True, eq=False)
class LowRank:
    """The active adapters of one map: (A, B, s) each, A (r, in) and B (out, r)."""

    parts: tuple[tuple[Tensor, Tensor, float], ...]

    def rows(self, cut: slice | Tensor) -> LowRank:
        """The adapters of some rows of a fused map."""
        return LowRank(tuple((a, b[cut], s) for a, b, s in self.parts))

    def output(self, x: Tensor) -> Tensor:
        """What the adapters add to x W^T."""
        added = [s * ((wide(x) @ wide(a).t()) @ wide(b).t()) for a, b, s in self.parts]
        return sum(added[1:], start=added[0])

    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A."""
        added = [s * (wide(b) @ wide(a)) for a, b, s in self.parts]
        return sum(added, start=wide(weight))

    def columns(self, weight: Tensor) -> Tensor:
        """sum_o W'_oj^2, from products with r columns only."""
        a = torch.cat([wide(a) for a, _, _ in self.parts])  # several adapters are one of the summed rank
        b = torch.cat([s * wide(b) for _, b, s in self.parts], dim=1)
        cross = (a * (b.t() @ wide(weight))).sum(0)
        return column_power(weight) + 2 * cross + (a * ((b.t() @ b) @ a)).sum(0)


def merge(call: LinearCall) -> LinearCall:
    """The call of the whole map: its weight and output with the adapters in them. The call itself where it has none."""
    if call.adapter is None:
        return call
    output = None if call.output is None else wide(call.output) + call.adapter.output(call.input)
    return replace(call, weight=call.adapter.merged(call.weight), output=output, adapter=None)
