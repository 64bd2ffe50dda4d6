"""Entries that pass the model's own forward by: `forward_features`, `encode`, a block called alone.

What sits in the layers works there too. What needs the model's forward (the stage `inputs`, and methods that compare
two passes) does not, and this is where it is noticed: in the first block that regularizers were put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dampen._torch import in_backward

if TYPE_CHECKING:
    from dampen.hooks.context import ModelSite


class EntrySite:
    """What is kept on the first block: the way to the model's site."""

    def __init__(self) -> None:
        self.model: ModelSite | None = (
            None  # set by the model's site, and not copied along: a copy of one block is one
        )

    def check(self, training: bool) -> None:
        """Raise where a method was passed by, and note it where a step of two passes was."""
        model = self.model
        if model is None or not model.enabled or torch.compiler.is_compiling() or in_backward():
            return
        model.ledger.enter_block(training)
        passed = [r for r in model.own if "inputs" in r.stages and model.acts(r, training)]
        if passed and model.ledger.strict and not model.ledger.is_inside():
            name = type(passed[0]).__name__
            raise RuntimeError(
                f"{name} acts on the model's input, but a block was reached without the model's forward "
                "(through forward_features, encode or a submodule), so it would do nothing. Call the model itself, "
                f"regularize the part that you call, or say that you mean it: regularize(..., strict=False)."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None}


def entry_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the first block, which looks whether the model's forward is under way."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._dampen_entry.check(self.training)
        return base(self, *args, **kwargs)

    return forward
