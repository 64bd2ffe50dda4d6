"""The layer around an attention, found by structure: which module it is, and which
linear layers are in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dampen.hooks.discover.roles import (
    adapter_side,
    attention_role,
    feed_forward_roles,
    is_adapter,
    is_convolution,
    is_linear,
    linear_layers,
    weight_of,
)
from dampen.hooks.discover.source import adds

NAME = re.compile(r"attention|attn", re.IGNORECASE)
PROJECTIONS = {"q", "k", "v", "qkv", "kv"}
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers: only a Sequential has a forward, and none of them is a block
that adds its residual."""


@dataclass
class LinearPlan:
    """A linear map of a layer: its module, its role, and the attention
    module it lies in, if any."""

    module: nn.Module
    role: str
    attention: str | None = None
    expert: bool = False  # whether it is one expert's, of several
    side: str = (
        ""  # lora_a or lora_b, for the two maps of an adapter; their role is lora_q and so on
    )


def inside(inner: str, outer: str) -> bool:
    """Whether the dotted name `inner` lies strictly below `outer`."""
    return inner != outer and (outer == "" or inner.startswith(outer + "."))


def parents(name: str) -> list[str]:
    """The dotted names above one, the closest first, down to "", which is the model.

    >>> parents("blocks.0.attn")
    ['blocks.0', 'blocks', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def names_below(names: Iterable[str]) -> dict[str, list[str]]:
    """For each dotted name that holds some of these, which of them lie strictly below it. A model
    of a thousand layers is looked through by this once, instead of
    comparing each name with each."""
    found: dict[str, list[str]] = {}
    for name in names:
        for parent in parents(name):
            found.setdefault(parent, []).append(name)
    return found


def closest(name: str, among: Container[str]) -> str | None:
    """The name itself or the closest one above it that is among these."""
    return next((n for n in (name, *parents(name)) if n in among), None)


class Attentions(dict[str, nn.Module]):
    """The attention modules of a model by name, and for each name above some of them, which these
    are."""

    def __init__(self, found: Mapping[str, nn.Module]) -> None:
        super().__init__(found)
        self.below = names_below(found)
        # the linear layers of a scope that belong to no attention
        self.outside: dict[str, dict[str, nn.Module]] = {}


def scope_of(model: nn.Module, name: str, attentions: Attentions) -> str:
    """The name of the layer around an attention: the closest ancestor that also holds linear maps
    outside attention."""
    parts = name.split(".") if name else []
    for i in range(len(parts) - 1, 0, -1):
        ancestor = ".".join(parts[:i])
        module = model.get_submodule(ancestor)
        if NAME.search(type(module).__name__) and not _holds_feed_forward(
            module, ancestor, attentions
        ):
            # a wrapper that adds the output projection (BERT) or the norm (T5) is not yet the layer
            continue
        if _wraps_sublayer(model, ancestor, module):
            continue
        if _outside_attention(model, ancestor, attentions):
            element = ".".join(parts[: i + 1])
            return (
                element
                if _is_layer_of_list(model, ancestor, element, name)
                else _owner(model, parts, i)
            )
    elements = [
        i
        for i in range(len(parts), 0, -1)
        if isinstance(model.get_submodule(".".join(parts[: i - 1])), LISTS)
    ]
    for i in (
        elements
    ):  # no linear map beside it: the smallest element of a list that has other maps (convolutions)
        element = ".".join(parts[:i])
        wrapper = _wraps_sublayer(model, element, model.get_submodule(element))
        if not wrapper and _has_other_maps(model, element, attentions):
            return element
    if elements:
        return ".".join(parts[: elements[-1]])
    # the model itself is the layer, where all its attentions are its children and
    # none is a block of its own
    if any("." in n for n in attentions) or is_whole_block(model.get_submodule(name)):
        return name
    roles = feed_forward_roles(_outside_attention(model, "", attentions))
    return "" if {"ffn_in", "ffn_out"} <= set(roles.values()) and len(parts) == 1 else name


def _wraps_sublayer(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a module in a list of sublayers only projects what enters and leaves an attention
    (CrossViT): it adds no residual and has no name of a feed-forward in it."""
    if isinstance(module, LISTS) or not isinstance(
        model.get_submodule(name.rpartition(".")[0]), nn.ModuleList
    ):
        return False
    maps = {n: m for n, m in module.named_modules() if is_linear(m) and n.count(".") == 0}
    named = feed_forward_roles(maps, by_shape=False)
    return bool(maps) and set(named.values()) == {"other"} and not adds(type(module))


def _is_layer_of_list(model: nn.Module, holder: str, element: str, attention: str) -> bool:
    """Whether an element of a list adds its residual itself, so that it is a layer although its
    neighbors hold all the linear layers beside attention (experts kept as parameters, blocks of one
    sublayer each)."""
    if (
        not isinstance(model.get_submodule(holder), nn.ModuleList)
        or holder.rpartition(".")[2].isdigit()
    ):
        return False
    module = model.get_submodule(element)
    owned = _owner(model, element.split("."), element.count(".")) != holder
    return (
        element != attention and not owned and not isinstance(module, LISTS) and adds(type(module))
    )


def group_sublayers(
    model: nn.Module, scopes: Mapping[str, str], crossing: Callable[[str], bool]
) -> tuple[dict[str, str], dict[str, tuple[str, list[str]]]]:
    """Split scopes that are flat lists of sublayers, [attention, feed-forward, attention,
    feed-forward, ...] (x-transformers), into layers: an attention, a cross-attention after it, and
    what follows up to the next attention.

    Returns the scopes by attention, and for each layer made here the list and the
    names of its elements."""
    grouped, made = dict(scopes), {}
    for scope in dict.fromkeys(scopes.values()):
        holder = model.get_submodule(scope)
        if not isinstance(holder, LISTS):
            continue
        mine = {n: None for n, s in scopes.items() if s == scope}
        below = names_below(mine)
        groups: list[
            tuple[list[str], list[str], bool]
        ] = []  # elements, attentions, whether a feed-forward was met
        for key, module in holder.named_children():
            element = f"{scope}.{key}" if scope else key
            here = [element] if element in mine else below.get(element, [])
            if not here and not any(of for _, of, _ in groups) and _is_stem(module):
                continue
            feeds = not here and any(is_linear(m) for m in module.modules())
            same = bool(groups) and any(
                crossing(a) == crossing(b) for a in here for b in groups[-1][1]
            )
            if not groups or (here and groups[-1][1] and (groups[-1][2] or same)):
                groups.append(([], [], False))
            elements, attentions, fed = groups[-1]
            groups[-1] = (
                [*elements, element],
                attentions + here,
                fed or (feeds and bool(attentions)),
            )
        if len(groups) < 2:
            continue
        for elements, attentions, _ in groups:
            made[elements[0]] = scope, elements
            grouped |= dict.fromkeys(attentions, elements[0])
    for name, scope in scopes.items():
        if name == scope and scope not in made and (beside := _in_parallel_list(model, scope)):
            made[scope] = scope.rpartition(".")[0].rpartition(".")[0], [scope, beside]
    return grouped, made


def _in_parallel_list(model: nn.Module, name: str) -> str:
    """The feed-forward at the same place of another list of the module that holds the list of an
    attention (XLM: `attentions` and `ffns`), or ""."""
    holder, _, key = name.rpartition(".")
    above = holder.rpartition(".")[0]
    if not holder or not isinstance(own := model.get_submodule(holder), nn.ModuleList):
        return ""
    for local, other in model.get_submodule(above).named_children():
        if other is own or not isinstance(other, nn.ModuleList) or len(other) != len(own):
            continue
        maps = {n: m for n, m in other[int(key)].named_modules() if is_linear(m)}
        if {"ffn_in", "ffn_out"} <= set(feed_forward_roles(maps, by_shape=False).values()):
            return f"{above}.{local}.{key}" if above else f"{local}.{key}"
    return ""


def _is_stem(module: nn.Module) -> bool:
    """Whether an element before the first attention of a list looks at neighbors (a convolution
    wider than a position that does not work on each channel alone): a stage of its own, no sublayer
    of the layer after it (MaxViT)."""
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return any(max(m.kernel_size) > 1 for m in convolutions)


def refine_scopes(
    model: nn.Module, scopes: Mapping[str, str], attentions: Attentions
) -> dict[str, str]:
    """Scopes that are layers: one that holds other layers (CrossViT), or attentions of several
    blocks without linear maps (MobileNetV4, iFormer), is a stage, and the layer is the block in it
    that adds its residual."""
    refined = dict(scopes)
    for name, scope in scopes.items():
        others = [n for n in attentions.below.get(scope, ()) if n != name]
        holds_layers = any(scopes[n] != scope and inside(scopes[n], scope) for n in others)
        if holds_layers or (
            others and scope != name and not _outside_attention(model, scope, attentions)
        ):
            refined[name] = _own_block(model, name, scope, attentions) or scope
        elif stage := _stage_of(model, name, scope, attentions):
            refined[name] = _own_block(model, name, stage, attentions) or scope
    return refined


def _stage_of(model: nn.Module, name: str, scope: str, attentions: Attentions) -> str:
    """The element of a list around an attention, where that is a stage: several attentions, and
    beside them no linear layer (Twins, whose list of stages ends with the classifier)."""
    if not isinstance(model.get_submodule(scope), LISTS):
        return ""
    element = ".".join(name.split(".")[: scope.count(".") + 2]) if scope else name.split(".")[0]
    several = len(attentions.below.get(element, ())) > 1
    return element if several and not _outside_attention(model, element, attentions) else ""


def _own_block(model: nn.Module, name: str, scope: str, attentions: Attentions) -> str:
    """The largest module between a stage and an attention that holds no other attention and adds in
    its forward."""
    parts, start = name.split("."), len(scope.split(".")) if scope else 0
    for i in range(start + 1, len(parts)):
        above = ".".join(parts[:i])
        module = model.get_submodule(above)
        alone = all(n == name for n in attentions.below.get(above, ()))
        if (
            alone
            and not isinstance(module, LISTS)
            and any(
                adds(type(model.get_submodule(".".join(parts[:j])))) for j in range(i, len(parts))
            )
        ):
            return above
    return ""


def _holds_feed_forward(module: nn.Module, name: str, attentions: Mapping[str, nn.Module]) -> bool:
    """Whether a module named like attention has both maps of a feed-forward beside
    the attention (MaxViT)."""
    maps = {
        n: m
        for n, m in module.named_modules()
        if is_linear(m) and closest(f"{name}.{n}", attentions) is None
    }
    if {"ffn_in", "ffn_out"} <= set(feed_forward_roles(maps, by_shape=False).values()):
        return True
    roles = feed_forward_roles(
        maps
    )  # by shape: square maps are projections (DAB-DETR), whatever their order
    widths = {tuple(weight_of(maps[n]).shape) for n, role in roles.items() if role == "ffn_in"}
    return any(
        role == "ffn_out" and a != b and (b, a) in widths
        for n, role in roles.items()
        for a, b in [weight_of(maps[n]).shape]
    )


def _has_other_maps(model: nn.Module, scope: str, attentions: Mapping[str, nn.Module]) -> bool:
    """Whether something below `scope`, outside attention, multiplies: a convolution, or a map of
    its own kind."""
    return any(
        p.ndim > 1 and closest(f"{scope}.{n}", attentions) is None
        for n, p in model.get_submodule(scope).named_parameters()
    )


def _owner(model: nn.Module, parts: Sequence[str], end: int) -> str:
    """Where a layer's sublayers stand in a ModuleList (T5), the layer is the module that owns the
    list, if it is one of many."""
    inner, outer = ".".join(parts[:end]), ".".join(parts[: end - 1])
    if (
        isinstance(model.get_submodule(inner), nn.ModuleList)
        and end > 2
        and not isinstance(model.get_submodule(outer), LISTS)
        and isinstance(model.get_submodule(".".join(parts[: end - 2])), LISTS)
    ):
        return outer
    return inner


def is_whole_block(module: nn.Module) -> bool:
    """Whether an attention module carries its own feed-forward, so that it is the block as well."""
    return {"ffn_in", "ffn_out"} <= set(_inner_feed_forward(module).values())


def _outside_attention(
    model: nn.Module, scope: str, attentions: Attentions
) -> dict[str, nn.Module]:
    """The linear maps below `scope` that belong to no attention, by their
    names inside the scope."""
    if scope not in attentions.outside:
        prefix = scope + "." if scope else ""
        attentions.outside[scope] = {
            name: module
            for name, module in linear_layers(model.get_submodule(scope))
            if not _attention_above(prefix + name, scope, attentions, model)
        }
    return attentions.outside[scope]


def _attention_above(name: str, scope: str, attentions: Attentions, model: nn.Module) -> bool:
    """Whether a map lies in an attention module, or in a wrapper of one (BERT's output.dense)."""
    start = len(scope.split(".")) if scope else 0
    parts = name.split(".")
    for i in range(start + 1, len(parts)):
        above = ".".join(parts[:i])
        if above in attentions or (
            above in attentions.below and not isinstance(model.get_submodule(above), LISTS)
        ):
            return True
    return False


def find_linears(
    model: nn.Module, scope: str, attentions: Attentions, projections: Mapping[str, str] | None
) -> dict[str, LinearPlan]:
    """All linear maps of a layer with their roles."""
    plans: dict[str, LinearPlan] = {}
    prefix = scope + "." if scope else ""
    said = {local: role for role, local in (projections or {}).items()}
    outside = feed_forward_roles(_outside_attention(model, scope, attentions))
    inner_modules = dict(model.get_submodule(scope).named_modules())
    linear = dict(linear_layers(model.get_submodule(scope)))
    for local, module in model.get_submodule(scope).named_modules():
        name = prefix + local
        home = next((a for a in reversed(parents(name)) if a in attentions), None)
        if home is not None and is_convolution(module):
            inner = name[len(home) + 1 :] if home else name
            role = said.get(inner) or attention_role(inner, {})
            if role in PROJECTIONS:
                plans[name] = LinearPlan(module, role, home)
        if local not in linear:
            continue
        if home is not None:
            inner = name[len(home) + 1 :] if home else name
            role = said.get(inner) or attention_role(inner, dict(attentions[home].named_modules()))
            if role == "other" and home == scope:
                role = _role_in_block(attentions[home], local, said)
            plans[name] = LinearPlan(module, role, home, side=adapter_side(inner))
        elif local in outside:
            plans[name] = LinearPlan(module, outside[local], side=adapter_side(local))
        else:  # in a wrapper of an attention: its output projection, where it has one map or the name says so
            above = local.rpartition(".")[0]
            alone = (
                sum(
                    n.rpartition(".")[0] == above and is_linear(m) for n, m in inner_modules.items()
                )
                == 1
            )
            role = (
                "out"
                if alone or is_adapter(local)
                else attention_role(local.rpartition(".")[2], {})
            )
            role = f"lora_{role}" if is_adapter(local) else role
            plans[name] = LinearPlan(module, role, side=adapter_side(local))
    return plans


def _inner_feed_forward(module: nn.Module, by_shape: bool = True) -> dict[str, str]:
    return feed_forward_roles(
        {
            n: m
            for n, m in module.named_modules()
            if is_linear(m) and attention_role(n, {}) == "other"
        },
        by_shape,
    )


def _role_in_block(attention: nn.Module, name: str, said: Mapping[str, str]) -> str:
    """The role of a linear map in an attention that is its own layer: of
    its feed-forward, or other.

    The shapes show it only where the projections of the attention are known. Where none is, any map
    may be one (PaLM's fused map, a block whose maps are called `fc_1` to `fc_4`).
    """
    maps = [n for n, m in attention.named_modules() if is_linear(m) or is_convolution(m)]
    known = any((said.get(n) or attention_role(n, {})) in PROJECTIONS for n in maps)
    return _inner_feed_forward(attention, by_shape=known).get(name, "other")
