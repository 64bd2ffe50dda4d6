"""Put regularizers into a live model, and take them off again.

`attach` opens the sites that the methods need, `swap` gives a module another forward, `remove`
restores the model. A swapped class keeps its name, its signature and its place under `isinstance`,
so that state_dict keys, `save_pretrained` and code that inspects `forward` see the model they know.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dampen.hooks.attention import attention_forward, mark_forward
from dampen.hooks.block import block_forward, linear_forward, open_subsets, subset_forward
from dampen.hooks.builtin_dropout import sampled_forward
from dampen.hooks.context import (
    AttentionSite,
    BlockSite,
    EntrySite,
    Layer,
    LinearSite,
    ModelSite,
    entry_forward,
)
from dampen.hooks.discover.depth import Order, sites_of
from dampen.hooks.discover.layer import LinearPlan
from dampen.hooks.discover.roles import connect_adapters, is_lora, kind_of, weight_of
from dampen.hooks.discover.sites import (
    FEED_FORWARD,
    ROLES_OF_ATTENTION,
    LayerPlan,
    find_layers,
    is_cross,
    is_keyless,
    parts_of,
)
from dampen.hooks.discover.source import calls_socket, shows_no_softmax
from dampen.hooks.experts import (
    ExpertsSite,
    check_experts,
    eager_experts_forward,
    experts_forward,
    is_dispatched,
)
from dampen.hooks.library_backends import (
    backend_forward,
    find_backend,
    find_eager,
    flash_functions,
    hidden_forward,
    models_of,
)
from dampen.hooks.model import (
    carrier_forward,
    embedding_forward,
    find_embeddings,
    first_argument,
    mask_forward,
    model_forward,
    model_input,
    open_embeddings,
    open_padding,
)
from dampen.hooks.residual import (
    OwnerSite,
    PartSite,
    owner_forward,
    owner_of,
    part_forward,
    parts_with_forward,
)
from dampen.names import leave_out
from dampen.regularizer import (
    ADAPTERS,
    ATTENTION_STAGES,
    BLOCK_STAGES,
    LINEAR_STAGES,
    MODEL_STAGES,
    Regularizer,
    Site,
    UnsupportedModel,
)
from dampen.schedules import always_zero
from dampen.two_pass.doubled import own_randomness
from dampen.two_pass.reuse import SharedBlocks, plan_prefix, prefix_forward

# --- a forward set on the instance
#
# A `forward` of a module's own, as an instance attribute: it hides the class's, and with it
# every socket.
#
# Accelerate's hooks (`dispatch_model`, `device_map="auto"`, offloading) are set that way, and
# so are many a user's wrappers. They are entered: under Accelerate's hook, which moves inputs
# and weights first, where there is one; around a wrapper otherwise. Where a hook replaces
# for the forward instead of running it (linear maps whose operands change,
# `nn.MultiheadAttention`), a wrapper would be passed over, so it is refused.


class InstanceForward(NamedTuple):
    """What was found on a module: the attribute's name, and the callable in it."""

    attribute: str
    forward: Callable[..., Any]


def own_forward(module: nn.Module) -> InstanceForward | None:
    """The forward that a module has as an instance attribute, if any; below Accelerate's hook, if
    there is one."""
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
    """Raise where a hook that replaces the forward would skip one that the user has installed."""
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
    """Whether an instance attribute is the class's own forward, bound (what
    Accelerate leaves behind)."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )


def _class_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


# --- the forward of each kind of site

FORWARDS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "attention": attention_forward,
    "mark": mark_forward,
    "subset": subset_forward,
    "linear": linear_forward,
    "block": block_forward,
    "prefix": prefix_forward,
    "embedding": embedding_forward,
    "mask": mask_forward,
    "experts": experts_forward,
    "eager_experts": eager_experts_forward,
    "owner": owner_forward,
    "part": part_forward,
    "model": model_forward,
    "instance": instance_forward,
    "entry": entry_forward,
    "sampled": sampled_forward,
    "carrier": carrier_forward,
    "backend": backend_forward,
    "hidden": hidden_forward,
}


# --- class swap

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
    # A wrapper would rename the keys of state_dict, a hook cannot stand in for what happens inside
    # the forward, and a forward set on the instance is copied by deepcopy still bound to the old
    # module: a class has none of these faults
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
    """Take back the last swap of `module`, if it is of this kind; another on top (FSDP2) stays, and
    so does ours."""
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


# --- attach


def check_model(model: Any) -> None:
    """Raise where a model cannot be regularized, saying the right order of things."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"regularize takes an nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "regularize cannot change a TorchScript module. Regularize the Python model instead."
        )
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ValueError(
                f"{where} is compiled already. Regularize first, then torch.compile(model)."
            )
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ValueError(
                f"{where} is wrapped in "
                f"{type(module).__name__} already. Regularize first, then wrap: "
                f"{type(module).__name__}(model)."
            )
        if any(
            c.__name__ in ("FSDPModule", "FullyShardedDataParallel") for c in type(module).__mro__
        ):
            raise ValueError(
                f"{where} is sharded already. Regularize first, then fully_shard(model)."
            )
        if is_swapped(module):
            raise ValueError(
                "the model is regularized already. Give all methods in one "
                "call, regularize(model, [a, b]), or reg.remove() first."
            )


def attach(
    model: nn.Module,
    methods: Sequence[Regularizer],
    sites: str | Sequence[str],
    attention: str,
    projections: Mapping[str, str] | None,
    depth: str = "stack",
) -> tuple[list[Layer], list[Regularizer], SharedBlocks]:
    """Clone the methods into every chosen layer and open the sites that they need. Nothing is
    changed if anything is wrong."""
    _check_methods(methods)
    methods = [_inspected(m, model) for m in methods]
    plans = find_layers(model, sites, attention, projections, whole_stacks=True)
    layered = [m for m in methods if m.stages - set(MODEL_STAGES)]
    whole = [m for m in methods if m.stages & set(MODEL_STAGES)]
    _check_plans(layered, plans, _readable_adapters(model))
    sites_by_layer = sites_of([plan.name for plan in plans], depth)
    layers = [_layer(layered, plan, site) for plan, site in zip(plans, sites_by_layer, strict=True)]
    own = [_clone(m, Site("")) for m in whole]
    clones = [c for layer in layers for c in layer.clones] + own
    _check_zeros(methods, clones, len(layers))
    for clone in clones:
        clone.prepare(model)
    embedded = [c for c in own if "embeddings" in c.stages]
    embeddings = find_embeddings(model) if embedded else {}
    _check_passes(methods, clones, model)
    comparing = any(m.passes > 1 for m in methods)
    everywhere = find_layers(model, projections=projections, whole_stacks=True) if comparing else []
    prefix, blocks = plan_prefix(
        everywhere, {layer.site.name: layer.clones for layer in layers}, own
    )
    for plan, layer in zip(plans, layers, strict=True):
        _check_modules(plan, layer)
    for plan, layer in zip(plans, layers, strict=True):
        _open(plan, layer)
        # never a ModuleList or Sequential, which would count the newcomer
        holder = next(m for m in (*plan.attentions.values(), plan.block) if m is not None)
        here = [*layer.clones, *own] if layer is layers[0] else layer.clones
        holder.add_module("dampen_regularizers", nn.ModuleList(here))
        for clone in here:
            clone.train(holder.training)
    _open_owners(model, plans, layers)
    for block, place in blocks:
        swap(block, "prefix", place)
    blockless = [layer for plan, layer in zip(plans, layers, strict=True) if plan.block is None]
    whole_model = ModelSite(clones, own, model_input(model), blockless)
    whole_model.layers, whole_model.order = layers, Order(layers, depth)
    whole_model.doubled = prefix.doubled if comparing else None
    for module, kind, state in open_embeddings(model, embeddings, embedded, whole_model):
        swap(module, kind, state)
    if any("inputs" in c.stages or c.passes > 1 for c in own):
        entry = EntrySite()
        whole_model.watch_entry(entry)
        swap(plans[0].block or next(iter(plans[0].attentions.values())), "entry", entry)
    whole_model.padding = open_padding(model, layers)
    _switch_library(model, plans, layers)
    swap(model, "model", whole_model)
    connect_adapters(model)
    return layers, clones, prefix


def _switch_library(model: nn.Module, plans: Sequence[LayerPlan], layers: Sequence[Layer]) -> None:
    """Where a library computes attention behind a back end without a socket, or by itself although
    it has a better one, switch it in training forwards."""
    attentions = {name: m for plan in plans for name, m in plan.attentions.items()}
    backend = find_backend(model, attentions, layers) or find_eager(model, attentions, layers)
    if backend is None:
        return
    for name, module in attentions.items():
        swap(module, "hidden", (backend, name))
    for module in models_of(model):
        swap(module, "backend", backend)


def _check_methods(methods: Sequence[Any]) -> None:
    if not methods:
        raise ValueError("regularize needs at least one regularizer, got an empty list.")
    for m in methods:
        if isinstance(m, type) and issubclass(m, Regularizer):
            example = ", ".join(f"{k}={v}" for k, v in m.example.items())
            raise TypeError(
                "regularize takes regularizers, got the class "
                f"{m.__name__}. Write {m.__name__}({example})."
            )
        if not isinstance(m, Regularizer):
            raise TypeError(
                "regularize takes regularizers such as "
                f"DropKey(0.1), got {m!r} of type {type(m).__name__}."
            )
        if not m.stages:
            raise ValueError(f"{type(m).__name__} overrides no stage, so it would do nothing.")
        if m.does_nothing:
            name, arguments = type(m).__name__, ", ".join(f"{k}={v}" for k, v in m.example.items())
            raise ValueError(
                f"{name}() would do nothing: everything that it can act on is left at 0 or off. "
                f"Say what it should act on, for example {name}({arguments or '...'})."
            )


def _check_zeros(
    methods: Sequence[Regularizer], clones: Sequence[Regularizer], layers: int
) -> None:
    """Raise where a schedule over depth leaves nothing of a method, as DropPath's default in a
    model of one layer. A method that was requested at 0 is a baseline, and `print(reg)` says so."""
    for m in methods:
        placed = [c for c in clones if c.name == m.name]
        meant = [
            n
            for n, s in m.schedules.items()
            if not all(always_zero(s, depth) for depth in (0.0, 0.5, 1.0))
        ]
        if placed and meant and all(c.idle_forever for c in placed):
            deepest = max(c.site.depth for c in placed if c.site is not None)
            raise ValueError(
                f"{type(m).__name__}({meant[0]}={m.schedules[meant[0]]}) "
                f"would do nothing: on the {layers} layer(s) "
                "chosen, whose depths run from 0 to "
                f"{deepest:.3g}, it is 0 for the whole of training. "
                "Give a number, as in "
                f"{type(m).__name__}({meant[0]}=0.1), or a list with one value per layer."
            )


def _check_passes(
    methods: Sequence[Regularizer], clones: Sequence[Regularizer], model: nn.Module
) -> None:
    weighing = [m for m in methods if m.pass_weights() is not None]
    for m in weighing:
        others = [o for o in methods if o is not m and (o in weighing or o.passes > m.passes)]
        if others:
            raise ValueError(
                f"{type(m).__name__} weighs the task losses of its {m.passes} passes, and "
                f"{others[0]} beside it needs {others[0].passes} passes without these weights. "
                "Leave one of the two out."
            )
    comparing = [m for m in methods if m.passes > 1 and not m.stochastic]
    drawing = [c for c in clones if c.stochastic and c.passes == 1]
    if (
        comparing
        and all(c.always_idle for c in drawing)
        and not own_randomness(model.named_modules())
    ):
        name = type(comparing[0]).__name__
        beside = (
            f"{drawing[0]} never drops anything" if drawing else "no stochastic method was given"
        )
        raise ValueError(
            f"{name} compares {comparing[0].passes} passes, but "
            f"nothing is random in them: {beside} and "
            f"{type(model).__name__} has no dropout, so it would always be zero. Add one: "
            f"regularize(model, [DropKey(0.1), {name}(...)])."
        )


def _readable_adapters(model: nn.Module) -> set[int]:
    """The maps whose low-rank adapters can be read (peft's), by the ids of
    the two modules of each."""
    layers = [m for m in model.modules() if is_lora(m)]
    return {id(part) for m in layers for parts in (m.lora_A, m.lora_B) for part in parts.modules()}  # type: ignore[union-attr]


def _check_plans(
    methods: Sequence[Regularizer], plans: Sequence[LayerPlan], readable: set[int]
) -> None:
    found = {role for plan in plans for role in plan.roles}
    for method in methods:
        suitable = [plan for plan in plans if plan.reached(method)] or plans
        if "attention" in parts_of(method) and not any(plan.has_softmax for plan in plans):
            raise UnsupportedModel(
                f"{type(method).__name__} finds nothing to act "
                "on: the attention of every layer chosen "
                f"('{plans[0].name}') has no softmax over tokens "
                "(it is of channels, linear or deformable)."
            )
        if parts_of(method) == {"blocks"} and all(plan.pools for plan in plans):
            raise UnsupportedModel(
                f"{type(method).__name__} finds nothing to act "
                "on: the attention of every layer chosen "
                f"('{plans[0].name}') only pools tokens, without a residual."
            )
        for plan in suitable:
            if "feed-forward" in parts_of(method):
                check_experts(method, plan.experts, plan.name)
            known = {
                p.role
                for p in plan.linears.values()
                if p.role.startswith("lora_") and id(p.module) in readable
            }
            roles = plan.roles - known if method.reads_adapters else plan.roles
            if (
                not plan.has_softmax
            ):  # what only an attention has is not missed in a layer without one
                roles |= ROLES_OF_ATTENTION & (found | {"q", "k", "v"})
            if (
                not plan.roles & FEED_FORWARD
            ):  # nor a feed-forward in a layer that has none, if others have
                roles |= FEED_FORWARD & found
            method.check_layer(roles, plan.name)
            # of a layer that is no module, the branches can be seen, but not
            # what goes in and comes out
            needed = sorted(
                method.stages
                & (set(BLOCK_STAGES) - {"branch"} if plan.elements else set(BLOCK_STAGES))
            )
            if needed and plan.block is None:
                raise ValueError(
                    f"{type(method).__name__} acts on whole blocks "
                    f"(stage {', '.join(needed)}), but around the "
                    f"attention '{next(iter(plan.attentions))}' no module is the block. "
                    "Put attention and feed-forward of one layer into one module."
                )


def _layer(methods: Sequence[Regularizer], plan: LayerPlan, site: Site) -> Layer:
    index = site.index
    # what acts on the tokens sits in the first layer
    chosen = [
        m
        for m in methods
        if "before_step" in m.stages or ((index == 0 or m.stages != {"tokens"}) and plan.reached(m))
    ]
    layer = Layer(site, [_clone(m, site) for m in chosen])
    layer.attentions = list(plan.attentions)
    layer.tells_padding = bool(plan.attentions) and plan.has_softmax
    layer.reached = {m.name: plan.reached(m) for m in chosen}
    around = [*plan.attentions.values(), *(linear.module for linear in plan.linears.values())]
    for clone in layer.clones:
        clone.neighbors = around or [m for m in (plan.block,) if m is not None]
        clone.linears = [(m.module, m.side or m.role) for m in plan.linears.values()]
        others = [
            c
            for c in layer.clones
            if c is not clone and not c.only_reads and c.stages & set(LINEAR_STAGES)
        ]
        clone.changed_maps = frozenset(role for c in others for role in c.roles)
    return layer


def _inspected(method: Regularizer, model: nn.Module) -> Regularizer:
    """A copy that has looked at the model, to make the clones from."""
    copied = copy.deepcopy(method)
    copied.inspect_model(model)
    return copied


def _clone(method: Regularizer, site: Site) -> Regularizer:
    clone = copy.deepcopy(method)
    clone.place(site)
    return clone


def _check_modules(plan: LayerPlan, layer: Layer) -> None:
    """Raise where a module of the layer cannot be opened although the code of the
    model does not show it."""
    for name, linear in _wanted_linears(plan, layer).items():
        check_own_forward(linear.module, name)
        weight = weight_of(linear.module)
        if not weight.is_floating_point():
            readers = [c for c in layer.clones if c.roles & {linear.role, linear.side}]
            raise ValueError(
                f"'{name}' ({type(linear.module).__name__}) keeps its "
                f"weight as {weight.dtype} (a quantized load), "
                "which is not the matrix that it multiplies with, and "
                f"{', '.join(type(c).__name__ for c in readers)} would read it as one. "
                f"Load the model without quantization, or {leave_out(plan.name)}."
            )
    looking = [c for c in layer.clones if c.stages & set(ATTENTION_STAGES)]
    for name, module in plan.attentions.items():
        if isinstance(module, nn.MultiheadAttention):
            check_own_forward(module, name)
        elif (
            looking
            and not is_keyless(module)
            and not calls_socket(module)
            and shows_no_softmax(module)
        ):
            raise UnsupportedModel(
                f"{type(looking[0]).__name__} acts inside softmax attention, "
                f"but the code of {type(module).__name__} "
                f"at '{name}' has no softmax and calls no "
                "attention of torch (is it linear attention?). "
                f"If so, {leave_out(name)}."
            )


def _wanted_linears(plan: LayerPlan, layer: Layer) -> dict[str, LinearPlan]:
    """The linear maps of a layer that its clones observe."""
    roles = {r for c in layer.clones for r in c.roles}
    return {
        name: linear
        for name, linear in plan.linears.items()
        if roles & {linear.role, linear.side}
        and (linear.attention is None or linear.attention in plan.attentions)
    }


def _open(plan: LayerPlan, layer: Layer) -> None:
    """Swap the classes of the modules that the layer's clones need to see."""
    stages = {s for c in layer.clones for s in c.stages}
    roles = {r for c in layer.clones for r in c.roles}
    linear_sites: dict[str, list[nn.Module]] = {name: [] for name in plan.attentions}
    for linear in _wanted_linears(plan, layer).values():
        swap(
            linear.module,
            "linear",
            LinearSite(layer, linear.side or linear.role, kind_of(linear.module), linear.expert),
        )
        if linear.attention is not None:
            linear_sites[linear.attention].append(linear.module)
    torch_maps = any(
        isinstance(m, nn.MultiheadAttention) for m in plan.attentions.values()
    )  # it inlines its maps
    maps = roles & ({"q", "k", "v", "out"} if torch_maps else {"q", "k", "v"})
    if stages & set(ATTENTION_STAGES) or maps or any(c.needs_valid for c in layer.clones):
        for name, module in plan.attentions.items():
            if is_keyless(module):
                layer.kernels[name] = "left out (no softmax over tokens)"
                swap(module, "mark", layer)
                continue
            layer.kernels[name] = (
                ""  # nothing ran yet; a place that appears in the first step would compile it twice
            )
            site = AttentionSite(layer, name, is_cross(name, module), linear_sites[name])
            site.flash = flash_functions(module)
            inside = [m for m in plan.linears.values() if m.attention == name]
            site.adapters = [m.module for m in inside if m.side]
            swap(module, "attention", site)
    elif "branch" in stages:
        for module in plan.attentions.values():
            swap(module, "mark", layer)
    for module in plan.mixers if "branch" in stages else ():
        swap(module, "mark", layer)
    if stages & set(LINEAR_STAGES) and roles & FEED_FORWARD:
        _open_experts(plan, layer)
    for module, state in open_subsets(plan, layer):
        swap(module, "subset", state)
    if plan.block is not None:
        # adapters may be switched off or merged: then their maps do not run
        wanted = roles & plan.roles - ADAPTERS
        wants_linear = bool(stages & set(LINEAR_STAGES)) and bool(wanted)
        first = layer.site.index == 0
        swap(
            plan.block,
            "block",
            BlockSite(layer, first, plan.branches, wants_linear, first_argument(plan.block)),
        )


def _open_experts(plan: LayerPlan, layer: Layer) -> None:
    """Watch the modules of a layer that route tokens to experts, and have these run one by one."""
    for experts in plan.experts.values():
        for owner in experts.owners.values():
            if is_dispatched(owner):
                swap(owner, "eager_experts", layer)
        swap(experts.router, "experts", ExpertsSite(layer, experts))


def _open_owners(model: nn.Module, plans: Sequence[LayerPlan], layers: Sequence[Layer]) -> None:
    """Follow the modules that run layers which are no modules, where a method
    acts on their branches."""
    owners: dict[str, OwnerSite] = {}
    for plan, layer in zip(plans, layers, strict=True):
        if not plan.elements or not any("branch" in c.stages for c in layer.clones):
            continue
        name = owner_of(model, plan.name)
        if name not in owners:
            owners[name] = OwnerSite(name)
            swap(model.get_submodule(name), "owner", owners[name])
        owners[name].layers.append((layer, "ffn_out" in plan.roles))
        for element in plan.elements:
            for part in parts_with_forward(model.get_submodule(element)):
                swap(part, "part", PartSite(layer, name))


# --- remove


def remove(model: nn.Module) -> None:
    """Take every regularizer off `model`, which is then exactly what it was: for a deepcopy or a
    loaded file, whose handle is gone. Where the handle is at hand, `reg.remove()` does the same.

    Args:
        model: a regularized model.

    Raises:
        TypeError: `model` is not an nn.Module.
        ValueError: it carries no regularizers.

    >>> import copy, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.DropKey(0.1))
    >>> twin = copy.deepcopy(model)
    >>> remove(twin)
    >>> type(twin) is dampen.models.ViT, type(model) is dampen.models.ViT
    (True, False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"remove takes an nn.Module, got {type(model).__name__}.")
    swapped = {name: module for name, module in model.named_modules() if is_swapped(module)}
    if not swapped:
        raise ValueError(
            f"{type(model).__name__} carries no regularizers: it was never "
            "regularized, or they were removed already."
        )
    covered = [
        name or "(the model itself)" for name, module in swapped.items() if is_covered(module)
    ]
    if covered:
        more = f" and {len(covered) - 1} more" if len(covered) > 1 else ""
        raise RuntimeError(
            f"remove() after fully_shard (FSDP2) would strip FSDP's class from {covered[0]}{more}. "
            "Nothing was changed. Remove before sharding, or save the "
            "state_dict, whose keys are the plain model's, "
            "and load it into a plain model."
        )
    for module in swapped.values():
        site = vars(module).get("_dampen_model")
        if isinstance(site, ModelSite) and not (site.enabled and not site.sampling):
            raise RuntimeError(
                "remove() inside "
                f"{'reg.mc_mode()' if site.enabled else 'reg.disable()'}, which would have nothing "
                "left to restore at its end. Nothing was changed. "
                "Leave the with block first, then remove."
            )
    for module in list(model.modules()):
        site = vars(module).get("_dampen_model")
        if isinstance(site, ModelSite):
            site.ledger.unwatch()
            for attached in site.attached:
                attached.remove()
            site.attached = []
            for rate in site.own_rates:
                rate.restore()
        unswap(module)
        if "dampen_regularizers" in dict(module.named_children()):
            del module.dampen_regularizers
