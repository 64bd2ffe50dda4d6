"""What becomes of penalties: they wait in slots on the clones until they are taken, and are never lost in silence.

A penalty that is made and not added to the loss changes nothing, and nothing looks wrong. So one parameter of each
layer that makes penalties is watched: if a backward pass reaches it while penalties wait, they were left out of the
loss, and the next training forward says so. (A hook on a parameter is the one thing that works alike in eager mode,
inside a compiled graph, under checkpointing and in DDP; a hook on an activation ends a graph.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dampen._torch import own_parameter

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer


_MAIN = threading.main_thread().ident


class Ledger:
    """The penalties of one regularized model: which wait, and whether a backward went past them."""

    def __init__(self, model: nn.Module | None, clones: Iterable[Regularizer], strict: bool) -> None:
        self.model, self.clones, self.strict = model, list(clones), strict
        for clone in self.clones:
            clone.ledger = self
        comparing = next((c for c in self.clones if c.passes > 1), None)
        self.comparing = "" if comparing is None else type(comparing).__name__
        self.fresh()

    def fresh(self) -> None:
        """Nothing has happened yet."""
        self.askers: list[str] = []  # threads inside `reg.loss`, which takes what its forwards make, whatever the mode
        self.inside: list[str] = []  # threads inside the model's own forward
        self.gradients = False  # the model's forward is under way, and was entered with gradients on
        self.outside = False  # a training forward that a two-pass method should have seen ran outside `reg.loss`
        self.alarm = False  # whether `passed` has anyone in it; alone, because a graph is guarded by what it reads
        self.passed: set[str] = set()  # the threads whose backward went past penalties, or past a two-pass method
        self.hooks: dict[int, tuple[nn.Parameter, RemovableHandle]] = {}

    # --- while a forward runs ---------------------------------------------------------------------------------------

    def counts(self, clone: Regularizer) -> bool:
        """Whether a penalty that is being made is to be kept: in training, with gradients, or where it was asked
        for."""
        if self.asked():
            return True
        if not clone.training:
            return False
        if not torch.is_grad_enabled():  # reentrant checkpointing turns gradients off inside a forward that has them
            clone.lost = clone.lost or self.gradients or clone.input_has_gradient
            return False
        self.check()
        if not torch.compiler.is_compiling():
            self.watch(clone)
        return True

    def keeps_nothing(self) -> bool:
        """Whether no penalty of the model's forward under way would be kept: it has no gradients (`generate`), and
        `reg.loss` did not ask for it."""
        return not torch.is_grad_enabled() and not self.gradients and self.is_inside() and not self.asked()

    def enter(self, training: bool, input_has_gradient: bool = False) -> None:
        """The model's own forward starts; `leave` ends it, whatever happens. An input with a gradient
        under `no_grad` is a reentrant checkpoint's around the whole model."""
        self._start(training)
        self.gradients = torch.is_grad_enabled() or input_has_gradient
        self.inside.append(owner())

    def leave(self) -> None:
        """The model's own forward has ended."""
        self.inside.pop()
        self.gradients = False

    def enter_block(self, training: bool) -> None:
        """The first block starts, perhaps without the model's forward."""
        if not self.is_inside():
            self._start(training)

    def is_inside(self) -> bool:
        """Whether this thread is inside the model's own forward."""
        return owner() in self.inside

    def _start(self, training: bool) -> None:
        if training and torch.is_grad_enabled() and not self.asked():
            self.check()
            if self.comparing:
                self.outside = True

    def check(self) -> None:
        """Raise in the first training forward after a backward that went past penalties."""
        if self.alarm and self.strict and owner() in self.passed:
            why = self._why()
            self.forget()
            raise RuntimeError(why)

    def _why(self) -> str:
        end = "If it is meant, say so: dampen.regularize(..., strict=False)."
        if self.outside:
            return (
                f"{self.comparing} compares two passes, but the last training step called the model outside reg.loss, "
                "so it did nothing. Let the handle run both passes: "
                f"loss, terms = reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y)). {end}"
            )
        names = ", ".join(sorted({name_of(key) for c in self.clones for key in list(c._penalties)})) or "none now"
        return (
            f"a backward pass ran through the model while its penalties ({names}) had not been taken, so "
            "they were not in the loss. Write loss = task + reg.penalty() before loss.backward(), or loss, "
            "terms = reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y)). A copy of a model "
            f"has no handle: copy.deepcopy(reg) copies both, dampen.remove(copy) makes it plain. {end}"
        )

    # --- waiting, taken, forgotten ----------------------------------------------------------------------------------

    def taken(self) -> None:
        """The penalties were taken: whatever backward went past them before, they are in the user's hands now."""
        self.outside = False
        if self.alarm:
            self.passed &= self._waiting()
            self.alarm = bool(self.passed)

    def _waiting(self) -> set[str]:
        """The threads whose penalties wait, as far as they could change the training."""
        return {owner_of(key) for c in self.clones for key, value in list(c._penalties.items()) if value.requires_grad}

    def forget(self) -> None:
        """Drop what waits in this thread, after an error: its step is over."""
        for clone in self.clones:
            clone.drop_penalties()
            clone.lost = False
        self.taken()

    def asked(self) -> bool:
        """Whether this thread is inside `reg.loss`."""
        return bool(self.askers) and (torch.compiler.is_compiling() or owner() in self.askers)

    def asking(self) -> Asking:
        """Inside `reg.loss`: what the forwards make is counted under `no_grad` and in eval too, for it is taken."""
        return Asking(self)

    # --- watching the backward --------------------------------------------------------------------------------------

    def watch(self, clone: Regularizer) -> None:
        """Have a parameter of the clone's layer tell when a backward reaches it. Cheap where one is watched already.

        Looked for anew where it was frozen or replaced meanwhile (LoRA; FSDP2 has its own inside a forward)."""
        if not self.strict:
            return
        if clone.watched is not None:
            module, name, parameter = clone.watched
            if parameter.requires_grad and own_parameter(module, name) is parameter:
                return
        clone.watched = _first_trained(clone.neighbors) or _first_trained([] if self.model is None else [self.model])
        if clone.watched is not None:
            parameter = clone.watched[2]
            if id(parameter) not in self.hooks:
                self.hooks[id(parameter)] = parameter, parameter.register_post_accumulate_grad_hook(self.saw_backward)

    def saw_backward(self, parameter: Tensor) -> None:
        """A backward has reached a watched parameter."""
        waiting = self._waiting()
        if parameter.device.type == "cpu":
            waiting &= {owner()}  # there a backward runs in the thread that called it; elsewhere in one of torch's own
        if self.outside:
            waiting.add(owner())
        self.passed |= waiting
        self.alarm = bool(self.passed)

    def unwatch(self) -> None:
        """Take the hooks away."""
        for _, handle in self.hooks.values():
            handle.remove()
        self.hooks = {}
        for clone in self.clones:
            clone.watched = None

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "clones": self.clones, "strict": self.strict, "comparing": self.comparing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.fresh()  # a copy has a step of its own; its parameters come without hooks
        for clone in self.clones:  # a clone does not carry its ledger along: a copy of one block would copy the model
            clone.ledger = self


class Asking:
    """A thread inside `reg.loss`; what an error leaves is forgotten."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.me = ledger, owner()

    def __enter__(self) -> None:
        self.ledger.outside = False
        self.ledger.askers.append(self.me)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self.ledger.forget()
        finally:
            self.ledger.askers.remove(self.me)


def owner() -> str:
    """Whose penalties: "" is the main thread, and a compiled graph, which knows no thread."""
    if torch.compiler.is_compiling() or threading.get_ident() == _MAIN:
        return ""
    return str(threading.get_ident())


def slot(name: str) -> str:
    """Where a penalty waits until it is taken: one place per name, and per thread where there are several."""
    me = owner()
    return f"{name}@{me}" if me else name


def name_of(key: str) -> str:
    """The name of the penalty in a slot."""
    return key.partition("@")[0]


def owner_of(key: str) -> str:
    """The thread that a slot belongs to."""
    return key.partition("@")[2]


def makes_penalties(clone: Regularizer) -> bool:
    """Whether the code of a method mentions `penalize`."""
    return class_penalizes(type(clone))


def class_penalizes(method: type) -> bool:
    """Whether the code of a class mentions `penalize`."""
    functions = (f for cls in method.__mro__ if not _is_base(cls) for f in vars(cls).values())
    return any("penalize" in getattr(getattr(f, "__code__", None), "co_names", ()) for f in functions)


def _is_base(cls: type) -> bool:
    return cls.__module__ == "dampen.regularizer" or not cls.__module__ or cls.__module__.startswith("torch.")


def _first_trained(modules: Iterable[nn.Module]) -> tuple[nn.Module, str, nn.Parameter] | None:
    for module in modules:
        for inner in module.modules():
            for name, p in inner.named_parameters(recurse=False):
                if p.requires_grad and p.is_leaf:
                    return inner, name, p
    return None
