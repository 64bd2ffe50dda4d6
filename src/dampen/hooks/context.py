"""One context per forward of a block, and what is kept on the modules of a model while regularizers
are attached."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import in_backward
from dampen.calls import Penalties
from dampen.regularizer import (
    ATTENTION_STAGES,
    LINEAR_STAGES,
    STEP_STAGES,
    Regularizer,
    Site,
    in_order,
)
from dampen.two_pass.doubled import DoubledBatch

if TYPE_CHECKING:
    from dampen.hooks.block import StreamSocket
    from dampen.hooks.builtin_dropout import OwnRate
    from dampen.hooks.discover.depth import Order
    from dampen.hooks.experts import Routing
    from dampen.hooks.library_backends import FlashFunction
    from dampen.hooks.model import Padding
    from dampen.hooks.residual import Memory, ResidualSocket
    from dampen.hooks.tracing.channels import Heads
    from dampen.hooks.weights import AttachedOptimizer
    from dampen.kernels.attend import Needs
    from dampen.masks import ModelMask
    from dampen.regularizer import Call


# --- entries that pass the model's own forward by
#
# Entries that pass the model's own forward by: `forward_features`, `encode`, a block called
# alone.
#
# What sits in the layers works there too. What needs the model's forward (the stage `inputs`,
# and methods that compare two passes) does not, and this is where it is noticed: in the first
# block that regularizers were put into.


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
                f"{name} acts on the model's input, but a block "
                "was reached without the model's forward "
                "(through forward_features, encode or a submodule), so it "
                "would do nothing. Call the model itself, "
                "regularize the part that you call, or say that "
                "you mean it: regularize(..., strict=False)."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"model": None}


def entry_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the first block, which looks whether the model's forward is under way."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._dampen_entry.check(self.training)
        return base(self, *args, **kwargs)

    return forward


# --- sites, layers and frames


class AtRole:
    """What some methods do at the linear layers of one role."""

    def __init__(self, methods: Sequence[Regularizer], role: str) -> None:
        here = [r for r in methods if role in r.roles]
        self.operands = [r for r in here if "operands" in r.stages]
        self.multiplying = [r for r in here if r.multiplies]
        self.product = [r for r in here if "product" in r.stages]
        self.valid = any(r.needs_valid for r in here)


class AtWork:
    """The methods at work in a forward of a layer, and where. It is kept as long
    as these stay the same."""

    def __init__(self, methods: Sequence[Regularizer], training: bool) -> None:
        self.methods, self.training = list(methods), training
        self.attention = [r for r in methods if sees_attention(r)]
        self.branch = [r for r in methods if "branch" in r.stages]
        self.block = [r for r in methods if "block" in r.stages]
        self.linear = any(not r.stages.isdisjoint(LINEAR_STAGES) for r in methods)
        self.valid = any(r.needs_valid for r in methods)
        self.jacobian = any(r.takes_jacobian for r in self.attention)
        self.roles: dict[str, AtRole] = {}

    def at_role(self, role: str) -> AtRole:
        """What is done at the linear layers of a role."""
        found = self.roles.get(role)
        if found is None:
            found = self.roles[role] = AtRole(self.methods, role)
        return found


def sees_attention(r: Regularizer) -> bool:
    """Whether anything of a regularizer happens inside attention; one of the branches alone leaves
    the kernel be."""
    return bool(r.roles) or r.needs_valid or not r.stages.isdisjoint(ATTENTION_STAGES)


class Frame:
    """The state of one forward of one block."""

    def __init__(self, work: AtWork | None, block: Any) -> None:
        self.thread = (
            0 if torch.compiler.is_compiling() else threading.get_ident()
        )  # 0 inside a compiled graph
        self.work = work  # None where no module is the block: then each place looks for itself
        self.in_block = block is not None  # False: the order of execution is unknown
        self.block = block  # the module whose forward this is
        self.samples: int | None = None  # the length of its input
        self.call: Call | None = None  # the attention under way
        self.multiplying = False  # a linear site is running its own F.linear
        self.valid: Tensor | None = None  # (B, N): the tokens of this forward that are not padding
        self.sequence_first = False  # the feed-forward sees (N, B, D)
        self.early = ""  # a feed-forward map that ran before padding was known
        self.residual: ResidualSocket | StreamSocket | None = (
            None  # sees the residual branches, where a method acts
        )
        self.layout_seen = False  # whether an attention has shown which axis is the batch
        self.inside = 0  # attention modules of the block that are running
        self.attended = 0  # those that have run
        self.hits = 0  # linear maps seen since the block started
        self.routing: Routing | None = None  # the mixture of experts that is running
        self.memory: dict[
            int, Any
        ] = {}  # what a clone (by its serial number) keeps from branch to branch

    def restart(self) -> None:
        """Nothing of the forward has run yet."""
        self.__init__(self.work, self.block)  # type: ignore[misc]


def open_frame(layer: Layer, work: AtWork | None = None, block: Any = None) -> Frame:
    """A new context for the layer; give it back with `close_frame` in a `finally`.

    Args:
        layer: whose forward starts.
        work: its methods at work, where a block has looked them up.
        block: the module that is the block; None where there is none.
    """
    frame = Frame(work, block)
    layer.frames.append(frame)
    return frame


def close_frame(layer: Layer, frame: Frame) -> None:
    """The end of a forward. What it held is let go at once: a circle of references would keep the
    forward's tensors until Python next looks for circles, and the next step would have to find
    memory elsewhere."""
    layer.frames.remove(frame)
    frame.residual = frame.call = None


def frame_of(layer: Layer) -> Frame | None:
    """The frame that the calling thread has open in this layer, the innermost
    if there are several."""
    if not layer.frames:
        return None
    thread = 0 if torch.compiler.is_compiling() else threading.get_ident()
    if thread:
        for frame in reversed(layer.frames):
            if frame.thread == thread:
                return frame
    # A graph knows no thread, and code between two graphs finds the frame of the graph around it:
    # the only one, then.
    found = [frame for frame in layer.frames if not (thread and frame.thread)]
    if len(found) > 1:
        raise RuntimeError(
            "Two threads run compiled parts of the layer "
            f"'{layer.site.name}' at the same time, and a compiled graph "
            "cannot separate them. Give each thread a copy of the "
            "model (copy.deepcopy), or do not compile it."
        )
    return found[0] if found else None


class Layer:
    """What the sites of one layer share: the clones, and the frames of the forwards under way."""

    residual_memory: Memory | None = (
        None  # what the last forward of the block did; see `residual.py`
    )
    residual_same = 0  # forwards that were compared with it and were like it
    inner_sums = 0  # residuals inside a branch that the last followed forward left as they are
    order: Order | None = None  # who wants to know when the layer starts
    passed_by = False  # whether its attention turned out to be over channels
    residual_departures = 0  # forwards that departed from it

    def __init__(self, site: Site, clones: Sequence[Regularizer]) -> None:
        self.site = site
        self.clones = list(clones)
        # as they act; those that only move weights have nothing to do in a forward
        self.ordered = in_order(c for c in clones if c.stages - set(STEP_STAGES))
        self.enabled = True
        self.sampling = False  # Monte-Carlo averaging: stochastic methods act in eval too
        self.frames: list[Frame] = []  # one per forward under way
        self.attentions: list[str] = []  # the names of its attention modules
        self.tells_padding = True  # whether an attention here reports which tokens are padding
        self.padding: Padding | None = None  # where one of the model's layers cannot
        self.reached: dict[str, set[str]] = {}  # method -> the parts of the layer that it acts on
        self.kernels: dict[
            str, str
        ] = {}  # attention name -> what ran last, and why; "" before it ran
        self.work: AtWork | None = None  # that of the last forward outside a graph

    def at_work(self, module: nn.Module) -> AtWork | None:
        """The methods at work in this forward of one of the layer's modules; None where none is.

        Args:
            module: the block, or one of its modules that runs outside a block's forward.
        """
        # a graph may not depend on the numbers of a schedule, only on its form
        compiling = torch.compiler.is_compiling()
        if not compiling and self.order is not None:
            self.order.saw(self, module)
        if not self.enabled:
            return None
        sampled = module.__dict__.get("_dampen_sampled")
        training = module.training and not (sampled is not None and sampled.flipped)
        no_penalty = not compiling and not torch.is_grad_enabled()
        found = []
        for r in self.ordered:
            if not (training or r.in_eval or (self.sampling and r.stochastic)):
                continue
            if r.asleep or (r.idle_forever if compiling else r.idle):
                continue
            if r.only_reads and no_penalty and r.ledger is not None and r.ledger.keeps_nothing():
                continue
            found.append(r)
        if not found:
            return None
        if "_is_replica" in module.__dict__:
            raise_replica(self.site.name)
        if compiling:  # what is kept would be something that a graph depends on
            return AtWork(found, training)
        work = self.work
        if work is None or work.training is not training or work.methods != found:
            work = self.work = AtWork(found, training)
        return work

    def active(self, module: nn.Module) -> list[Regularizer]:
        """The same as a list."""
        work = self.at_work(module)
        return [] if work is None else work.methods

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: one that is made during a forward or inside a with
        block is not inside it."""
        fresh: dict[str, Any] = {
            "frames": [],
            "enabled": True,
            "sampling": False,
            "residual_memory": None,
            "residual_same": 0,
            "work": None,
        }
        fresh["order"] = None  # which knows all layers: a copy of one block would copy the model
        return {**self.__dict__, **fresh}


def raise_replica(where: str) -> None:
    """The copies that nn.DataParallel makes share the regularizers of the first one: no penalty
    would be right."""
    raise RuntimeError(
        f"nn.DataParallel runs a copy of '{where or 'the model'}' per "
        "device, and all of them share the regularizers "
        "of the first: penalties would be mixed or lost, and draws would stand "
        "on the wrong device. Use one device, or "
        "torch.nn.parallel.DistributedDataParallel, which has one process per device."
    )


class AttentionSite:
    """What is kept on an attention module."""

    over_channels = False  # whether its scores were seen to be those of channels with channels
    over_tokens = (
        False  # whether they were seen not to be; no graph reads it, so that none depends on it
    )

    def __init__(self, layer: Layer, name: str, cross: bool, linears: Sequence[nn.Module]) -> None:
        self.layer, self.name, self.cross = layer, name, cross
        self.linears = list(linears)  # linear sites inside, for projections that the module inlines
        self.adapters: list[nn.Module] = []  # the maps of low-rank adapters inside
        self.follow: bool | None = (
            None  # whether channels are followed to the attention; None: not known yet
        )
        self.told: dict[int, Heads] = {}  # leading axes -> where the heads are
        self.cuts: dict[
            str, tuple[str, Any]
        ] = {}  # q, k, v -> map and rows, where they are unusual
        self.unknown: dict[
            str, str
        ] = {}  # q, k, v -> the fused map of which no rows are known to make them
        self.path: tuple[int, list[str]] | None = (
            None  # the way of eager scores in the forward before; see `tracing/eager.py`
        )
        # the mask of eager scores in the forward before: what it is made
        # of, and what was read of it
        self.mask: tuple[list[Any], list[int], tuple[ModelMask | None]] | None = None
        # shape -> whether dampen's attention computes what the model's own code
        # computes; None: not compared
        self.replaced: dict[Any, bool] | None = None
        self.switched = 0  # forwards under way for which a library switch (timm's fused_attn) is on
        self.needs: Needs | None = (
            None  # of the methods in the last forward outside a graph, with the kernels they got
        )
        self.kernel: object = None  # the one that ran last
        self.flash: list[FlashFunction] = []  # functions of flash_attn and the like that it calls
        self.entries: list[FlashFunction] = []  # of Hugging Face's registry, outside graphs

    def knows_tokens(self) -> bool:
        """Whether an attention of the module was seen to be over tokens. A graph is judged by its
        shapes every time."""
        return not torch.compiler.is_compiling() and self.over_tokens

    def note_channels(self, over_channels: bool) -> bool:
        """Keep what the first attention has shown."""
        if over_channels:
            self.over_channels = True
        elif not torch.compiler.is_compiling():
            self.over_tokens = True
        return over_channels

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "needs": None, "kernel": None, "mask": None}


class LinearSite:
    """What is kept on a linear map."""

    def __init__(self, layer: Layer, role: str, kind: str, expert: bool = False) -> None:
        self.layer, self.role, self.kind = layer, role, kind  # kind: see `roles.kind_of`
        self.expert = expert  # whether it is one expert's, of several
        self.adapter: nn.Module | None = None  # the LoRA layer around the map


class BlockSite:
    """What is kept on a block."""

    def __init__(
        self, layer: Layer, first: bool, branches: int, wants_linear: bool, input_name: str
    ) -> None:
        self.layer, self.first, self.branches, self.wants_linear = (
            layer,
            first,
            branches,
            wants_linear,
        )
        self.input_name = input_name


class ModelSite:
    """What is kept on the model itself."""

    def __init__(
        self,
        clones: Sequence[Regularizer],
        own: Sequence[Regularizer],
        model_input: tuple[str, int],
        blockless: Sequence[Layer] = (),
    ) -> None:
        self.clones = list(clones)  # all of them
        self.blockless = list(
            blockless
        )  # layers that are no module: their frame is open during the model's forward
        self.own = in_order(own)  # those with a stage of the whole model
        self.input_name, self.input_position = model_input
        self.enabled = True
        self.sampling = False  # Monte-Carlo averaging
        self.ledger = Penalties(None, clones, strict=False)
        self.entry: EntrySite | None = None
        self.layers: list[Layer] = []
        self.doubled: DoubledBatch | None = None  # where a method compares two passes
        self.padding: Padding | None = None  # where a layer cannot report its padding itself
        self.order: Order | None = None  # in which the layers run
        self.own_rates: list[
            OwnRate
        ] = []  # of the model's own dropout, those that the handle has set
        self.stepping = [c for c in clones if not c.stages.isdisjoint(STEP_STAGES)]
        self.attached: list[AttachedOptimizer] = []  # whose steps they follow
        self.writes: dict[int, int] = {}  # versions of weights, when training saw them without one

    @contextlib.contextmanager
    def holding(self, name: str, value: bool) -> Iterator[None]:
        """A switch of all layers and of the model, set inside and then as it
        was: blocks may nest."""
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
        """Raise where a method inside attention has met no attention over
        tokens in the whole model."""
        if not any(layer.passed_by for layer in self.layers):
            return
        clones = {
            c.name: c
            for layer in self.layers
            for c in layer.clones
            if c.stages & set(ATTENTION_STAGES)
        }
        for name, clone in clones.items():
            reached = [layer.reached[name] for layer in self.layers if name in layer.reached]
            if reached and not any("attention" in parts for parts in reached):
                why = {
                    k for layer in self.layers for k in layer.kernels.values() if "left out" in k
                }
                raise RuntimeError(
                    f"{clone} found no attention to act on: every attention of the layers chosen "
                    f"('{self.layers[0].site.name}', ...) was "
                    f"{' or '.join(sorted(why))}. Leave the method "
                    "out, or those of its terms that are about attention."
                )

    def watch_entry(self, entry: EntrySite) -> None:
        """Have the first block look whether the model's forward is under way."""
        self.entry, entry.model = entry, self

    def acts(self, r: Regularizer, training: bool) -> bool:
        """Whether a clone with a stage of the whole model is at work in this forward."""
        return self.enabled and (training or r.in_eval or (self.sampling and r.stochastic))

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"enabled": True, "sampling": False, "attached": [], "writes": {}}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.entry is not None:
            self.entry.model = self
