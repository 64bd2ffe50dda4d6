"""What a regularizer is. Read this file first.

A regularizer is an `nn.Module` that overrides some of twelve named **stages** which the data meets on its way through
a Transformer. What it overrides is its declaration; there is no config class beside it:

    batch -> inputs -> tokens -> [(operands -> product -> qkv -> mask -> logits -> probs -> heads) -> branch -> block]
    x L -> outputs

Letters in every signature of this package: B batch, H heads, N queries, M keys, D channels; q (B, H, N, D), k and v
(B, H, M, D), s raw scores and a attention weights (B, H, N, M), o attention output (B, H, N, D).

`qkv` and `heads` run once per attention; `mask`, `logits` and `probs` may run once per chunk of queries
(`call.rows`), so what all queries share is drawn in `qkv` and kept in `call.memory[self.serial]`.

`regularize` puts one clone of each regularizer into every layer of a model. A clone's schedules are 0-d tensors, so
that a schedule over training never recompiles a graph, and `penalize` adds a term to the loss of the present step.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dampen.masks import causal_rows
from dampen.projections import split_projection
from dampen.schedules import Schedule, Value, always_zero, constant, per_layer

MODEL_STAGES = ("inputs", "outputs")
BLOCK_STAGES = ("tokens", "branch", "block")
LINEAR_STAGES = ("operands", "product")
ATTENTION_STAGES = ("qkv", "mask", "logits", "probs", "heads")
STAGES = ("inputs", "tokens", *LINEAR_STAGES, *ATTENTION_STAGES, "branch", "block", "outputs")
ROLES = ("q", "k", "v", "qkv", "kv", "out", "ffn_in", "ffn_out")
"""What a linear map of a block is for. A fused projection has the role qkv (or kv)."""


@dataclass(frozen=True)
class Site:
    """Where a clone lives: the layer's name, and its place among the layers that were chosen."""

    name: str
    index: int = 0
    total: int = 1

    @property
    def depth(self) -> float:
        """0 in the first layer, 1 in the last."""
        return self.index / max(1, self.total - 1)


@dataclass(eq=False)
class LinearCall:
    """One application of a linear map y = x W^T + b. It dies with the forward that made it."""

    role: str
    input: Tensor  # (..., in)
    weight: Tensor  # (out, in), whatever layout the module keeps
    bias: Tensor | None
    module: nn.Module | None = None
    site: Site | None = None
    valid: Tensor | None = None  # (B, N) bool, False on padded tokens; None when nothing is padded
    output: Tensor | None = None  # known to `product` and to the attention call that collects its maps


@dataclass(eq=False)
class BranchCall:
    """One residual branch, about to be added to `residual`. `role` is "attention" or "ffn"."""

    role: str
    residual: Tensor
    site: Site | None = None
    skip: bool = True  # a method that sets it False takes the residual away: the branch goes on alone


@dataclass(eq=False)
class Call:
    """One attention, as its stages see it. It dies with the forward that made it."""

    module: nn.Module | None = None
    site: Site | None = None
    cross: bool = False
    is_causal: bool = False  # the flag was given; no mask tensor stands for it
    mask: Tensor | None = None  # the model's own bool mask (B or 1, H or 1, N or 1, M), True may be seen
    bias: Tensor | None = None  # the model's own score bias (relative positions), hidden places 0
    scale: float = 1.0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # B, H, N, M
    kv_heads: int = 0  # as seen at the socket; a library may have repeated grouped keys before it
    head_size: int = 0
    value_size: int = 0  # channels of a value head; mostly the same
    device: torch.device | None = None
    rows: slice | None = None  # which queries this call stands for, when the queries come in chunks
    valid: Tensor | None = None  # (B, N) bool, False on padded queries; None when nothing is padded
    seen: Tensor | None = None  # the valid keys of all queries, which a chunk's own mask does not tell
    maps: dict[str, LinearCall] = field(default_factory=dict)  # the linear maps run so far, by role
    memory: dict[int, Any] = field(default_factory=dict)  # what a clone (by its serial number) keeps for later stages

    @property
    def role(self) -> str:
        """self, cross or causal."""
        if self.cross:
            return "cross"
        return "causal" if self.is_causal or getattr(self.module, "is_causal", False) else "self"

    @property
    def keep(self) -> Tensor | None:
        """Bool, broadcastable to (B, H, N, M), True where the model lets a query see a key; None: everywhere."""
        if self.is_causal:
            return causal_rows(self.shape[2], self.shape[3], self.rows, self.device)
        return self.mask

    @property
    def valid_keys(self) -> Tensor | None:
        """(B or 1, M) bool: the keys that some query of some head may see; None when the model gave no mask."""
        if self.seen is not None:
            return self.seen
        return None if self.mask is None else self.mask.flatten(1, 2).any(1)

    def projection(self, role: str) -> LinearCall:
        """The bare linear map behind "q", "k" or "v": its own input, weight (heads x d, in), bias and output, fused
        or not."""
        return split_projection(self, role)


_serials = itertools.count()


class UnsupportedModel(ValueError):
    """A method says that it cannot act on this model, and why. The model is left as it was."""


class Regularizer(nn.Module):
    """Override the stages you need. The set of overridden stages says where the regularizer sits and what it costs.

    A minimal method, complete with schedule, printing, conformance and command line:

    >>> class DropQuery(Regularizer):
    ...     '''Hide random keys from all queries.'''
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
    needs_valid: ClassVar[bool] = False
    """True where `LinearCall.valid` is read: the layer's attention is then watched for its padding mask."""
    roles: frozenset[str] = frozenset()
    """The linear maps that the method wants to see, in `operands` and `product` and in `Call.maps`. Every one by
    default where a linear stage is overridden."""
    per_query: bool = True
    """False where `mask` is the same for all queries, so that long sequences need no chunks for its sake."""
    stages: frozenset[str] = frozenset()
    """The stages at work. An instance may switch some off by assigning a smaller set."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.stages = frozenset(s for s in STAGES if getattr(cls, s) is not getattr(Regularizer, s))
        if cls.stages & set(LINEAR_STAGES) and not cls.roles:
            cls.roles = frozenset(ROLES)

    def __init__(self) -> None:
        super().__init__()
        self.serial = next(_serials)
        self.site: Site | None = None
        self._schedules: dict[str, tuple[Schedule, float]] = {}  # name -> (schedule, upper end of the range)
        self._progress = 0.0
        self._penalties: dict[str, Tensor] = {}
        self.neighbors: list[nn.Module] = []  # the layer's own modules, to know whether anything here is being trained
        self.input_has_gradient = False  # whether the layer's last input did
        self.asleep = False  # left out for a moment, though it is attached

    # --- the stages, in the order in which the data meets them
    # ------------------------------------------------------------

    def inputs(self, x: Tensor) -> Tensor:
        """The model's input."""
        return x

    def tokens(self, x: Tensor) -> Tensor:
        """(B, N, D) entering the first block; may return fewer tokens."""
        return x

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        """Before a linear map of a block: its input and weight (out, in)."""
        return x, weight

    def product(self, y: Tensor, call: LinearCall) -> Tensor:
        """After a linear map of a block."""
        return y

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Before the attention scores. `call.keep` and `call.projection("q")` are known here."""
        return q, k, v

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor | None:
        """A bool tensor that broadcasts to (B, H, N, M): True hides. The fused kernel stays."""
        return None

    def logits(self, s: Tensor, call: Call) -> Tensor:
        """Raw scores with the model's bias, before any masking. Needs the N x M matrix."""
        return s

    def probs(self, a: Tensor, call: Call) -> Tensor:
        """Attention weights. Needs the N x M matrix."""
        return a

    def heads(self, o: Tensor, call: Call) -> Tensor:
        """What each head gives out, before the output projection."""
        return o

    def branch(self, b: Tensor, call: BranchCall) -> Tensor:
        """A residual branch just before it is added to `call.residual`."""
        return b

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        """A block's input and output; returns the output."""
        return y

    def outputs(self, outputs: list[Tensor], valid: Tensor | None = None) -> None:
        """One model output (logits) per pass; `valid` is False on padded positions."""

    # --- services for subclasses
    # ------------------------------------------------------------------------------------------

    def scheduled(self, name: str, value: Value, *, high: float = 1.0) -> None:
        """Make `self.<name>` a 0-d float32 tensor that follows `value` over depth and training, checked to be in [0,
        high).

        Use `high=math.inf` for weights. Never branch in Python on the tensor's value: it changes between steps."""
        self._schedules[name] = (as_schedule(value, f"{type(self).__name__}({name}=...)", high), high)
        self.register_buffer(name, torch.zeros(()), persistent=False)
        self.at(self._progress)

    def penalize(self, value: Tensor, name: str | None = None) -> None:
        """Add `value` to the loss of this step. Compute it unconditionally, because checkpointing replays the forward.

        A layer that runs several times in one forward adds each time; a checkpoint's recompute does not add again.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:  # not inside a backward
            key = self.name if name is None else f"{self.name}.{name}"
            old = self._penalties.get(key)
            self._penalties[key] = value if old is None else old + value

    @property
    def name(self) -> str:
        """The registry name: the class name in snake case."""
        return snake_case(type(self).__name__)

    # --- housekeeping
    # -----------------------------------------------------------------------------------------------------

    def neutral(self) -> None:
        """Make this clone do nothing: every rate and weight 0, always. Override where another value is the identity."""
        self._schedules = {name: (constant(0.0), high) for name, (_, high) in self._schedules.items()}
        self.at(self._progress)

    def at(self, progress: float) -> None:
        """Set the scheduled values for this clone's depth at `progress`."""
        self._progress = progress
        depth = 0.0 if self.site is None else self.site.depth
        for name, (schedule, high) in self._schedules.items():
            value = schedule(depth, progress)
            check_value(value, f"{type(self).__name__}({name}=...) at depth {depth:.3g}, progress {progress:.3g}", high)
            getattr(self, name).fill_(value)

    def place(self, site: Site) -> None:
        """Tell the clone where it lives; lists with one value per layer must match the number of layers."""
        for name, (schedule, _) in self._schedules.items():
            if isinstance(schedule, per_layer) and len(schedule.values) != site.total:
                raise ValueError(
                    f"{type(self).__name__}({name}=...) has {len(schedule.values)} values, but {site.total} layers "
                    "were "
                    f"chosen. Give one value per layer, one number for all, or a schedule such as linear(0.3, 0.0)."
                )
        self.site = site
        self.at(self._progress)

    def prepare(self, model: nn.Module) -> None:
        """Look at the model once, after the clone was placed and before anything is attached. Raise to refuse it."""

    def check_layer(self, roles: set[str], where: str) -> None:
        """Raise if a layer lacks the linear maps that the method needs. `roles` are those found at `where`."""
        if self.roles and not self.roles & roles:
            raise ValueError(
                f"{type(self).__name__} acts on the linear maps {', '.join(sorted(self.roles))}, but '{where}' has "
                "only "
                f"{', '.join(sorted(roles)) or 'none'}. Leave the layer out with sites=, or name the maps with "
                "projections=."
            )

    @property
    def always_idle(self) -> bool:
        """Whether every scheduled value is 0 in this clone's layer for the whole of training, by construction."""
        depth = 0.0 if self.site is None else self.site.depth
        learns = any(True for _ in self.parameters())
        return not learns and bool(self._schedules) and all(always_zero(s, depth) for s, _ in self._schedules.values())

    @property
    def does_nothing(self) -> bool:
        """Whether nothing was asked of a method that must be told what to act on, as with `ExplicitDropout()`."""
        return False

    @property
    def wants_gradient(self) -> bool:
        """Whether the clone's layer, or anything before it, is being trained; a frozen backbone is fine without
        gradient."""
        return self.input_has_gradient or any(p.requires_grad for m in self.neighbors for p in m.parameters())

    def take_penalties(self) -> dict[str, Tensor]:
        """The penalties of the forward just done, by name; the slots are empty afterwards."""
        taken, self._penalties = self._penalties, {}
        return taken

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Regularizer:
        super()._apply(fn, recurse)
        for name in self._schedules:  # model.half() must not round a rate of 0.1 to 0.1001
            self.register_buffer(name, getattr(self, name).float(), persistent=False)
        if not any(getattr(self, name).is_meta for name in self._schedules):
            self.at(self._progress)
        return self

    def _save_to_state_dict(self, *args: Any) -> None:
        """A regularizer is not part of the model: learnable rates are saved by the handle."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing is expected, so nothing is missing: strict loads work both ways."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_penalties": {}}  # deepcopy and pickle never meet a live graph

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name).item():.3g}" for name in self._schedules)


def as_schedule(value: Value, what: str, high: float = 1.0) -> Schedule:
    """A number, a schedule or a list as a schedule, with errors in the user's own words."""
    if callable(value):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise ValueError(f"{what} is an empty list. Give one value per layer, or one number for all.")
        return per_layer(tuple(check_value(v, f"{what}, layer {i}", high) for i, v in enumerate(value)))
    return constant(check_value(value, what, high))


def check_value(value: Any, what: str, high: float = 1.0) -> float:
    """`value` as a float in [0, high), or an error that says what was got and what to give."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{what} must be a number, a schedule f(depth, progress) or a list of numbers, "
            f"got {value!r} of type {type(value).__name__}."
        )
    if math.isnan(value) or not 0 <= value < high:
        expected = (
            "a probability in [0, 1)"
            if high == 1.0
            else "a finite number >= 0"
            if math.isinf(high)
            else f"in [0, {high})"
        )
        raise ValueError(f"{what} must be {expected}, got {value}.")
    return float(value)


def snake_case(name: str) -> str:
    """DropKey -> drop_key, RDrop -> r_drop."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def needs_matrix(regularizers: Iterable[Regularizer]) -> bool:
    """Whether any regularizer needs the N x M matrix of scores or weights, so that no fused kernel can run."""
    return any("logits" in r.stages or "probs" in r.stages for r in regularizers)
