"""Probes: observers in every layer of any model, plain or regularized, that leave no trace.

A probe is a regularizer that changes nothing and writes down what its stages see. It does not go
through `regularize`, because the model may be regularized already: where a site is open the probe
joins the clones there, where none is it opens one for the time of the measurement."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dampen.diagnostics.predictions import device_of, in_mode
from dampen.hooks.builtin_dropout import no_fast_path
from dampen.hooks.context import AttentionSite, BlockSite, Layer
from dampen.hooks.discover.roles import weight_of
from dampen.hooks.discover.sites import LayerPlan, find_layers, is_cross
from dampen.hooks.model import first_argument
from dampen.hooks.patch import swap
from dampen.regularizer import ATTENTION_STAGES, BLOCK_STAGES, Regularizer, Site, in_order

__all__ = [
    "LayerPlan",
    "Probe",
    "batch_first",
    "call",
    "in_float64",
    "is_cross",
    "map_tensors",
    "probed",
    "unwrapped",
    "valid_tokens",
    "weight_of",
]


class Probe(Regularizer):
    """Base of all probes: acts in eval, draws nothing."""

    in_eval = True
    stochastic = False


P = TypeVar("P", bound=Probe)


@contextmanager
def probed(model: nn.Module, make: Callable[[], P]) -> Iterator[list[tuple[LayerPlan, P]]]:
    """Put one probe into every layer; afterwards model, modes, random state and regularizers are
    what they were.

    The body runs the model in eval mode. A compiled model runs eagerly.

    Args:
        model: any model that returns logits; left as it was.
        make: makes the probe of one layer.
    """
    plans = find_layers(model)
    device = device_of(model)
    with ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        )
        stack.enter_context(in_mode(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_kept(model))
        stack.enter_context(no_fast_path())
        probes = []
        for i, plan in enumerate(plans):
            probe = make()
            probe.place(Site(plan.name, i, len(plans)))
            stack.enter_context(_inserted(plan, probe))
            probes.append((plan, probe))
        yield probes


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile`'s wrapper.

    Args:
        model: any model that returns logits; left as it was.
    """
    return getattr(model, "_orig_mod", model)


def in_float64(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """A copy of the model in float64, and inputs to match: small singular values survive there.

    Args:
        model: any model that returns logits; left as it was.
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
    """
    doubled = map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t)
    return copy.deepcopy(unwrapped(model)).double(), doubled


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model on a tensor, a tuple (positional) or a mapping (keywords).

    Args:
        model: any model that returns logits; left as it was.
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def map_tensors(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same inputs with every tensor changed.

    Args:
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
        change: applied to each tensor.
    """
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {k: map_tensors(v, change) for k, v in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(map_tensors(v, change) for v in inputs)
    return inputs


def valid_tokens(inputs: Any) -> Tensor | None:
    """(B, N) bool, False on padding, where the inputs say so as Hugging Face's do.

    Args:
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.bool()
    return None


def batch_first(plan: LayerPlan) -> bool:
    """Whether tokens come as (B, N, D); torch.nn's layers take (N, B, D) by default.

    Args:
        plan: one layer that `find_layers` found.
    """
    return all(
        m.batch_first for m in plan.attentions.values() if isinstance(m, nn.MultiheadAttention)
    )


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """What a forward leaves behind in regularizers that are attached already."""
    clones = [m for m in model.modules() if isinstance(m, Regularizer)]
    layers = {
        id(layer): layer for m in model.modules() if (layer := _layer_of(m)) is not None
    }.values()
    before = [(c, c._penalties, c.input_has_gradient, c.ledger) for c in clones]
    kernels = [(layer, dict(layer.kernels)) for layer in layers]
    for clone in clones:
        # nothing consumes what a probe's forward makes
        clone._penalties, clone.ledger = {}, None
    try:
        yield
    finally:
        for clone, penalties, gradient, ledger in before:
            clone._penalties, clone.input_has_gradient, clone.ledger = penalties, gradient, ledger
        for layer, ran in kernels:
            layer.kernels = ran


@contextmanager
def _inserted(plan: LayerPlan, probe: Probe) -> Iterator[None]:
    """The probe among the clones of its layer, and the sites open that it needs."""
    if plan.block is None and probe.stages & set(BLOCK_STAGES):
        raise ValueError(
            f"around the attention '{next(iter(plan.attentions))}' no module is the block, so its "
            "residual branches "
            "cannot be seen. Put attention and feed-forward of one layer into one module."
        )
    found = [_layer_of(m) for m in (plan.block, *plan.attentions.values()) if m is not None]
    layer = next((one for one in found if one is not None), None) or Layer(
        probe.site or Site(plan.name), []
    )
    clones, enabled = layer.clones, layer.enabled
    layer.attentions = layer.attentions or list(plan.attentions)
    opened: list[tuple[nn.Module, str]] = []
    try:
        # Inside reg.disable() the probe is alone.
        layer.clones, layer.enabled = [*(clones if enabled else []), probe], True
        layer.ordered = in_order(layer.clones)
        for module, kind, state in _needed(plan, probe, layer):
            swap(module, kind, state)
            opened.append((module, kind))
        yield
    finally:
        for module, kind in reversed(opened):
            module.__class__ = type(module)._dampen_base  # type: ignore[attr-defined]
            delattr(module, f"_dampen_{kind}")
        layer.clones, layer.enabled, layer.ordered = clones, enabled, in_order(clones)


def _needed(plan: LayerPlan, probe: Probe, layer: Layer) -> Iterator[tuple[nn.Module, str, object]]:
    """The sites that the probe's stages need and that are not open yet."""
    for name, module in plan.attentions.items():
        open_already = hasattr(module, "_dampen_attention")
        if probe.stages & set(ATTENTION_STAGES) and not open_already:
            yield module, "attention", AttentionSite(layer, name, is_cross(name, module), [])
        elif "branch" in probe.stages and not open_already and not hasattr(module, "_dampen_mark"):
            yield module, "mark", layer
    if (
        plan.block is not None
        and probe.stages & set(BLOCK_STAGES)
        and not hasattr(plan.block, "_dampen_block")
    ):
        first = layer.site.index == 0
        yield (
            plan.block,
            "block",
            BlockSite(layer, first, plan.branches, False, first_argument(plan.block)),
        )


def _layer_of(module: nn.Module) -> Layer | None:
    """The layer of a module that has a site, if it has one."""
    for kind in ("block", "attention", "mark"):
        site = getattr(module, f"_dampen_{kind}", None)
        if site is not None:
            layer: Layer = site if isinstance(site, Layer) else site.layer
            return layer
    return None
