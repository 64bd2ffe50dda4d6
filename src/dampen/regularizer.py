"""What a regularizer is. Read this file first.

A regularizer is an `nn.Module` that overrides some of sixteen named **stages** which the data meets
on its way through a Transformer, and the weights in a step of the optimizer. What it overrides is
its declaration; there is no config
class beside it:

    batch -> inputs -> embeddings -> tokens -> [(operands -> product -> qkv -> mask -> logits ->
    probs -> heads)
    -> branch -> block] x L -> outputs -> task; before_step -> after_step

Letters in every signature of this package: B batch, H heads, N queries, M keys, D channels; q (B,
H, N, D), k and v (B, H, M, D), s raw scores and a attention weights (B, H, N, M), o attention
output (B, H, N, D).

`qkv` and `heads` run once per attention; `mask`, `logits` and `probs` may run once per chunk of
queries (`call.rows`), so what all queries share is drawn in `qkv` and kept in
`call.memory[self.serial]`.

`regularize` puts one clone of each regularizer into every layer of a model. A clone's schedules are
0-d tensors, so that a schedule over training never recompiles a graph, and `penalize` adds a term
to the loss of the present step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dampen._torch import graph_task_id, has_numbers, has_parameters, placed_like, whole_tensor
from dampen.calls import (
    MAIN_THREAD,
    Penalties,
    Penalty,
    class_penalizes,
    consume,
    now,
    settle,
    total,
)
from dampen.calls import BranchCall as BranchCall
from dampen.calls import Call as Call
from dampen.calls import LinearCall as LinearCall
from dampen.calls import Site as Site
from dampen.calls import StepCall as StepCall
from dampen.names import ATTENTION_STAGES as ATTENTION_STAGES
from dampen.names import BLOCK_STAGES as BLOCK_STAGES
from dampen.names import LINEAR_STAGES as LINEAR_STAGES
from dampen.names import LOSS_STAGES as LOSS_STAGES
from dampen.names import MATRIX_STAGES, check_keywords, leave_out
from dampen.names import MODEL_STAGES as MODEL_STAGES
from dampen.names import STAGES as STAGES
from dampen.names import STEP_STAGES as STEP_STAGES
from dampen.names import snake_case as snake_case
from dampen.schedules import (
    Schedule,
    Value,
    always_zero,
    as_only_layer,
    as_schedule,
    check_value,
    constant,
    per_layer,
)

ROLES = ("q", "k", "v", "qkv", "kv", "out", "ffn_in", "ffn_out")
"""What a linear map of a block is for. A fused projection has the role qkv (or kv)."""

ADAPTERS = frozenset({"lora_a", "lora_b"})
"""The roles of the two maps of a low-rank adapter (LoRA), for methods that name them in `roles`."""


_serials = itertools.count()
_BELOW_1 = 1 - 2**-24  # the largest float32 below 1


class UnsupportedModel(ValueError):
    """A method says that it cannot act on this model, and why. The model is left as it was."""


class Regularizer(nn.Module):
    """Override the stages you need. The set of overridden stages says where the regularizer sits
    and what it costs.

    A minimal method, complete with schedule, printing, conformance and command line:

    >>> class DropQuery(Regularizer):
    ...     '''Drop what random queries read: their outputs in a head are 0.'''
    ...     def __init__(self, rate=0.1):
    ...         super().__init__()
    ...         self.scheduled("rate", rate)
    ...     def heads(self, o, call):
    ...         return o * (torch.rand(o.shape[:-1], device=o.device) >= self.rate).unsqueeze(-1)
    >>> sorted(DropQuery.stages)
    ['heads']
    """

    passes: ClassVar[int] = 1
    """Forward passes per training step that the method needs."""
    in_eval: ClassVar[bool] = False
    """True for deterministic transforms that also act at inference."""
    stochastic: ClassVar[bool] = True
    """False for methods that draw nothing: their result depends on the data alone."""
    per_sample: bool = False
    """True where all that a method does is each sample's own: no draw is shared by a batch, and no
    penalty is made. A step of two passes may then run as one batch that
    holds every sample twice."""
    needs_valid: ClassVar[bool] = False
    """True where `LinearCall.valid` is read: the layer's attention is then watched
    for its padding mask."""
    reads_adapters: bool = False
    """True where `LinearCall.adapter` is read: a map with LoRA beside it is then W + s B A."""
    needs_adapters: ClassVar[bool] = False
    """True for a method on low-rank adapters: its contracts are checked on
    models that have some."""
    needs_module: ClassVar[bool] = False
    """True where `LinearCall.module` is read: experts that are slices of
    one parameter have none."""
    skips_samples: bool = False
    """True where a branch may run on the samples of `keep_samples` alone."""
    not_skipped: str = ""
    """Why a method that skips computes all the same in its layer."""
    reads_start: ClassVar[bool] = False
    """True where `outputs` reads `self.reference`, the logits of the model at `regularize`."""
    reference: Tensor | None = None
    reads_ids: ClassVar[bool] = False
    """True where `embeddings` reads `self.input_ids`, the integer input of the embedding."""
    input_ids: Tensor | None = None
    turn: int = 0
    """The number of the pass under way, from 0, for a method with several passes."""
    replaces_weight_decay: ClassVar[bool] = False
    """True for a method that decays weights: the optimizer's own decay is then switched off."""
    takes_jacobian: bool = False
    """True where a penalty is a derivative of the attention: the attention is then run with
    gradients in a `reg.loss` under `no_grad` too, and what it gives is detached."""
    multiplies: bool = False
    """True where `multiply` may stand in for a linear map and `product`."""
    measuring: bool = False
    """True while gradients are on for a derivative's sake alone, so that penalties are
    kept without a graph."""
    roles: frozenset[str] = frozenset()
    """The linear maps that the method wants to see, in `operands` and `product` and in `Call.maps`.
    Every one by default where a linear stage is overridden."""
    branch_roles: frozenset[str] = frozenset({"attention", "ffn", "mixer"})
    """The residual branches that the method acts on, by `BranchCall.role`."""
    per_query: bool = True
    """False where `mask` is the same for all queries, so that long sequences need
    no chunks for its sake."""
    stages: frozenset[str] = frozenset()
    """The stages at work. An instance may switch some off by assigning a smaller set."""
    only_reads: bool = False
    """True for a method that returns what it gets and only makes penalties. Such methods run first
    at every stage, on operands that no other method has changed; where that takes one more
    attention or linear layer, it is computed for them. By default: the method draws nothing, does
    not act in eval, and its code calls `penalize`."""
    acts_first: ClassVar[bool] = False
    """True for methods that replace or add numbers: they act before those that drop some. Otherwise
    methods act in the order of their names, whatever the order in which they are given."""
    reads_product: bool = True
    """False for a method that only reads and does not look at the `y` of `product`: then no product
    is made for it where another method has changed the operands."""
    changed_maps: frozenset[str] = frozenset()
    """The linear layers (their roles) that other methods of the same block change, known once a
    clone is placed."""
    example: ClassVar[dict[str, Any]] = {}
    """Arguments of a sensible instance, for methods that do nothing until they
    get something to act on."""
    zero_is_identity: bool = True
    """Whether a method does nothing where all its scheduled values are 0, so that its stages need
    not run then. Taken to be False for a class with a `neutral` of its own that
    does not say otherwise."""
    _name: ClassVar[str] = "regularizer"
    acts_here: bool = True
    """False for a clone that has nothing to act on in its layer, as `prepare` may find;
    `print(reg)` counts it."""
    ledger: Penalties | None = None
    """What the clones of one model share about their penalties; None where a method is used without
    `regularize`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = check_keywords(cls.__init__)  # type: ignore[method-assign]
        if "neutral" in vars(cls) and "zero_is_identity" not in vars(cls):
            cls.zero_is_identity = False
        cls._name = snake_case(
            cls.__name__
        )  # once per class: a cached function may not be called inside a graph
        cls.stages = frozenset(s for s in STAGES if getattr(cls, s) is not getattr(Regularizer, s))
        if "per_sample" not in vars(cls) and any(s in vars(cls) for s in STAGES):
            # what a method says of its own stages says nothing of those that replace them
            cls.per_sample = False
        if "only_reads" not in vars(cls):
            cls.only_reads = not cls.stochastic and not cls.in_eval and class_penalizes(cls)
        if cls.stages & set(LINEAR_STAGES) and not cls.roles:
            cls.roles = frozenset(ROLES)

    def __init__(self) -> None:
        super().__init__()
        self.serial = next(_serials)
        self.site: Site | None = None
        self._schedules: dict[
            str, tuple[Schedule, float]
        ] = {}  # name -> (schedule, upper end of the range)
        self._given = self._schedules  # as they were before the clone was placed
        self._numbers: dict[
            str, float
        ] = {}  # the scheduled values as plain numbers, beside their tensors
        self._progress = 0.0
        self._penalties: dict[str, Penalty] = {}
        self.neighbors: list[
            nn.Module
        ] = []  # the layer's own modules, to know whether anything here is being trained
        self.linears: list[tuple[nn.Module, str]] = []  # the layer's linear maps with their roles
        self.input_has_gradient = False  # whether the layer's last input did
        self.asleep = False  # left out for a moment, though it is attached
        self.idle = False  # every scheduled value is 0 now: in eager mode the stages are not run
        self.idle_forever = (
            False  # and will stay so, by construction: then they are not in a compiled graph either
        )
        self.lost = (
            False  # a penalty was made where gradients are off inside a forward that has them
        )
        self.watched: tuple[nn.Module, str, nn.Parameter] | None = (
            None  # reports a backward to the ledger
        )

    @classmethod
    def canonical(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The one spelling of all arguments that make the same function. A study
        trains equal ones once."""
        return dict(arguments)

    # --- the stages, in the order in which the data meets them
    # ------------------------------------------------------------

    def inputs(self, x: Tensor) -> Tensor:
        """The model's input.

        Args:
            x: as the model gets it.
        """
        return x

    def embeddings(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """What the input or patch embedding gives, (B, N, D), before positions; `valid` (B, N) is
        False on padding.

        Args:
            x: the embeddings.
            valid: False on padding.
        """
        return x

    def tokens(self, x: Tensor) -> Tensor:
        """(B, N, D) entering the first block; may return fewer tokens.

        Args:
            x: the tokens of a batch.
        """
        return x

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        """Before a linear map of a block: its input and weight (out, in).

        Args:
            x: the input, (..., in).
            weight: the weight, (out, in).
            call: which linear layer it is.

        Returns:
            the input and the weight to multiply.
        """
        return x, weight

    def product(self, y: Tensor, call: LinearCall) -> Tensor:
        """After a linear map of a block.

        Args:
            y: the output of the linear layer.
            call: which linear layer it is.
        """
        return y

    def multiply(self, call: LinearCall) -> Tensor | None:
        """Instead of `product`, for a method with `multiplies` that only reads a map: the map
        itself, x W^T + b, and what is read off it, as one function. None: the map runs as it is,
        and `product` sees what it gives."""
        return None

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Before the attention scores. `call.keep` and `call.projection("q")` are known here.

        Args:
            q: queries, (B, H, N, d).
            k: keys, (B, Hk, M, d).
            v: values, (B, Hk, M, dv).
            call: what is known of this attention: padding, layer, linear layers.

        Returns:
            queries, keys and values.
        """
        return q, k, v

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor | None:
        """A bool tensor that broadcasts to (B, H, N, M): True hides. The fused kernel stays.

        Args:
            q: queries, (B, H, N, d).
            k: keys, (B, Hk, M, d).
            call: what is known of this attention: padding, layer, linear layers.

        Returns:
            the mask, or None to hide nothing.
        """
        return None

    def logits(self, s: Tensor, call: Call) -> Tensor:
        """Raw scores with the model's bias, before any masking. Needs the N x M matrix.

        Args:
            s: scores, (B, H, N, M).
            call: what is known of this attention: padding, layer, linear layers.
        """
        return s

    def probs(self, a: Tensor, call: Call) -> Tensor:
        """Attention weights. Needs the N x M matrix.

        Args:
            a: weights, (B, H, N, M).
            call: what is known of this attention: padding, layer, linear layers.
        """
        return a

    def heads(self, o: Tensor, call: Call) -> Tensor:
        """Head output, before the output projection.

        Args:
            o: head output, (B, H, N, dv).
            call: what is known of this attention: padding, layer, linear layers.
        """
        return o

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        """A residual branch just before it is added to `call.residual`.

        Args:
            b: the branch, (B, N, D).
            call: the stream that it is added to, and its kind.
        """
        return b

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        """A block's input and output; returns the output.

        Args:
            x: the input of the block.
            y: its output.
        """
        return y

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        """One model output (logits) per pass; `valid` is False on padded positions.

        Args:
            outputs: logits, one tensor per pass.
            valid: False on padded positions.
        """

    def task(self, loss: Tensor) -> None:
        """The task loss of the step, the mean over its passes; what is penalized is added to it.

        Args:
            loss: a scalar.
        """

    def before_step(self, call: StepCall) -> Callable[[], None] | None:
        """Before a step of an optimizer that was given to `reg.attach_optimizer`, in every layer;
        what it returns runs after the step."""
        return None

    def after_step(self, call: StepCall) -> None:
        """After a step of such an optimizer, once for the whole model."""

    def keep_samples(self, x: Tensor, memory: dict[int, Any]) -> Tensor | None:
        """For `skips_samples`: the numbers of the samples that keep the branch about to run on x;
        None for all. `memory` is that of the branch's call."""
        return None

    def pass_weights(self) -> tuple[float | Tensor, ...] | None:
        """For methods with several passes: the factors of their task losses; None for the mean."""
        return None

    def averaged_weights(self) -> Mapping[str, Tensor] | None:
        """For methods that average weights: what `reg.averaged()` puts into the model, by name."""
        return None

    # --- services for subclasses
    # ------------------------------------------------------------------------------------------

    def scheduled(self, name: str, value: Value, *, high: float = 1.0) -> None:
        """Make `self.<name>` a 0-d float32 tensor that follows `value` over depth and training,
        checked to be in [0, high).

        Use `high=math.inf` for weights. Never branch in Python on the tensor's value:
        it changes between steps.

        Args:
            name: of the attribute.
            value: a number, a schedule, or one number per layer.
            high: the bound that values must stay below.

        Raises:
            ValueError: a value outside [0, high).
        """
        self._schedules[name] = (
            as_schedule(value, f"{type(self).__name__}({name}=...)", high),
            high,
        )
        self.register_buffer(name, torch.zeros((), dtype=torch.float32), persistent=False)
        self._numbers.pop(name, None)
        self.at(self._progress)

    def current(self, name: str) -> float | Tensor:
        """The scheduled value as a plain number, and as its tensor under `torch.compile`, where a
        number would recompile the graph whenever it changes. A number saves several small
        operations per layer in eager mode.

        Args:
            name: as given to `scheduled`.
        """
        return getattr(self, name) if torch.compiler.is_compiling() else self._numbers[name]

    def fixed(self, name: str) -> float | None:
        """The scheduled value as a number for a function of torch that takes no tensor. None in a
        graph where the value may change: a number there compiles the graph anew.

        Args:
            name: as given to `scheduled`.
        """
        if torch.compiler.is_compiling() and not isinstance(self._schedules[name][0], constant):
            return None
        return self._numbers[name]

    def weight_dropout(self) -> float | Tensor | None:
        """For methods with the stage `probs` that are inverted dropout of single weights: the rate,
        as a number where it may be one (`fixed`). None: they do something else."""
        return None

    def hiding_rate(self) -> float | Tensor | None:
        """For methods with the stage `mask`: the rate that independent draws per key do not exceed,
        or None where keys are hidden together. It says how unlikely a query
        is to lose every key."""
        return None

    def native_hiding(self, keys: int) -> tuple[float | Tensor, tuple[int, int] | None] | None:
        """For methods with the stage `mask` that a native kernel can do: the rate, and which share
        of the keys with the largest scores is meant (numerator and denominator, or a count and 0;
        None: all). None: torch does it."""
        return None

    def penalize(self, value: Penalty, name: str | None = None) -> None:
        """Add `value` to the loss of this step. Compute it unconditionally, because checkpointing
        replays the forward.

        What is added waits until it is taken: a layer that runs several times adds each time, a
        checkpoint's recompute does not add again, and a forward in eval or
        under `no_grad` adds nothing.

        Args:
            value: a scalar with a gradient.
            name: of the term; default: the method's name.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling and graph_task_id() != -1:  # inside a backward: a checkpoint's recompute
            return
        thread = MAIN_THREAD if compiling else threading.get_ident()
        me = "" if thread == MAIN_THREAD else str(thread)
        ledger = self.ledger
        # `reg.loss` consumes what its forwards make, whatever the mode
        if ledger is None or (ledger.askers and me in ledger.askers) or ledger.counts(self):
            key = self._name if name is None else f"{self._name}.{name}"
            key = f"{key}@{me}" if me else key
            value = now(value).detach() if self.measuring else value
            old = self._penalties.get(key)
            self._penalties[key] = value if old is None else total([old, value])

    @property
    def name(self) -> str:
        """The registry name: the class name in snake case."""
        return type(self)._name

    # --- housekeeping
    # -----------------------------------------------------------------------------------------------------

    def neutral(self) -> None:
        """Make this clone do nothing: every rate and weight 0, always. Override where another value
        is the identity."""
        self._given = self._schedules = {
            name: (constant(0.0), high) for name, (_, high) in self._schedules.items()
        }
        self.at(self._progress)

    def at(self, progress: float) -> None:
        """Set the scheduled values for this clone's depth at `progress`."""
        self.__dict__["_progress"] = (
            progress  # in every step: `nn.Module` takes a microsecond to set an attribute
        )
        depth = 0.0 if self.site is None else self.site.depth
        changed = has_parameters(self)  # what is learned may have been frozen meanwhile
        for name, (schedule, high) in self._schedules.items():
            value = schedule(depth, progress)
            if self._numbers.get(name) == value:
                continue  # most schedules are constant: nothing to check, nothing to set
            what = (
                f"{type(self).__name__}({name}=...) at depth {depth:.3g}, progress {progress:.3g}"
            )
            self._numbers[name] = check_value(value, what, high)
            # a rate next to 1 must not become 1 in float32, which would scale by 1 / 0
            getattr(self, name).fill_(min(value, _BELOW_1) if high == 1.0 else value)
            changed = True
        if changed:
            self.idle = self._is_idle()

    def _is_idle(self) -> bool:
        """Whether nothing would change if the stages were not run now: every value is 0, or the
        weight of a method that is a penalty and no more. Override where other zeros are enough."""
        if (
            not self.zero_is_identity
            or not self._numbers
            or any(p.requires_grad for p in self.parameters())
        ):
            return False
        if not self.stochastic and "weight" in self._numbers:
            return self._numbers["weight"] == 0
        return not any(self._numbers.values())

    def place(self, site: Site) -> None:
        """Set the place of the clone; lists with one value per layer must match the number of
        layers. A clone may be placed again, once it is known in which order the layers run."""
        self._given = self._schedules = dict(self._schedules if self.site is None else self._given)
        for name, (schedule, high) in list(self._schedules.items()):
            if isinstance(schedule, per_layer) and len(schedule.values) != site.total:
                raise ValueError(
                    f"{type(self).__name__}({name}=...) has {len(schedule.values)} "
                    f"values, but {site.total} layers were chosen. Give one value per "
                    "layer, one number for all, or a schedule such as linear(0.3, 0.0)."
                )
            if isinstance(schedule, per_layer):  # counts all layers, whatever stack they are in
                self._schedules = dict(self._schedules)
                self._schedules[name] = (constant(schedule.values[site.index]), high)
        if (site.total if site.stack is None else site.stack[1]) == 1:
            self._schedules = {
                name: (as_only_layer(s), high) for name, (s, high) in self._schedules.items()
            }
        self.site = site
        self.at(self._progress)
        self.idle = self._is_idle()  # what decides may have been set after the last value
        self.idle_forever = self.idle and self.always_idle

    def inspect_model(self, model: nn.Module) -> None:
        """Look at the whole model once, before the method is cloned into its layers: for what all
        clones share. Raise to refuse it."""

    def prepare(self, model: nn.Module) -> None:
        """Look at the clone's own layer, after it was placed and before anything is attached. Raise
        to refuse it. What needs a walk through the model belongs in `inspect_model`."""

    def check_layer(self, roles: set[str], where: str) -> None:
        """Raise if a layer lacks the linear maps that the method needs. `roles` are
        those found at `where`."""
        if self.roles and not self.roles & roles:
            raise ValueError(
                f"{type(self).__name__} acts on the linear maps {', '.join(sorted(self.roles))}, "
                f"but '{where}' has only {', '.join(sorted(roles)) or 'none'}. Name the "
                f"maps with projections=, or {leave_out(where)}."
            )

    @property
    def always_idle(self) -> bool:
        """Whether every scheduled value is 0 in this clone's layer for the whole of training, by
        construction."""
        depth = 0.0 if self.site is None else self.site.depth
        learns = any(p.requires_grad for p in self.parameters())
        return (
            not learns
            and bool(self._schedules)
            and all(always_zero(s, depth) for s, _ in self._schedules.values())
        )

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The scheduled values by name, as they were given."""
        return {name: schedule for name, (schedule, _) in self._schedules.items()}

    @property
    def does_nothing(self) -> bool:
        """True if a method that needs something to act on got nothing, as with
        `ExplicitDropout()`."""
        return False

    @property
    def wants_gradient(self) -> bool:
        """Whether the clone's layer, or anything before it, is being trained; a frozen backbone is
        fine without gradient."""
        return self.input_has_gradient or any(
            p.requires_grad for m in self.neighbors for p in m.parameters()
        )

    def saved(self) -> dict[str, Tensor]:
        """What the handle's state_dict keeps of a clone, by name: the learned values."""
        return {name: whole_tensor(p) for name, p in self.named_parameters()}

    def restore(self, name: str, value: Tensor) -> None:
        """Take back one of them."""
        with torch.no_grad():
            parameter = self.get_parameter(name)
            parameter.copy_(placed_like(value, parameter))

    def take_penalties(self) -> dict[str, Tensor]:
        """The penalties made since they were last taken, by name; the slots are empty afterwards.

        Those that this thread's forwards made; where they made none, those of the thread that ran
        them for it."""
        return settle(consume(self))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Regularizer:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in self._schedules:  # model.half() must not round a rate of 0.1 to 0.1001
            self.register_buffer(name, getattr(self, name).float(), persistent=False)
        self._numbers = {}  # the tensors may be new and empty (`to_empty`)
        self.at(self._progress)
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        """A regularizer is not part of the model: learnable rates are saved by the handle."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing is expected, so nothing is missing: strict loads work both ways."""

    def __getstate__(self) -> dict[str, Any]:
        """For deepcopy and pickle, which must never meet a live graph nor the
        ledger of another model."""
        state = {**self.__dict__, "_penalties": {}, "asleep": False, "lost": False, "watched": None}
        state.pop("ledger", None)
        return state

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name).item():.3g}" for name in self._schedules)


def in_order(regularizers: Iterable[Regularizer]) -> list[Regularizer]:
    """The order in which methods act, whatever the order in which they are given: those that only
    read, those that replace or add numbers, those that drop some; among these by name, and two of
    one class by what they print."""
    given = list(regularizers)
    names = [r.name for r in given]
    # what a method prints separates two of one class; a graph may not depend on the numbers in it
    several = (
        {}
        if torch.compiler.is_compiling()
        else {r: repr(r) for r in given if names.count(r.name) > 1}
    )
    return sorted(
        given, key=lambda r: (not r.only_reads, not r.acts_first, r.name, several.get(r, ""))
    )


def check_only_reads(r: Regularizer, stage: str, given: Tensor, returned: Tensor) -> Tensor:
    """What a stage returned; raise where a method that says that it only reads has changed it."""
    looked_at = (
        r.only_reads and returned is not given and has_numbers(given) and has_numbers(returned)
    )
    if looked_at and (returned.data_ptr() != given.data_ptr() or returned.shape != given.shape):
        raise RuntimeError(
            f"{type(r).__name__}.{stage} returned another tensor than it "
            "got, but a method that makes penalties and "
            "draws nothing only reads (only_reads is True). Return the "
            "tensor as it is, or set only_reads = False in "
            "the class if it is meant to change it."
        )
    return returned


def needs_matrix(regularizers: Iterable[Regularizer]) -> bool:
    """Whether any regularizer needs the N x M matrix of scores or weights, so that no
    fused kernel can run."""
    return any(stage in r.stages for r in regularizers for stage in MATRIX_STAGES)
