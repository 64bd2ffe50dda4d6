"""What passes between a layer and its methods: what a stage is given, and the
penalties that it leaves.

A stage is given the layer it sits in, and the linear map, the residual branch or the attention that
is under way. Letters as in `regularizer.py`: B batch, H heads, N queries, M keys, D channels.

Penalties accumulate on the clones until they are consumed. A penalty that is made and not added to
the loss changes nothing, and nothing looks wrong. So one parameter of each layer that makes
penalties is watched: if a backward pass reaches it while penalties wait, they were left out of the
loss, and the next training forward says so. (A hook on a parameter is the one thing that works
alike in eager mode, inside a compiled graph, under checkpointing and in DDP; a hook on an
activation ends a graph.)
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from dampen._torch import memory_is_gone, own_parameter
from dampen.masks import any_in_row, causal_rows

if TYPE_CHECKING:
    from dampen.functional.explicit.layers import LowRank
    from dampen.regularizer import Regularizer


# --- what a stage is given


@dataclass(frozen=True)
class Site:
    """Where a clone lives: the layer's name, and its place among the layers that were chosen."""

    name: str
    index: int = 0
    total: int = 1
    stack: tuple[int, int] | None = (
        None  # its place in its own stack (encoder, decoder), and how many stand there
    )

    @property
    def depth(self) -> float:
        """0 in the first layer, 1 in the last; of its own stack, where there are several."""
        index, total = (self.index, self.total) if self.stack is None else self.stack
        return index / max(1, total - 1)


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
    output: Tensor | None = (
        None  # x W^T + b, known to `product` and in attention; None where x or W was changed
    )
    counted: list[Any] = field(
        default_factory=list
    )  # the penalties that were made of it; see `Call.is_first`
    tokens: int | Tensor | None = (
        None  # of an expert: the valid tokens of the whole batch, of which it gets some
    )
    adapter: LowRank | None = None  # LoRA beside the map, which weight and output do not contain

    def clean_output(self) -> Tensor:
        """x W^T + b of the input and the weight above, which no method has changed; made where it
        was not. It is not kept: a checkpoint would not make it again, and miss it."""
        if self.output is not None:
            return self.output
        both = torch.promote_types(
            self.input.dtype, self.weight.dtype
        )  # they differ where autocast is left
        bias = None if self.bias is None else self.bias.to(both)
        return functional.linear(self.input.to(both), self.weight.to(both), bias)


@dataclass(eq=False)
class BranchCall:
    """One residual branch, about to be added to `residual`. `role` is "attention", "ffn",
    "parallel" for both, or "mixer" for what replaces attention in a layer without one (Mamba)."""

    role: str
    residual: Tensor
    site: Site | None = None
    batch_axis: int | None = (
        None  # 1 where the block was seen to work on (N, B, D); None: by convention
    )
    skip: bool = (
        True  # a method that sets it False takes the residual away: the branch continues alone
    )
    memory: dict[int, Any] = field(
        default_factory=dict
    )  # what a clone keeps for the later branches of this forward


@dataclass(eq=False)
class StepCall:
    """One step of an optimizer on the weights of `model`."""

    model: nn.Module
    rates: dict[int, float]  # the learning rate of each parameter that has a gradient, by its id

    def moving(self, places: Iterable[tuple[nn.Module, str]]) -> list[tuple[nn.Parameter, float]]:
        """Those parameters that this step moves, each with its learning rate.

        Args:
            places: modules with the names of their parameters, which FSDP2 replaces.
        """
        found = [getattr(module, name) for module, name in places]
        return [(p, self.rates[id(p)]) for p in found if id(p) in self.rates]


@dataclass(eq=False)
class Call:
    """One attention, as its stages see it. It dies with the forward that made it."""

    module: nn.Module | None = None
    site: Site | None = None
    cross: bool = False
    given: Sequence[int] | None = None  # the shape of the first tensor that the module got
    is_causal: bool = False  # the flag was given; there is no mask tensor
    mask: Tensor | None = (
        None  # the model's own bool mask (B or 1, H or 1, N or 1, M), True may be seen
    )
    bias: Tensor | None = None  # the model's own score bias (relative positions), hidden places 0
    blind: Tensor | None = (
        None  # bool (..., N or 1, 1): queries from which a number hides every key; see `ModelMask`
    )
    scores: Tensor | None = (
        None  # the final scores (B, H, N, M), where they are there before keys are hidden
    )
    scale: float = 1.0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # B, H, N, M
    kv_heads: int = 0  # as seen at the socket; a library may have repeated grouped keys before it
    head_size: int = 0
    value_size: int = 0  # channels of a value head; mostly the same
    device: torch.device | None = None
    rows: slice | None = None  # which queries this call covers, when the queries come in chunks
    valid: Tensor | None = None  # (B, N) bool, False on padded queries; None when nothing is padded
    seen: Tensor | None = (
        None  # the valid keys of all queries, which a chunk's own mask does not show
    )
    shows_all: bool = False  # whether the mask was found to show every key to some query
    maps: dict[str, LinearCall] = field(default_factory=dict)  # the linear maps run so far, by role
    cuts: dict[str, tuple[str, Any]] = field(
        default_factory=dict
    )  # q, k, v: which map, and its rows, where it is seen
    unknown: dict[str, str] = field(
        default_factory=dict
    )  # q, k, v: the fused map whose rows for it are unknown
    followed: Any = None  # from which channels the operands come; see `hooks/tracing/channels.py`
    weights: Tensor | None = (
        None  # A in `heads`, where the model computes it itself and its rows may not sum to 1
    )
    memory: dict[int, Any] = field(
        default_factory=dict
    )  # what a clone (by its serial number) keeps for later stages

    @property
    def role(self) -> str:
        """self, cross or causal."""
        if self.cross:
            return "cross"
        return "causal" if self.is_causal or getattr(self.module, "is_causal", False) else "self"

    @property
    def keep(self) -> Tensor | None:
        """Bool, broadcastable to (B, H, N, M), True where the model lets a query see a
        key; None: everywhere."""
        if self.is_causal:
            return causal_rows(self.shape[2], self.shape[3], self.rows, self.device)
        return self.mask

    def part(self, rows: slice) -> Call:
        """The call as the queries in `rows` see it.

        Args:
            rows: some of the N queries.
        """

        def cut(t: Tensor | None) -> Tensor | None:
            if t is None or t.shape[-2] == 1:
                return t
            return t[..., rows, :]

        return dataclasses.replace(
            self, rows=rows, mask=cut(self.mask), bias=cut(self.bias), blind=cut(self.blind)
        )

    @property
    def row_sums(self) -> Tensor | None:
        """What the rows of A sum to, broadcastable to (B, H, N, 1), for `heads`: 0 for a query
        without keys, less than 1 beside attention sinks. None: every row sums to 1."""
        if self.weights is not None:
            return self.weights.sum(-1, keepdim=True)
        return None if self.is_causal or self.mask is None else any_in_row(self.mask)

    @property
    def valid_keys(self) -> Tensor | None:
        """(B or 1, M) bool: the keys that some query of some head may see; None: all of them."""
        if self.seen is not None or self.mask is None or self.shows_all:
            return self.seen
        mask = self.mask if self.blind is None else self.mask & ~self.blind
        return mask.flatten(1, 2).any(1)

    def projection(self, role: str) -> LinearCall:
        """The bare linear map behind "q", "k" or "v": its own input, weight (heads x d, in), bias
        and output, fused or not."""
        return _cut(*self.source(role), role)

    def is_first(self, roles: str, key: Any) -> bool:
        """Whether this is the first attention that penalizes the projections behind `roles` under
        `key`: a module may attend several times with what its projections made once (DiffLlama,
        images of several sizes in one row)."""
        first: LinearCall | None = None
        maps: list[LinearCall | None] = []  # None for the first: a circle of references would stay
        rows: list[tuple[int, ...]] = []
        for role in roles:
            linear, cut = find_source(self, role)
            first = linear if first is None else first
            maps.append(None if linear is first else linear)
            # the rows as something that can be compared, also in a graph
            rows.append((cut.start, cut.stop) if isinstance(cut, slice) else (len(cut),))
        assert first is not None
        for other_key, other_maps, other_rows in first.counted:
            same = other_key == key and rows == other_rows
            if same and all(a is b for a, b in zip(maps, other_maps, strict=True)):
                return False
        first.counted.append((key, maps, rows))
        return True

    def source(self, role: str) -> tuple[LinearCall, slice | Tensor]:
        """The linear map behind "q", "k" or "v" as it ran, fused or not, and which of
        its rows make the role."""
        return find_source(self, role)


def find_source(call: Call, role: str) -> tuple[LinearCall, slice | Tensor]:
    """The linear map behind q, k or v of one attention call, and its rows, all of them
    where it is not fused."""
    if role in call.cuts:
        name, rows = call.cuts[role]
        return check_whole(call.maps[name]), rows
    if role in call.maps:
        return check_whole(call.maps[role]), slice(0, call.maps[role].weight.shape[0])
    fused = "qkv" if "qkv" in call.maps else "kv" if "kv" in call.maps and role != "q" else None
    if fused is None:
        found = ", ".join(sorted(call.maps)) or "none"
        where = call.site.name if call.site else "this attention"
        raise RuntimeError(
            f"{type(call.module).__name__} at '{where}': cannot find the linear "
            f"layer that makes {role} (roles found: {found}). Name it: "
            f"regularize(..., projections={{'q': 'name', 'k': 'name', 'v': 'name'}}) "
            f"or {{'qkv': 'name'}}, with names inside the attention module."
        )
    whole = call.maps[fused]
    if whole.weight.shape[0] == 0:
        check_whole(whole)
    if isinstance(whole.module, nn.Conv1d | nn.Conv2d):
        raise RuntimeError(
            f"{type(call.module).__name__} at "
            f"'{call.site.name if call.site else 'this attention'}': its convolution "
            f"'{fused}' makes q, k and v, and the way of its "
            f"channels to {role} could not be followed. "
            "Inside torch.compile run one plain forward first "
            "(regularize(..., example=...) does), else leave the "
            "layer out with target_modules=."
        )
    if role in call.unknown:
        raise RuntimeError(
            f"{type(call.module).__name__} at "
            f"'{call.site.name if call.site else 'this attention'}': its fused map "
            f"'{fused}' makes q, k and v, but what the attention gets as "
            f"{role} is not in the columns where {role} "
            "would be with all of q first, then k, then v (they may be "
            "interleaved per head), so which columns make "
            f"{role} is unknown. Use separate projections, or "
            "leave the layer out with target_modules=."
        )
    rows = _fused_rows(call, whole, fused)
    start = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}[role]
    return whole, slice(start, start + rows[role])


def claimed_rows(call: Call, role: str) -> slice | None:
    """The rows of a fused map that make a role by convention: all of q, then k, then v. None where
    they do not fit."""
    try:
        rows = find_source(call, role)[1]
    except RuntimeError:  # raised where a method requests the map
        return None
    return rows if isinstance(rows, slice) else None


def _cut(whole: LinearCall, rows: slice | Tensor, role: str) -> LinearCall:
    """Some rows of a map."""
    if isinstance(rows, slice) and rows == slice(0, whole.weight.shape[0]):
        return whole
    return dataclasses.replace(
        whole,
        role=role,
        weight=whole.weight[rows],
        bias=None if whole.bias is None else whole.bias[rows],
        output=None if whole.output is None else whole.output[..., rows],
        adapter=None if whole.adapter is None else whole.adapter.rows(rows),
    )


def check_whole(linear: LinearCall) -> LinearCall:
    """The map itself; raise where its weight was taken apart again: DeepSpeed's ZeRO-3 leaves an
    empty tensor, and FSDP one whose memory was given back."""
    if any(t is not None and memory_is_gone(t) for t in (linear.weight, linear.bias)):
        where = linear.site.name if linear.site else ""
        raise RuntimeError(
            f"the weight of the linear layer {linear.role} "
            f"at '{where}' is read where its attention "
            "runs, but FSDP shards this layer as a unit of its own and has freed the weight by "
            "then. Shard whole blocks instead: fully_shard(block) for each block, and not "
            "fully_shard(linear)."
        )
    if linear.weight.shape[0] == 0 and hasattr(linear.weight, "ds_id"):
        raise RuntimeError(
            f"the weight of the map {linear.role} is read where its "
            "attention runs, but DeepSpeed's ZeRO-3 keeps it "
            "whole only while the map itself runs. Let it gather "
            "whole blocks, before deepspeed.initialize: "
            "deepspeed.utils.set_z3_leaf_modules(model, [type(block)])."
        )
    return linear


def _fused_rows(call: Call, whole: LinearCall, fused: str) -> dict[str, int]:
    """How many rows of a fused weight make q, k and v, from the number of query
    heads seen at the socket.

    The number of key heads follows from the weight, because some libraries repeat keys before they
    call the socket.
    """
    if call.value_size not in (0, call.head_size):
        raise RuntimeError(
            f"{type(call.module).__name__}: its fused projection makes "
            f"values of {call.value_size} channels and keys "
            f"of {call.head_size}, so it is unknown which of its rows make what. "
            "Use separate projections, or leave the layer out with target_modules=."
        )
    total, queries = whole.weight.shape[0], call.shape[1] * call.head_size if fused == "qkv" else 0
    keys, rest = divmod(total - queries, 2)
    if rest or keys <= 0 or keys % call.head_size:
        raise RuntimeError(
            f"{type(call.module).__name__}: its fused projection has {total} "
            f"rows, which {call.shape[1]} query heads "
            f"of size {call.head_size} and equal numbers of keys and values "
            "cannot make. Use separate projections, or "
            "say which maps make q, k and v (projections=)."
        )
    return {"q": queries, "k": keys, "v": keys}


# --- the penalties that it leaves

MAIN_THREAD = threading.main_thread().ident

Parts = tuple[Any, ...]
Sum = Callable[[Sequence[Parts]], Sequence[Tensor]]
"""From the parts of several penalties to their values."""


class Deferred(NamedTuple):
    """A penalty that is not summed yet: what would be summed, and who sums it.

    In a small model a step is calls more than numbers, and a penalty of each map is many small
    ones. What waits under one name is put together, and when penalties are consumed, one call makes
    the sums of all layers.
    """

    parts: Parts
    sum_up: Sum


Penalty = Tensor | Deferred


def now(value: Penalty) -> Tensor:
    """The value of a penalty, alone."""
    return value.sum_up([value.parts])[0] if isinstance(value, Deferred) else value


def total(values: Sequence[Penalty]) -> Penalty:
    """The sum of penalties, on the device of the first; still deferred where all are, and alike."""
    first = values[0]
    if len(values) == 1:
        return first
    parts: list[Any] = []
    for value in values:
        if (
            not isinstance(value, Deferred)
            or not isinstance(first, Deferred)
            or value.sum_up is not first.sum_up
        ):
            out = now(first)
            for other in values[1:]:
                out = out + now(other).to(out.device)
            return out
        parts += value.parts
    assert isinstance(first, Deferred)  # so are all
    return Deferred(tuple(parts), first.sum_up)


def settle(terms: Mapping[str, Penalty]) -> dict[str, Tensor]:
    """The values of all, those that one function sums in one call.

    >>> together = lambda penalties: [torch.tensor(float(sum(parts))) for parts in penalties]
    >>> both = settle({"a": total([Deferred((1, 2), together), Deferred((3,), together)]), "b": torch.tensor(4.0)})
    >>> {name: value.item() for name, value in both.items()}
    {'a': 6.0, 'b': 4.0}
    """
    found = dict(terms)
    for sum_up in {value.sum_up: None for value in terms.values() if isinstance(value, Deferred)}:
        waiting = {n: v for n, v in terms.items() if isinstance(v, Deferred) and v.sum_up is sum_up}
        found.update(zip(waiting, sum_up([v.parts for v in waiting.values()]), strict=True))
    return found  # type: ignore[return-value]


def waiting_of(clone: Regularizer) -> dict[str, Penalty]:
    """Those slots of a clone that the calling thread's forwards have filled: one per
    name, and per thread."""
    me, found = owner(), {}
    for key, value in list(clone._penalties.items()):
        if key.partition("@")[2] == me:
            found[key] = value
    return found


def consume(clone: Regularizer) -> dict[str, Penalty]:
    """The penalties of a clone by name; their slots are empty afterwards.

    Those that this thread's forwards made; where they made none, those of the thread
    that ran them for it."""
    taken: dict[str, Penalty] = {}
    slots, me = clone._penalties, owner()
    mine = [key for key in list(slots) if key.partition("@")[2] == me]
    for key in mine or list(slots):
        name, value = key.partition("@")[0], slots.pop(key)
        taken[name] = total([taken[name], value]) if name in taken else value
    return taken


class Penalties:
    """The penalties of one regularized model: which wait, and whether a backward went past them."""

    def __init__(
        self, model: nn.Module | None, clones: Iterable[Regularizer], strict: bool
    ) -> None:
        self.model, self.clones, self.strict = model, list(clones), strict
        for clone in self.clones:
            clone.ledger = self
        comparing = next((c for c in self.clones if c.passes > 1), None)
        self.comparing = "" if comparing is None else type(comparing).__name__
        self.fresh()

    def fresh(self) -> None:
        """Nothing has happened yet."""
        self.askers: list[
            str
        ] = []  # threads inside `reg.loss`, which takes what its forwards make, whatever the mode
        self.inside: list[str] = []  # threads inside the model's own forward
        self.gradients = (
            False  # the model's forward is under way, and was entered with gradients on
        )
        # a training forward that a two-pass method should have seen ran outside `reg.loss`
        self.outside = False
        # whether `passed` has anyone in it; alone, because a graph is guarded by what it reads
        self.alarm = False
        self.passed: set[str] = (
            set()
        )  # the threads whose backward went past penalties, or past a two-pass method
        self.hooks: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}

    # while a forward runs

    def counts(self, clone: Regularizer) -> bool:
        """Whether a penalty that is being made is to be kept: in training, with gradients, or where
        it was requested explicitly."""
        if self.asked():
            return True
        if not clone.training:
            return False
        if (
            not torch.is_grad_enabled()
        ):  # reentrant checkpointing turns gradients off inside a forward that has them
            clone.lost = clone.lost or self.gradients or clone.input_has_gradient
            return False
        self.check()
        if not torch.compiler.is_compiling():
            self.watch(clone)
        return True

    def keeps_nothing(self) -> bool:
        """Whether no penalty of the model's forward under way would be kept: it has no gradients
        (`generate`), and `reg.loss` did not request it."""
        return (
            not torch.is_grad_enabled()
            and not self.gradients
            and self.is_inside()
            and not self.asked()
        )

    def enter(self, training: bool, input_has_gradient: bool = False) -> None:
        """The model's own forward starts; `leave` ends it, whatever happens. An input with a
        gradient under `no_grad` is a reentrant checkpoint's around the whole model."""
        self._start(training)
        self.gradients = torch.is_grad_enabled() or input_has_gradient
        self.inside.append(owner())

    def leave(self) -> None:
        """The model's own forward has ended."""
        self.inside.pop()
        self.gradients = False

    def enter_block(self, training: bool) -> None:
        """The first block starts, perhaps without the model's forward."""
        if not self.is_inside():
            self._start(training)

    def is_inside(self) -> bool:
        """Whether this thread is inside the model's own forward."""
        return owner() in self.inside

    def _start(self, training: bool) -> None:
        if training and torch.is_grad_enabled() and not self.asked():
            self.check()
            if self.comparing:
                self.outside = True

    def check(self) -> None:
        """Raise in the first training forward after a backward that went past penalties."""
        if self.alarm and self.strict and owner() in self.passed:
            why = self._why()
            self.forget()
            raise RuntimeError(why)

    def _why(self) -> str:
        end = "If it is meant, say so: dampen.regularize(..., strict=False)."
        if self.outside:
            return (
                f"{self.comparing} compares two passes, but the last training "
                "step called the model outside reg.loss, "
                "so it did nothing. Let the handle run both passes: "
                "loss, terms = reg.loss(lambda: model(x), "
                f"lambda out: F.cross_entropy(out, y)). {end}"
            )
        found = sorted({key.partition("@")[0] for c in self.clones for key in list(c._penalties)})
        names = ", ".join(found) or "none now"
        return (
            "a backward pass ran through the model while its "
            f"penalties ({names}) had not been taken, so "
            "they were not in the loss. Write loss = task + "
            "reg.penalty() before loss.backward(), or loss, "
            "terms = reg.loss(lambda: model(x), lambda out: "
            "F.cross_entropy(out, y)). A copy of a model "
            "has no handle: copy.deepcopy(reg) copies both, "
            f"dampen.remove(copy) makes it plain. {end}"
        )

    # waiting, taken, forgotten

    def taken(self) -> None:
        """The penalties were taken: whatever backward went past them before, they are in
        the user's hands now."""
        self.outside = False
        if self.alarm:
            self.passed &= self._waiting()
            self.alarm = bool(self.passed)

    def _waiting(self) -> set[str]:
        """The threads whose penalties wait, as far as they could change the training."""
        waiting = [slot for c in self.clones for slot in list(c._penalties.items())]
        return {
            key.partition("@")[2]
            for key, value in waiting
            if isinstance(value, Deferred) or value.requires_grad
        }

    def forget(self) -> None:
        """Drop what waits in this thread, after an error: its step is over."""
        for clone in self.clones:
            for key in waiting_of(clone):
                del clone._penalties[key]
            clone.lost = False
        self.taken()

    def asked(self) -> bool:
        """Whether this thread is inside `reg.loss`."""
        if not self.askers or torch.compiler.is_compiling():
            return bool(self.askers)
        here = threading.get_ident()
        return ("" if here == MAIN_THREAD else str(here)) in self.askers

    def asking(self) -> Asking:
        """Inside `reg.loss`: what the forwards make is counted under `no_grad` and in eval too, for
        it is taken."""
        return Asking(self)

    # watching the backward

    def watch(self, clone: Regularizer) -> None:
        """Have a parameter of the clone's layer report when a backward reaches it. Cheap where one
        is watched already.

        Looked for anew where it was frozen or replaced meanwhile (LoRA; FSDP2 has its
        own inside a forward)."""
        if not self.strict:
            return
        if clone.watched is not None:
            module, name, parameter = clone.watched
            if parameter.requires_grad and own_parameter(module, name) is parameter:
                return
        clone.watched = _first_trained(clone.neighbors) or _first_trained(
            [] if self.model is None else [self.model]
        )
        if clone.watched is not None:
            parameter = clone.watched[2]
            if id(parameter) not in self.hooks:
                self.hooks[id(parameter)] = (
                    parameter,
                    parameter.register_post_accumulate_grad_hook(self.saw_backward),
                )

    def saw_backward(self, parameter: Tensor) -> None:
        """A backward has reached a watched parameter."""
        waiting = self._waiting()
        if parameter.device.type == "cpu":
            waiting &= {
                owner()
            }  # there a backward runs in the thread that called it; elsewhere in one of torch's own
        if self.outside:
            waiting.add(owner())
        self.passed |= waiting
        self.alarm = bool(self.passed)

    def unwatch(self) -> None:
        """Take the hooks away."""
        for _, handle in self.hooks.values():
            handle.remove()
        self.hooks = {}
        for clone in self.clones:
            clone.watched = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "clones": self.clones,
            "strict": self.strict,
            "comparing": self.comparing,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.fresh()  # a copy has a step of its own; its parameters come without hooks
        for clone in (
            self.clones
        ):  # a clone does not carry its ledger along: a copy of one block would copy the model
            clone.ledger = self


class Asking:
    """A thread inside `reg.loss`; what an error leaves is forgotten."""

    def __init__(self, ledger: Penalties) -> None:
        self.ledger, self.me = ledger, owner()

    def __enter__(self) -> None:
        self.ledger.outside = False
        self.ledger.askers.append(self.me)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.ledger.forget()
        finally:
            self.ledger.askers.remove(self.me)


def owner() -> str:
    """Whose penalties: "" is the main thread, and a compiled graph, which knows no thread."""
    if torch.compiler.is_compiling() or threading.get_ident() == MAIN_THREAD:
        return ""
    return str(threading.get_ident())


def makes_penalties(clone: Regularizer) -> bool:
    """Whether the code of a method mentions `penalize`."""
    return class_penalizes(type(clone))


def class_penalizes(method: type) -> bool:
    """Whether the code of a class mentions `penalize`."""
    functions = (f for cls in method.__mro__ if not _is_base(cls) for f in vars(cls).values())
    return any(
        "penalize" in getattr(getattr(f, "__code__", None), "co_names", ()) for f in functions
    )


def _is_base(cls: type) -> bool:
    return (
        cls.__module__ == "dampen.regularizer"
        or not cls.__module__
        or cls.__module__.startswith("torch.")
    )


def _first_trained(modules: Iterable[nn.Module]) -> tuple[nn.Module, str, nn.Parameter] | None:
    for module in modules:
        for inner in module.modules():
            for name, p in inner.named_parameters(recurse=False):
                if p.requires_grad and p.is_leaf:
                    return inner, name, p
    return None
