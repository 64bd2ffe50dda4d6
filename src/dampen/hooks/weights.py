"""Methods that act on weights: around optimizer steps, other weights for a while, the start of a
fine-tuning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dampen._torch import placed_like, shared_until_written, version_of, whole_tensor
from dampen.hooks.context import ModelSite
from dampen.hooks.discover.roles import is_lora
from dampen.regularizer import Regularizer, StepCall

# --- the optimizer
#
# The optimizer of a regularized model: the methods that act on weights run around its steps.


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


# --- other weights for a while
#
# Other weights in a model for a while: an average, the start of a fine-tuning, a point between.


def floating(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and buffers that belong to a model, by name; not those of its
    regularizers.

    Args:
        model: regularized or not.
    """
    state = model.state_dict(keep_vars=True)
    return {n: t for n, t in state.items() if isinstance(t, Tensor) and t.is_floating_point()}


@contextlib.contextmanager
def carrying(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these weights; afterwards its own, to the bit.

    Args:
        model: whose weights are exchanged.
        values: by the names of `floating`; what is not named stays.
    """
    live = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    # what runs inside may write to buffers, as batch norm does
    written = values.keys() | {n for n, _ in model.named_buffers(remove_duplicate=False)}
    own = {n: t.detach().clone() for n, t in live.items() if n in written}
    held = {id(p) for p in model.parameters()}

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() while "
                f"{type(model).__name__} carries other weights: the step would "
                "be undone where the block ends. Leave the block first."
            )

    _write(live, values)
    try:
        with register_optimizer_step_pre_hook(refuse):
            yield
    finally:
        _write(live, own)


@torch.no_grad()
def _write(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        # past autograd, which would count a graph that was made before as changed
        sharded = getattr(value, "device_mesh", None) is not None
        into[name].data.copy_(value if sharded else placed_like(value, into[name]))
    # autocast keeps copies of the weights in low precision, which are those of before
    torch.clear_autocast_cache()


# --- the start of a fine-tuning
#
# The model that fine-tuning started from: its adapters off, and of its other weights those that
# are trained kept beside it.


class Start:
    """The start of one model.

    Args:
        model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self.adapted = any(is_lora(m) for m in model.modules())
        kept = _trained_beside_adapters(model) if self.adapted else floating(model)
        # no memory is taken until a weight moves
        self.weights = {n: shared_until_written(t) for n, t in kept.items()}

    @contextlib.contextmanager
    def entered(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model is its start, in eval mode.

        Args:
            model: whose start it is.
        """
        modes = [(m, m.training) for m in model.modules()]
        model.eval()
        # peft's own switch also changes which parameters have gradients
        off: list[Any] = [
            m for m in model.modules() if self.adapted and hasattr(m, "_disable_adapters")
        ]
        before = [m._disable_adapters for m in off]
        for m in off:
            m._disable_adapters = True
        try:
            with carrying(model, self.weights):
                yield
        finally:
            for m, was in zip(off, before, strict=True):
                m._disable_adapters = was
            for module, training in modes:
                module.training = training

    @contextlib.contextmanager
    def interpolated(self, model: nn.Module, alpha: float) -> Iterator[None]:
        """Inside, the weights are (1 - alpha) start + alpha now; of adapters, their share is alpha.

        Args:
            model: whose start it is.
            alpha: 0 is the start, 1 the model as it is.
        """
        adapters: list[Any] = [m for m in model.modules() if is_lora(m)] if self.adapted else []
        before = [dict(m.scaling) for m in adapters]
        for m, scaling in zip(adapters, before, strict=True):
            m.scaling.update({name: alpha * s for name, s in scaling.items()})
        live = floating(model)
        mixed = {
            n: torch.lerp(t.to(live[n]), live[n].detach(), alpha) for n, t in self.weights.items()
        }
        try:
            with carrying(model, mixed):
                yield
        finally:
            for m, scaling in zip(adapters, before, strict=True):
                m.scaling.update(scaling)

    def state_dict(self) -> dict[str, Tensor]:
        """The starting weights."""
        return {n: whole_tensor(t).detach().clone() for n, t in self.weights.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` gave.

        Args:
            state: of the same model.
        """
        if state.keys() != self.weights.keys():
            raise ValueError(
                "the starting weights are of another model: "
                f"{sorted(state.keys() ^ self.weights.keys())[:4]} are in one of them only."
            )
        self.weights = {n: t.to(self.weights[n], copy=True) for n, t in state.items()}


def _trained_beside_adapters(model: nn.Module) -> dict[str, Tensor]:
    """What training moves in a model with adapters and is none of theirs: trained parameters (a
    head, biases), and the statistics of batch norm."""
    adapters = [f"{name}." for name, m in model.named_modules() if is_lora(m)]

    def of_adapter(name: str) -> bool:
        inner = [name.removeprefix(a) for a in adapters if name.startswith(a)]
        return any(not n.startswith("base_layer.") for n in inner)

    return {
        n: t
        for n, t in floating(model).items()
        if (t.requires_grad or n.rpartition(".")[2].startswith("running_")) and not of_adapter(n)
    }
