"""Models of Hugging Face that were loaded with `attn_implementation="eager"`: their training forward runs the library's
`sdpa` while a method looks into attention, where both compute the same; eval and the config never see it.

Whether both compute the same is read off the code of the eager function that the model's file brings: softmax(q k^T *
scale + bias + mask), dropout, the product with values, and nothing else. Capped scores, attention sinks, or an
attention whose own code does something of its own in `eager` (GPT-2 may reorder and upcast) are left alone, and so is a
model of which one part has no SDPA. The eager socket follows those as it follows any code.

A forward that needs the matrix of weights keeps `eager`: attentions that are asked for, a mask of heads, a user's hook
on an attention module. So does an attention that is called without its model, whose masks are those of `eager`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dampen._torch import forward_hooks, in_backward
from dampen.hooks.library_backend import WANTED, LibraryBackend, asked, configs_of, models_of
from dampen.hooks.source import names_any

if TYPE_CHECKING:
    from dampen.hooks.context import Layer

_PLAIN = set(  # what the code of an eager function may name: anything else might be more than SDPA computes
    "repeat_kv num_key_value_groups head_dim torch nn functional F matmul transpose softmax float32 to type dtype "
    "dropout training contiguous size shape hasattr getattr".split()
)
_ARGUMENTS = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
_NEEDS_MATRIX = ("output_attentions", "head_mask", "decoder_head_mask", "cross_attn_head_mask")


class EagerBackend(LibraryBackend):
    """The configs of one model that ask for `eager`, and `sdpa` during the training forwards that can take it."""

    def __init__(self, model: nn.Module, configs: Sequence[Any], layers: Sequence[Layer]) -> None:
        super().__init__(configs, ["sdpa"] * len(configs), layers)
        self.staying = 0  # forwards under way that keep eager
        self.took_sdpa = False  # whether the last forward of the model did: a checkpoint's recompute must do the same
        self.watched = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
        self.places = {_name(m): _places(m) for m in models_of(model)}

    def run_model(
        self, base: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """The outermost forward decides for those inside it."""
        if not self.wanted(module):
            return base(module, *args, **kwargs)
        if self.under_way or not (self.staying or self._leave_alone(module, args, kwargs)):
            self.took_sdpa = True
            return self.run(base, module, *args, **kwargs)
        self.staying += 1
        self.took_sdpa = False
        try:
            return base(module, *args, **kwargs)
        finally:
            self.staying -= 1

    def run_attention(
        self, base: Callable[..., Any], module: nn.Module, where: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Inside its model the configs have been switched, or not; alone its masks are eager ones."""
        alone = not torch.compiler.is_compiling() and not self.under_way and not self.staying
        if alone and self.took_sdpa and in_backward() and self.wanted(module):
            return self.run(base, module, *args, **kwargs)
        return base(module, *args, **kwargs)

    def _leave_alone(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether this forward must be left alone: somebody wants more of its attention than the result."""
        given = [kwargs.get(name) for name in _NEEDS_MATRIX]
        given += [args[i] for i in self.places.get(_name(module), ()) if i < len(args)]
        if any(x is not None and x is not False for x in given):
            return True
        if any(c.output_attentions or getattr(c, WANTED) != "eager" for c in self.configs):
            return (
                True  # asked for by the config, or no longer eager: the user has changed it since
            )
        return any(forward_hooks(m, not_of="transformers.") for m in self.watched)

    def describe(self) -> str:
        return (
            "'eager' runs as 'sdpa' in training forwards; it stays where weights of attention are asked for, by "
            "output_attentions=True or a forward hook"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "staying": 0}


def find_eager(
    model: nn.Module, attentions: Mapping[str, nn.Module], layers: Sequence[Layer]
) -> EagerBackend | None:
    """The switch of a model that was loaded with `eager`, where every attention of it computes what `sdpa` computes."""
    configs = [config for config in configs_of(model) if getattr(config, WANTED) == "eager"]
    if not any(asked(m) == "eager" for m in attentions.values()):
        return None
    looking_up = [
        m
        for m in model.modules()
        if any(vars(m).get("config") is c for c in configs)
        and not hasattr(type(m), "set_attn_implementation")
        and names_any(type(m), {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"})
    ]
    known = {id(m) for m in looking_up}
    supported = all(getattr(type(m), "_supports_sdpa", False) for m in models_of(model))
    every = all(id(m) in known for m in attentions.values() if asked(m) == "eager")
    if (
        not supported
        or not every
        or not all(_same_in_sdpa(cls) for cls in {type(m) for m in looking_up})
    ):
        return None
    return EagerBackend(model, configs, layers)


def _same_in_sdpa(cls: type) -> bool:
    """Whether an attention looks its back end up, and the library's `eager` and `sdpa` do the same for it."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType):
        return False
    forward = inspect.unwrap(forward)
    registry, eager = (
        forward.__globals__.get(n) for n in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward")
    )
    named = set(forward.__code__.co_names)
    if registry is None or not isinstance(eager, FunctionType):
        return False
    sdpa = registry["sdpa"]
    if not named >= {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"} or "eager" in _texts(
        forward.__code__
    ):
        return False
    if not getattr(sdpa, "__module__", "").startswith("transformers."):
        return False  # a user's own
    allowed = _ARGUMENTS | ({"position_bias"} & set(inspect.signature(sdpa).parameters))
    return (
        set(inspect.signature(eager).parameters) <= allowed
        and set(eager.__code__.co_names) <= _PLAIN
    )


def _texts(code: CodeType) -> set[str]:
    """The strings among the constants of a code, also inside tuples."""
    flat = [x for c in code.co_consts for x in (c if isinstance(c, tuple) else (c,))]
    return {x for x in flat if isinstance(x, str)}


def _name(module: nn.Module) -> str:
    """A class by name: the swapped one has the name of the one below it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _places(module: nn.Module) -> list[int]:
    """Where the arguments that need the matrix stand among positional ones."""
    names = list(inspect.signature(module.forward).parameters)
    return [names.index(name) for name in _NEEDS_MATRIX if name in names]
