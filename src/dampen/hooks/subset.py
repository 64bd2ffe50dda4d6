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
from dampen.regularizer import STEP_STAGES, Regularizer

if TYPE_CHECKING:
    from dampen.hooks.find import LayerPlan

SIMPLE = (bool, int, float, str, type(None))


class SubsetSite:
    """What is kept on a sublayer that may run on some samples of a batch."""

    def __init__(self, layer: Layer, skipper: Regularizer) -> None:
        self.layer, self.skipper = layer, skipper


def subset_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a sublayer on the kept samples, with zeros for the others."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: SubsetSite = self._dampen_subset
        frame = frame_of(site.layer)
        if frame is None or frame.work is None or site.skipper not in frame.work.methods:
            return base(self, *args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        x = next((v for v in leaves if isinstance(v, Tensor)), None)
        if x is None or why_not(x, leaves):
            return base(self, *args, **kwargs)
        kept = site.skipper.keep_samples(x, frame.memory)
        if kept is None:
            return base(self, *args, **kwargs)
        batch = len(x)
        some = [v[kept] if isinstance(v, Tensor) and has_batch(v, batch) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(some, form)
        found, form = pytree.tree_flatten(base(self, *args, **kwargs))
        whole = [spread(v, kept, batch) if isinstance(v, Tensor) else v for v in found]
        return pytree.tree_unflatten(whole, form)

    return forward


def has_batch(value: Tensor, batch: int) -> bool:
    """Whether the first axis of an argument is the samples."""
    return value.ndim > 0 and value.shape[0] == batch


def why_not(x: Tensor, leaves: list[Any]) -> str:
    """Why a sublayer with these arguments runs on all samples; empty where it need not."""
    if any(not isinstance(v, (Tensor, *SIMPLE)) for v in leaves):
        return "an argument may carry states (a cache)"
    if x.ndim != 3 or x.shape[0] == x.shape[1]:
        return "the axis of the samples cannot be told from that of the tokens"
    batch, tokens = x.shape[:2]
    sizes = {v.shape[0] for v in leaves if isinstance(v, Tensor) and v.ndim > 0}
    if sizes - {1, batch, tokens}:
        return "an argument's first axis is neither samples nor tokens"
    return ""


def spread(some: Tensor, kept: Tensor, batch: int) -> Tensor:
    """The results of the kept samples in their places, 0 elsewhere."""
    if some.ndim == 0 or some.shape[0] != len(kept):
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
    sublayers = list(plan.attentions.values())
    if holder is plan.block or holder is None or any(a in holder.modules() for a in sublayers):
        skipper.not_skipped = "no module holds the feed-forward alone, so it runs on all samples"
    else:
        sublayers.append(holder)
    return [(module, SubsetSite(layer, skipper)) for module in sublayers]


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
