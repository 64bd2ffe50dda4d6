"""Where regularizers can sit: the layers of a model, found by structure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dampen.hooks.discover.layer import (
    LISTS,
    NAME,
    PROJECTIONS,
    Attentions,
    LinearPlan,
    closest,
    find_linears,
    group_sublayers,
    is_whole_block,
    names_below,
    refine_scopes,
    scope_of,
)
from dampen.hooks.discover.roles import (
    attention_role,
    feed_forward_roles,
    is_convolution,
    is_linear,
)
from dampen.hooks.discover.source import (
    adds,
    calls_socket,
    computes_attention,
    shows_no_softmax,
    shows_parts,
)
from dampen.hooks.experts import ExpertsPlan, find_experts
from dampen.regularizer import (
    ADAPTERS,
    ATTENTION_STAGES,
    BLOCK_STAGES,
    LINEAR_STAGES,
    ROLES,
    Regularizer,
)

_KEYLESS = re.compile(
    r"outlook|deformableattention|linearattention|lightningattention", re.IGNORECASE
)
_FEED_FORWARD = re.compile(r"(mlp|ffn?|feed_?forward)\b", re.IGNORECASE)
FEED_FORWARD = {"ffn_in", "ffn_out"}
ROLES_OF_ATTENTION = set(ROLES) - FEED_FORWARD
_CROSS = re.compile(
    r"cross|encoder_attn|encdec|enc_dec|multihead_attn|encoder_attention", re.IGNORECASE
)


@dataclass
class LayerPlan:
    """One layer of a model, before anything is attached to it."""

    name: str
    block: nn.Module | None  # None where no single module is the layer
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    linears: dict[str, LinearPlan] = field(default_factory=dict)
    # residual branches that the block should have: one per attention, one for the feed-forward
    branches: int = 0
    experts: dict[str, ExpertsPlan] = field(
        default_factory=dict
    )  # its mixtures of experts, by the module that routes
    elements: list[str] = field(
        default_factory=list
    )  # what it consists of, where no single module is the layer
    mixers: list[nn.Module] = field(default_factory=list)  # what replaces attention (Mamba)

    @property
    def pools(self) -> bool:
        """Whether this is a head that pools tokens by attention: no residual goes around it."""
        modules = [*self.attentions.values(), *([] if self.block is None else [self.block])]
        return (
            any("pool" in type(m).__name__.lower() for m in modules) or "pool" in self.name.lower()
        )

    @property
    def has_softmax(self) -> bool:
        """Whether an attention here has a softmax over tokens."""
        return not all(is_keyless(m) for m in self.attentions.values())

    def reached(self, method: Regularizer) -> set[str]:
        """The parts of this layer that a method acts on, of those in `parts_of`."""
        has = {
            "attention": self.has_softmax,
            "feed-forward": bool(method.roles & self.roles & FEED_FORWARD),
            "projections": bool(method.roles & self.roles - FEED_FORWARD - ADAPTERS),
            "adapters": bool(method.roles & self.roles & ADAPTERS),
            "blocks": self._has_blocks(method) and bool(method.branch_roles & self.branch_roles),
        }
        return {part for part in parts_of(method) if has[part]}

    def _has_blocks(self, method: Regularizer) -> bool:
        """Whether the layer has what the stages of blocks of a method need: a module, or branches
        that its owner adds. A head that pools has no residual."""
        whole = method.stages & set(BLOCK_STAGES) - {"branch"}
        return not self.pools and (self.block is not None or bool(self.elements and not whole))

    @property
    def branch_roles(self) -> set[str]:
        """The roles of its residual branches."""
        return {"attention" if self.attentions else "mixer", "ffn"}

    @property
    def roles(self) -> set[str]:
        """The roles of the linear maps found."""
        mha = {
            r
            for m in self.attentions.values()
            if isinstance(m, nn.MultiheadAttention)
            for r in "qkv"
        }
        experts = {
            role for plan in self.experts.values() for role in plan.parameters.values() if role
        }
        sides = {plan.side for plan in self.linears.values()} - {""}
        return mha | experts | sides | {plan.role for plan in self.linears.values()}


def parts_of(method: Regularizer) -> set[str]:
    """The parts of a layer that a method acts on, by its stages and roles: attention, feed-forward,
    projections (the linear layers of attention), adapters (LoRA), blocks (residual branches, or the
    block as a whole)."""
    attends, multiplies = method.stages & set(ATTENTION_STAGES), method.stages & set(LINEAR_STAGES)
    read = (
        {"out"} if attends else ROLES_OF_ATTENTION
    )  # a method inside attention only reads what made q, k and v
    wanted = {
        "attention": bool(attends),
        "feed-forward": bool(multiplies and method.roles & FEED_FORWARD),
        "projections": bool(multiplies and method.roles & read),
        "adapters": bool(multiplies and method.roles & ADAPTERS),
        "blocks": bool(method.stages & set(BLOCK_STAGES)),
    }
    return {part for part, acts in wanted.items() if acts}


def find_layers(
    model: nn.Module,
    sites: str | Sequence[str] = "*",
    attention: str = "all",
    projections: Mapping[str, str] | None = None,
    whole_stacks: bool = False,
) -> list[LayerPlan]:
    """The layers of `model` whose attention modules match `sites` (patterns of dotted names) and
    the requested kind.

    `whole_stacks`: also the layers without attention that stand in one list with these (hybrids
    with Mamba)."""
    if attention not in ("self", "cross", "all"):
        raise ValueError(f"attention must be 'self', 'cross' or 'all', got {attention!r}.")
    found = find_attentions(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module: nothing "
            "calls F.scaled_dot_product_attention and no "
            "module is attention by its name or "
            f"code.{describe_candidates(model)} Write the attention as a module "
            "that calls F.scaled_dot_product_attention."
        )
    plans = _all_layers(model, found, projections)
    if whole_stacks and attention != "cross":
        plans += find_beside(model, plans, found)
    chosen = []
    for plan in plans:
        names = {
            n: m
            for n, m in plan.attentions.items()
            if attention == "all" or kind_of(n, m) == attention
        }
        matching = {n: m for n, m in names.items() if matches(sites, n, plan.name)}
        if matching or (not plan.attentions and matches(sites, plan.name)):
            plan.attentions = matching
            chosen.append(plan)
    if not chosen:
        candidates = "\n  ".join(
            f"{n or '(the model itself)'}  [{kind_of(n, m)}]" for n, m in found.items()
        )
        raise ValueError(
            f"no attention of {type(model).__name__} matches "
            f"target_modules={sites!r}, attention={attention!r}. "
            f"Candidates:\n  {candidates}"
        )
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted(chosen, key=lambda plan: order[plan.name]) if whole_stacks else chosen


def matches(sites: str | Sequence[str], *names: str) -> bool:
    """Whether one of the names fits a pattern and none fits an exclusion, a pattern that begins
    with "!". Exclusions alone leave everything else.

    >>> matches("blocks.*", "blocks.0"), matches("!blocks.0", "blocks.0"), matches("!blocks.0", "blocks.1")
    (True, False, True)
    """
    patterns = [sites] if isinstance(sites, str) else list(sites)
    wanted = [p for p in patterns if not p.startswith("!")] or ["*"]
    unwanted = [p[1:] for p in patterns if p.startswith("!")]
    fits = any(fnmatch.fnmatch(n, p) for n in names for p in wanted)
    return fits and not any(fnmatch.fnmatch(n, p) for n in names for p in unwanted)


def _all_layers(
    model: nn.Module, found: Attentions, projections: Mapping[str, str] | None
) -> list[LayerPlan]:
    """Every layer with attention, in the order of its first one."""
    scopes = refine_scopes(model, {name: scope_of(model, name, found) for name in found}, found)
    scopes, groups = group_sublayers(model, scopes, lambda name: is_cross(name, found[name]))
    layers: dict[str, LayerPlan] = {}
    linears: dict[str, Linears] = {}
    for name, module in found.items():
        scope = scopes[name]
        if scope not in layers:
            layers[scope] = _plan_layer(
                model, name, scope, found, groups.get(scope), projections, linears
            )
        layers[scope].attentions[name] = module
    return list(layers.values())


Linears = tuple[dict[str, LinearPlan], dict[str, list[str]]]
"""The linear layers of a module with their roles, and which of them lie below each name."""


def _plan_layer(
    model: nn.Module,
    name: str,
    scope: str,
    found: Attentions,
    group: tuple[str, list[str]] | None,
    projections: Mapping[str, str] | None,
    linears: dict[str, Linears],
) -> LayerPlan:
    """The layer around the attention `name`: the module `scope`, or a group of the elements of a
    list, whose linear layers are found once for all groups (`linears`)."""
    whole, elements = group or (scope, [scope])
    block = model.get_submodule(scope)
    callable_block = not isinstance(block, nn.ModuleList | nn.ModuleDict) and (
        scope != name or _is_block(block)
    )
    plan = LayerPlan(scope, block if callable_block and group is None else None)
    if whole not in linears:
        plans = find_linears(model, whole, found, projections)
        linears[whole] = plans, names_below(plans)
    plan.linears, below = linears[whole]
    if group is not None:
        names = [n for e in elements for n in ([e] if e in plan.linears else below.get(e, ()))]
        plan.linears = {n: plan.linears[n] for n in names}
    plan.experts = find_experts(model, elements, found, plan.linears)
    listed = isinstance(model.get_submodule(whole), LISTS) or len(elements) > 1
    plan.elements = elements if plan.block is None and listed else []
    around = sum((e in found) + len(found.below.get(e, ())) for e in elements)
    plan.branches = around + ("ffn_out" in plan.roles)
    return plan


def _is_block(attention: nn.Module) -> bool:
    """Whether an attention alone is the block: it has its own feed-forward, or adds its residual
    itself (diffusers)."""
    own = getattr(attention, "residual_connection", False) is True
    adding = adds(type(attention)) and not computes_attention(
        attention
    )  # what is added to scores is no residual
    return own or is_whole_block(attention) or adding


def find_beside(model: nn.Module, plans: Sequence[LayerPlan], found: Attentions) -> list[LayerPlan]:
    """The layers without attention beside those with one, in the same list: of the same class, or
    with a feed-forward whose linear layers have the same names, or usual ones."""
    beside: dict[str, LayerPlan] = {}
    lists = {plan.name.rpartition(".")[0] for plan in plans if plan.block is not None}
    for holder in (
        name
        for name in lists
        if isinstance(model.get_submodule(name), nn.ModuleList | nn.Sequential)
    ):
        known = [
            plan
            for plan in plans
            if plan.block is not None and plan.name.rpartition(".")[0] == holder
        ]
        kinds = {type(plan.block) for plan in known}
        roles = {
            n[len(p.name) + 1 :]: m.role
            for p in known
            for n, m in p.linears.items()
            if m.attention is None
        }
        for key, block in model.get_submodule(holder).named_children():
            name = f"{holder}.{key}" if holder else key
            if isinstance(block, LISTS) or name in found or name in found.below:
                continue
            maps = {n: m for n, m in block.named_modules() if is_linear(m)}
            experts = find_experts(model, [name], Attentions({}), {})
            feeding = {n: m for n, m in maps.items() if _FEED_FORWARD.match(n)}
            usual = feed_forward_roles(maps, by_shape=False) | feed_forward_roles(feeding)
            given = {n: roles.get(n) or role for n, role in usual.items()}
            alike = type(block) in kinds and bool(maps)
            if not alike and not experts and not set(given.values()) >= FEED_FORWARD:
                continue
            plan = LayerPlan(name, block)
            plan.linears = {f"{name}.{n}": LinearPlan(m, given[n]) for n, m in maps.items()}
            plan.experts = find_experts(model, [name], Attentions({}), plan.linears)
            feeds = {n.split(".")[0] for n, role in given.items() if role in FEED_FORWARD}
            feeds |= {n[len(name) + 1 :].split(".")[0] for n in experts}
            plan.mixers = [m for n, m in block.named_children() if n not in feeds and _mixes(m)]
            plan.branches = int(bool(feeds))
            beside[name] = plan
    return list(beside.values())


def find_outside(model: nn.Module, plans: Sequence[LayerPlan], residual: bool) -> list[str]:
    """The largest modules that lie in no layer, hold none, and have two linear layers or more;
    `residual`: or add in their code, as a block with a residual does, and multiply."""
    held = {
        name
        for plan in plans
        for name in [plan.name, *plan.elements, *plan.attentions, *plan.linears]
    }
    above = names_below(held)
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or name in above:
            continue
        if closest(name, held) is not None or closest(name, found) is not None:
            continue
        linears = sum(is_linear(m) for m in module.modules())
        if linears > 1 or (residual and any(adds(type(m)) and _mixes(m) for m in module.modules())):
            found.append(name)
    return found


def _mixes(module: nn.Module) -> bool:
    """Whether a part of a layer without attention replaces it: it multiplies."""
    return any(p.ndim > 1 for p in module.parameters()) and not isinstance(module, LISTS)


def find_attentions(model: nn.Module) -> Attentions:
    """The innermost attention modules by name: those that call the socket, then those that are only
    named like one."""
    modules = dict(model.named_modules())
    certain = {
        n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention) or calls_socket(m)
    }
    certain -= names_below(certain).keys()
    below = names_below(certain)
    certain = {_with_projections(n, modules, below) for n in certain}
    named = {
        n for n, m in modules.items() if NAME.search(type(m).__name__) and not isinstance(m, LISTS)
    }
    # not a helper of one (timm's CvT): it has linear layers, or computes attention of what
    # convolutions make
    named = {
        n
        for n in named
        if computes_attention(modules[n])
        or (_multiplies(modules[n]) and not _only_projects(modules[n]))
    }
    named -= names_below(named | certain).keys()
    named -= {n for n in named if closest(n, certain) is not None}
    if (
        not certain | named
    ):  # maps of another kind (convolutions, quantized), or another name: the code decides
        named = {
            n for n, m in modules.items() if not isinstance(m, LISTS) and computes_attention(m)
        }
        named -= names_below(named).keys()
    found = certain | named
    found |= set(_beside_found(modules, found, all_projections=True))
    return Attentions({n: m for n, m in modules.items() if n in found})


def find_unnamed(model: nn.Module) -> list[str]:
    """Modules whose code computes attention, and that are none of those found: nothing in their
    names says so."""
    modules = dict(model.named_modules())
    return _beside_found(modules, set(find_attentions(model)))


def _beside_found(
    modules: Mapping[str, nn.Module], found: set[str], all_projections: bool = False
) -> list[str]:
    """The innermost modules beside the attentions found whose code has a softmax and
    a product of two tensors.

    Args:
        modules: of the model, by name.
        found: the names of its attentions.
        all_projections: only those with linear layers that by their names make
            queries, keys and values.
    """
    above = names_below(found)
    beside = [
        n
        for n, m in modules.items()
        if n not in above
        and closest(n, found) is None
        and not isinstance(m, LISTS)
        and (_projects_all(m) if all_projections else sum(is_linear(c) for c in m.modules()) > 1)
        and computes_attention(m)
    ]
    outer = names_below(beside)
    return [n for n in beside if n not in outer]


def _projects_all(module: nn.Module) -> bool:
    """Whether a module holds linear layers that by their names make queries, keys and values."""
    roles = {attention_role(n, {}) for n, m in module.named_modules() if is_linear(m)}
    return "qkv" in roles or ("q" in roles and ("kv" in roles or {"k", "v"} <= roles))


def describe_candidates(model: nn.Module, most: int = 6) -> str:
    """The modules that come closest to attention in a model without any, and why each is none."""
    lines: list[str] = []
    for name, module in model.named_modules():
        softmax, product = (False, False) if isinstance(module, LISTS) else shows_parts(module)
        called = bool(NAME.search(type(module).__name__))
        if called:
            why = "is named like attention, but has no linear layers, and its code no softmax of a product"
        elif softmax:
            why = "has a softmax, but no product of two tensors"
        elif product:
            why = "multiplies two tensors, but has no softmax"
        if called or softmax or product:
            lines.append(f"\n  '{name}' ({type(module).__name__}) {why}")
    more = f"\n  and {len(lines) - most} more" if len(lines) > most else ""
    return f" Looked at:{''.join(lines[:most])}{more}\n" if lines else ""


def _with_projections(
    name: str, modules: Mapping[str, nn.Module], below: Mapping[str, list[str]]
) -> str:
    """The attention that calls a function kept as a module (x-transformers' `Attend`, which has no
    parameters): the closest module around it, if that makes its queries, keys or values. The name
    itself for any other attention."""
    own = any(
        p.ndim > 1 for p in modules[name].parameters(recurse=False)
    )  # as of nn.MultiheadAttention
    if own or _projections_in(modules[name]):
        return name
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        above = ".".join(parts[:end])
        around = modules[above]
        if isinstance(around, LISTS):
            continue
        alone = all(n == name for n in below.get(above, ()))
        return above if alone and _projections_in(around) else name
    return name


def _multiplies(module: nn.Module) -> bool:
    """Whether a module has linear layers, or others that by their names make
    queries, keys or values."""
    parts = list(module.named_modules())
    named = (n for n, m in parts if n and attention_role(n, {}) in PROJECTIONS and _mixes(m))
    return any(is_linear(m) for _, m in parts) or next(named, None) is not None


def _only_projects(module: nn.Module) -> bool:
    """Whether a module is what comes after an attention (LXMERT's output, with a norm and the
    residual): its code multiplies no two tensors and has no softmax, and it makes no
    queries, keys or values."""
    return not shows_parts(module)[1] and not _projections_in(module) and shows_no_softmax(module)


def _projections_in(module: nn.Module) -> bool:
    """Whether a module holds linear layers that make queries, keys or values, by their names."""
    maps = (n for n, m in module.named_modules() if is_linear(m) or is_convolution(m))
    return not PROJECTIONS.isdisjoint(attention_role(n, {}) for n in maps)


def is_keyless(module: nn.Module) -> bool:
    """Whether an attention has no softmax over keys that are tokens, by the name of its class: it
    attends over channels (DaViT, XCiT), is linear, samples points (deformable DETR), or has weights
    without keys (VOLO's outlook)."""
    return bool(_KEYLESS.search(type(module).__name__))


def is_cross(name: str, module: nn.Module) -> bool:
    """Whether an attention reads its keys from another sequence, by its flag, its
    attribute or its class."""
    flag = getattr(module, "is_cross_attention", None)
    return (
        flag
        if isinstance(flag, bool)
        else bool(_CROSS.search(name.rsplit(".", 1)[-1] + " " + type(module).__name__))
    )


def kind_of(name: str, module: nn.Module) -> str:
    return "cross" if is_cross(name, module) else "self"
