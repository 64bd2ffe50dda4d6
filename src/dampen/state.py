"""What is kept on the modules of a model while regularizers are attached to it, and what the sites of a layer share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dampen.regularizer import Call, Regularizer, Site


class Layer:
    """What the sites of one layer share: the clones, and the state of the forward under way."""

    def __init__(self, site: Site, clones: Sequence[Regularizer]) -> None:
        self.site = site
        self.clones = list(clones)
        self.enabled = True
        self.sampling = False  # Monte-Carlo averaging: stochastic methods act in eval too
        self.call: Call | None = None  # the attention under way
        self.multiplying = False  # a linear site is running its own F.linear
        self.valid: Tensor | None = None  # (B, N): the tokens of this forward that are not padding
        self.sequence_first = False  # the feed-forward sees (N, B, D)
        self.early: str | None = None  # inside a block: a feed-forward map that ran before padding was known
        self.sublayer = ""  # what has run since the last residual addition: "", "ffn" or "attention"
        self.entered = "ffn"  # which kind of sublayer the next linear map belongs to
        self.hits = 0  # linear maps seen since the block started
        self.kernels: dict[str, str] = {}  # attention name -> what ran last, and why

    def active(self, training: bool) -> list[Regularizer]:
        """The clones at work in this forward."""
        if not self.enabled:
            return []
        return [r for r in self.clones if (training or r.in_eval or (self.sampling and r.stochastic)) and not r.asleep]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "call": None, "valid": None, "multiplying": False, "early": None}


class AttentionSite:
    """What is kept on an attention module."""

    def __init__(self, layer: Layer, name: str, cross: bool, linears: Sequence[nn.Module]) -> None:
        self.layer, self.name, self.cross = layer, name, cross
        self.linears = list(linears)  # linear sites inside, for projections that the module inlines


class LinearSite:
    """What is kept on a linear map."""

    def __init__(self, layer: Layer, role: str) -> None:
        self.layer, self.role = layer, role


class BlockSite:
    """What is kept on a block."""

    def __init__(self, layer: Layer, first: bool, branches: int, wants_linear: bool, input_name: str) -> None:
        self.layer, self.first, self.branches, self.wants_linear = layer, first, branches, wants_linear
        self.input_name = input_name


class ModelSite:
    """What is kept on the model itself."""

    def __init__(self, clones: Sequence[Regularizer], own: Sequence[Regularizer], model_input: tuple[str, int]) -> None:
        self.clones = list(clones)  # all of them: their slots are emptied when the model's forward starts
        self.own = list(own)  # those with a stage of the whole model
        self.input_name, self.input_position = model_input
        self.enabled = True
