"""The penalty of dropout on a residual branch: the mask acts on the branch itself, so no weight stands in it.

With b the branch just before it is added, bias and all, and m a plain mask, E ||m b - b||^2 = p ||b||^2, which splits
into p^2 ||b||^2 (bias, the paper's form) and p (1-p) ||b||^2; with inverted masks it is p/(1-p) ||b||^2. The branch
is read where the block's last map of it gives it out (the output projection, the second feed-forward map).
"""

from __future__ import annotations

from torch import Tensor

from dampen.calls import LinearCall
from dampen.formulas.explicit.forms import Number, combine, single
from dampen.formulas.explicit.precision import wide
from dampen.formulas.explicit.reductions import token_rows

BRANCHES = ("out", "ffn_out")


def branch_penalty(y: Tensor, call: LinearCall, rate: Number, form: str, reduction: str, swapped: bool) -> Tensor:
    """The penalty of a branch y, (B, N, D), or (N, B, D) where `swapped`; padded tokens count nowhere."""
    if y.ndim == 2 and reduction in ("token_mean", "author"):
        raise RuntimeError(
            f"reduction={reduction!r} divides by each sample's tokens, but '{call.role}' gives tokens without samples, "
            f"of shape {tuple(y.shape)}. Use reduction='mean' or 'sum'."
        )
    if call.adapter is not None:  # LoRA beside the map: the branch is the sum of both
        y = wide(y) + call.adapter.output(call.input)
    swapped = swapped and y.ndim == 3
    tokens = y.shape[0] if swapped or y.ndim == 2 else y.shape[1:-1].numel()
    batch = y.shape[1] if swapped else 1 if y.ndim == 2 else y.shape[0]
    valid = None if call.valid is None else (call.valid.t() if swapped else call.valid).reshape(-1, tokens)
    rows = token_rows(reduction, batch, tokens, valid, wide(y).dtype)
    squares = wide(y).square().sum(-1)
    if rows.weights is not None:
        squares = squares * (rows.weights.t() if swapped else rows.weights).reshape(squares.shape)
    total = squares.sum()
    return combine(single(form, rate), total, total) * rows.factor
