"""DropHead: drop whole attention heads."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.hooks.discover.sites import find_attentions
from dampen.hooks.tracing.products import heads_of
from dampen.masks import few_kept
from dampen.regularizer import Call, Regularizer, UnsupportedModel
from dampen.schedules import Value


class DropHead(Regularizer):
    """Drop whole attention heads, independently per sample, and scale up those that stay (arXiv
    2004.13342).

    o_h <- m_h o_h H / sum_h m_h, m_h ~ Bernoulli(1 - p), with at least one head left.

    The paper's schedule falls to zero in the middle of training and rises again:
    `DropHead(vshape(0.2, 0.2))`. Differences from the paper: where all heads would go, one random
    head stays (the paper draws again), so the realized rate is p - p^H / H.

    Args:
        rate: probability to drop a head.

    >>> from dampen import DropHead, vshape
    >>> DropHead(vshape(0.2, 0.2))
    DropHead(rate=0.2)
    """

    per_sample = True
    rate: Tensor

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)
        # the layer says that it has one head
        self.single = False

    def extra_repr(self) -> str:
        return super().extra_repr() + (", one head: nothing to drop" if self.single else "")

    def prepare(self, model: nn.Module) -> None:
        """Hierarchical models begin with one head, of which one always stays; a model of such
        layers is refused."""
        self.single = any(heads_of(m) == 1 for m in self.neighbors)
        self.acts_here = not self.single
        if self.single and all(heads_of(m) == 1 for m in find_attentions(model).values()):
            raise UnsupportedModel(
                f"DropHead always leaves one head, and every attention of {type(model).__name__} "
                "has one, so it would "
                "do nothing. Take DropKey, or a model with more heads."
            )

    def heads(self, o: Tensor, call: Call) -> Tensor:
        if o.shape[1] == 1 and not self.single:
            raise RuntimeError(
                f"{type(call.module).__name__} at "
                f"'{call.site.name if call.site else 'this attention'}' attends with "
                "one head at a time, and DropHead always leaves one, so it would do nothing there. "
                "Leave the layer out with target_modules=, or take DropKey."
            )
        kept = few_kept(o.shape[:2], self.current("rate"), o.device, guard=True)
        scale = kept.div_(kept.mean(-1, keepdim=True))  # H / sum_h m_h
        return o * scale.to(o.dtype)[:, :, None, None]
