"""Run a sublayer on the samples that keep its branch: the others' branch is multiplied by 0 anyway.

The method draws which samples stay when the sublayer starts, and multiplies the branch where it is
added. So whatever stands between the two (an output projection with a bias, LayerScale) changes
nothing: what a dropped sample gets there is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dampen._torch import pytree
from dampen.hooks.context import Layer, frame_of
from dampen.hooks.layout import heads_of
from dampen.regularizer import STEP_STAGES, Regularizer

if TYPE_CHECKING:
    from dampen.hooks.find import LayerPlan

SIMPLE = (bool, int, float, str, type(None))


class SubsetSite:
    """What is kept on a sublayer that may run on some samples of a batch."""

    def __init__(self, layer: Layer, skipper: Regularizer, part: str, heads: int | None) -> None:
        self.layer, self.skipper, self.part, self.heads = layer, skipper, part, heads

    def tell(self, reason: str) -> None:
        """Let `print(reg)` say that a forward ran the sublayer on all samples."""
        said = f"the {self.part} ran on all samples, {reason}"
        if said not in self.skipper.not_skipped:
            self.skipper.not_skipped = " and ".join(filter(None, (self.skipper.not_skipped, said)))


def subset_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a sublayer on the kept samples, with zeros for the others."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: SubsetSite = self._dampen_subset
        frame = frame_of(site.layer)
        if frame is None or frame.work is None or site.skipper not in frame.work.methods:
            return base(self, *args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        x = next((v for v in leaves if isinstance(v, Tensor)), None)
        if x is None:
            return base(self, *args, **kwargs)
        reason = why_not(x, leaves, frame.samples, site.heads)
        if reason:
            site.tell(reason)
            return base(self, *args, **kwargs)
        kept = site.skipper.keep_samples(x, frame.memory)
        if kept is None:
            return base(self, *args, **kwargs)
        some_x = x[kept]  # once: attention knows by identity that queries, keys and values are one
        some = list(leaves)
        for i, v in enumerate(leaves):
            if v is x:
                some[i] = some_x
            elif isinstance(v, Tensor) and is_by_sample(v, x, site.heads):
                some[i] = v[kept]
        args, kwargs = pytree.tree_unflatten(some, form)
        found, form = pytree.tree_flatten(base(self, *args, **kwargs))
        whole = [spread(v, kept, x, site.heads) if isinstance(v, Tensor) else v for v in found]
        return pytree.tree_unflatten(whole, form)

    return forward


def is_by_sample(v: Tensor, x: Tensor, heads: int | None) -> bool | None:
    """Whether an argument's first axis is the samples of x (B, N, D); None where that cannot be told.

    A tensor (H, N, M), one bias for each head, looks like one for each sample where H equals B.
    """
    batch, tokens, width = x.shape
    if v is x:
        return True
    if v.ndim == 0 or v.shape[0] == 1 or (v.ndim <= 2 and v.shape[0] == tokens):
        return False
    if v.shape[0] != batch:
        return None
    if v.ndim == 2:
        return True if v.shape[1] == tokens else None
    if v.ndim == 4 and v.shape[1] in (1, heads) and v.shape[2] in (1, tokens):
        return True
    distinct = heads not in (None, batch) or (v.shape == x.shape and width != tokens)
    return True if v.shape[1] == tokens and distinct else None


def why_not(x: Tensor, leaves: list[Any], samples: int | None, heads: int | None) -> str:
    """Why a sublayer with these arguments runs on all samples; empty where it need not."""
    if any(not isinstance(v, (Tensor, *SIMPLE)) for v in leaves):
        return "an argument may carry states (a cache)"
    if x.ndim != 3 or x.shape[0] == x.shape[1]:
        return "the axis of the samples cannot be told from that of the tokens"
    if x.shape[0] != samples:
        return "its first axis is not the samples of the block (windows?)"
    if any(isinstance(v, Tensor) and is_by_sample(v, x, heads) is None for v in leaves):
        return "an argument's axis of the samples cannot be told"
    return ""


def spread(some: Tensor, kept: Tensor, x: Tensor, heads: int | None) -> Tensor:
    """A result of the kept samples in their places, 0 elsewhere; what is not by sample as it is."""
    batch, tokens = x.shape[:2]
    states = some.ndim > 1 and some.shape[1] == tokens
    weights = some.ndim == 4 and some.shape[1] == heads and len(kept) > 1
    if some.ndim == 0 or some.shape[0] != len(kept) or not (states or weights):
        return some
    return some.new_zeros((batch, *some.shape[1:])).index_copy(0, kept, some)


def open_subsets(plan: LayerPlan, layer: Layer) -> list[tuple[nn.Module, SubsetSite]]:
    """The sublayers of a layer that a method may run on some samples; the method is told why none,
    or only some."""
    skipper = next((c for c in layer.clones if c.skips_samples), None)
    if skipper is None:
        return []
    others = [c for c in layer.clones if c is not skipper and c.stages - set(STEP_STAGES)]
    if others or plan.block is None:
        by = type(others[0]).__name__ if others else "the model, which has no module for the layer"
        skipper.not_skipped = f"nothing is skipped beside {by}"
        return []
    if any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in skipper.neighbors):
        skipper.not_skipped = "nothing is skipped, the samples are on the second axis"
        return []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plan.block.modules()):
        skipper.not_skipped = "nothing is skipped, batch norm mixes the samples"
        return []
    feed_forward = [m.module for m in plan.linears.values() if m.role in ("ffn_in", "ffn_out")]
    holder = smallest_around(plan.block, feed_forward)
    sublayers = [(m, "attention") for m in plan.attentions.values()]
    heads = next(filter(None, map(heads_of, plan.attentions.values())), None)
    if holder is plan.block or holder is None or any(a in holder.modules() for a, _ in sublayers):
        skipper.not_skipped = "no module holds the feed-forward alone, so it runs on all samples"
    else:
        sublayers.append((holder, "feed-forward"))
    return [(m, SubsetSite(layer, skipper, part, heads)) for m, part in sublayers]


def smallest_around(block: nn.Module, parts: list[nn.Module]) -> nn.Module | None:
    """The smallest module of a block that holds all of some modules, more than one of them.

    Args:
        block: where to look.
        parts: modules in it.
    """
    if len(parts) < 2:
        return None
    holding = [m for m in block.modules() if all(p in set(m.modules()) for p in parts)]
    return min(holding, key=lambda m: len(list(m.modules())), default=None)
