"""What is kept on the modules of a model while regularizers are attached to it, and what the sites of a layer share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dampen.calls.ledger import Ledger
from dampen.hooks.entry import EntrySite
from dampen.hooks.frame import Frame
from dampen.hooks.own_dropout import OwnRate, is_flipped
from dampen.regularizer import ATTENTION_STAGES, Regularizer, Site, in_order
from dampen.two_pass.doubled import DoubledBatch

if TYPE_CHECKING:
    from dampen.hooks.memory import Memory
    from dampen.hooks.order import Order
    from dampen.hooks.padding import Padding


class Layer:
    """What the sites of one layer share: the clones, and the frames of the forwards under way."""

    residual_memory: Memory | None = None  # what the last forward of the block did; see `residual.py`
    residual_same = 0  # forwards that were compared with it and were like it
    order: Order | None = None  # who wants to know when the layer starts
    passed_by = False  # whether its attention turned out to be over channels
    residual_changes = False  # whether a forward has ever departed from it

    def __init__(self, site: Site, clones: Sequence[Regularizer]) -> None:
        self.site = site
        self.clones = list(clones)
        self.ordered = in_order(clones)  # as they act
        self.enabled = True
        self.sampling = False  # Monte-Carlo averaging: stochastic methods act in eval too
        self.frames: list[Frame] = []  # one per forward under way; see `frame.py`
        self.attentions: list[str] = []  # the names of its attention modules
        self.tells_padding = True  # whether an attention here reports which tokens are padding
        self.padding: Padding | None = None  # where one of the model's layers cannot
        self.reached: dict[str, set[str]] = {}  # method -> the parts of the layer that it acts on
        self.kernels: dict[str, str] = {}  # attention name -> what ran last, and why; "" before it ran

    def active(self, module: nn.Module) -> list[Regularizer]:
        """The clones at work in this forward of one of the layer's modules."""
        if not torch.compiler.is_compiling() and self.order is not None:
            self.order.saw(self, module)
        if not self.enabled:
            return []
        training = module.training and not is_flipped(module)
        compiling = (
            torch.compiler.is_compiling()
        )  # a graph may not depend on the numbers of a schedule, only on its form
        found = []
        for r in self.ordered:
            acts = training or r.in_eval or (self.sampling and r.stochastic)
            if r.only_reads and not compiling and r.ledger is not None and r.ledger.keeps_nothing():
                continue
            if acts and not r.asleep and not (r.idle_forever if compiling else r.idle):
                found.append(r)
        if found and "_is_replica" in module.__dict__:
            raise_replica(self.site.name)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: one that is made during a forward or inside a with block is not inside it."""
        fresh: dict[str, Any] = {
            "frames": [],
            "enabled": True,
            "sampling": False,
            "residual_memory": None,
            "residual_same": 0,
        }
        fresh["order"] = None  # which knows all layers: a copy of one block would copy the model
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # models pickled with 0.2 have none
        fresh: dict[str, Any] = {
            "ordered": in_order(state["clones"]),
            "tells_padding": True,
            "padding": None,
            "reached": {},
        }
        self.__dict__.update({**fresh, **state, "frames": []})


def raise_replica(where: str) -> None:
    """The copies that nn.DataParallel makes share the regularizers of the first one: no penalty would be right."""
    raise RuntimeError(
        f"nn.DataParallel runs a copy of '{where or 'the model'}' per device, and all of them share the regularizers "
        "of the first: penalties would be mixed or lost, and draws would stand on the wrong device. Use one device, or "
        "torch.nn.parallel.DistributedDataParallel, which has one process per device."
    )


class AttentionSite:
    """What is kept on an attention module."""

    over_channels = False  # whether its scores were seen to be those of channels with channels
    over_tokens = False  # whether they were seen not to be; no graph reads it, so that none depends on it

    def __init__(self, layer: Layer, name: str, cross: bool, linears: Sequence[nn.Module]) -> None:
        self.layer, self.name, self.cross = layer, name, cross
        self.linears = list(linears)  # linear sites inside, for projections that the module inlines
        self.follow: bool | None = None  # whether channels are followed to the attention; None: not known yet
        self.told: dict[int, tuple[int | None, int]] = {}  # leading axes -> axis of the heads, and how many
        self.cuts: dict[str, tuple[str, Any]] = {}  # q, k, v -> map and rows, where they are unusual
        self.unknown: dict[str, str] = {}  # q, k, v -> the fused map of which no rows are known to make them
        self.path: tuple[int, list[str]] | None = None  # the way of eager scores in the forward before; see `eager.py`
        self.switched = 0  # forwards under way for which a library switch (timm's fused_attn) is on

    def knows_tokens(self) -> bool:
        """Whether an attention of the module was seen to be over tokens. A graph tells by its shapes every time."""
        return not torch.compiler.is_compiling() and self.over_tokens

    def note_channels(self, over_channels: bool) -> bool:
        """Keep what the first attention has shown."""
        if over_channels:
            self.over_channels = True
        elif not torch.compiler.is_compiling():
            self.over_tokens = True
        return over_channels

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {"follow": None, "told": {}, "cuts": {}, "unknown": {}, "path": None, **state}
        )  # models pickled with 0.1 have none


class LinearSite:
    """What is kept on a linear map."""

    adapter: nn.Module | None = None  # models pickled with 0.1 have none, nor a kind
    kind = ""

    expert = False

    def __init__(self, layer: Layer, role: str, kind: str, expert: bool = False) -> None:
        self.layer, self.role, self.kind = layer, role, kind  # kind: see `roles.kind_of`
        self.expert = expert  # whether it is one expert's, of several
        self.adapter: nn.Module | None = None  # the LoRA layer around the map


class BlockSite:
    """What is kept on a block."""

    def __init__(self, layer: Layer, first: bool, branches: int, wants_linear: bool, input_name: str) -> None:
        self.layer, self.first, self.branches, self.wants_linear = layer, first, branches, wants_linear
        self.input_name = input_name


class ModelSite:
    """What is kept on the model itself."""

    sampling = False  # models pickled with 0.1 have none
    doubled: DoubledBatch | None = None  # likewise
    padding: Padding | None = None  # likewise
    order: Order | None = None  # likewise

    def __init__(
        self,
        clones: Sequence[Regularizer],
        own: Sequence[Regularizer],
        model_input: tuple[str, int],
        blockless: Sequence[Layer] = (),
    ) -> None:
        self.clones = list(clones)  # all of them
        self.blockless = list(blockless)  # layers that are no module: their frame is open during the model's forward
        self.own = in_order(own)  # those with a stage of the whole model
        self.input_name, self.input_position = model_input
        self.enabled = True
        self.ledger = Ledger(None, clones, strict=False)
        self.entry: EntrySite | None = None
        self.layers: list[Layer] = []
        self.doubled: DoubledBatch | None = None  # where a method compares two passes
        self.padding: Padding | None = None  # where a layer cannot report its padding itself
        self.own_rates: list[OwnRate] = []  # of the model's own dropout, those that the handle has set

    @contextlib.contextmanager
    def holding(self, name: str, value: bool) -> Iterator[None]:
        """A switch of all layers and of the model, set inside and then as it was: blocks may nest."""
        places: list[Layer | ModelSite] = [self, *self.layers]
        before = [getattr(place, name) for place in places]
        for place in places:
            setattr(place, name, value)
        try:
            yield
        finally:
            for place, was in zip(places, before, strict=True):
                setattr(place, name, was)

    def check_reached(self) -> None:
        """Raise where a method inside attention has met no attention over tokens in the whole model."""
        if not any(layer.passed_by for layer in self.layers):
            return
        clones = {c.name: c for layer in self.layers for c in layer.clones if c.stages & set(ATTENTION_STAGES)}
        for name, clone in clones.items():
            reached = [layer.reached[name] for layer in self.layers if name in layer.reached]
            if reached and not any("attention" in parts for parts in reached):
                raise RuntimeError(
                    f"{clone} found no attention to act on: every attention of the layers chosen "
                    f"('{self.layers[0].site.name}', ...) attends over channels, not over tokens. Leave the method "
                    "out, or those of its terms that are about attention."
                )

    def watch_entry(self, entry: EntrySite) -> None:
        """Have the first block look whether the model's forward is under way."""
        self.entry, entry.model = entry, self

    def acts(self, r: Regularizer, training: bool) -> bool:
        """Whether a clone with a stage of the whole model is at work in this forward."""
        return self.enabled and (training or r.in_eval or (self.sampling and r.stochastic))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "enabled": True, "sampling": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"blockless": [], "entry": None, "layers": [], "own_rates": [], **state})
        if self.entry is not None:
            self.entry.model = self
        if "ledger" not in state:  # a model pickled with 0.1
            self.ledger = Ledger(None, self.clones, strict=False)
