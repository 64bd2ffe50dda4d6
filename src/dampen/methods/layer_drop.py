"""LayerDrop: drop whole layers in training, prune them afterwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dampen.hooks.discover.sites import find_layers
from dampen.hooks.patch import is_swapped
from dampen.masks import few_kept
from dampen.names import leave_out
from dampen.regularizer import Regularizer
from dampen.schedules import Value


class LayerDrop(Regularizer):
    """Skip whole layers at random, one draw per layer and forward (arXiv 1909.11556).

    y <- x with probability p, else y. Nothing is rescaled. A model trained so can lose layers at
    inference: `prune_layers(model, 0.5)` takes out every other one, the paper's simplest and robust
    choice.

    Differences from the paper: a dropped layer is computed and its result not used, so that under
    DDP every rank has a gradient for every parameter whatever it drew. Skipping the computation
    breaks DDP in the second step.

    Args:
        rate: probability to drop a layer. The paper takes 0.2.

    >>> from dampen import LayerDrop
    >>> LayerDrop(0.2)
    LayerDrop(rate=0.2)
    """

    rate: Tensor

    def __init__(self, rate: Value = 0.2) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            name = self.site.name if self.site else ""
            raise ValueError(
                f"LayerDrop: the layer '{name}' turns {tuple(x.shape)} into {tuple(y.shape)}, so "
                "it cannot be skipped. "
                f"To continue, {leave_out(name)}."
            )
        dropped = few_kept((), self.current("rate"), y.device) == 0
        return torch.where(dropped, x.to(y.dtype), y)


def every_other(layers: int, rate: float = 0.5) -> list[int]:
    """Which of `layers` to take out for a pruning rate: those whose number (from 1) is a multiple
    of floor(1 / rate).

    Args:
        layers: names, first to last.
        rate: share of the layers to take out.

    >>> every_other(6, 0.5), every_other(6, 1 / 3)
    ([1, 3, 5], [2, 5])
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate <= 0.5:
        raise ValueError(
            f"every_other: rate is the share of layers to take out, in (0, 0.5], got {rate!r}."
        )
    step = int(1 / rate + 1e-9)
    return [i for i in range(layers) if (i + 1) % step == 0]


def prune_layers(model: nn.Module, rate: float = 0.5) -> list[str]:
    """Take every other layer out of `model`, in place, and return the names of those taken:
    LayerDrop's pruning.

    Each stack of layers (encoder, decoder) is pruned by itself. Layers must be in an
    `nn.ModuleList` or `nn.Sequential`. What Hugging Face models keep about the number and order of
    their layers is put right.

    Args:
        model: changed in place.
        rate: share of the layers to take out.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=6, heads=2, mlp=16)
    >>> prune_layers(model, 0.5), len(model.blocks)
    (['blocks.1', 'blocks.3', 'blocks.5'], 3)
    """
    if any(is_swapped(m) for m in model.modules()):
        raise ValueError(
            "the model is regularized. Call reg.remove() first, then prune_layers(model)."
        )
    stacks: dict[str, list[int]] = {}
    for plan in find_layers(model):
        stack, _, index = plan.name.rpartition(".")
        if not index.isdigit() or not isinstance(
            model.get_submodule(stack), nn.ModuleList | nn.Sequential
        ):
            raise ValueError(
                f"the layer '{plan.name}' is not in a ModuleList or Sequential: it cannot "
                "be pruned."
            )
        stacks.setdefault(stack, []).append(int(index))
    taken = []
    for stack, members in stacks.items():
        out = [members[i] for i in every_other(len(members), rate)]
        holder: Any = model.get_submodule(stack)
        for member in reversed(out):
            del holder[member]
        taken += [f"{stack}.{member}" for member in out]
        _renumber(model, stack, holder, out)
    return taken


def _renumber(model: nn.Module, stack: str, holder: Any, out: list[int]) -> None:
    """Hugging Face numbers its layers for the key-value cache, and counts them in the
    configuration."""
    for i, layer in enumerate(holder):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = i
    before = len(holder) + len(out)
    config: Any = getattr(model.get_submodule(stack.rpartition(".")[0]), "config", None)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if getattr(config, name, None) == before:
            setattr(config, name, len(holder))
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and len(kinds) == before:
        config.layer_types = [kind for i, kind in enumerate(kinds) if i not in out]
