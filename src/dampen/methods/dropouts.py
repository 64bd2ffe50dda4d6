"""The plain dropouts of a Transformer, switched on without editing the model: one class per
place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dampen._torch import on_gpu
from dampen.masks import drop
from dampen.methods.drop_connect import check_targets
from dampen.regularizer import BranchCall, LinearCall, Regularizer
from dampen.schedules import Value


def _drop(method: Regularizer, x: Tensor, rate: float | Tensor) -> Tensor:
    """Inverted dropout; on a GPU by torch's one kernel, which wants a number."""
    if on_gpu(x) and (number := method.fixed("rate")) is not None:
        return drop(x, number)
    return drop(x, rate)


class HiddenDropout(Regularizer):
    """Plain dropout on each residual branch just before it is added: the residual dropout of the
    Transformer (arXiv 1706.03762), `hidden_dropout_prob` of BERT-like models, switched on without
    editing the model.

    x + b becomes x + m * b / (1 - p), m ~ Bernoulli(1 - p) per feature, for the attention and the
    feed-forward branch of each block. With `EmbeddingDropout`, `DropAttention(normalized=False)`,
    `ProjectionDropout` and `FeedForwardDropout` it makes up the places of dropout in figure 1 of
    Explicit Dropout (arXiv 2604.20505), whose penalty for this place is
    `ExplicitDropout(residual=...)`; with `DropKey(unit="column")` and `RDrop` it is HiddenKey
    (`dampen.hidden_key`). A model's own dropout stays as it is and acts besides.

    Args:
        rate: probability to zero a feature. One number, a schedule, or one value per layer:
            `last(0.3, rest=0.1)` gives the last layer a rate of its own.

    >>> from dampen import HiddenDropout, last
    >>> HiddenDropout(0.1), HiddenDropout(last(0.3, rest=0.1))
    (HiddenDropout(rate=0.1), HiddenDropout(rate=0.1))
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        return _drop(self, b, self.rate)


class EmbeddingDropout(Regularizer):
    """Plain dropout on what the input or patch embedding gives, before positions are added.

    e becomes m * e / (1 - p), m ~ Bernoulli(1 - p) per feature: the first place of dropout in
    figure 1 of Explicit Dropout (arXiv 2604.20505). Differences from the paper: the Transformer
    (arXiv 1706.03762) drops the sum of embeddings and positions; here positions stay whole, so that
    no token loses its place. The token lookup itself is untouched: whole words are not dropped.

    Args:
        rate: probability to zero a feature.

    >>> from dampen import EmbeddingDropout
    >>> EmbeddingDropout(0.1)
    EmbeddingDropout(rate=0.1)
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def embeddings(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return _drop(self, x, self.rate)


class FeedForwardDropout(Regularizer):
    """Plain dropout on the input of each feed-forward map: the "implicit" feed-forward of Explicit
    Dropout (arXiv 2604.20505).

    y = W (m * x) / (1 - p) + b, m ~ Bernoulli(1 - p), on both layers of the feed-forward (gate, up
    and down of a gated one). With `shared=True` one mask per feature serves all tokens of the
    batch: equation 4 of that paper, whose expected squared change of y is what
    `AroraDropout(ffn=...)` has in closed form.

    Args:
        rate: probability to zero a feature.
        shared: one mask per feature and forward, instead of one per token.

    >>> from dampen import FeedForwardDropout
    >>> FeedForwardDropout(0.2)
    FeedForwardDropout(rate=0.2)"""

    per_sample = True
    rate: Tensor
    roles = frozenset({"ffn_in", "ffn_out"})

    def __init__(self, rate: Value = 0.1, shared: bool = False) -> None:
        super().__init__()
        self.scheduled("rate", rate)
        self.shared, self.per_sample = shared, not shared

    def extra_repr(self) -> str:
        return super().extra_repr() + (", shared" if self.shared else "")

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        if self.shared:
            return drop_features(x, self.current("rate")), weight
        return _drop(self, x, self.current("rate")), weight


def drop_features(x: Tensor, rate: float | Tensor) -> Tensor:
    """Inverted dropout with one mask for all tokens of a batch.

    Args:
        x: (..., features).
        rate: probability to zero a feature.
    """
    return x * drop(x.new_ones(x.shape[-1]), rate)


class ProjectionDropout(Regularizer):
    """Plain dropout on the input of the attention's projections, by default of the output
    projection: with `FeedForwardDropout`, `DropAttention(normalized=False)`, `HiddenDropout` and
    `EmbeddingDropout` every place of figure 1 of Explicit Dropout (arXiv 2604.20505), switched on
    without editing the model.

    y = W (m * x) / (1 - p) + b, m ~ Bernoulli(1 - p). A fused projection makes q, k and v of one
    masked x, for which `ExplicitDropout(joint=...)` is the penalty; separate maps draw separately.
    The explicit counterpart of the output projection is `ExplicitDropout(output=...)`.

    Args:
        rate: probability to zero a feature.
        targets: "out" (default), or roles among q, k, v, qkv, kv, out; where a model fuses them say
            qkv.
        shared: one mask per feature and forward for all tokens, as in `FeedForwardDropout`; on "v"
            the implicit twin of `AroraDropout(value=...)`.

    >>> from dampen import ProjectionDropout
    >>> ProjectionDropout(0.2)
    ProjectionDropout(rate=0.2, targets=out)
    """

    per_sample = True
    rate: Tensor

    def __init__(
        self, rate: Value = 0.1, targets: str | Sequence[str] = "out", shared: bool = False
    ) -> None:
        super().__init__()
        self.scheduled("rate", rate)
        self.shared, self.per_sample = shared, not shared
        self.roles = check_targets(targets, "ProjectionDropout")
        if self.roles & {"ffn_in", "ffn_out"}:
            raise ValueError(
                f"ProjectionDropout: targets are projections of attention, got {targets!r}; the "
                "feed-forward has "
                "FeedForwardDropout."
            )

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        if self.shared:
            return drop_features(x, self.current("rate")), weight
        return _drop(self, x, self.current("rate")), weight

    def extra_repr(self) -> str:
        shared = ", shared" if self.shared else ""
        return f"{super().extra_repr()}, targets={' '.join(sorted(self.roles))}{shared}"
