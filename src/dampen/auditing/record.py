"""One forward of a model under observation: which module draws random numbers, which attention
kernel runs, which rows of scores are hidden.

Two modes see it. The dispatch mode sees every kernel, also those inside fused functions, and with
it every draw of random numbers. The function mode sees the calls of
`F.scaled_dot_product_attention` with their arguments. Hooks name the module in which this happens.
All of them are gone afterwards.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import (
    TorchDispatchMode,
    in_backward,
    operator_facts,
    sdp_choice,
)
from dampen.auditing.state import Kept, seed_all
from dampen.containers import tensors_in, with_tensors

HIDDEN = -1e4
"""Scores at or below this count as hidden."""
KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "flex_attention": "flex",
    "_safe_softmax": "math",
    "_softmax": "explicit softmax",
}
"""Operator: the attention kernel that it belongs to. The last two are not fused."""
UNFUSED = ("math", "explicit softmax")
_DROPPING = ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout")


class DrawSite(NamedTuple):
    """A place that draws: a module, and the number of the draw in its forward."""

    module: str
    number: int


@dataclass(frozen=True)
class Draw:
    """One operator that drew random numbers.

    Attributes:
        site: where.
        operator: its name.
        rate: of a dropout; None for other random numbers.
        attention: whether a function of attention drew it.
        size: how many numbers it drew.
        digest: of what it returned; NaN where nobody compares it.
        backward: in a backward, which is a checkpoint's recompute.
    """

    site: DrawSite
    operator: str
    rate: float | None
    attention: bool
    size: int
    digest: float
    backward: bool


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: the kernel that ran, and the one that would run
    otherwise ("": not known)."""

    module: str
    kernel: str
    without_mask: str = ""
    without_dropout: str = ""
    mask: str = ""  # what the mask is: "causal", "hides nothing" or "other"; "": none
    weights: bool = False  # F.multi_head_attention_forward was to return its weights


@dataclass
class Events:
    """What happened in one forward, and in its backward."""

    draws: list[Draw] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    called: Counter[str] = field(default_factory=Counter)
    training: dict[str, bool] = field(default_factory=dict)  # the mode in which it was called
    hidden: dict[tuple[str, str], int] = field(default_factory=dict)  # (module, outcome): rows
    nan: str | None = None  # the first module that returned NaN
    samples: list[tuple[str, Tensor]] = field(default_factory=list)
    weights: dict[str, tuple[float, int]] = field(default_factory=dict)  # largest sum, address
    recomputed: bool = False

    @property
    def forward(self) -> list[Draw]:
        """The draws of the forward."""
        return [d for d in self.draws if not d.backward]


class ForwardObserver(TorchDispatchMode):
    """Observes one forward and its backward.

    Args:
        model: any model.
        kept: its state. A parameter is kept there before something writes into it.
        base: a seed. Each draw then depends on this seed and its place alone, so that one dropout
            can change while all others stay. None: as the generators give them.
        other: places that draw with another seed.
        batch: keep a summary of each of so many samples of each module's output; 0: none.
        still: dropouts keep everything.
        light: note draws and calls alone.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled below it, and each call would go through dynamo

    def __init__(
        self,
        model: nn.Module,
        kept: Kept,
        base: int | None = None,
        other: Mapping[DrawSite, int] | None = None,
        batch: int = 0,
        still: bool = False,
        light: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.kept, self.base, self.batch = model, kept, base, batch
        self.other, self.still, self.light = other or {}, still, light
        self.record = Events()
        self.stack: list[str] = []
        self.counts: Counter[tuple[str, bool]] = Counter()
        self.functions: list[str] = []
        self.requested: dict[str, str] = {}  # the kernels that a call could have had

    @contextmanager
    def observing(self) -> Iterator[Events]:
        """Observe what runs inside."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(name))
                stack.callback(enter.remove)
                leave = module.register_forward_hook(self._leave(name), always_call=True)
                stack.callback(leave.remove)
            stack.enter_context(self)
            if not self.light:
                stack.enter_context(_Functions(self))
            yield self.record

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.stack.append(name)
            self.record.called[name] += 1
            self.record.training.setdefault(name, module.training)
            self.record.recomputed = self.record.recomputed or in_backward()

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name in self.stack:  # an error may have left some behind
                while self.stack.pop() != name:
                    pass
            if in_backward() or self.light:
                return
            with torch.no_grad():
                for t in tensors_in(output):
                    if not t.is_floating_point() or t.is_nested:
                        continue
                    if self.record.nan is None and bool(t.isnan().any()):
                        self.record.nan = name
                    if self.batch and t.ndim > 1 and len(t) == self.batch:
                        x = t.detach().double().flatten(1)
                        self.record.samples.append(
                            (name, torch.stack([x.mean(1), x.abs().mean(1)], 1))
                        )

        return hook

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        facts = operator_facts(func)
        if not (facts.written or facts.draws or facts.name in KERNELS):
            return func(*args, **kwargs)
        given = {**facts.defaults, **dict(zip(facts.arguments, args, strict=False)), **kwargs}
        for argument in facts.written:
            for tensor in tensors_in(given.get(argument)):
                self.kept.before_write(tensor)
        if facts.draws and not _is_certain(facts.name, given):
            out = self._draw(func, facts.name, given, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if facts.name in KERNELS and not self.light and not in_backward():
            self._attended(facts.name, given, out, self.stack[-1] if self.stack else "")
        return out

    def _draw(
        self, func: Any, name: str, given: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that draws, under the seed of its place, and note it."""
        rate = _rate(name, given)
        if self.still and rate is not None:
            return _expected(func, name, given)
        backward = in_backward()
        where = self.stack[-1] if self.stack else ""
        site = DrawSite(where, self.counts[where, backward])
        self.counts[where, backward] += 1
        if self.base is not None and given.get("generator") is None:
            text = f"{self.base} {site.module} {site.number} {self.other.get(site, 0)}"
            torch.manual_seed(zlib.crc32(text.encode()))
        out = func(*args, **kwargs)
        attention = any(f in _ATTENDING for f in self.functions) or "dot_product" in name
        size, digest = _digest(out) if self.base is None else (_size(out), float("nan"))
        self.record.draws.append(Draw(site, name, rate, attention, size, digest, backward))
        return out

    def _attended(self, name: str, given: dict[str, Any], out: Any, where: str) -> None:
        """A kernel of attention has run, or a softmax that may belong to one."""
        in_mha = "multi_head_attention_forward" in self.functions
        self.record.attention.append(
            AttentionCall(
                where,
                KERNELS[name],
                self.requested.get("mask", ""),
                self.requested.get("dropout", ""),
                self.requested.get("form", ""),
                in_mha and name == "_softmax",
            )
        )
        scores = given.get("self")
        if scores is None:
            scores = given.get("attn_mask", given.get("attn_bias"))
        if not isinstance(scores, Tensor) or scores.ndim < 2 or not scores.is_floating_point():
            return
        with torch.no_grad():
            largest = scores.detach().amax(-1)
            gone = int((largest == -torch.inf).sum())
            faint = int(((largest <= HIDDEN) & (largest > -torch.inf)).sum())
            if gone:
                first = next(tensors_in(out))
                outcome = "NaN" if bool(first.isnan().any()) else "zeros"
                self._count(where, outcome, gone)
            if faint:
                self._count(where, "uniform weights", faint)

    def _count(self, where: str, outcome: str, rows: int) -> None:
        key = where, outcome
        self.record.hidden[key] = self.record.hidden.get(key, 0) + rows


_ATTENDING = ("scaled_dot_product_attention", "multi_head_attention_forward")


class _Functions(TorchFunctionMode):
    """Names the function of torch that runs, and what attention was called with."""

    def __init__(self, observer: ForwardObserver) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        o = self.observer
        o.functions.append(getattr(func, "__name__", ""))
        attends = F.scaled_dot_product_attention
        if func is attends:
            o.requested = _choices(*args, **kwargs)

        def seen(*args: Any, **kwargs: Any) -> Tensor:
            o.requested = _choices(*args, **kwargs)
            return attends(*args, **kwargs)

        try:
            if func is F.multi_head_attention_forward:  # what it calls, this mode does not see
                F.scaled_dot_product_attention = seen
            out = func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = attends
            o.functions.pop()
            o.requested = {}
        if func is F.multi_head_attention_forward and isinstance(out[1], Tensor):
            where = o.stack[-1] if o.stack else ""
            largest = float(out[1].detach().sum(-1).max())
            o.record.weights[where] = (largest, out[1].data_ptr())
        return out


def _choices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> dict[str, str]:
    """The kernels that would run without the mask, and without dropout, and what the mask is."""
    found: dict[str, str] = {}
    if query.is_nested:
        return found
    if attn_mask is not None:
        if not attn_mask.requires_grad:  # a learned bias hides nothing, and cannot be left out
            found["form"] = _form(attn_mask)
        found["mask"] = sdp_choice(query, key, value, None, dropout_p, is_causal, **more)
    if dropout_p > 0:
        found["dropout"] = sdp_choice(query, key, value, attn_mask, 0.0, is_causal, **more)
    return found


def _form(mask: Tensor) -> str:
    """What a mask hides: "causal" all later keys, "hides nothing", or "other"."""
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    if bool(seen.all()):
        flat = mask.dtype == torch.bool or not bool(mask.any())
        return "hides nothing" if flat else "other"
    square = mask.ndim >= 2 and mask.shape[-1] == mask.shape[-2]
    if square and bool((seen == torch.ones_like(seen).tril()).all()):
        return "causal"
    return "other"


def _expected(func: Any, name: str, given: dict[str, Any]) -> Any:
    """What a dropout gives on average: nothing is dropped, and nothing is scaled."""
    if name == "bernoulli_":
        return given["self"].fill_(given["p"])
    if name == "bernoulli":
        return torch.full_like(given["self"], given["p"])
    if "dropout_p" in given:
        return func(**{**given, "dropout_p": 0.0})
    x = given["input"] if "input" in given else given["self"]
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _rate(name: str, given: dict[str, Any]) -> float | None:
    """The drop rate of an operator; None for one that does not drop."""
    if "dropout_p" in given:
        return float(given["dropout_p"])
    p = given.get("p")
    if name not in _DROPPING or not isinstance(p, int | float):
        return None
    return 1 - float(p) if name.startswith("bernoulli") else float(p)


def _is_certain(name: str, given: dict[str, Any]) -> bool:
    """Whether an operator that may draw does not draw here: rate 0, or not in training."""
    if given.get("train", given.get("training")) is False:
        return True
    return _rate(name, given) in (0.0, 1.0)


def _size(out: Any) -> int:
    return sum(t.numel() for t in tensors_in(out))


def _digest(out: Any) -> tuple[int, float]:
    """How many numbers a draw gave, and one number that identifies them."""
    size, total = 0, 0.0
    with torch.no_grad():
        for t in tensors_in(out):
            flat = t.detach().flatten().double()
            weights = torch.cos(torch.arange(1, flat.numel() + 1, device=flat.device).double())
            total += float((flat * weights).nan_to_num(3.0, 5.0, 7.0).sum())
            size += flat.numel()
    return size, total


class Forward(NamedTuple):
    """A forward: its output, copied, and what happened in it."""

    outputs: list[Tensor]
    record: Events


class AuditedModel:
    """A model and what it is called with, to be run in any mode.

    Args:
        model: any model.
        args: positional arguments.
        kwargs: by name.
        kept: state of the model.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Kept
    ) -> None:
        self.model, self.args, self.kwargs, self.kept = model, args, kwargs, kept

    def call(self) -> Any:
        """The model on copies of its inputs, which it may change in place."""
        args, kwargs = copied((self.args, self.kwargs))
        return self.model(*args, **kwargs)

    def prepare(self, training: bool, seed: int | None = 0) -> None:
        """The model as it was, in a mode, with the generators at a seed.

        Args:
            training: the mode.
            seed: of the generators; None: leave them.
        """
        self.kept.restore()
        self.model.train(training)
        if seed is not None:
            seed_all(seed)

    def run(
        self,
        training: bool,
        base: int | None = 0,
        other: Mapping[DrawSite, int] | None = None,
        seed: int | None = 0,
        batch: int = 0,
        still: bool = False,
        light: bool = False,
        change: Callable[[], Any] | None = None,
    ) -> Forward:
        """One forward without gradients.

        Args:
            training: the mode.
            base: see `ForwardObserver`.
            other: see `ForwardObserver`.
            seed: of the generators; None: leave them.
            batch: see `ForwardObserver`.
            still: see `ForwardObserver`.
            light: see `ForwardObserver`.
            change: called when the model is ready to run.
        """
        self.prepare(training, seed)
        if change is not None:
            change()
        observer = ForwardObserver(self.model, self.kept, base, other, batch, still, light)
        with warnings.catch_warnings(), torch.no_grad(), observer.observing() as record:
            # a reentrant checkpoint warns of it, and here nobody wants a gradient
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            output = self.call()
        return Forward([t.detach().clone() for t in tensors_in(output)], record)


def copied(value: Any) -> Any:
    """Nested inputs with each tensor copied.

    Args:
        value: tensors in tuples, lists and mappings.
    """
    return with_tensors(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two outputs agree to the bit; NaN equals NaN.

    Args:
        a: tensors.
        b: tensors.
    """
    if len(a) != len(b):
        return False
    return all(
        x.shape == y.shape and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        for x, y in zip(a, b, strict=True)
    )
