"""The gradient's variance while a trial trains (`train.variance_every`): AttentionDrop claims that
it falls by a tenth.

Measured at the present weights over the same few batches each time, in training mode, with the
methods and their penalties, not augmented. The global random state, buffers and gradients are put
back, so training does not notice."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen.studies.errors import ConfigError

if TYPE_CHECKING:
    from dampen.studies.trainer.state import TrialState

BATCHES = 8
"""Batches of the trial's own size, fixed by its seed; fewer where the training part is smaller."""
KINDS = ("trace", "normalized", "mean_squared_norm")


def measure_variance(s: TrialState, seed: int) -> dict[str, float]:
    """tr Cov(g) over batches, and the same divided by the mean squared norm of the gradient, at
    this step.
    """
    from dampen.diagnostics import gradient_variance

    size = s.options.batch_size
    order = torch.randperm(len(s.data.train), generator=torch.Generator().manual_seed(seed))
    count = min(BATCHES, len(order) // size)
    if count < 2:
        problem = "train.variance_every: two batches are needed, "
        problem += f"{len(order)} examples make {count} of {size}"
        raise ConfigError("The trial", [problem])
    picked = [s.data.train.batch(order[i * size : (i + 1) * size]) for i in range(count)]
    batches = [{"batch": batch, "labels": batch["target"]} for batch in picked]

    def loss(model: nn.Module, given: Mapping[str, Any], labels: Tensor) -> Tensor:
        return s.losses({**given["batch"], "target": labels})[0]

    found = gradient_variance(s.raw, batches, loss=loss, seed=seed % 2**63)
    return {"step": s.step, **{kind: getattr(found, kind) for kind in KINDS}}


def over_training(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """The mean over the measurements of a log, for the result; None where there are none.

    A log has null for what was not finite: such values are left out, and a mean of nothing is None.
    """
    found = [m for line in lines for m in line.get("variance", [])]
    if not found:
        return None
    known = {kind: [m[kind] for m in found if m[kind] is not None] for kind in KINDS}
    return {
        "n": len(found),
        **{kind: statistics.fmean(values) if values else None for kind, values in known.items()},
    }
