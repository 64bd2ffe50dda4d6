"""The handle that a user's training function gets, instrumented; the baseline's does nothing.

It measures step times, checks the loss, and raises where a stop was requested. The model's forward
draws from a stream of its own, so a loader that shuffles with the global generator sees the same
numbers in every configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dampen.deprecated import accepts_old_arguments
from dampen.handle import Handle
from dampen.hooks.builtin_dropout import OwnRate, choose_own, find_own, sampling_own
from dampen.schedules import as_schedule, check_progress, per_layer
from dampen.studies.trainer.data import derive


class RandomStream:
    """A stream of random numbers for the model's forward: inside, the global generator has this
    stream's state.

    Swapping the state of the global generator, rather than drawing from a private one, keeps
    activation checkpointing right: it saves and restores what it finds."""

    def __init__(self, seed: int):
        self.seed = derive(seed, "forward")
        self.states: dict[str, Tensor] = {}
        self.outside: dict[str, Tensor] = {}
        self.device: torch.device | None = None
        self.depth = 0

    def enter(self) -> None:
        """From now on the model draws from its own stream."""
        self.depth += 1
        if self.depth == 1:
            for name in self._devices():
                self.outside[name] = _get(name)
                _set(name, self.states.setdefault(name, _fresh(name, self.seed)))

    def leave(self) -> None:
        """Back to the global stream, as if nothing had been drawn."""
        self.depth -= 1
        if self.depth == 0:
            for name, state in self.outside.items():
                self.states[name] = _get(name)
                _set(name, state)
            self.outside = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def attach(self, model: nn.Module) -> list[Any]:
        """Enter and leave around each forward of the model; returns the hooks, to be removed."""
        first = next(model.parameters(), None)
        self.device = first.device if first is not None else None
        before = model.register_forward_pre_hook(self._before, prepend=True)
        after = model.register_forward_hook(self._after, always_call=True)
        return [before, after]

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if (
            not torch.compiler.is_compiling()
        ):  # a compiled model is entered by reg.loss, outside of its graph
            self.enter()

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self.depth:
            self.leave()

    def _devices(self) -> list[str]:
        on_gpu = self.device is not None and self.device.type == "cuda"
        return ["cpu", str(self.device)] if on_gpu else ["cpu"]


def _get(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state(device)


def _set(device: str, state: Tensor) -> None:
    torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)


def _fresh(device: str, seed: int) -> Tensor:
    return torch.Generator(device).manual_seed(seed).get_state()


class Clock:
    """Times of training steps, taken between calls of one kind: of progress, loss or penalty,
    whichever came most.
    """

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.last: dict[str, tuple[float, float]] = {}
        self.paused = (0.0, 0.0)

    def mark(self, kind: str) -> None:
        """A call of this kind: the time since the one before is a step's."""
        now = (time.perf_counter() - self.paused[0], time.process_time() - self.paused[1])
        if kind in self.last:
            before = self.last[kind]
            self.times.setdefault(kind, []).append((now[0] - before[0], now[1] - before[1]))
        self.last[kind] = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that dampen spends here is not part of a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.paused = (
                self.paused[0] + time.perf_counter() - wall,
                self.paused[1] + time.process_time() - cpu,
            )

    @property
    def count(self) -> int:
        """Steps begun: one more than there are times between them."""
        return len(self.steps()) + 1 if self.last else 0

    def steps(self) -> list[tuple[float, float]]:
        """(wall, processor) seconds of each step."""
        return max(self.times.values(), key=len, default=[])


class Observer:
    """Receives from a handle that a step of some kind was done, and the terms of the loss."""

    def __init__(
        self,
        stream: RandomStream,
        clock: Clock,
        step: Callable[[float | None, Mapping[str, Tensor] | None], None],
    ):
        self.stream, self.clock, self.step = stream, clock, step


class InstrumentedHandle(Handle):
    """The handle of a configuration with methods: its base class, reporting to the trial."""

    observer: Observer
    hooks: list[Any]

    def progress(self, t: float) -> None:
        super().progress(t)
        if "observer" in self.__dict__:  # the first call comes from the constructor
            self.observer.clock.mark("progress")
            self.observer.step(float(t), None)

    def loss(
        self, forward: Callable[[], Any], criterion: Callable[[Any], Tensor], **options: Any
    ) -> Any:
        self.observer.clock.mark("loss")
        with self.observer.stream.inside():
            loss, terms = super().loss(forward, criterion, **options)
        self.observer.step(None, terms)
        return loss, terms

    def penalties(self) -> dict[str, Tensor]:
        self.observer.clock.mark("penalties")
        terms = super().penalties()
        self.observer.step(None, terms)
        return terms

    @contextmanager
    def averaged(self, loader: Iterable[Any] | None = None) -> Iterator[None]:
        """Nothing changes in a configuration without WeightAverage: one script serves all."""
        if all(c.averaged_weights() is None for c in self.clones):
            yield
            return
        with super().averaged(loader):
            yield

    def remove(self) -> None:
        super().remove()
        _unhook(self)


def instrument(handle: Handle, observer: Observer) -> InstrumentedHandle:
    """Make a handle report to its trial.

    Args:
        handle: of the configuration's methods.
        observer: receives steps and loss terms.
    """
    handle.__class__ = InstrumentedHandle
    assert isinstance(handle, InstrumentedHandle)  # by the line above
    handle.observer, handle.hooks = observer, observer.stream.attach(handle.model)
    return handle


class BaselineHandle(Handle):
    """The handle of the baseline: the same methods as `Handle`, and the model is left as it
    is.

    Nothing is inherited but the type: there is no site in the model that the real one's methods
    could look at."""

    def __init__(self, model: nn.Module, observer: Observer):
        self.model, self.methods, self.layers, self.clones = model, [], [], []
        self.observer, self.hooks = observer, observer.stream.attach(model)
        self.start, self.anchoring = None, False
        self._progress, self._removed = 0.0, False
        self._rates: list[OwnRate] = []  # the model's own drop rates that were set here

    def _alive(self) -> None:
        if self._removed:
            raise RuntimeError(
                "this regularization was removed from its model. Call trial.regularize again."
            )

    passes = 1

    def progress(self, t: float) -> None:
        self._alive()
        self._progress = check_progress(t)
        for r in self._rates:
            r.at(self._progress)
        self.observer.clock.mark("progress")
        self.observer.step(float(t), None)

    def loss(
        self, forward: Callable[[], Any], criterion: Callable[[Any], Tensor], **options: Any
    ) -> Any:
        self._alive()
        self.observer.clock.mark("loss")
        with self.observer.stream.inside():
            task = criterion(forward())
        terms = {"task": task}
        self.observer.step(None, terms)
        return task, terms

    def penalties(self) -> dict[str, Tensor]:
        self._alive()
        self.observer.clock.mark("penalties")
        self.observer.step(None, {})
        return {}

    def penalty(self) -> Tensor:
        self.penalties()
        first = next(self.model.parameters(), None)
        return torch.zeros((), device=first.device if first is not None else None)

    def parameters(self) -> list[nn.Parameter]:
        return []

    def attach_optimizer(self, optimizer: Any) -> None:
        self._alive()

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self._progress, "parameters": {}, "methods": []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state["methods"]):
            raise ValueError(
                f"the state is of the methods {list(state['methods'])}, but this is the baseline."
            )
        self._progress = float(state["progress"])

    @torch.no_grad()
    def mc_average(
        self, forward: Callable[[], Any], samples: int = 16, logits: Any = None
    ) -> Tensor:
        if samples < 1:
            raise ValueError(f"mc_average needs at least one sample, got {samples}.")

        def probabilities() -> Tensor:
            found = forward() if logits is None else logits(forward())
            chances: Tensor = getattr(found, "logits", found).softmax(-1)
            return chances

        with self.mc_mode():
            return torch.stack([probabilities() for _ in range(samples)]).mean(0)

    def builtin_dropout(self, target_modules: str | Sequence[str] = "*") -> list[OwnRate]:
        self._alive()
        known = {(id(r.module), r.attribute): r for r in self._rates}
        rates = [known.get((id(r.module), r.attribute), r) for r in find_own(self.model)]
        return rates if target_modules == "*" else choose_own(rates, target_modules)

    @accepts_old_arguments
    def set_builtin_dropout(
        self, rate: Any, target_modules: str | Sequence[str] = "*"
    ) -> list[OwnRate]:
        """As in `Handle`; this model has no layers that dampen knows, so a schedule may not vary
        with depth.

        Args:
            rate: a number, or a schedule over training.
            target_modules: pattern(s) of names or kinds.
        """
        rates = self.builtin_dropout()
        chosen = choose_own(rates, target_modules)
        schedule = as_schedule(rate, "reg.set_builtin_dropout(rate=...)")
        if isinstance(schedule, per_layer) or any(
            schedule(0.0, t / 8) != schedule(1.0, t / 8) for t in range(9)
        ):
            raise ValueError(
                "reg.set_builtin_dropout(rate=...) on the baseline takes a number or a schedule "
                "over training: without regularizers the layers of the model are not looked for, "
                "so that a rate cannot vary with depth."
            )
        for r in chosen:
            r.schedule = schedule
            r.at(self._progress)
        self._rates = [r for r in rates if r.schedule is not None]
        return chosen

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    @contextmanager
    def at_start(self) -> Iterator[None]:
        raise self._no_start("reg.at_start()")
        yield

    @contextmanager
    def interpolate(self, alpha: float) -> Iterator[None]:
        raise self._no_start("reg.interpolate(alpha)")
        yield

    def _no_start(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what} needs the starting weights, and the baseline keeps none. Copy them in your "
            "training function before it trains, so that every method is treated alike."
        )

    @contextmanager
    def averaged(self, loader: Iterable[Any] | None = None) -> Iterator[None]:
        yield

    @contextmanager
    def mc_mode(self) -> Iterator[None]:
        with sampling_own(self.model):
            yield

    def kernels(self) -> dict[str, str]:
        return {}

    def remove(self) -> None:
        self._alive()
        _unhook(self)
        for r in self._rates:
            r.restore()
        self._removed = True

    def __repr__(self) -> str:
        return f"baseline: no regularizers in {type(self.model).__name__}"


def _unhook(handle: Any) -> None:
    for hook in handle.hooks:
        hook.remove()
    handle.hooks = []
