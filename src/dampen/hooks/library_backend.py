"""Back ends of Hugging Face's attention registry that hide the scores, flex_attention and the flash_attention family:
the training forward runs another entry of the same registry, one that has a socket, where a method needs a mask by
query or the matrix of scores. For methods on queries, keys, values, head outputs and whole keys the back end stays, and
the attention wraps its entry (`flash.py`). flex_attention keeps its padding in a BlockMask, which no method reads: it
stays for head outputs and whole keys. A graph of torch.compile always switches, because it cannot trace the wrapping.

Which entry a model takes stands in its config, and it decides twice: the model prepares its masks for it, and each
attention looks it up. So it is switched around the whole forward of the library's model, which then builds the masks of
the new back end itself (causal, padding, sliding windows, packed sequences), and given back afterwards: eval and the
config never see it. A recompute of activation checkpointing runs an attention alone, with the masks of its forward, so
there each attention is switched by itself.

The entry taken is `sdpa`; `eager` where the attention hands something to the registry that SDPA has no place for (a cap
on scores, attention sinks). flex_attention and flash run on CUDA, and nothing here was tried on one: the tests stand in
for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dampen._torch import in_backward
from dampen.hooks.context import sees_attention
from dampen.hooks.flash import RegistryEntry, fits_widened
from dampen.kernels.attend import reads_apart
from dampen.regularizer import Regularizer, needs_matrix

if TYPE_CHECKING:
    from dampen.hooks.context import Layer

WANTED = "_attn_implementation_internal"  # of a config of transformers; its property would set those below it too
_ONLY_EAGER = {"softcap", "s_aux"}


def is_hidden(implementation: object) -> bool:
    """Whether an entry of the registry computes attention where no socket can open."""
    return isinstance(implementation, str) and (
        implementation == "flex_attention" or "flash" in implementation
    )


class LibraryBackend:
    """The configs of one model that ask for a hidden back end, and what they ask for during a training forward."""

    def __init__(
        self, configs: Sequence[Any], instead: Sequence[str], layers: Sequence[Layer]
    ) -> None:
        self.configs, self.instead, self.layers = list(configs), list(instead), list(layers)
        self.before = [getattr(config, WANTED) for config in configs]
        self.under_way = (
            0  # forwards that have it switched; another thread may be in the same model
        )
        self.wrapped = False  # whether every attention's entry of the registry can be wrapped
        self.widens = False  # whether more channels of q and k can hide keys there

    def wanted(self, module: nn.Module) -> bool:
        """Whether a method at work in this forward needs another back end."""
        at_work = [layer.active(module) for layer in self.layers]
        if not any(sees_attention(r) for active in at_work for r in active):
            return False
        return torch.compiler.is_compiling() or not self.stays(at_work)

    def stays(self, at_work: Iterable[Sequence[Regularizer]]) -> bool:
        """Whether methods can act while the model's own back end runs.

        Args:
            at_work: the methods of each layer.
        """
        return self.wrapped and all(
            not reads_apart(active, dropout=True) and all(self._acts_around(r) for r in active)
            for active in at_work
        )

    def _acts_around(self, r: Regularizer) -> bool:
        """Whether a method needs nothing from inside the attention."""
        if needs_matrix([r]) or r.takes_jacobian:
            return False
        if "mask" in r.stages:
            return self.widens and not r.per_query
        flex = any("flex" in name for name in self.before)  # its padding is in a BlockMask
        return not flex or not (r.needs_valid or "qkv" in r.stages)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward during which the configs ask for a back end with a socket; they ask for their own again once no
        forward needs the other any more."""
        if self.under_way == 0:  # not what they asked for once: a user may have changed it since
            self.before = [getattr(config, WANTED) for config in self.configs]
        self.under_way += 1
        try:
            self._ask(self.instead)
            return forward(*args, **kwargs)
        finally:
            self.under_way -= 1
            if self.under_way == 0:
                self._ask(self.before)

    def _ask(self, names: Sequence[str]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            setattr(config, WANTED, name)

    def run_model(
        self, base: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a model of the library, which prepares masks."""
        return (
            self.run(base, module, *args, **kwargs)
            if self.wanted(module)
            else base(module, *args, **kwargs)
        )

    def run_attention(
        self, base: Callable[..., Any], module: nn.Module, where: str, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of an attention: inside its model's forward, or in a checkpoint's recompute."""
        if not self.wanted(module):
            return base(module, *args, **kwargs)
        self._check(module, where, (*args, *kwargs.values()))
        return self.run(base, module, *args, **kwargs)

    def _check(self, module: nn.Module, where: str, arguments: Sequence[Any]) -> None:
        """Raise where an attention got masks that another back end prepared, which would be read wrongly."""
        foreign = next((type(a).__name__ for a in arguments if type(a).__name__ == "BlockMask"), "")
        alone = not self.under_way and not in_backward()
        if foreign or alone:
            happened = f"got a {foreign}" if foreign else "was called without the model around it"
            raise RuntimeError(
                f"{type(module).__name__} at '{where}' {happened}, so its masks are those of '{self.before[0]}', a back "
                "end that regularizers cannot look into. Call the model itself, which prepares the masks of SDPA in "
                "training, or load it with attn_implementation='sdpa'."
            )

    def describe(self) -> str:
        """What is switched, in words."""
        pairs = dict.fromkeys(zip(self.before, self.instead, strict=True))
        if self.stays([layer.clones for layer in self.layers]):
            return "; ".join(
                f"'{a}' stays in training forwards: no method needs a mask by query or the matrix. In a graph of "
                f"torch.compile it runs as '{b}'"
                for a, b in pairs
            )
        return "; ".join(
            f"'{a}' runs as '{b}' in training forwards, where attention can be entered"
            for a, b in pairs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "under_way": 0}


def find_backend(
    model: nn.Module, attentions: Mapping[str, nn.Module], layers: Sequence[Layer]
) -> LibraryBackend | None:
    """The hidden back ends of a model's attentions."""
    hidden = [config for config in configs_of(model) if is_hidden(getattr(config, WANTED))]
    if not any(is_hidden(asked(m)) for m in attentions.values()):
        return None
    instead = [_instead(model, config, attentions.values()) for config in hidden]
    backend = LibraryBackend(hidden, instead, layers)
    entries = {name: _entry(m) for name, m in attentions.items() if is_hidden(asked(m))}
    backend.wrapped = all(e is not None for e in entries.values())
    backend.widens = all(b == "sdpa" for b in instead) and all(
        fits_widened(getattr(m, "head_dim", 0), getattr(m, "num_key_value_groups", 1))
        for m in attentions.values()
    )
    for name, entry in entries.items():
        site = vars(attentions[name]).get("_dampen_attention")
        if site is not None and entry is not None and backend.wrapped:
            site.entries.append(entry)
    return backend


def _entry(attention: nn.Module) -> RegistryEntry | None:
    """The entry of the registry that an attention looks up, where it is there."""
    for cls in type(attention).__mro__:
        forward = vars(cls).get("forward")
        if not isinstance(forward, FunctionType):
            continue
        space = inspect.unwrap(forward).__globals__
        registry = space.get("ALL_ATTENTION_FUNCTIONS")
        if registry is not None and hasattr(registry, "_global_mapping"):
            name = str(asked(attention))
            return RegistryEntry(space["__name__"], name) if name in registry else None
    return None


def models_of(model: nn.Module) -> list[nn.Module]:
    """The library's models inside a model, which prepare masks for their attentions."""
    return [m for m in model.modules() if hasattr(type(m), "set_attn_implementation")]


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of transformers that a model holds, those below them too."""
    known: dict[int, Any] = {}
    for module in model.modules():
        _collect(vars(module).get("config"), known)
    return list(known.values())


def asked(attention: nn.Module) -> object:
    """The entry of the registry that an attention looks up."""
    return getattr(vars(attention).get("config"), WANTED, None)


def _collect(config: Any, known: dict[int, Any]) -> None:
    """A config of transformers and those below it."""
    if not hasattr(config, WANTED) or id(config) in known:
        return
    known[id(config)] = config
    for name in getattr(config, "sub_configs", {}):
        _collect(getattr(config, name, None), known)


def _instead(model: nn.Module, config: Any, attentions: Any) -> str:
    """The entry of the registry that takes everything these attentions hand over and has a socket."""
    classes = {type(m) for m in attentions if vars(m).get("config") is config}
    owners = [
        m
        for m in model.modules()
        if vars(m).get("config") is config and hasattr(type(m), "_supports_sdpa")
    ]
    fits = all(getattr(type(m), "_supports_sdpa", False) for m in owners)
    return (
        "sdpa" if fits and not any(_hands_over(cls) & _ONLY_EAGER for cls in classes) else "eager"
    )


def _hands_over(cls: type) -> set[str]:
    """The keywords that the code of a class's forward calls others with."""
    forward = inspect.getattr_static(cls, "forward", None)
    code = inspect.unwrap(forward).__code__ if isinstance(forward, FunctionType) else None
    constants = () if code is None else code.co_consts
    return {name for c in constants if isinstance(c, tuple) for name in c if isinstance(name, str)}


def backend_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model of the library whose back end is switched."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dampen_backend.run_model(base, self, *args, **kwargs)

    return forward


def hidden_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention in such a model."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, where = self._dampen_hidden
        return backend.run_attention(base, self, where, *args, **kwargs)

    return forward
