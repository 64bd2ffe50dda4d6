"""While a trainer computes a loss: what its model returned, and forwards without gradient left
plain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dampen.handle import Handle

_NAMES = ("logits", "scores", "sentence_embedding")


class OutputWatch:
    """The outputs of a model's calls since they were last taken."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        # of the backbone, where the model gives no logits
        self.hidden: list[Tensor] = []

    def take(self) -> tuple[list[Any], list[Tensor]]:
        """Outputs and hidden states seen since the last time."""
        taken = self.outputs, self.hidden
        self.outputs, self.hidden = [], []
        return taken


@contextlib.contextmanager
def watching(
    model: nn.Module, reg: Handle, backbone: nn.Module | None = None
) -> Iterator[OutputWatch]:
    """Inside, calls of `model` with gradients are remembered, and calls without (the reference pass
    of DPO, a pass for metrics) run as if nothing were regularized.

    Args:
        model: the model that the trainer calls.
        reg: the handle that `dampen.regularize` returned.
        backbone: the module whose hidden states count where the model returns no logits.
    """
    watch, plain = OutputWatch(), contextlib.ExitStack()

    def before(module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            plain.enter_context(reg.disable())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        plain.close()
        if torch.is_grad_enabled() or reg.anchoring:
            watch.outputs.append(output)

    def states(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() or reg.anchoring:
            watch.hidden.append(
                output[0] if isinstance(output, tuple) else output.last_hidden_state
            )

    hooks = [
        model.register_forward_pre_hook(before),
        model.register_forward_hook(after, always_call=True),
    ]
    if backbone is not None:
        hooks.append(backbone.register_forward_hook(states))
    try:
        yield watch
    finally:
        plain.close()
        for hook in hooks:
            hook.remove()


def predictions(outputs: list[Any]) -> Tensor | None:
    """The predictions of one pass: logits, scores or sentence embeddings, joined where the model
    was called several times; None where some output has none.

    Args:
        outputs: of one pass, in order.
    """
    found = [_prediction(o) for o in outputs]
    if not found or any(f is None for f in found):
        return None
    tensors = [f for f in found if f is not None]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors)


def _prediction(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    for name in _NAMES:
        if isinstance(output, Mapping):
            value = output.get(name)
        else:
            value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    return None
