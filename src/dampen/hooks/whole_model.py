"""The forward of the whole model: the stage `inputs`, and the penalties that wait until they are taken."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from dampen._torch import is_empty, refuse_nested
from dampen.containers import tensors_in
from dampen.hooks.blame import add_blame
from dampen.hooks.context import ModelSite, close_frame, open_frame
from dampen.hooks.determinism import deterministic
from dampen.hooks.optimizer import check_attached
from dampen.masks import memories
from dampen.regularizer import Regularizer

_DATA = (
    "pixel_values",
    "images",
    "image",
    "x",
    "input",
    "inputs",
    "input_values",
    "input_features",
    "input_ids",
    "src",
)


TRACED = (
    "torch.jit.trace cannot record a model in training mode whose regularizers are on: it would keep the choices of "
    "one step for all others. Call model.eval() first, trace inside `with reg.disable():`, or use torch.compile."
)


def model_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the whole model, with the stage inputs open. Penalties wait until they are taken; an error ends
    the step that they belong to."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = self._dampen_model.doubled
        if doubled is None or torch.compiler.is_compiling() or not doubled.turn:
            return once(self, *args, **kwargs)
        return doubled.run(self, partial(once, self), partial(base, self), silent, args, kwargs)

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: ModelSite = self._dampen_model
        for r in site.own:
            if "inputs" in r.stages and site.acts(r, self.training):
                args, kwargs = apply_inputs(self, site, r, args, kwargs)
        # whether a graph is made is asked first: it would depend on what is asked before that
        if not torch.compiler.is_compiling():
            if self.training and site.enabled and torch.jit.is_tracing():
                raise RuntimeError(TRACED)
            if site.stepping and self.training and site.enabled and torch.is_grad_enabled():
                check_attached(self, site)
            if site.order is not None and not site.order.known:
                site.order.start()
        trained = not torch.is_grad_enabled() and any(
            t.requires_grad for t in tensors_in((args, kwargs))
        )
        site.ledger.enter(self.training and site.enabled, trained)
        if site.padding is not None:
            site.padding.start()
        frames = [(layer, open_frame(layer)) for layer in site.blockless if layer.enabled]
        if not torch.compiler.is_compiling():
            memories.setdefault(threading.get_ident(), []).append(None)
        try:
            out = base(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                site.check_reached()
            return out
        except BaseException as error:  # an aborted forward leaves no penalty for the next one
            site.ledger.forget()
            add_blame(error)
            raise
        finally:
            site.ledger.leave()
            if not torch.compiler.is_compiling():
                opened = memories[threading.get_ident()]
                opened.pop()
                if not opened:
                    del memories[threading.get_ident()]
            for layer, frame in frames:
                close_frame(layer, frame)

    return forward


@contextlib.contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    """Inside, nothing in the model is random; what draws in its own code is found by its draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deterministic(model):
            yield


def apply_inputs(
    self: Any, site: ModelSite, r: Regularizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model with the stage `inputs` of a regularizer applied to its data."""
    name, i = site.input_name, site.input_position
    given = args[i] if len(args) > i else kwargs.get(name)
    if isinstance(given, torch.Tensor):
        refuse_nested(given, f"{type(r).__name__} at the input '{name}'")
        if is_empty(given):
            return args, kwargs
    if given is not None and len(args) > i:
        return (*args[:i], r.inputs(given), *args[i + 1 :]), kwargs
    if given is not None:
        return args, {**kwargs, name: r.inputs(given)}
    raise RuntimeError(
        f"{type(r).__name__} acts on the input '{name}' of {type(self).__name__}, but the model was "
        f"called without it (got {len(args)} positional arguments, keywords {sorted(kwargs)}), so it "
        f"would do nothing. Call the model with '{name}', or remove {type(r).__name__}."
    )


def model_input(module: nn.Module) -> tuple[str, int]:
    """Which argument of a model's forward is the data, by the usual names, else the first: its name and position."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    name = next((n for n in _DATA if n in names), first_argument(module))
    return name, names.index(name) if name in names else 0


def first_argument(module: nn.Module) -> str:
    """The name of the first argument of a module's forward."""
    names = [
        n
        for n, p in inspect.signature(type(module).forward).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    ]
    return names[1] if len(names) > 1 else ""
