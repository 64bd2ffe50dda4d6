"""The model that fine-tuning started from: its adapters off, and of its other weights those that
are trained kept beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import shared_until_written, whole_tensor
from dampen.hooks.adapters import is_lora
from dampen.hooks.weights import carrying, floating


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
