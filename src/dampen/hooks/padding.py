"""Padding in layers whose attention cannot report it: those without a softmax over tokens (Mamba, linear attention).

It is read from the `attention_mask` that the model was called with, else from an attention of the same forward. Where a
layer runs before the first attention that reports padding, its penalty would count padded tokens, which is an error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dampen.names import leave_out

if TYPE_CHECKING:
    from dampen.hooks.context import Layer
    from dampen.hooks.embeddings import MaskSite


class Padding:
    """What the layers of one model know about the padding of a forward."""

    def __init__(self) -> None:
        self.masks: list[
            MaskSite
        ] = []  # the modules that are called with `attention_mask`, the innermost first
        self.reported: dict[
            int, Tensor
        ] = {}  # by thread: the valid tokens (B, N) that an attention has reported
        self.unknown: dict[int, str] = {}  # by thread: a layer that needed them before

    def start(self) -> None:
        """A forward of the model starts."""
        self.reported.pop(_thread(), None)
        self.unknown.pop(_thread(), None)

    def report(self, valid: Tensor) -> None:
        """An attention has met a mask: its valid tokens (B, N)."""
        before = self.unknown.get(_thread())
        if before is not None and not torch.compiler.is_compiling() and not bool(valid.all()):
            raise RuntimeError(
                f"The layer '{before}' has no attention that reports padding and ran before the first one that does, "
                "so its penalty counted padded tokens. Call the model with attention_mask=, a 2-d mask, give batches "
                f"without padding, or {leave_out(before)}."
            )
        self.reported[_thread()] = valid

    def of(self, layer: Layer) -> Tensor | None:
        """The valid tokens (B, N) of a layer that cannot report them itself; None where nothing is padded."""
        given = [site for site in self.masks if site.mask is not None]
        for site in given:
            if site.mask is not None and site.mask.ndim == 2:
                return site.mask != 0
        if self.masks and not given:
            return None  # called without a mask: nothing is padded
        valid = self.reported.get(_thread())
        if valid is None:
            self.unknown[_thread()] = layer.site.name
        return valid

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "reported": {}, "unknown": {}}


def open_padding(model: nn.Module, layers: Sequence[Layer]) -> Padding | None:
    """Watch the masks of a model in which a layer needs padding and cannot report it."""
    from dampen.hooks.embeddings import mask_sites  # which imports the state of a layer

    needing = [
        layer
        for layer in layers
        if not layer.tells_padding and any(c.needs_valid for c in layer.clones)
    ]
    if not needing:
        return None
    padding = Padding()
    padding.masks = mask_sites(model, needing[0].site.name)
    for layer in layers:
        layer.padding = padding
    return padding


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
