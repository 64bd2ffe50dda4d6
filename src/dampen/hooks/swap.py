"""Class swap: give a live module another forward, as `parametrize` and FSDP2 do, and take it back.

The swapped class keeps its name, its signature and its place under `isinstance`, so that state_dict keys,
`save_pretrained` and code that inspects `forward` see the model they know."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from dampen.hooks.forwards import FORWARDS
from dampen.hooks.instance import give_back, own_forward, take_over

_classes: dict[tuple[type, str], type] = {}


def swap(module: nn.Module, kind: str, state: object) -> None:
    """Give `module` the forward of `kind` and keep `state` on it."""
    found = None if is_swapped(module) else own_forward(module)
    if (
        found is not None
    ):  # an instance attribute hides the class's forward: it becomes the first swap
        take_over(module, found)
        _push(module, "instance", found)
    _push(module, kind, state)


def _push(module: nn.Module, kind: str, state: object) -> None:
    setattr(module, f"_dampen_{kind}", state)
    # A wrapper would rename the keys of state_dict, a hook cannot stand in for what happens inside the forward, and a
    # forward set on the instance is copied by deepcopy still bound to the old module: a class has none of these faults
    module.__class__ = _swapped(type(module), kind)


def unswap(module: nn.Module) -> None:
    """Take back every swap of `module`."""
    while "_dampen_kind" in vars(type(module)):
        kind = type(module)._dampen_kind  # type: ignore[attr-defined]
        module.__class__ = type(module)._dampen_base  # type: ignore[attr-defined]
        state = vars(module).pop(f"_dampen_{kind}")
        if kind == "instance":
            give_back(module, state)


def pop(module: nn.Module, kind: str) -> None:
    """Take back the last swap of `module`, if it is of this kind; another on top (FSDP2) stays, and so does ours."""
    if vars(type(module)).get("_dampen_kind") == kind:
        module.__class__ = type(module)._dampen_base  # type: ignore[attr-defined]
        delattr(module, f"_dampen_{kind}")


def is_swapped(module: nn.Module) -> bool:
    """Whether any class of the module is ours."""
    return any("_dampen_kind" in vars(cls) for cls in type(module).__mro__)


def is_covered(module: nn.Module) -> bool:
    """Whether somebody else (FSDP2) has swapped the class on top of ours."""
    return is_swapped(module) and "_dampen_kind" not in vars(type(module))


def original_class(cls: type) -> type:
    """The class below our swaps."""
    while "_dampen_kind" in vars(cls):
        cls = cls._dampen_base  # type: ignore[attr-defined]
    return cls


def _swapped(base: type, kind: str) -> type:
    """One subclass per class and kind: a shared type means a shared compiled graph."""
    if (base, kind) not in _classes:
        forward: Any = base.forward  # type: ignore[attr-defined]
        made = FORWARDS[kind](forward)
        _classes[base, kind] = type(
            base.__name__,
            (base,),
            {
                "forward": functools.wraps(forward)(made),
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
                "__reduce_ex__": _reduce,
                "_dampen_base": base,
                "_dampen_kind": kind,
            },
        )
    return _classes[base, kind]


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and deepcopy by the original class and the list of swaps."""
    kinds = [
        vars(cls)["_dampen_kind"]
        for cls in reversed(type(self).__mro__)
        if "_dampen_kind" in vars(cls)
    ]
    reduced: Any = object.__reduce_ex__(self, protocol)
    state = reduced[2:]
    return (_revive, (original_class(type(self)), tuple(kinds)), *state)


def _revive(base: type, kinds: tuple[str, ...]) -> Any:
    for kind in kinds:
        base = _swapped(base, kind)
    return object.__new__(base)
