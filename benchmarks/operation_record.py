"""A record of one forward, operation by operation, below every Python call: its linear calls, attentions and branches.

- A *core* is one softmax attention: a fused operator, or a softmax of a product of two activations whose result is
  multiplied with a third.
- A *linear call* is a product with a parameter, whichever module or function makes it.
- A *branch* is what is added to a tensor that it was computed from.

What is known about a tensor is kept by its storage, so that views share it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_SCORES = 30_000_000
MOST_HEADS = 12
LEAST = -70.0  # a score as far below the largest of its row leaves a key no weight


@dataclass
class Linear:
    """One product with a parameter."""

    index: int
    module: str
    weights: tuple[str, ...]
    kind: str  # linear or conv
    rows: int
    ins: int
    outs: int
    sources: frozenset[int]  # the nearest events that its input was computed from
    ancestors: int  # a bit set of all events before it
    zeros: float  # the share of exact zeros in its input
    x: Tensor
    y: Tensor  # without bias
    depthwise: bool = False
    given: tuple[int, ...] = ()  # the shape that its module was given
    inner: bool = False  # whether it is a part of another call: the adapter beside a weight
    touched: bool | None = (
        None  # whether its input is another than its module was given; None: not known
    )


@dataclass
class Core:
    """One softmax attention."""

    index: int
    module: str
    kind: str
    shape: tuple[int, int, int]  # batch x heads, queries, keys
    seen: Tensor | None  # which keys have weight
    distinct: Tensor | None  # rows without equal scores, so that "the k largest" are k
    sources: frozenset[int]
    ancestors: int
    v_sources: frozenset[int] = frozenset()
    v: Tensor | None = None
    done: bool = False
    depth: float | None = None
    site: str = ""
    allowed: Tensor | None = (
        None  # the keys that the mask of a fused operator leaves, whatever the scores
    )


@dataclass
class Branch:
    """Something added to a tensor that it was computed from."""

    module: str
    shape: tuple[int, ...]
    events: int  # bit set: what lies between
    last: frozenset[int]
    samples_zero: tuple[bool, ...]
    base: int = 0  # bit set: what the tensor was computed from that it is added to
    parallel: bool = False  # it is added to another branch of the same tensor
    partial: bool = False  # it is added to a part of a larger tensor, as to one group of channels


@dataclass
class Tags:
    """What is known about a storage."""

    near: frozenset[int] = frozenset()
    before: int = 0
    weights: tuple[str, ...] = ()
    scores: frozenset[int] | None = None  # attention scores: what their queries and keys came from
    core: int | None = None  # it holds the attention weights of this core


_EMPTY = Tags()
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "addbmm", "linear", "mv", "dot"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_SOFTMAX = {"_softmax", "_safe_softmax"}


_CLOCKS = {
    "timestep",
    "timesteps",
    "t",
    "guidance",
    "r_timestep",
    "timestep_cond",
    "sigma",
    "pooled_projections",
}
_CLOCK, _CONTENT = 1 << 30_000, 1 << 30_001
"""Bits beside those of events: whether a tensor depends on an input that all tokens share (the time of a diffusion),
and whether on any other input. What is shared modulates tokens, and its sum with them is no residual addition."""


class Trace(TorchDispatchMode):
    """All linear calls, cores and branches of one forward, in the order of execution."""

    def __init__(
        self, model: nn.Module, change: Callable[[Linear, Tensor], Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.names = {id(m): n for n, m in model.named_modules(remove_duplicate=True)}
        self.stack: list[str] = [""]
        self.events: list[Linear | Core] = []
        self.branches: list[Branch] = []
        self.tags: dict[int, Tags] = {}
        self.alive: list[Any] = []
        self.change = change
        self.next_site: tuple[str, float] | None = None
        self.notes: list[str] = []
        self.started: dict[str, int] = {}  # the events before each module's last call
        # the modules that hold a weight and, beside it, the two linear layers of an adapter
        self.adapted = {n for n, m in model.named_modules() if _holds_adapter(m)}
        self.biases: dict[str, Any] = {
            n: getattr(model.get_submodule(n), "bias", None) for n in self.adapted
        }
        self.given: dict[str, Tensor | None] = {}  # the first input of each module's last call
        for name, parameter in model.named_parameters():
            self.tags[_key(parameter)] = Tags(weights=(name,))
            self.alive.append(parameter.untyped_storage())

    @property
    def cores(self) -> list[Core]:
        return [e for e in self.events if isinstance(e, Core) and e.done]

    @property
    def linears(self) -> list[Linear]:
        return [e for e in self.events if isinstance(e, Linear) and not e.inner]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside, with the names of the modules at work."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        name = self.names.get(id(module), self.stack[-1])
        self.stack.append(name)
        self.started[name] = len(self.events)
        first = given[0] if given else None
        # no call on the tensor here: a function mode of the model's own would see it
        self.given[name] = first if isinstance(first, Tensor) else None

    def _leave(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        name = self.stack.pop()
        if name in self.adapted and isinstance(out, Tensor):
            self._join_adapter(name, out)

    def _join_adapter(self, name: str, out: Tensor) -> None:
        """W x and B A x of one module are one linear call, whose output is what the module returns."""
        mine = [e for e in self.events[self.started[name] :] if isinstance(e, Linear)]
        whole = next((e for e in mine if e.weights[:1] == (f"{name}.weight",)), None)
        if whole is None:
            return
        for event in mine:
            event.inner = event is not whole
        self.branches = [b for b in self.branches if b.module != name]
        before = self.tags.get(_key(out), _EMPTY).before
        bias = self.biases[name]
        y = out.detach().reshape(whole.rows, whole.outs)
        whole.y = (y if bias is None else y - bias.detach()).double().float()
        changed = None if self.change is None else self.change(whole, out.detach())
        if changed is not None:
            out.detach().copy_(changed)
        self._mark(out, Tags(frozenset({whole.index}), before | 1 << whole.index))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        tags = [self.tags.get(_key(t), _EMPTY) for t in given]
        if name in ("add", "add_") and len(given) == 2:
            self._branch(given, tags)
        zeros = _zeros(name, given, tags)
        out = func(*args, **kwargs)
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if not results:
            return out
        if name.startswith("_scaled_dot_product") and "backward" not in name:
            return self._fused(name, args, kwargs, given, tags, out)
        if name == "convolution" and len(given) >= 2 and tags[1].weights:
            return self._linear(
                "conv", given, tags, out, zeros, bias=given[2] if len(given) > 2 else None
            )
        if name in _PRODUCTS:
            return self._product(name, given, tags, out, zeros)
        near = frozenset().union(*(t.near for t in tags)) if tags else frozenset()
        new = Tags(near, _union(tags), scores=_scores(tags))
        cores = [t.core for t in tags if t.core is not None]
        new.core = cores[0] if cores and name not in ("sum", "mean", "amax") else None
        floats = [t for g, t in zip(given, tags, strict=True) if g.is_floating_point()]
        lookup = name in _LOOKUPS and given[0].ndim < 3
        if floats and all(t.weights for t in floats) and not lookup:
            new.weights = tuple(dict.fromkeys(w for t in floats for w in t.weights))
        if (
            name == "mul"
            and new.core is not None
            and self._core(new.core).shape[2] == 1
            and len(given) == 2
        ):
            value = next((i for i in (0, 1) if tags[i].core is None and tags[i].before), None)
            if value is not None:  # one key: einsum writes the product as a multiplication
                self._complete(new.core, given[value], tags[value], tags)
                new = Tags(frozenset({new.core}), _union(tags) | 1 << new.core)
        if name in _SOFTMAX and tags[0].scores is not None:
            new = self._softmax(given[0], args[1], tags[0].scores, tags)
        elif name == "exp" and tags[0].scores is not None:
            new = self._softmax(given[0], -1, tags[0].scores, tags, kind="exp")
        for result in results:
            key = _key(result)
            old = self.tags.get(key)
            if old is None:
                self.alive.append(result.untyped_storage())
                self.tags[key] = new
            elif name.endswith("_") and not old.weights:  # written in place
                merged = Tags(
                    old.near | new.near, old.before | new.before, (), _scores([old, new]), new.core
                )
                self.tags[key] = merged
        return out

    def _add(self, event: Linear | Core) -> None:
        self.events.append(event)

    def _mark(self, result: Tensor, tags: Tags) -> None:
        self.tags[_key(result)] = tags
        self.alive.append(result.untyped_storage())

    def _branch(self, given: list[Tensor], tags: list[Tags]) -> None:
        if (
            given[0].shape != given[1].shape
            or given[0].ndim < 2
            or not given[0].is_floating_point()
        ):
            return
        for a, b, other, tensor in (
            (tags[0], tags[1], given[0], given[1]),
            (tags[1], tags[0], given[1], given[0]),
        ):
            if b.before & _CONTENT and not a.before & _CONTENT:
                continue
            between = b.before & ~a.before
            parallel = bool(a.before & ~b.before)
            if between and b.scores is None and (not parallel or tensor.ndim > 2):
                flat = tensor.detach().reshape(tensor.shape[0], -1)
                zero = tuple((flat == 0).all(1).tolist())
                base, shape = a.before & b.before, tuple(tensor.shape)
                self.branches.append(
                    Branch(
                        self.stack[-1],
                        shape,
                        between,
                        b.near,
                        zero,
                        base,
                        parallel,
                        partial=other.untyped_storage().nbytes() > other.nbytes,
                    )
                )
                if not parallel:
                    return

    def _linear(
        self,
        kind: str,
        given: list[Tensor],
        tags: list[Tags],
        out: Any,
        zeros: float,
        bias: Tensor | None,
    ) -> Any:
        x, weight = given[0], given[1]
        y = out.detach()
        if kind == "conv":
            y = y.movedim(1, -1)
        rows = y.numel() // max(1, y.shape[-1])
        y = y.reshape(rows, y.shape[-1])
        ins = weight[0].numel() if kind == "conv" else x.shape[-1]
        clean = y.double() - (
            bias.detach().double() if bias is not None and bias.numel() == y.shape[-1] else 0
        )
        event = Linear(
            len(self.events), self.stack[-1], tags[1].weights, kind, rows, ins, y.shape[-1], tags[0].near,
            tags[0].before, zeros, x.detach().clone(), clean.float(),
            depthwise=kind == "conv" and weight.shape[1] == 1 < x.shape[1],
        )  # fmt: skip
        given_to_module = self.given.get(self.stack[-1])
        event.given = () if given_to_module is None else tuple(given_to_module.shape)
        own = event.weights == (f"{self.stack[-1]}.weight",)
        if own and given_to_module is not None and given_to_module.numel() == x.numel():
            event.touched = not torch.equal(given_to_module.reshape(-1), x.detach().reshape(-1))
        self._add(event)
        new = Tags(frozenset({event.index}), tags[0].before | 1 << event.index)
        if (
            event.ins == event.outs <= MOST_HEADS
        ):  # heads are mixed: these are scores or attention weights still
            new.scores, new.core = tags[0].scores, tags[0].core
        self._mark(out, new)
        if self.change is not None:
            changed = self.change(event, out)
            if changed is not None:
                out.copy_(changed)
        return out

    def _core(self, index: int) -> Core:
        event = self.events[index]
        assert isinstance(event, Core)
        return event

    def _product(
        self, name: str, given: list[Tensor], tags: list[Tags], out: Tensor, zeros: float
    ) -> Tensor:
        bias, bias_tag = None, None
        if name in ("addmm", "baddbmm", "addbmm"):
            bias, given, bias_tag, tags = given[0], given[1:], tags[0], tags[1:]
        first, second = tags[0], tags[1]
        if second.weights or first.weights:
            if not second.weights or (
                first.weights and given[0].requires_grad and not given[1].requires_grad
            ):
                given, tags = [given[1], given[0], *given[2:]], [second, first, *tags[2:]]
            if bias_tag is not None and bias_tag.before:
                bias = None  # it depends on data: not a bias
            return self._linear("linear", given, tags, out, zeros, bias)
        core = next(
            (t.core for t in (first, second) if t.core is not None and not self._core(t.core).done),
            None,
        )
        if core is not None:
            at = 1 if first.core == core else 0
            # with the weights on the right, the values are (D, M)
            self._complete(core, given[at] if at else given[at].mT, tags[at], tags)
            self._mark(out, Tags(frozenset({core}), _union(tags) | 1 << core))
            return out
        near = first.near | second.near
        before = first.before | second.before | (bias_tag.before if bias_tag else 0)
        self._mark(out, Tags(near, before, scores=near))
        return out

    def _complete(self, core: int, value: Tensor, tag: Tags, tags: list[Tags]) -> None:
        """The second product of an attention has run."""
        event = self._core(core)
        event.done, event.v, event.v_sources = True, value.detach().clone(), tag.near
        if (
            event.seen is not None and value.shape[-2] < event.shape[2]
        ):  # the last score is a sink without a value
            event.seen = event.seen[..., : value.shape[-2]]
        event.ancestors |= _union(tags)

    def _softmax(
        self, s: Tensor, dim: int, near: frozenset[int], tags: list[Tags], kind: str = "eager"
    ) -> Tags:
        s = s.detach().movedim(dim, -1)
        n, m = s.shape[-2], s.shape[-1]
        shape = (s.numel() // max(1, n * m), n, m)
        seen = distinct = None
        if s.numel() <= LARGEST_SCORES:
            seen, distinct = _seen(s.reshape(shape))
        index = len(self.events)
        before = _union(tags)
        site = self._site()
        self._add(
            Core(
                index,
                self.stack[-1],
                kind,
                shape,
                seen,
                distinct,
                near,
                before,
                depth=site[1],
                site=site[0],
            )
        )
        return Tags(frozenset({index}), before | 1 << index, core=index)

    def _site(self) -> tuple[str, float | None]:
        site, self.next_site = self.next_site, None
        return site if site is not None else ("", None)

    def _fused(
        self, name: str, args: Any, kwargs: Any, given: list[Tensor], tags: list[Tags], out: Any
    ) -> Any:
        q, k, v = given[:3]
        mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
        causal = kwargs.get(
            "is_causal", args[4] if len(args) > 4 and isinstance(args[4], bool) else False
        )
        scale = kwargs.get("scale")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        shape = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2])
        seen = distinct = allowed = None
        if math.prod(shape) <= LARGEST_SCORES:
            keys = (
                k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            )
            s = q.detach().double() @ keys.detach().double().mT * scale
            bias = torch.zeros_like(s)
            if causal:
                bias = bias.masked_fill(
                    ~torch.ones(shape[1], shape[2], dtype=torch.bool).tril(), -math.inf
                )
            if mask is not None:
                added = bias + mask.detach().double() if mask.dtype != torch.bool else None
                bias = bias.masked_fill(~mask, -math.inf) if added is None else added
            seen, distinct = _seen((s + bias).reshape(shape))
            allowed = _seen(bias.reshape(shape))[0]
        index = len(self.events)
        near = frozenset().union(*(t.near for t in tags[:2]))
        before = _union(tags)
        site = self._site()
        core = Core(
            index,
            self.stack[-1],
            name,
            shape,
            seen,
            distinct,
            near,
            before,
            tags[2].near,
            v.detach().clone(),
            True,
        )
        core.site, core.depth = site
        core.allowed = allowed
        self._add(core)
        for result in pytree.tree_leaves(out):
            if isinstance(result, Tensor):
                self._mark(result, Tags(frozenset({index}), before | 1 << index))
        return out


def _holds_adapter(module: nn.Module) -> bool:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    inner = [m for m in module.children() if isinstance(m, nn.Linear)]
    return weight is not None and weight.ndim == 2 and len(inner) == 2


def _key(t: Tensor) -> int:
    try:
        return int(t.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(t)


def _scores(tags: list[Tags]) -> frozenset[int] | None:
    found = [t.scores for t in tags if t.scores is not None]
    return frozenset().union(*found) if found else None


def _union(tags: list[Tags]) -> int:
    bits = 0
    for t in tags:
        bits |= t.before
    return bits


def _zeros(name: str, given: list[Tensor], tags: list[Tags]) -> float:
    """The share of zeros in the input of a product with a parameter, before an operator may write over it."""
    if name == "convolution":
        return float((given[0] == 0).float().mean()) if given[0].numel() else 0.0
    if name not in _PRODUCTS:
        return 0.0
    start = 1 if name in ("addmm", "baddbmm", "addbmm") else 0
    if len(given) < start + 2:
        return 0.0
    x = given[start] if tags[start + 1].weights else given[start + 1]
    return float((x == 0).float().mean()) if x.numel() else 0.0


def _seen(s: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys have weight (none in rows that are masked everywhere), and which rows have no two equal scores."""
    s = s.float()
    top = s.amax(-1, keepdim=True)
    seen = (s - top > LEAST) & (top > -1e4)
    order = s.sort(-1).values
    return seen, ((order.diff(dim=-1) > 0) | (order[..., 1:] < top + LEAST)).all(-1)


def record(
    model: nn.Module,
    inputs: dict[str, Any],
    seed: int = 1,
    change: Callable[[Linear, Tensor], Tensor | None] | None = None,
    grad: bool = True,
) -> tuple[Trace, Any]:
    """One training forward with its record."""
    torch.manual_seed(seed)
    trace = Trace(model, change)
    for name, value in inputs.items():
        for tensor in (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)):
            trace.tags[_key(tensor)] = Tags(before=_CLOCK if name in _CLOCKS else _CONTENT)
            trace.alive.append(tensor.untyped_storage())
    with torch.set_grad_enabled(grad), trace.recording():
        out = model.train()(**inputs)
    return trace, out
