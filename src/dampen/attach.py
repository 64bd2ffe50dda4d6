"""Put clones of the regularizers into a model: which sites open, and what each keeps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dampen.prefix import Prefix, plan_prefix
from dampen.randomness import own_randomness
from dampen.regularizer import (
    ATTENTION_STAGES,
    BLOCK_STAGES,
    LINEAR_STAGES,
    MODEL_STAGES,
    Regularizer,
    Site,
)
from dampen.sites import LayerPlan, find_layers, is_cross
from dampen.socket import first_argument, model_input
from dampen.state import AttentionSite, BlockSite, Layer, LinearSite, ModelSite
from dampen.swap import is_swapped, swap


def check_model(model: Any) -> None:
    """Raise where a model cannot be regularized, saying the right order of things."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"regularize takes an nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("regularize cannot change a TorchScript module. Regularize the Python model instead.")
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(f"{where} is compiled already. Regularize first, then torch.compile(model).")
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ValueError(
                f"{where} is wrapped in {type(module).__name__} already. Regularize first, then wrap: "
                f"{type(module).__name__}(model)."
            )
        if any(c.__name__ in ("FSDPModule", "FullyShardedDataParallel") for c in type(module).__mro__):
            raise ValueError(f"{where} is sharded already. Regularize first, then fully_shard(model).")
        if is_swapped(module):
            raise ValueError(
                "the model is regularized already. Give all methods in one call, regularize(model, [a, b]), or "
                "reg.remove() first."
            )


def attach(
    model: nn.Module,
    methods: Sequence[Regularizer],
    sites: str | Sequence[str],
    attention: str,
    projections: Mapping[str, str] | None,
) -> tuple[list[Layer], list[Regularizer], Prefix]:
    """Clone the methods into every chosen layer and open the sites that they need. Nothing is changed if anything is
    wrong."""
    _check_methods(methods)
    plans = find_layers(model, sites, attention, projections)
    layered = [m for m in methods if m.stages - set(MODEL_STAGES)]
    whole = [m for m in methods if m.stages & set(MODEL_STAGES)]
    _check_plans(layered, plans)
    layers = [_layer(layered, plan, i, len(plans)) for i, plan in enumerate(plans)]
    own = [_clone(m, Site("")) for m in whole]
    clones = [c for layer in layers for c in layer.clones] + own
    for clone in clones:
        clone.prepare(model)
    _check_passes(methods, clones, model)
    comparing = any(m.passes > 1 for m in methods)
    everywhere = find_layers(model, projections=projections) if comparing else []
    prefix, blocks = plan_prefix(everywhere, {layer.site.name: layer.clones for layer in layers}, own)
    for plan, layer in zip(plans, layers, strict=True):
        _open(plan, layer)
        holder = next(
            iter(plan.attentions.values())
        )  # never a ModuleList or Sequential, which would count the newcomer
        here = [*layer.clones, *own] if layer is layers[0] else layer.clones
        holder.add_module("dampen_regularizers", nn.ModuleList(here))
        for clone in here:
            clone.train(holder.training)
    for block, place in blocks:
        swap(block, "prefix", place)
    swap(model, "model", ModelSite(clones, own, model_input(model)))
    return layers, clones, prefix


def _check_methods(methods: Sequence[Any]) -> None:
    if not methods:
        raise ValueError("regularize needs at least one regularizer, got an empty list.")
    for m in methods:
        if isinstance(m, type) and issubclass(m, Regularizer):
            raise TypeError(f"regularize takes regularizers, got the class {m.__name__}. Write {m.__name__}(...).")
        if not isinstance(m, Regularizer):
            raise TypeError(
                f"regularize takes regularizers such as DropKey(0.1), got {m!r} of type {type(m).__name__}."
            )
        if not m.stages:
            raise ValueError(f"{type(m).__name__} overrides no stage, so it would do nothing.")


def _check_passes(methods: Sequence[Regularizer], clones: Sequence[Regularizer], model: nn.Module) -> None:
    comparing = [m for m in methods if m.passes > 1]
    drawing = [c for c in clones if c.stochastic and c.passes == 1]
    if comparing and all(c.always_idle for c in drawing) and not own_randomness(model.named_modules()):
        name = type(comparing[0]).__name__
        beside = f"{drawing[0]} never drops anything" if drawing else "no stochastic method stands beside it"
        raise ValueError(
            f"{name} compares {comparing[0].passes} passes, but nothing is random in them: {beside} and "
            f"{type(model).__name__} has no dropout, so it would always be zero. Add one: "
            f"regularize(model, [DropKey(0.1), {name}(...)])."
        )


def _check_plans(methods: Sequence[Regularizer], plans: Sequence[LayerPlan]) -> None:
    for method in methods:
        for plan in plans:
            method.check_layer(plan.roles, plan.name)
            needed = sorted(method.stages & set(BLOCK_STAGES))
            if needed and plan.block is None:
                raise ValueError(
                    f"{type(method).__name__} acts on whole blocks (stage {', '.join(needed)}), but around the "
                    "attention "
                    f"'{next(iter(plan.attentions))}' no module is the block. Put attention and feed-forward of one "
                    "layer into one module."
                )


def _layer(methods: Sequence[Regularizer], plan: LayerPlan, index: int, total: int) -> Layer:
    site = Site(plan.name, index, total)
    chosen = [
        m for m in methods if index == 0 or m.stages != {"tokens"}
    ]  # what acts on the tokens sits in the first layer
    layer = Layer(site, [_clone(m, site) for m in chosen])
    for clone in layer.clones:
        clone.neighbors = [*plan.attentions.values(), *(linear.module for linear in plan.linears.values())]
    return layer


def _clone(method: Regularizer, site: Site) -> Regularizer:
    clone = copy.deepcopy(method)
    clone.place(site)
    return clone


def _open(plan: LayerPlan, layer: Layer) -> None:
    """Swap the classes of the modules that the layer's clones need to see."""
    stages = {s for c in layer.clones for s in c.stages}
    roles = {r for c in layer.clones for r in c.roles}
    linear_sites: dict[str, list[nn.Module]] = {name: [] for name in plan.attentions}
    for linear in plan.linears.values():
        if linear.role not in roles or (linear.attention is not None and linear.attention not in plan.attentions):
            continue
        swap(linear.module, "linear", LinearSite(layer, linear.role))
        if linear.attention is not None:
            linear_sites[linear.attention].append(linear.module)
    torch_maps = any(isinstance(m, nn.MultiheadAttention) for m in plan.attentions.values())  # it inlines its maps
    maps = roles & ({"q", "k", "v", "out"} if torch_maps else {"q", "k", "v"})
    if stages & set(ATTENTION_STAGES) or maps or any(c.needs_valid for c in layer.clones):
        for name, module in plan.attentions.items():
            swap(module, "attention", AttentionSite(layer, name, is_cross(name, module), linear_sites[name]))
    elif "branch" in stages:
        for module in plan.attentions.values():
            swap(module, "mark", layer)
    if plan.block is not None:
        wants_linear = bool(stages & set(LINEAR_STAGES)) and bool(roles & plan.roles)
        first = layer.site.index == 0
        swap(plan.block, "block", BlockSite(layer, first, plan.branches, wants_linear, first_argument(plan.block)))
