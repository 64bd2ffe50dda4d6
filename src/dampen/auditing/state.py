"""The audit leaves everything as it was: modes, buffers, gradients, attributes,
hooks and generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import compiler_is_loaded, give_hooks, take_hooks


class Kept:
    """A model's state outside its parameters, which can be brought back any number of times.

    Args:
        model: any model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.buffers = [(b, b.detach().clone()) for b in model.buffers()]
        self.attributes = [(one, _outline(vars(one))) for one in _holders(model)]
        self.parameters: dict[int, tuple[Tensor, Tensor]] = {}
        self.storages = {_storage(p): p for p in model.parameters()}

    def before_write(self, tensor: Tensor) -> None:
        """Keep a parameter before something writes into it for the first time.

        Args:
            tensor: that is about to be changed in place.
        """
        parameter = self.storages.get(_storage(tensor))
        if parameter is not None and id(parameter) not in self.parameters:
            self.parameters[id(parameter)] = (parameter, parameter.detach().clone())

    def restore(self) -> None:
        """Bring everything back."""
        for one, outline in self.attributes:
            _restore(vars(one), outline)
        with torch.no_grad():
            for tensor, before in [*self.buffers, *self.parameters.values()]:
                if not _same_bits(tensor, before):
                    tensor.copy_(before)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Kept]:
    """Inside, a model may be run in any way. Afterwards it is what it was, to the bit.

    Args:
        model: any model.
    """
    kept = Kept(model)
    gradients = [(p, p.grad, take_hooks(p)) for p in model.parameters()]
    with ExitStack() as stack:
        stack.enter_context(generators_kept())
        stack.callback(kept.restore)
        for p, _, _ in gradients:
            p.grad = None
        stack.callback(_give_back, gradients)
        if compiler_is_loaded():  # else nothing is compiled, and to load it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield kept


def _give_back(gradients: list[tuple[nn.Parameter, Tensor | None, Any]]) -> None:
    for p, gradient, hooks in gradients:
        p.grad = gradient
        give_hooks(p, hooks)


@contextmanager
def generators_kept() -> Iterator[None]:
    """The global generators of torch, Python and numpy are afterwards what they were."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    before = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(before)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, Python and numpy.

    Args:
        seed: below 2 to the power of 32.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _holders(model: nn.Module) -> list[Any]:
    """Every module, and the objects that dampen keeps on them, whose attributes
    a forward may change."""
    found: dict[int, Any] = {id(m): m for m in model.modules()}
    new = list(found.values())
    while new:
        values = [v for one in new for v in vars(one).values()]
        values += [v for value in values if isinstance(value, list | tuple) for v in value]
        new = []
        for v in values:
            ours = type(v).__module__.startswith("dampen.") and hasattr(v, "__dict__")
            if ours and id(v) not in found:
                found[id(v)] = v
                new.append(v)
    return list(found.values())


def _outline(attributes: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Each attribute of a module: its name, the object, and a copy of its content where it can
    change in place."""
    return [(name, value, _content(name, value)) for name, value in attributes.items()]


def _content(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return list(value)
    return set(value) if isinstance(value, set) else None


def _restore(attributes: dict[str, Any], outline: list[tuple[str, Any, Any]]) -> None:
    """Set attributes back, in their order; what was not there is gone."""
    same = list(attributes) == [name for name, _, _ in outline]
    if not same or any(attributes[name] is not value for name, value, _ in outline):
        attributes.clear()
        attributes.update({name: value for name, value, _ in outline})
    for _, value, content in outline:
        if content is None:
            continue
        if isinstance(value, Tensor):
            if not _same_bits(value, content):
                with torch.no_grad():
                    value.copy_(content)
        elif isinstance(value, torch.Generator):
            value.set_state(content)
        elif isinstance(value, dict):
            if _is_other(list(value.items()), content):
                value.clear()
                value.update(content)
        elif isinstance(value, list) and _is_other(value, content):
            value[:] = content
        elif isinstance(value, set) and value != content:
            value.clear()
            value.update(content)


def _is_other(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold other objects. Equality is not used: tensors answer it elementwise."""
    if len(now) != len(before):
        return True
    pairs = zip(now, before, strict=True)
    if now and isinstance(now[0], tuple) and len(now[0]) == 2:
        return any(a[0] is not b[0] or a[1] is not b[1] for a, b in pairs)
    return any(a is not b for a, b in pairs)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, nested or functorch tensors have none
        return id(tensor)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    return bool(((a == b) | ((a != a) & (b != b))).all())
