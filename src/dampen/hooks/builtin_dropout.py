"""The dropout that a model brings itself: where it is, at which rate, and how the
handle sets and samples it.

Modules that drop (nn.Dropout, drop path, stochastic depth) and rates that a module keeps as a
number and uses in its own forward (`attention_dropout` of Hugging Face, `dropout` of
nn.MultiheadAttention, `layerdrop`).
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import DropoutModule, checkpointing_now, in_backward
from dampen.hooks.context import ModelSite
from dampen.regularizer import Regularizer
from dampen.schedules import Schedule, check_value

if TYPE_CHECKING:
    from dampen.hooks.context import Layer


# --- its rates

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
_PATH = re.compile(r"drop_?path|stochastic_?depth|^drop_prob$", re.IGNORECASE)


class OwnRate:
    """One drop rate of the model's own: the module that has it, the attribute, and what it was."""

    def __init__(self, place: str, module: nn.Module, attribute: str, kind: str) -> None:
        self.place, self.module, self.attribute, self.kind = place, module, attribute, kind
        self.original = self.rate
        self.schedule: Schedule | None = None  # None: as the model has it
        self.depth = 0.0

    @property
    def rate(self) -> float:
        """The rate now."""
        return float(getattr(self.module, self.attribute))

    @property
    def name(self) -> str:
        """Where it is: the module's name, and the attribute where that is no matter of course."""
        return (
            self.place
            if self.attribute in ("p", "drop_prob")
            else f"{self.place}.{self.attribute}".lstrip(".")
        )

    def at(self, progress: float) -> None:
        """Set what the schedule says. A number that stays is not set again: a compiled graph is
        guarded by it."""
        if self.schedule is not None:
            what = f"reg.set_builtin_dropout(rate=...) at '{self.name}'"
            value = check_value(self.schedule(self.depth, progress), what)
            if self.rate != value:
                setattr(self.module, self.attribute, value)

    def restore(self) -> None:
        """As the model had it."""
        self.schedule = None
        if self.rate != self.original:
            setattr(self.module, self.attribute, self.original)

    def __repr__(self) -> str:
        return f"{self.name}: {self.kind} {self.rate:.3g}"


def find_own(model: nn.Module) -> list[OwnRate]:
    """Every drop rate of the model's own, in the order of its modules, those at 0 included.

    >>> model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1)
    >>> find_own(model)[:2]
    [self_attn.dropout: attention dropout 0.1, dropout: dropout 0.1]
    """
    found = []
    for place, module in model.named_modules():
        if isinstance(module, Regularizer) or "dampen_regularizers" in place:
            continue
        for attribute, value in vars(module).items():
            number = (
                isinstance(value, float | int) and not isinstance(value, bool) and 0 <= value <= 1
            )
            if number and (kind := _kind(place, module, attribute)):
                found.append(OwnRate(place, module, attribute, kind))
    return found


def _kind(place: str, module: nn.Module, attribute: str) -> str:
    """dropout, attention dropout, drop path or layer drop; "" for what is no rate at work."""
    last, cls = place.rsplit(".", 1)[-1], type(module).__name__
    if isinstance(module, DropoutModule):
        if attribute != "p":
            return ""
        return "attention dropout" if _ATTENTION.search(last) and "proj" not in last else "dropout"
    if attribute == "p" and _PATH.search(cls):  # torchvision's StochasticDepth
        return "drop path"
    if "drop" not in attribute.lower() or not _is_used(type(module), attribute):
        return ""
    if _PATH.search(attribute) or _PATH.search(cls):
        return "drop path"
    if "layer" in attribute.lower():
        return "layer drop"
    attends = isinstance(module, nn.MultiheadAttention) or _ATTENTION.search(attribute)
    return "attention dropout" if attends else "dropout"


def _is_used(cls: type, attribute: str) -> bool:
    """Whether the code of a class reads an attribute outside its constructor; timm keeps
    `drop_rate` as a record."""
    functions = (
        f
        for base in cls.__mro__
        if base is not nn.Module
        for name, f in vars(base).items()
        if name not in ("__init__", "extra_repr") and isinstance(f, FunctionType)
    )
    return any(attribute in f.__code__.co_names for f in functions)


def own_rates(model: nn.Module, known: Sequence[OwnRate]) -> list[OwnRate]:
    """Every drop rate of the model's own; those that were set already with
    what they were before."""
    before = {(id(r.module), r.attribute): r for r in known}
    return [before.get((id(r.module), r.attribute), r) for r in find_own(model)]


def depth_of(place: str, model: nn.Module, layers: Sequence[Layer]) -> float:
    """The depth of the layer that a module lies in; 0 before the first layer, 1 after the last."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    for layer in layers:
        name = layer.site.name
        if place == name or name == "" or place.startswith(name + "."):
            return layer.site.depth
    return 0.0 if order[place] < order[layers[0].site.name] else 1.0


def choose_own(rates: Sequence[OwnRate], sites: str | Sequence[str]) -> list[OwnRate]:
    """Those whose name or kind matches a pattern, or an error that lists what there is."""
    patterns = [sites] if isinstance(sites, str) else list(sites)
    chosen = [
        r
        for r in rates
        if any(fnmatch.fnmatch(text, p) for text in (r.name, r.place, r.kind) for p in patterns)
    ]
    if not chosen:
        there = "\n  ".join(map(str, rates)) or "none: the model has no dropout of its own"
        raise ValueError(
            f"no dropout of the model's own matches target_modules={sites!r}. There are:\n  {there}"
        )
    return chosen


def describe_own(rates: Sequence[OwnRate]) -> list[str]:
    """One line per kind, rate and family of places ("blocks.*.attn_drop");
    those at 0 only counted."""
    groups: dict[tuple[str, str, str], int] = {}
    for r in rates:
        if r.rate > 0:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", r.name)
            key = r.kind, f"{r.rate:.3g}", pattern
            groups[key] = groups.get(key, 0) + 1
    lines = [
        f"  (built-in)  {kind} {rate}: {where}{f' (x{n})' if n > 1 else ''}"
        for (kind, rate, where), n in groups.items()
    ]
    silent = sum(r.rate == 0 for r in rates)
    return [*lines, f"  (built-in)  {silent} more at rate 0"] if silent else lines


# --- Monte-Carlo sampling in eval


class SampledSite:
    """What is kept on a module whose own dropout acts in eval too."""

    def __init__(self) -> None:
        self.on = False
        self.flipped = False  # the module believes to be in training at this moment

    def __getstate__(self) -> dict[str, Any]:
        return {"on": False, "flipped": False}  # a copy made inside `mc_mode` is a plain one


def sampled_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that drops, in training mode by itself; its
    children stay as they are."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: SampledSite = self._dampen_sampled
        if not site.on or self.training:
            return base(self, *args, **kwargs)
        self.training = site.flipped = True
        try:
            return base(self, *args, **kwargs)
        finally:
            self.training = site.flipped = False

    return forward


def is_flipped(module: nn.Module) -> bool:
    """Whether a module is in training mode only to sample its own dropout."""
    site = module.__dict__.get("_dampen_sampled")
    return site is not None and site.flipped


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """torch.nn's encoder layers have a fused eval path that calls none of their
    modules, and so no dropout."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# --- Monte-Carlo sampling in eval


@contextlib.contextmanager
def sampling_own(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of `model` that have a drop rate above 0 drop in eval mode
    too. Blocks may nest."""
    from dampen.hooks.patch import pop, swap  # which knows this module

    modules = {id(r.module): r.module for r in find_own(model) if r.rate > 0}.values()
    new = [m for m in modules if "_dampen_sampled" not in vars(m)]
    for module in new:
        swap(module, "sampled", SampledSite())
    sites: list[SampledSite] = [vars(m)["_dampen_sampled"] for m in modules]
    before = [site.on for site in sites]
    for site in sites:
        site.on = True
    try:
        with no_fast_path():
            yield
    finally:
        for site, was in zip(sites, before, strict=True):
            site.on = was
        for module in new:
            pop(module, "sampled")


# --- deterministic
#
# `deterministic`: a model without anything random, for a while.
#
# What preference-tuning trainers, teachers and comparisons of gradients need: the model's own
# dropout and drop path, the functional calls in its code (`F.dropout`, attention's `dropout_p`)
# and the regularizers are all silent inside.

_DROPOUTS = {
    getattr(home, name)
    for home in (F, torch)
    for name in (
        "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
        "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
    )
    if hasattr(home, name)
}  # fmt: skip
_TRAINING = {f: inspect.signature(f) for f in (F.multi_head_attention_forward, F.rrelu)}
_DRAWS = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm "
    "normal normal_ bernoulli bernoulli_ uniform_ "
    "random_ multinomial poisson exponential_ geometric_ cauchy_ log_normal_".split()
)


@contextlib.contextmanager
def deterministic(model: nn.Module) -> Iterator[None]:
    """Inside, nothing in `model` is random: not its own dropout and drop path, not functional
    calls, not the regularizers, in training mode too. Afterwards, also after an error, everything
    is exactly as it was.

    With activation checkpointing the backward belongs inside, because it runs the forward again.
    What draws random numbers in another way (a random mask of the input) stays
    on, and a warning names it.

    Args:
        model: any model, regularized or not.

    Raises:
        TypeError: `model` is not an nn.Module.

    >>> model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5)
    >>> x = torch.randn(3, 2, 8)
    >>> with deterministic(model):
    ...     torch.equal(model(x), model(x))
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"deterministic takes an nn.Module, got {type(model).__name__}.")
    mode = _Silence("deterministic()")
    with contextlib.ExitStack() as stack:
        _silence_modules(model, mode, stack)
        with mode:
            yield
    mode.report(type(model).__name__)


class Silence:
    """Switches every dropout of a model off, and back on: what `dampen.silence(model)` returns.

    Inside `with`, or from `on()` to `off()`, the model's dropout modules, its functional dropout,
    the dropout of its attention, its drop paths and its regularizers do nothing, in training mode
    too. Other models are not touched. That is what the reference model of DPO and the teacher of a
    distillation need.

    With activation checkpointing the backward has to run before `off()`, because it runs the
    forward again. Of a compiled model, give the one that torch.compile returned: the graph of the
    inner one would not be reached.

    Args:
        model: any model, regularized or not.

    >>> model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5)
    >>> x = torch.randn(3, 2, 8)
    >>> with Silence(model):
    ...     torch.equal(model(x), model(x))
    True
    >>> quiet = Silence(model).on()
    >>> torch.equal(model(x), model(x))
    True
    >>> quiet.off()
    >>> torch.equal(model(x), model(x))
    False
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"silence takes an nn.Module, got {type(model).__name__}.")
        self.model = model
        self._mode: _Silence | None = None
        self._stack = contextlib.ExitStack()

    @property
    def active(self) -> bool:
        """Whether the model is silent now."""
        return self._mode is not None

    def on(self) -> Silence:
        """Switch every dropout off."""
        if self._mode is not None:
            raise RuntimeError(
                f"{type(self.model).__name__} is silent already. "
                "Call off() first, or use one `with` block."
            )
        mode = _Silence("silence()", alone=True)
        with contextlib.ExitStack() as stack:
            _silence_modules(self.model, mode, stack)
            self._stack = stack.pop_all()
        self._mode = mode
        return self

    def off(self) -> None:
        """Bring every dropout back as it was."""
        if self._mode is None:
            raise RuntimeError(
                f"{type(self.model).__name__} is not silent. Call "
                "on() first, or use `with silence(model):`."
            )
        mode, self._mode = self._mode, None
        self._stack.close()
        mode.report(type(self.model).__name__)

    def __enter__(self) -> Silence:
        return self.on()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            self.off()
        else:  # the error of the block is the one to see
            self._mode = None
            self._stack.close()

    def __repr__(self) -> str:
        state = "on: nothing drops" if self.active else "off: as the model has it"
        return f"Silence({type(self.model).__name__}, {state})"


def silence(model: nn.Module) -> Silence:
    """A switch that turns every dropout of a model off, functional ones too, and back on.

    Use it as a context, or keep it: `quiet = dampen.silence(reference).on()`, later `quiet.off()`.

    Args:
        model: any model, regularized or not.

    Returns:
        the switch, off until it is entered or `on()` is called.

    >>> model = nn.Dropout(0.5)
    >>> with silence(model):
    ...     model(torch.ones(3))
    tensor([1., 1., 1.])
    """
    return Silence(model)


def _silence_modules(model: nn.Module, mode: _Silence, stack: contextlib.ExitStack) -> None:
    """Rates at 0, regularizers off, and hooks that follow the forwards,
    until the stack is closed."""
    rates = [r for r in find_own(model) if r.rate > 0]
    mode.silenced = mode.silenced or bool(rates)
    for module in model.modules():
        site = vars(module).get("_dampen_model")
        if isinstance(site, ModelSite):
            stack.enter_context(site.holding("enabled", False))
            mode.silenced = True
    stack.callback(_restore, [(r, getattr(r.module, r.attribute)) for r in rates])
    for r in rates:
        setattr(r.module, r.attribute, 0.0)
    for module in model.modules():
        stack.callback(module.register_forward_pre_hook(mode.enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(mode.leave, always_call=True).remove)


def _restore(before: list[tuple[Any, Any]]) -> None:
    for r, value in before:
        setattr(r.module, r.attribute, value)


def _would_drop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout (input, p, training) would have dropped anything."""
    rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(
        rate > 0 and kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    )


class _Silence(TorchFunctionMode):
    """Turns functional dropout off, and remembers what else was drawn while the model ran."""

    def __init__(self, name: str, alone: bool = False) -> None:
        super().__init__()
        self.name = name
        self.alone = alone  # it works while the model runs, and not for what runs beside it
        self.silenced = False  # whether anything was random that is not now
        self.depth, self.gradients = 0, False  # forwards that run now, in all threads
        # of each thread, the modules whose forwards run
        self.running: dict[int, list[nn.Module]] = collections.defaultdict(list)
        self.checkpointed = self.recomputed = False
        self.drawn: set[str] = set()

    def enter(self, module: nn.Module, args: Any) -> None:
        """A forward of one of the model's modules starts.

        Inside `loss.backward()` the mode is off, for that is a torch function too: a checkpoint's
        recompute opens it again."""
        if torch.compiler.is_compiling():
            return
        modules = self.running[threading.get_ident()]
        if not modules:
            self.gradients = torch.is_grad_enabled()
            if self.alone or in_backward():
                self.__enter__()  # type: ignore[no-untyped-call]
        modules.append(module)
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """It has ended, or failed; where another hook failed before `enter`, it has not begun."""
        if torch.compiler.is_compiling():
            return
        modules = self.running[threading.get_ident()]
        if not modules or modules[-1] is not module:
            return
        modules.pop()
        self.depth -= 1
        if not modules and (self.alone or in_backward()):
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            self._look(func)
        if func in _DROPOUTS:
            self.silenced = self.silenced or _would_drop(args, kwargs)
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) < 5 else kwargs
            return func(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)
        if func in _TRAINING:
            bound = _TRAINING[func].bind(*args, **kwargs)
            bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Callable[..., Any]) -> None:
        if in_backward():
            self.recomputed = True
        elif torch.is_grad_enabled():
            self.checkpointed = self.checkpointed or checkpointing_now()
        elif (
            self.depth
            and self.gradients
            and (func in _DROPOUTS or func is F.scaled_dot_product_attention)
        ):
            self.checkpointed = (
                True  # reentrant checkpointing turns gradients off inside a forward that has them
            )
        if self.depth and getattr(func, "__name__", "") in _DRAWS:
            self.drawn.add(func.__name__)

    def report(self, name: str) -> None:
        """At the end: raise where a recompute would be random, warn of what was not silenced."""
        if self.checkpointed and self.silenced and not self.recomputed:
            raise RuntimeError(
                f"{name} ran under activation checkpointing inside "
                f"{self.name}, and its backward did not: it would "
                "run the forward again with everything random, and give "
                "wrong gradients. Put loss.backward() inside "
                "the with block, or run the forward under torch.no_grad() if no gradient is wanted."
            )
        if self.drawn:
            warnings.warn(
                f"{name} drew random numbers inside {self.name} by "
                f"{', '.join(sorted(self.drawn))}, in its own "
                "code, which is not dropout and was left as it is.",
                stacklevel=3,
            )
