"""The dropout that a model brings itself: where it is, at which rate, and how the handle sets and samples it.

Modules that drop (nn.Dropout, drop path, stochastic depth) and rates that a module keeps as a number and uses in its
own forward (`attention_dropout` of Hugging Face, `dropout` of nn.MultiheadAttention, `layerdrop`)."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dampen._torch import DropoutModule
from dampen.regularizer import Regularizer
from dampen.schedules import Schedule, check_value

if TYPE_CHECKING:
    from dampen.hooks.context import Layer

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
        """Set what the schedule says. A number that stays is not set again: a compiled graph is guarded by it."""
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
    """Whether the code of a class reads an attribute outside its constructor; timm keeps `drop_rate` as a record."""
    functions = (
        f
        for base in cls.__mro__
        if base is not nn.Module
        for name, f in vars(base).items()
        if name not in ("__init__", "extra_repr") and isinstance(f, FunctionType)
    )
    return any(attribute in f.__code__.co_names for f in functions)


def own_rates(model: nn.Module, known: Sequence[OwnRate]) -> list[OwnRate]:
    """Every drop rate of the model's own; those that were set already with what they were before."""
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
    """One line per kind, rate and family of places ("blocks.*.attn_drop"); those at 0 only counted."""
    groups: dict[tuple[str, str, str], int] = {}
    for r in rates:
        if r.rate > 0:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", r.name)
            key = r.kind, f"{r.rate:.3g}", pattern
            groups[key] = groups.get(key, 0) + 1
    lines = [
        f"  (own)  {kind} {rate}: {where}{f' (x{n})' if n > 1 else ''}"
        for (kind, rate, where), n in groups.items()
    ]
    silent = sum(r.rate == 0 for r in rates)
    return [*lines, f"  (own)  {silent} more at rate 0"] if silent else lines


# --- Monte-Carlo sampling in eval


class SampledSite:
    """What is kept on a module whose own dropout acts in eval too."""

    def __init__(self) -> None:
        self.on = False
        self.flipped = False  # the module believes to be in training at this moment

    def __getstate__(self) -> dict[str, Any]:
        return {"on": False, "flipped": False}  # a copy made inside `mc_mode` is a plain one


def sampled_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that drops, in training mode by itself; its children stay as they are."""

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
    """torch.nn's encoder layers have a fused eval path that calls none of their modules, and so no dropout."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
