"""Dropout before the projections of attention: queries, keys, values and the output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dampen.masks import drop
from dampen.methods.drop_connect import check_targets
from dampen.regularizer import LinearCall, Regularizer
from dampen.schedules import Value


class ProjectionDropout(Regularizer):
    """Plain dropout on the input of the attention's projections, by default of the output projection: with
    `FeedForwardDropout`, `DropAttention(normalized=False)`, `HiddenDropout` and `EmbeddingDropout` every place of
    figure 1 of Explicit Dropout (arXiv 2604.20505), switched on without editing the model.

    y = W (m * x) / (1 - p) + b, m ~ Bernoulli(1 - p). A fused projection makes q, k and v of one masked x, for which
    `ExplicitDropout(joint=...)` stands; separate maps draw separately. The explicit counterpart of the output
    projection is `ExplicitDropout(output=...)`.

    Args:
        rate: probability to zero a feature.
        targets: "out" (default), or roles among q, k, v, qkv, kv, out; where a model fuses them say qkv.

    >>> from dampen import ProjectionDropout
    >>> ProjectionDropout(0.2)
    ProjectionDropout(rate=0.2, targets=out)
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1, targets: str | Sequence[str] = "out") -> None:
        super().__init__()
        self.scheduled("rate", rate)
        self.roles = check_targets(targets, "ProjectionDropout")
        if self.roles & {"ffn_in", "ffn_out"}:
            raise ValueError(
                f"ProjectionDropout: targets are projections of attention, got {targets!r}; the feed-forward has "
                "FeedForwardDropout."
            )

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        return drop(x, self.current("rate")), weight

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, targets={' '.join(sorted(self.roles))}"
