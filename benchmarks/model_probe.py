"""An independent witness of what regularizers do inside a model.

Nothing here imports how dampen finds attention. Two forwards of the plain model are recorded operation by operation,
below every Python call, and the facts are read off the record:

- a *core* is one softmax attention: a fused operator, or a softmax of a product of two activations whose result is
  multiplied with a third;
- a *linear call* is a product with a parameter, whichever module or function makes it;
- a *branch* is what is added to a tensor that it was computed from;
- a linear call is of a feed-forward where it ends in a branch, starts from another linear call of that branch, has no
  core between, and mixes no tokens;
- the value projection of a core is the linear call whose outputs, marked by their column, arrive at the second product.

Then each method runs in the same model, recorded in the same way, and the two records are compared: which cores and
linear calls it reached, how many keys it hid, which it showed that the model hides, what its penalty should be.

A method *works*, is *refused* (dampen raised and said why), does *not apply* (the plain model has nothing of the kind),
is *unchecked* (it acts, but the probe does not know what it should give), or is WRONG (other numbers than the definition), SILENT (a part was left out and the printed report does not say so) or
CRASH (an error that is no refusal)."""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dampen
from dampen.native import available as native_available

VERSION = 4  # raise it where a judgement changes: the sweep then runs again
RATE = 0.2  # of the penalties
MOST_HEADS = 12
LEAST = -70.0  # a score as far below the largest of its row leaves a key no weight
LARGEST_SCORES = 30_000_000
WORST = 5.5  # standard errors
CHECKS = ("depth", "masks")  # no methods: their refusals are those of the methods


# --- the record of a forward


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


@dataclass
class Branch:
    """Something added to a tensor that it was computed from."""

    module: str
    shape: tuple[int, ...]
    events: int  # bit set: what lies between
    last: frozenset[int]
    samples_zero: tuple[bool, ...]


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


class Trace(TorchDispatchMode):
    """All linear calls, cores and branches of one forward, in the order of execution."""

    def __init__(self, model: nn.Module, change: Callable[[Linear, Tensor], Tensor | None] | None = None) -> None:
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
        for name, parameter in model.named_parameters():
            self.tags[_key(parameter)] = Tags(weights=(name,))
            self.alive.append(parameter.untyped_storage())

    @property
    def cores(self) -> list[Core]:
        return [e for e in self.events if isinstance(e, Core) and e.done]

    @property
    def linears(self) -> list[Linear]:
        return [e for e in self.events if isinstance(e, Linear)]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside, with the names of the modules at work."""
        before = register_module_forward_pre_hook(lambda m, _: self.stack.append(self.names.get(id(m), self.stack[-1])))
        after = register_module_forward_hook(lambda m, *_: (self.stack.pop(), None)[1], always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

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
            return self._linear("conv", given, tags, out, zeros, bias=given[2] if len(given) > 2 else None)
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
        if name == "mul" and new.core is not None and self._core(new.core).shape[2] == 1 and len(given) == 2:
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
                merged = Tags(old.near | new.near, old.before | new.before, (), _scores([old, new]), new.core)
                self.tags[key] = merged
        return out

    def _add(self, event: Linear | Core) -> None:
        self.events.append(event)

    def _mark(self, result: Tensor, tags: Tags) -> None:
        self.tags[_key(result)] = tags
        self.alive.append(result.untyped_storage())

    def _branch(self, given: list[Tensor], tags: list[Tags]) -> None:
        if given[0].shape != given[1].shape or given[0].ndim < 2 or not given[0].is_floating_point():
            return
        for a, b, tensor in ((tags[0], tags[1], given[1]), (tags[1], tags[0], given[0])):
            between = b.before & ~a.before
            if between and not (a.before & ~b.before) and b.scores is None:
                flat = tensor.detach().reshape(tensor.shape[0], -1)
                self.branches.append(
                    Branch(self.stack[-1], tuple(tensor.shape), between, b.near, tuple((flat == 0).all(1).tolist()))
                )
                return

    def _linear(
        self, kind: str, given: list[Tensor], tags: list[Tags], out: Any, zeros: float, bias: Tensor | None
    ) -> Any:
        x, weight = given[0], given[1]
        y = out.detach()
        if kind == "conv":
            y = y.movedim(1, -1)
        rows = y.numel() // max(1, y.shape[-1])
        y = y.reshape(rows, y.shape[-1])
        ins = weight[0].numel() if kind == "conv" else x.shape[-1]
        clean = y.double() - (bias.detach().double() if bias is not None and bias.numel() == y.shape[-1] else 0)
        event = Linear(
            len(self.events), self.stack[-1], tags[1].weights, kind, rows, ins, y.shape[-1], tags[0].near,
            tags[0].before, zeros, x.detach().clone(), clean.float(), kind == "conv" and weight.shape[1] == 1 < x.shape[1],
        )  # fmt: skip
        self._add(event)
        new = Tags(frozenset({event.index}), tags[0].before | 1 << event.index)
        if event.ins == event.outs <= MOST_HEADS:  # heads are mixed: these are scores or attention weights still
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

    def _product(self, name: str, given: list[Tensor], tags: list[Tags], out: Tensor, zeros: float) -> Tensor:
        bias, bias_tag = None, None
        if name in ("addmm", "baddbmm", "addbmm"):
            bias, given, bias_tag, tags = given[0], given[1:], tags[0], tags[1:]
        first, second = tags[0], tags[1]
        if second.weights or first.weights:
            if not second.weights or (first.weights and given[0].requires_grad and not given[1].requires_grad):
                given, tags = [given[1], given[0], *given[2:]], [second, first, *tags[2:]]
            if bias_tag is not None and bias_tag.before:
                bias = None  # it depends on data: not a bias
            return self._linear("linear", given, tags, out, zeros, bias)
        core = next((t.core for t in (first, second) if t.core is not None and not self._core(t.core).done), None)
        if core is not None:
            at = 1 if first.core == core else 0
            self._complete(core, given[at], tags[at], tags)
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
        event.ancestors |= _union(tags)

    def _softmax(self, s: Tensor, dim: int, near: frozenset[int], tags: list[Tags], kind: str = "eager") -> Tags:
        s = s.detach().movedim(dim, -1)
        n, m = s.shape[-2], s.shape[-1]
        shape = (s.numel() // max(1, n * m), n, m)
        seen = distinct = None
        if s.numel() <= LARGEST_SCORES:
            seen, distinct = _seen(s.reshape(shape))
        index = len(self.events)
        before = _union(tags)
        site = self._site()
        self._add(Core(index, self.stack[-1], kind, shape, seen, distinct, near, before, depth=site[1], site=site[0]))
        return Tags(frozenset({index}), before | 1 << index, core=index)

    def _site(self) -> tuple[str, float | None]:
        site, self.next_site = self.next_site, None
        return site if site is not None else ("", None)

    def _fused(self, name: str, args: Any, kwargs: Any, given: list[Tensor], tags: list[Tags], out: Any) -> Any:
        q, k, v = given[:3]
        mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
        causal = kwargs.get("is_causal", args[4] if len(args) > 4 and isinstance(args[4], bool) else False)
        scale = kwargs.get("scale")
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        shape = (q.shape[0] * q.shape[1], q.shape[2], k.shape[2])
        seen = distinct = None
        if math.prod(shape) <= LARGEST_SCORES:
            keys = k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            s = q.detach().double() @ keys.detach().double().mT * scale
            if causal:
                s = s.masked_fill(~torch.ones(shape[1], shape[2], dtype=torch.bool).tril(), -math.inf)
            if mask is not None:
                s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.detach().double()
            seen, distinct = _seen(s.reshape(shape))
        index = len(self.events)
        near = frozenset().union(*(t.near for t in tags[:2]))
        before = _union(tags)
        site = self._site()
        core = Core(index, self.stack[-1], name, shape, seen, distinct, near, before, tags[2].near, v.detach().clone(), True)
        core.site, core.depth = site
        self._add(core)
        for result in pytree.tree_leaves(out):
            if isinstance(result, Tensor):
                self._mark(result, Tags(frozenset({index}), before | 1 << index))
        return out


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
    with torch.set_grad_enabled(grad), trace.recording():
        out = model.train()(**inputs)
    return trace, out


# --- what the plain model is


@dataclass
class Facts:
    """The plain model, read off its records."""

    trace: Trace
    cores: list[Core]
    channel: set[int]  # cores whose keys are not tokens
    values: dict[int, tuple[int, Tensor]]  # core -> its value projection and the columns that reach it
    attention: set[str]  # parameters of the projections of attention
    feed_forward: dict[int, Linear]
    branches: list[Branch]
    ambiguous: list[str] = field(default_factory=list)
    own_masks: set[int] = field(default_factory=set)  # cores whose mask depends on the data, as in sparse attention

    @property
    def token_cores(self) -> list[Core]:
        return [c for c in self.cores if c.index not in self.channel]

    @property
    def feed_forward_weights(self) -> set[str]:
        return {e.weights[0] for e in self.feed_forward.values()}


def learn(model: nn.Module, inputs: dict[str, Any]) -> Facts:
    """What the plain model is made of."""
    trace, _ = record(model, inputs, grad=False)
    coded = _coded(model, inputs, trace)
    values: dict[int, tuple[int, Tensor]] = {}
    ambiguous = []
    for core, marked in zip(trace.cores, coded, strict=True):
        found = [i for i in core.v_sources if isinstance(trace.events[i], Linear)]
        if len(found) != 1 or marked is None:
            ambiguous.append(f"{core.module}: {len(found)} linear calls lead to its values")
            continue
        event = trace.events[found[0]]
        assert isinstance(event, Linear)
        codes = marked.unique()
        columns = codes.round().long().unique() - 1
        if not torch.allclose(codes, codes.round(), atol=0.02) or columns.min() < 0 or columns.max() >= event.outs:
            ambiguous.append(f"{core.module}: its values are no copy of a linear call's outputs")
            continue
        values[core.index] = found[0], columns
    attention: set[str] = set()
    ends = {i for b in trace.branches for i in b.last}  # a token that skips the projections is no projection
    for core in trace.cores:
        for i in core.sources | core.v_sources:
            event = trace.events[i]
            if isinstance(event, Linear) and i not in ends:
                attention |= set(event.weights)
    done = {c.index for c in trace.cores}
    for linear in trace.linears:
        if linear.sources and linear.sources <= done:
            attention |= set(linear.weights)
    ff = _feed_forward(model, inputs, trace, attention)
    damped, _ = record(model, inputs, change=lambda event, out: out.detach() * 0.9, grad=False)
    own = {
        a.index for a, b in zip(trace.cores, damped.cores, strict=False)
        if a.seen is None or b.seen is None or not torch.equal(a.seen, b.seen)
    }  # fmt: skip
    channel = _over_channels(trace, coded)
    return Facts(trace, trace.cores, channel, values, attention, ff, _residual_branches(trace), ambiguous, own)


def _coded(model: nn.Module, inputs: dict[str, Any], plain: Trace) -> list[Tensor | None]:
    """What arrives as values at each core where each linear call's outputs are the number of their column; the
    difference of two such forwards, so that what is added on the way does not count."""
    seen: list[list[Core]] = []
    for factor in (1, 2):

        def mark(event: Linear, out: Tensor, factor: int = factor) -> Tensor | None:
            if not out.is_floating_point():
                return None
            codes = torch.arange(1, event.outs + 1, dtype=out.dtype) * factor
            if event.kind == "conv":
                return codes.view(-1, *[1] * (out.ndim - 2)).expand_as(out)
            return codes.expand_as(out)

        try:
            seen.append(record(model, inputs, change=mark, grad=False)[0].cores)
        except Exception as error:  # a model whose control flow reads its data: its columns stay unknown
            plain.notes.append(f"columns unknown: {type(error).__name__}")
            return [None] * len(plain.cores)
    if {len(s) for s in seen} != {len(plain.cores)}:
        return [None] * len(plain.cores)
    pairs = [(a.v, b.v) for a, b in zip(*seen, strict=True)]
    return [b - a if a is not None and b is not None and a.shape == b.shape else None for a, b in pairs]


def _over_channels(trace: Trace, coded: list[Tensor | None]) -> set[int]:
    """Cores whose keys are channels: where each row of a value is one column of the linear call, not one token."""
    over = set()
    for core, v in zip(trace.cores, coded, strict=True):
        if v is None or v.ndim < 2 or v.shape[-1] < 2 or v.shape[-2] < 2:
            continue
        along_keys = v.flatten(0, -3)[0] if v.ndim > 2 else v
        constant_rows = bool((along_keys == along_keys[:, :1]).all())
        constant_columns = bool((along_keys == along_keys[:1]).all())
        if constant_rows and not constant_columns:
            over.add(core.index)
    return over


def _residual_branches(trace: Trace) -> list[Branch]:
    """Branches that end in a linear call, a convolution or a core."""
    return [b for b in trace.branches if b.last and b.events.bit_count() >= 1]


def _feed_forward(model: nn.Module, inputs: dict[str, Any], trace: Trace, attention: set[str]) -> dict[int, Linear]:
    cores = sum(1 << c.index for c in trace.cores)
    pairs: dict[int, set[int]] = {}
    convolved: set[int] = set()
    for branch in trace.branches:
        for i in branch.last:
            last = trace.events[i]
            if not isinstance(last, Linear) or last.kind != "linear" or last.outs != branch.shape[-1]:
                continue
            sources = _through_depthwise(trace, last.sources)
            inner = {
                j for j in sources
                if branch.events >> j & 1 and isinstance(trace.events[j], Linear) and trace.events[j].kind == "linear"
            }  # fmt: skip
            routers = {j for j in inner if trace.events[j].outs < last.ins}
            inner, sources = inner - routers, frozenset(sources) - routers
            own = last.ancestors & branch.events
            if inner and inner == set(sources) and not own & cores:
                pairs[i] = inner
                convolved |= {i} if not sources <= last.sources else set()
    if not pairs:
        return {}
    mixing = _mixing(model, inputs, trace, pairs)
    found: dict[int, Linear] = {}
    for last_index, firsts in pairs.items():
        if last_index in mixing - convolved:
            continue
        for i in (last_index, *firsts):
            event = trace.events[i]
            assert isinstance(event, Linear)
            if not set(event.weights) & attention:
                found[i] = event
    return found


def _through_depthwise(trace: Trace, sources: frozenset[int]) -> frozenset[int]:
    """The sources before a depthwise convolution, where that alone stands between two linear calls."""
    if len(sources) == 1:
        event = trace.events[next(iter(sources))]
        if isinstance(event, Linear) and event.kind == "conv" and event.depthwise:
            return event.sources
    return sources


def _mixing(model: nn.Module, inputs: dict[str, Any], trace: Trace, pairs: dict[int, set[int]]) -> set[int]:
    """The last calls of pairs between which tokens are mixed: a change of one row reaches others."""
    firsts = set().union(*pairs.values())
    wrong: set[int] = set()

    def change(event: Linear, out: Tensor) -> Tensor | None:
        plain = trace.events[event.index] if event.index < len(trace.events) else None
        if not isinstance(plain, Linear) or plain.weights != event.weights or plain.rows != event.rows:
            return None
        if event.index in pairs and plain.x.shape == event.x.shape:
            rows = (plain.x - event.x).abs().reshape(-1, event.x.shape[-1]).amax(-1) > 1e-6
            if bool(rows[1:].any()):
                wrong.add(event.index)
        y = out.detach().clone()
        if event.index in firsts:
            y.view(-1, y.shape[-1])[0] += 1.0
        return y

    def reset(event: Linear, out: Tensor) -> Tensor | None:
        changed = change(event, out)
        plain = trace.events[event.index] if event.index < len(trace.events) else None
        if changed is None or not isinstance(plain, Linear):
            return None
        clean = saved.get(event.index)
        if clean is None or clean.shape != out.shape:
            return changed
        y = clean.clone()
        if event.index in firsts:
            y.view(-1, y.shape[-1])[0] += 1.0
        return y

    saved: dict[int, Tensor] = {}

    def keep(event: Linear, out: Tensor) -> None:
        saved[event.index] = out.detach().clone()

    record(model, inputs, change=keep, grad=False)
    record(model, inputs, change=reset, grad=False)
    return wrong


# --- the judgement of a method


@dataclass
class Finding:
    """What came of one method on one model."""

    outcome: str
    why: str = ""
    reached: int = 0
    total: int = 0

    def to_json(self) -> dict[str, Any]:
        short = {"outcome": self.outcome}
        if self.why:
            short["why"] = self.why[:900]
        return short | ({"reached": self.reached, "total": self.total} if self.total else {})


class Refused(Exception):
    """dampen raised, and said why."""


Make = Callable[[], Any]
METHODS: dict[str, Make] = {
    "DropKey": lambda: dampen.DropKey(0.4),
    "HardMasking": lambda: dampen.HardMasking(0.5, top=0.5),
    "DropHead": lambda: dampen.DropHead(0.5),
    "DropPath": lambda: dampen.DropPath(0.9),
    "FeedForwardDropout": lambda: dampen.FeedForwardDropout(0.5),
    "ExplicitDropout(value)": lambda: dampen.ExplicitDropout(value=1.0, rate=RATE),
    "ExplicitDropout(ffn)": lambda: dampen.ExplicitDropout(ffn=1.0, rate=RATE),
    "depth": lambda: _recorder(),
    "masks": lambda: dampen.DropKey(0.5),
}


class Probe:
    """All judgements on one model."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any], methods: dict[str, Make] | None = None) -> None:
        if native_available():
            raise RuntimeError("Native kernels hide keys inside one operation, which leaves no record: set DAMPEN_NATIVE=0.")
        self.model, self.inputs = model, inputs
        self.methods = METHODS | (methods or {})
        self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.classes = {n: type(m) for n, m in model.named_modules()}
        self.facts = learn(model, inputs)
        self.reached_ff: set[str] = set()
        self.report = ""
        self._restore()
        self.plain_eval, self.plain_train = self._eval(), self._train()
        self.plain_gradients_finite = self._unbounded(0.0) == []
        self.steady = torch.equal(self.plain_train, self._train(seed=2))

    def _restore(self) -> None:
        self.model.load_state_dict(self.state)
        self.model.zero_grad()

    def _eval(self) -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            out = floats(self.model.eval()(**self.inputs))
        self._restore()
        return out

    def _train(self, seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            out = floats(self.model.train()(**self.inputs))
        self._restore()
        return out

    def run(self, only: tuple[str, ...] = ()) -> dict[str, Finding]:
        """Every method's finding."""
        judges: dict[str, Callable[[str], Finding]] = {
            "DropKey": self._drop_key, "HardMasking": self._hard, "DropHead": self._drop_head,
            "DropPath": self._drop_path, "FeedForwardDropout": self._ff_dropout,
            "ExplicitDropout(value)": self._value, "ExplicitDropout(ffn)": self._ffn, "depth": self._depth,
            "masks": self._masks,
        }  # fmt: skip
        return {name: self._judged(name, judge) for name, judge in judges.items() if not only or name in only}

    def _judged(self, name: str, judge: Callable[[str], Finding]) -> Finding:
        try:
            return judge(name)
        except Refused as error:
            return Finding("refused" if name not in CHECKS else "not applicable", str(error))
        except Wrong as error:
            return Finding("WRONG", str(error))
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            path = "/".join(where.filename.split("/")[-3:])
            return Finding("CRASH", f"{type(error).__name__}: {str(error)[:300]} (at {path}:{where.lineno})")
        finally:
            self._clean()

    def _clean(self) -> None:
        if {n: type(m) for n, m in self.model.named_modules()} != self.classes:
            reg = getattr(self, "_reg", None)
            if reg is not None:
                with contextlib.suppress(Exception):
                    reg.remove()
        self._reg = None
        self._restore()

    @contextlib.contextmanager
    def _regularized(self, name: str, **kwargs: Any) -> Iterator[Any]:
        """The model with a method in it; refusals are told from crashes, and eval, keys and removal are checked."""
        with _refusals():
            self._reg = reg = dampen.regularize(self.model, self.methods[name](), **kwargs)
            if list(self.model.state_dict()) != list(self.state):
                raise Wrong("the keys of the state_dict changed")
            self._restore()
            if not same(self._eval(), self.plain_eval):
                raise Wrong("the output in eval mode is not bit-identical")
            yield reg
        self.report = str(reg)
        reg.remove()
        self._reg = None
        self._restore()
        if {n: type(m) for n, m in self.model.named_modules()} != self.classes or not same(
            self._eval(), self.plain_eval
        ):
            raise Wrong("remove() did not restore the model")

    def _gradients(self, reg: Any) -> None:
        """A training step has finite gradients, if it has them without the method."""
        bad = self._unbounded(reg.penalty) if self.plain_gradients_finite else []
        if bad:
            raise Wrong(f"gradients are not finite: {bad[:3]}")

    def _unbounded(self, penalty: Any) -> list[str]:
        """The parameters whose gradient is not finite after a training step."""
        torch.manual_seed(1)
        out = floats(self.model.train()(**self.inputs))
        loss = out.float().square().mean() + (penalty() if callable(penalty) else penalty)
        if loss.requires_grad:
            loss.backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        bad = [n for n, g in grads.items() if not torch.isfinite(g).all()]
        self._restore()
        return bad

    # attention

    def _aligned(self, cores: list[Core]) -> list[tuple[Core, Core | None]]:
        """Each core of the plain model with the regularized one of the same size, in the order of execution."""
        left = list(cores)
        pairs: list[tuple[Core, Core | None]] = []
        for plain in self.facts.cores:
            at = next((i for i, c in enumerate(left) if c.shape == plain.shape), None)
            pairs.append((plain, None if at is None else left[at]))
            left = left if at is None else left[at + 1 :]
        return pairs

    def _hidden(self, name: str, expected: Callable[[Tensor], Tensor], repeats: int = 2) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            with contextlib.suppress(Refused), self._regularized(name):
                record(self.model, self.inputs)
                return Finding("WRONG", "acts although the probe finds no softmax attention over tokens")
            return Finding("not applicable", "no softmax attention over tokens")
        hidden: Counter[int] = Counter()
        wanted: dict[int, float] = defaultdict(float)
        spread: dict[int, float] = defaultdict(float)
        leaked: dict[int, int] = Counter()
        changed_shape: list[Core] = []
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(repeats):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                reg.penalties()
                for plain, now in self._aligned(trace.cores):
                    if now is None or now.seen is None or plain.seen is None:
                        changed_shape.append(plain)
                        continue
                    leaked[plain.index] += plain.index not in facts.own_masks and int((now.seen & ~plain.seen & plain.seen.any(-1, keepdim=True)).sum())
                    many = plain.seen.sum(-1)
                    rows = (many >= 2) & (plain.distinct if name == "HardMasking" else True)
                    hide = (plain.seen & ~now.seen).sum(-1)
                    hidden[plain.index] += int(hide[rows].sum())
                    wanted[plain.index] += float(expected(many[rows].double()).sum())
                    spread[plain.index] += float(many[rows].double().sum()) * 0.25
        leaks = [f"{self._name(i)}: {n} hidden keys got weight" for i, n in leaked.items() if n]
        if leaks:
            return Finding("WRONG", "keys that the model hides are seen: " + "; ".join(leaks[:4]))
        lost = [c for c in changed_shape if c.seen is not None]
        if lost:
            return Finding(
                "WRONG",
                f"{len(lost) // repeats} of {len(facts.cores)} attention calls of the plain model have no counterpart: "
                + ", ".join(sorted({c.module for c in lost})[:4]),
            )
        missed = [c for c in facts.token_cores if not hidden[c.index] and wanted[c.index] > 8]
        touched = [c for c in facts.cores if c.index in facts.channel and hidden[c.index]]
        if touched:
            return Finding("WRONG", f"hides channels, not tokens, at {touched[0].module}")
        off = []
        for c in facts.token_cores:
            if hidden[c.index] and wanted[c.index] > 0:
                z = (hidden[c.index] - wanted[c.index]) / math.sqrt(spread[c.index])
                if abs(z) > WORST:
                    off.append(f"{c.module}: {hidden[c.index]} keys hidden, {wanted[c.index]:.0f} expected (z {z:.1f})")
        if off:
            return Finding("WRONG", "share of hidden keys: " + "; ".join(off[:4]))
        reached = len(facts.token_cores) - len(missed)
        if missed and reached == 0:
            return Finding("SILENT", f"no key is hidden in any of {len(facts.token_cores)} attention calls")
        return self._coverage("attention", reached, len(facts.token_cores), [c.module for c in missed])

    def _name(self, index: int) -> str:
        return self.facts.trace.events[index].module

    def _coverage(self, what: str, reached: int, total: int, missed: list[str]) -> Finding:
        if not missed:
            return Finding("works", "", reached, total)
        unsaid = sorted({m for m in missed if not said(self.report, m)})
        if not unsaid:
            return Finding("works", f"{what}: {reached} of {total}, said", reached, total)
        return Finding(
            "SILENT",
            f"{what}: {reached} of {total} reached; print(reg) says nothing of " + ", ".join(unsaid[:5])
            + (f" and {len(unsaid) - 5} more" if len(unsaid) > 5 else ""),
            reached,
            total,
        )  # fmt: skip

    def _drop_key(self, name: str) -> Finding:
        return self._hidden(name, lambda m: 0.4 * m - 0.4**m)

    def _hard(self, name: str) -> Finding:
        return self._hidden(name, lambda m: 0.5 * (0.5 * m).ceil())

    def _drop_head(self, name: str) -> Finding:
        facts = self.facts
        done = {c.index for c in facts.token_cores}
        after = [e for e in facts.trace.linears if e.sources and e.sources <= done and e.zeros < 0.05]
        outs = [e for e in after if not e.ins == e.outs <= MOST_HEADS]
        if not facts.token_cores:
            return self._none_expected(name, "no softmax attention over tokens")
        zeros: dict[str, float] = defaultdict(float)
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(4):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                for e in trace.linears:
                    zeros[e.weights[0]] = max(zeros[e.weights[0]], e.zeros)
        missed = [e for e in outs if zeros[e.weights[0]] < 0.05]
        if outs and len(missed) == len(outs):
            return Finding("SILENT", f"no head is zeroed before any of {len(outs)} output projections")
        return self._coverage("output projections", len(outs) - len(missed), len(outs), [e.module for e in missed])

    def _none_expected(self, name: str, why: str) -> Finding:
        try:
            with self._regularized(name) as reg:
                out, _ = record(self.model, self.inputs)
                penalty = float(reg.penalty().detach())
        except Refused:
            return Finding("not applicable", why)
        if not same(floats(_), self.plain_train) or penalty:
            return Finding("unchecked", f"acts although the probe finds {why}")
        return Finding("SILENT", f"does nothing and says nothing ({why})")

    # linear layers

    def _ff_dropout(self, name: str) -> Finding:
        facts = self.facts
        ff = facts.feed_forward_weights
        if not ff:
            return self._none_expected(name, "no feed-forward")
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(2):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                for e in trace.linears:
                    sums[e.weights[0]][0] += e.zeros * e.x.numel()
                    sums[e.weights[0]][1] += e.x.numel()
        plain: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for e in facts.trace.linears:
            plain[e.weights[0]][0] += e.zeros * e.x.numel()
            plain[e.weights[0]][1] += e.x.numel()
        reached, wrong = set(), []
        for w, (zero, many) in sums.items():
            before = plain[w][0] / max(1.0, plain[w][1])
            now = zero / max(1.0, many)
            if before > 0.9:
                continue
            if now - before > 0.2 * (1 - before):
                reached.add(w)
                if w in facts.attention:
                    wrong.append(w)
        if wrong:
            return Finding("WRONG", f"acts on projections of attention: {', '.join(wrong[:4])} ({len(wrong)} in all)")
        self.reached_ff = reached
        other = sorted(reached - ff)
        modules = {e.weights[0]: e.module for e in facts.trace.linears}
        missed = [modules[w] for w in ff - reached if plain[w][0] / max(1.0, plain[w][1]) <= 0.9]
        found = self._coverage("feed-forward", len(ff & reached), len(ff), missed)
        if other and found.outcome == "works":
            found.why = f"also on {', '.join(other[:3])}" + (f" ({len(other)})" if len(other) > 3 else "")
        return found

    def _branch_key(self, trace: Trace) -> list[tuple[str, tuple[int, ...], Branch]]:
        return [(b.module, b.shape, b) for b in _residual_branches(trace)]

    def _drop_path(self, name: str) -> Finding:
        facts = self.facts
        if not facts.branches or not facts.cores:
            return self._none_expected(name, "no residual branch")
        hit: Counter[tuple[str, int]] = Counter()
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(4):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                seen: Counter[str] = Counter()
                for b in _residual_branches(trace):
                    hit[b.module, seen[b.module]] += any(b.samples_zero)
                    seen[b.module] += 1
        seen = Counter()
        missed, total, reached_kinds = [], 0, set()
        pending = []
        for b in facts.branches:
            key = (b.module, seen[b.module])
            seen[b.module] += 1
            if any(b.samples_zero):
                continue
            pending.append((b, bool(hit[key])))
            if hit[key]:
                reached_kinds.add(_kind(b.module))
        for b, reached in pending:
            if _kind(b.module) not in reached_kinds:
                continue  # not a sibling of a layer that was reached: a stem, a stage of convolutions
            total += 1
            if not reached:
                missed.append(b.module)
        if not total:
            changed = not same(self._changed, self.plain_train) if hasattr(self, "_changed") else False
            return Finding("works" if changed else "SILENT", "no residual branch is ever dropped")
        return self._coverage("branches", total - len(missed), total, missed)

    # penalties

    def _penalty(self, name: str, want: dict[str, float], what: str) -> Finding:
        """The penalty of one forward beside the formula, layer by layer where they differ."""
        if not want:
            return self._none_expected(name, what)
        with self._regularized(name) as reg:
            self._gradients(reg)
            self._restore()
            torch.manual_seed(1)
            self.model.train()(**self.inputs)
            got = float(reg.penalty().detach())
            layers = [layer.site.name for layer in reg.layers]
        total = sum(want.values())
        if close(got, total):
            return Finding("works", "", len(want), len(want))
        report = self.report
        missed, off, reached = [], [], 0
        for site in layers:
            mine = {m: v for m, v in want.items() if m == site or m.startswith(site + ".") or site == ""}
            try:
                with self._regularized(name, sites=site or "*") as reg:
                    torch.manual_seed(1)
                    self.model.train()(**self.inputs)
                    here = float(reg.penalty().detach())
            except Refused:
                here = 0.0
            if mine and here == 0.0:
                missed += list(mine)
            elif not close(here, sum(mine.values())):
                part = next((m for m, v in mine.items() if close(here, sum(mine.values()) - v)), None)
                if part is not None:
                    missed.append(part)
                else:
                    off.append(f"{site or '(model)'}: got {here:.6g}, formula {sum(mine.values()):.6g}")
            else:
                reached += len(mine)
        covered = {m for m in want for s in layers if m == s or m.startswith(s + ".") or s == ""}
        missed += [m for m in want if m not in covered]
        self.report = report
        if off:
            return Finding("WRONG", "penalty: " + "; ".join(off[:3]) + f" ({len(off)} of {len(layers)} layers)")
        if not missed:
            return Finding("WRONG", f"penalty: got {got:.6g}, formula {total:.6g}")
        return self._coverage(what, reached, len(want), missed)

    def _valid(self, event: Linear) -> Tensor | None:
        """Which rows are no padding: keys that some query sees, in the attention over the same tokens."""
        near = sorted(self.facts.cores, key=lambda c: (abs(c.index - event.index), c.index > event.index))
        for core in near:
            keys = core.shape[2] if core.v is None else core.v.shape[-2]  # fewer than scores where there is a sink
            if core.seen is None or core.index in self.facts.channel or event.rows % keys:
                continue
            samples = event.rows // keys
            if not (self._attends_to_itself(core) or event.index in core.v_sources) or core.shape[0] % samples:
                continue
            return core.seen[..., :keys].any(1).reshape(samples, -1, keys).any(1).flatten()
        return None

    def _attends_to_itself(self, core: Core) -> bool:
        """Whether queries, keys and values are projections of one tensor."""
        events = self.facts.trace.events
        return len({events[i].sources for i in core.sources | core.v_sources}) == 1

    def _mean(self, event: Linear, columns: Tensor | None = None) -> float:
        y = event.y if columns is None else event.y[:, columns]
        squares = y.double().square().sum(-1)
        valid = self._valid(event)
        if valid is not None and bool(valid.any()):
            squares = squares[valid]
        return 0.5 * RATE**2 * float(squares.mean())

    def _value(self, name: str) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            return self._none_expected(name, "no softmax attention over tokens")
        want: dict[str, float] = defaultdict(float)
        counted = set()
        for core in facts.token_cores:
            if core.index not in facts.values:
                continue
            index, columns = facts.values[core.index]
            if (index, tuple(columns.tolist())) in counted:
                continue
            counted.add((index, tuple(columns.tolist())))
            event = facts.trace.events[index]
            assert isinstance(event, Linear)
            want[core.module] += self._mean(event, columns)
        if not want:
            with self._regularized(name) as reg:
                self._gradients(reg)
            return Finding("unchecked", "; ".join(facts.ambiguous[:2]))
        found = self._penalty(name, want, "no value projection")
        unknown = len({c.module for c in facts.token_cores if c.index not in facts.values})
        if unknown and found.outcome in ("WRONG", "SILENT"):
            return Finding("unchecked", f"{unknown} value projections unknown to the probe; {found.why}")
        return found

    def _ffn(self, name: str) -> Finding:
        facts = self.facts
        want: dict[str, float] = defaultdict(float)
        reached = self.reached_ff
        for event in facts.trace.linears:
            if event.index in facts.feed_forward or event.weights[0] in reached:
                want[event.module] += self._mean(event)
        if any(re.search(r"expert", w) for w in facts.feed_forward_weights):
            return self._experts(name)
        return self._penalty(name, want, "no feed-forward")

    def _experts(self, name: str) -> Finding:
        """Routed layers: the penalty is there, is said where partial, and does not depend on padding."""
        with self._regularized(name) as reg:
            self._gradients(reg)
            torch.manual_seed(1)
            self.model.train()(**self.inputs)
            got = float(reg.penalty().detach())
        routed = {e.module for e in self.facts.feed_forward.values() if re.search(r"expert", e.weights[0])}
        unsaid = [m for m in routed if not said(self.report, m)]
        if not got:
            return Finding("SILENT", "no penalty in a mixture of experts")
        why = f"mixture of experts, value not checked; {len(unsaid)} modules of experts unnamed in the report"
        return Finding("works", why)

    # depth, masks

    def _depth(self, name: str) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            return Finding("not applicable", "no softmax attention over tokens")
        with self._regularized(name):
            trace = Trace(self.model)
            _Recorder.trace = trace
            torch.manual_seed(1)
            with trace.recording():
                self.model.train()(**self.inputs)
        known = [c for c in trace.cores if c.depth is not None]
        return depth_finding(known)

    def _masks(self, name: str) -> Finding:
        """Changing what a query must not see changes nothing, at model level."""
        ids_name = next((n for n in ("input_ids", "decoder_input_ids") if n in self.inputs), None)
        images = any(n.startswith("pixel") or n.startswith("image") for n in self.inputs)
        if ids_name is None or images or not self.steady or not self.facts.token_cores:
            return Finding("not applicable", "no token ids, or randomness of its own")
        ids = self.inputs[ids_name]
        if ids.ndim != 2:
            return Finding("not applicable", "ids are not (batch, length)")
        checks: dict[str, tuple[dict[str, Any], Tensor]] = {}
        future = ids.clone()
        future[:, -1] = torch.where(ids[:, -1] == 5, 6, 5)
        earlier = torch.ones_like(ids, dtype=torch.bool)
        earlier[:, -1] = False
        checks["future"] = {**self.inputs, ids_name: future}, earlier
        mask = self.inputs.get("attention_mask")
        if ids_name == "input_ids" and isinstance(mask, Tensor) and mask.shape == ids.shape and (mask == 0).any():
            padded = torch.where(mask == 0, torch.where(ids == 7, 8, 7), ids)
            checks["padding"] = {**self.inputs, ids_name: padded}, mask.bool()
        held = {}
        for what, (inputs, keep) in checks.items():
            a, b = self._positions(self.inputs, ids.shape), self._positions(inputs, ids.shape)
            if a is not None and b is not None and close_tensors(a[keep], b[keep]) and not torch.equal(a, b):
                held[what] = inputs, keep
        if not held:
            return Finding("not applicable", "the plain model hides neither the future nor padding")
        done = []
        methods: dict[str, Make] = {
            name: self.methods[name],
            "blur": lambda: dampen.BlurredAttention(5),
            "hard": lambda: dampen.HardMasking(0.5, top=0.5),
            "explicit": lambda: dampen.ExplicitDropout(value=1.0, ffn=1.0, rate=RATE),
        }
        for label, make in methods.items():
            self.methods[label] = make
            try:
                with self._regularized(label) as reg:
                    for what, (inputs, keep) in held.items():
                        for seed in range(3):
                            a = self._positions(self.inputs, ids.shape, seed, grad=True)
                            first = float(reg.penalty().detach())
                            b = self._positions(inputs, ids.shape, seed, grad=True)
                            second = float(reg.penalty().detach())
                            if a is None or b is None:
                                continue
                            if not close_tensors(a[keep], b[keep]):
                                worst = float((a[keep] - b[keep]).abs().max())
                                raise Wrong(f"{label}: hidden tokens ({what}) change the output by {worst:.3g}")
                            if what == "padding" and not close(first, second):
                                raise Wrong(f"{label}: padding changes the penalty from {first:.6g} to {second:.6g}")
                done.append(label)
            except Refused:
                continue
            finally:
                self._clean()
        return Finding("works", f"{', '.join(held)} under {', '.join(done)}")

    def _positions(
        self, inputs: dict[str, Any], shape: torch.Size, seed: int = 1, grad: bool = False
    ) -> Tensor | None:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(grad):
            out = self.model.train()(**inputs)
        leaves = [t for t in pytree.tree_leaves(_plain(out)) if isinstance(t, Tensor) and t.is_floating_point()]
        found = next((t for t in leaves if t.ndim >= 3 and t.shape[:2] == shape), None)
        self._restore()
        return None if found is None else found.detach()


class Wrong(AssertionError):
    """A judgement that stops the rest."""


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Errors that dampen raises on purpose become `Refused`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "/dampen/" in last.filename and (last.line or "").startswith("raise"):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


class _Recorder(dampen.Regularizer):
    """Writes down which site runs, and at which depth, before each attention."""

    trace: Trace | None = None

    def mask(self, q: Tensor, k: Tensor, call: Any) -> Tensor:
        if _Recorder.trace is not None and self.site is not None:
            _Recorder.trace.next_site = (self.site.name, float(self.site.depth))
        return torch.zeros(1, 1, 1, k.shape[2], dtype=torch.bool)


def _recorder() -> dampen.Regularizer:
    return _Recorder()


def depth_finding(cores: list[Core]) -> Finding:
    """Whether the depths rise with the order of execution, in each chain of attentions that depend on each other."""
    roots: dict[str, list[float]] = defaultdict(list)
    for c in cores:
        roots[_root(c.site)].append(float(c.depth or 0.0))
    whole = all(min(d) == 0.0 and max(d) in (1.0, 0.0) for d in roots.values())
    first: dict[str, Core] = {}
    for c in cores:
        first.setdefault(f"{c.site} {c.module}", c)
    cores = list(first.values())  # a layer that runs again has one depth all the same
    # each root spans 0 to 1 by itself (an encoder and a decoder), or all of them are one stack (a U-Net)
    group = (lambda c: _root(c.site)) if whole else (lambda c: "")
    last: dict[str, Core] = {}
    for c in cores:
        before = last.get(group(c))
        if before is not None and before.depth is not None and c.depth is not None:
            depends = bool(c.ancestors >> before.index & 1)
            restarts = before.depth == 1.0 and c.depth == 0.0
            if c.depth < before.depth - 1e-6 and depends and not restarts:
                return Finding(
                    "WRONG",
                    f"'{c.site}' runs after '{before.site}', and its depth {c.depth:.3g} is below {before.depth:.3g}",
                )
            if c.depth > before.depth + 1e-6 and not depends and _root(c.site) != _root(before.site):
                return Finding(
                    "WRONG",
                    f"'{before.site}' (depth {before.depth:.3g}) and '{c.site}' (depth {c.depth:.3g}) are one stack, "
                    "though neither needs the other",
                )
        last[group(c)] = c
    return Finding("works", "", len(cores), len(cores))


def _root(site: str) -> str:
    """The name up to its first number."""
    return re.split(r"\.?\d", site, maxsplit=1)[0]


def _kind(module: str) -> str:
    """The name without its last number: what layers of one list share."""
    return re.sub(r"\d+(?=\D*$)", "#", module)


def said(report: str, module: str) -> bool:
    """Whether the printed report says that this module, or a share of the layers, was left out."""
    for line in report.splitlines()[1:]:
        if re.search(r"\b\d+ of \d+ ", line):
            return True
        names = [t.strip(".") for t in re.findall(r"[\w.]+", line)]
        above = any(module == n or module.startswith(n + ".") for n in names if n)
        if re.match(r"  \((left out|skipped|note)\)", line) and (above or re.search(r"and \d+ more", line)):
            return True
        if above and (re.match(r"  \S+ +- ", line) or "left out" in line):
            return True
    return False


def _plain(out: Any) -> Any:
    return out.to_tuple() if hasattr(out, "to_tuple") else out


def floats(out: Any) -> Tensor:
    """Every floating tensor of an output, in one."""
    found = [t for t in pytree.tree_leaves(_plain(out)) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat([t.float().flatten() for t in found]) if found else torch.zeros(0)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return a.shape == b.shape and bool(torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()))


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-3, abs_tol=1e-9)


def close_tensors(a: Tensor, b: Tensor) -> bool:
    scale = max(1.0, float(a.abs().max())) if a.numel() else 1.0
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale, equal_nan=True))


def verdict(findings: dict[str, Finding]) -> str:
    """The worst of a model's outcomes."""
    outcomes = {f.outcome for f in findings.values()}
    for bad in ("CRASH", "WRONG", "SILENT", "refused"):
        if bad in outcomes:
            return bad
    return "works" if "works" in outcomes else "not applicable"
