"""The optimizer of a regularized model: the methods that act on weights run around its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dampen.hooks.context import ModelSite
from dampen.regularizer import Regularizer, StepCall


class AttachedOptimizer:
    """Runs `before_step` and `after_step` of the methods around every step of one optimizer.

    Args:
        model: the regularized model.
        clones: the methods in it that act on weights.
        optimizer: of torch.
    """

    def __init__(
        self, model: nn.Module, clones: Sequence[Regularizer], optimizer: torch.optim.Optimizer
    ) -> None:
        self.model, self.clones, self.optimizer = model, list(clones), optimizer
        self.decaying = next((c for c in clones if c.replaces_weight_decay), None)
        self.replaced: list[tuple[dict[str, Any], float]] = []
        self.waiting: list[Callable[[], None]] = []  # for the end of the step under way
        self.take_decay()
        self.hooks = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        ]

    def acting(self, stage: str) -> list[Regularizer]:
        """The methods with a stage that are at work now."""
        site = vars(self.model).get("_dampen_model")  # None after dampen.remove(model)
        if not isinstance(site, ModelSite) or not site.enabled:
            return []
        return [c for c in self.clones if stage in c.stages and not c.idle]

    @torch.no_grad()
    def before(self, *_: Any) -> None:
        """A step begins."""
        self.waiting.clear()
        acting = self.acting("before_step")
        if not acting:
            return
        self.take_decay()  # a loaded state of the optimizer brings its own back
        call = StepCall(self.model, learning_rates(self.optimizer))
        self.waiting += [f for c in acting if (f := c.before_step(call)) is not None]

    @torch.no_grad()
    def after(self, *_: Any) -> None:
        """A step has ended."""
        for function in self.waiting:
            function()
        self.waiting.clear()
        acting = self.acting("after_step")
        if acting:
            call = StepCall(self.model, learning_rates(self.optimizer))
            for clone in acting:
                clone.after_step(call)

    def take_decay(self) -> None:
        """Switch the optimizer's own weight decay off where a method decays the model."""
        groups = [g for g in self.optimizer.param_groups if g.get("weight_decay")]
        if self.decaying is None or not groups:
            return
        held = {id(p) for p in self.model.parameters()}
        taken = [(g, g["weight_decay"]) for g in groups if any(id(p) in held for p in g["params"])]
        if not taken:
            return
        for group, _ in taken:
            group["weight_decay"] = 0.0
        self.replaced += taken
        own = ", ".join(f"{decay:g}" for decay in dict.fromkeys(decay for _, decay in taken))
        warnings.warn(
            f"{type(self.decaying).__name__} replaces the weight decay of "
            f"{type(self.optimizer).__name__} ({own}), which is 0 from now on. Construct the "
            "optimizer with weight_decay=0.",
            stacklevel=4,
        )

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for hook in self.hooks:
            hook.remove()
        for group, decay in self.replaced:
            group["weight_decay"] = decay


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch below the wrappers of Accelerate, Lightning or Fabric.

    Args:
        optimizer: of torch, or wrapped.
    """
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"attach_optimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    return optimizer


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """The learning rate of each parameter that a step moves, by the parameter's id.

    Args:
        optimizer: of torch.
    """
    return {
        id(p): float(group["lr"])
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    }
