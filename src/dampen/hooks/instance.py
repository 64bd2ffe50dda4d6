"""A `forward` of a module's own, as an instance attribute: it hides the class's, and with it every socket.

Accelerate's hooks (`dispatch_model`, `device_map="auto"`, offloading) are set that way, and so are many a user's
wrappers. They are entered: under Accelerate's hook, which moves inputs and weights first, where there is one; around a
wrapper otherwise. Where a socket stands in for the forward instead of running it (linear maps whose operands change,
`nn.MultiheadAttention`), a wrapper would be passed over, so it is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from torch import nn


class InstanceForward(NamedTuple):
    """What was found on a module: the attribute's name, and the callable in it."""

    attribute: str
    forward: Callable[..., Any]


def own_forward(module: nn.Module) -> InstanceForward | None:
    """The forward that a module has as an instance attribute, if any; below Accelerate's hook, if there is one."""
    own = vars(module)
    if "forward" not in own:
        return None
    name = "_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"
    return InstanceForward(name, own[name])


def take_over(module: nn.Module, found: InstanceForward) -> None:
    """Let a call of the module reach its class again, which calls what was found."""
    if found.attribute == "forward":
        del module.forward
    else:
        object.__setattr__(module, found.attribute, functools.partial(_class_forward, module))


def give_back(module: nn.Module, found: InstanceForward) -> None:
    """The instance attribute as it was."""
    object.__setattr__(module, found.attribute, found.forward)


def instance_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a class whose instance had one of its own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dampen_instance.forward(*args, **kwargs)

    return forward


def check_own_forward(module: nn.Module, name: str) -> None:
    """Raise where a socket that stands in for the forward would pass over one that the user has put there."""
    found = own_forward(module)
    if found is None or _is_of_the_class(module, found.forward):
        return
    raise ValueError(
        f"'{name}' ({type(module).__name__}) has a forward of its own, an instance attribute "
        f"(a wrapper: {getattr(found.forward, '__qualname__', type(found.forward).__name__)}), "
        "which a regularizer here would pass over. Write it as a subclass or a forward hook, "
        "take it off (del module.forward), or leave its layer out with target_modules=."
    )


def _is_of_the_class(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether an instance attribute is the class's own forward, bound (what Accelerate leaves behind)."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )


def _class_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)
