"""The optimizer of a regularized model: the methods that act on weights run around its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dampen._torch import version_of
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
        self.site: ModelSite = vars(model)["_dampen_model"]
        self.decaying = next((c for c in clones if c.replaces_weight_decay), None)
        self.replaced: dict[int, float] = {}  # by the group's number: loading makes new groups
        self.waiting: list[Callable[[], None]] = []  # for the end of the step under way
        self.take_decay()
        self.hooks = [
            optimizer.register_step_pre_hook(self.before),
            optimizer.register_step_post_hook(self.after),
        ]

    def acting(self, stage: str) -> list[Regularizer]:
        """The methods with a stage that are at work now."""
        removed = vars(self.model).get("_dampen_model") is not self.site
        if removed or not self.site.enabled:
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
        groups = self.optimizer.param_groups
        decays = {i: g["weight_decay"] for i, g in enumerate(groups) if g.get("weight_decay")}
        if self.decaying is None or not decays:
            return
        held = {id(p) for p in self.model.parameters()}
        taken = {i: d for i, d in decays.items() if any(id(p) in held for p in groups[i]["params"])}
        if not taken:
            return
        for i in taken:
            groups[i]["weight_decay"] = 0.0
        self.replaced |= taken
        own = ", ".join(f"{decay:g}" for decay in dict.fromkeys(taken.values()))
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
        for i, decay in self.replaced.items():
            self.optimizer.param_groups[i]["weight_decay"] = decay


def check_attached(model: nn.Module, site: ModelSite) -> None:
    """Raise in training where an optimizer has moved the weights that a method should have
    followed. What moved them before training was first seen is not one: pre-trained weights are
    loaded.

    Args:
        model: the regularized model, in training.
        site: what is kept on it.
    """
    if not site.stepping or site.attached:
        return
    # `functional_call` lends the model plain tensors: only its Parameters can be an optimizer's
    parameters = [p for p in model.parameters() if isinstance(p, nn.Parameter)]
    if any(site.writes.setdefault(id(p), version_of(p)) < version_of(p) for p in parameters):
        raise RuntimeError(
            f"{type(site.stepping[0]).__name__} acts in the steps of the optimizer, but the "
            "weights have changed and the handle has no optimizer. Call "
            "reg.attach_optimizer(optimizer) once, before training. A copy of a model has no "
            "handle: copy.deepcopy(reg) copies both, dampen.remove(copy) makes it plain."
        )


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
