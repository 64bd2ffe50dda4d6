"""Where regularizers can sit: the layers of a model, found by structure.

A layer is one attention (or several, in a decoder block) with the feed-forward maps beside it. An attention module is
one whose `forward` calls `F.scaled_dot_product_attention`, directly or through Hugging Face's attention interface; by
name alone where the code does not tell (such a module must then prove itself on its first forward)."""

from __future__ import annotations

import dis
import fnmatch
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from dampen.regularizer import ATTENTION_STAGES, BLOCK_STAGES
from dampen.sockets.roles import attention_role, feed_forward_roles, is_linear

_SOCKETS = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}
_SOFTMAX = {"softmax", "Softmax"}
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
_KEYLESS = re.compile(r"channel|xca|crosscov|deformableattention|linearattention|lightningattention", re.IGNORECASE)
_NAME = re.compile(r"attention|attn", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|multihead_attn|encoder_attention", re.IGNORECASE)
_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass
class LinearPlan:
    """A linear map of a layer: its module, its role, and the attention module it lies in, if any."""

    module: nn.Module
    role: str
    attention: str | None = None


@dataclass
class LayerPlan:
    """One layer of a model, before anything is attached to it."""

    name: str
    block: nn.Module | None  # None where no single module is the layer
    attentions: dict[str, nn.Module] = field(default_factory=dict)
    linears: dict[str, LinearPlan] = field(default_factory=dict)
    branches: int = 0  # residual branches that the block should have: one per attention, one for the feed-forward

    @property
    def pools(self) -> bool:
        """Whether this is a head that pools tokens by attention: no residual goes around it."""
        modules = [*self.attentions.values(), *([] if self.block is None else [self.block])]
        return any("pool" in type(m).__name__.lower() for m in modules)

    def suits(self, stages: frozenset[str]) -> bool:
        """Whether a method with these stages has anything to act on here."""
        if stages <= set(BLOCK_STAGES) and self.pools:
            return False
        return not (stages & set(ATTENTION_STAGES) and all(is_keyless(m) for m in self.attentions.values()))

    @property
    def roles(self) -> set[str]:
        """The roles of the linear maps found."""
        mha = {r for m in self.attentions.values() if isinstance(m, nn.MultiheadAttention) for r in "qkv"}
        return mha | {plan.role for plan in self.linears.values()}


def find_layers(
    model: nn.Module,
    sites: str | Sequence[str] = "*",
    attention: str = "all",
    projections: Mapping[str, str] | None = None,
) -> list[LayerPlan]:
    """The layers of `model` whose attention modules match `sites` (patterns of dotted names) and the kind asked for."""
    if attention not in ("self", "cross", "all"):
        raise ValueError(f"attention must be 'self', 'cross' or 'all', got {attention!r}.")
    found = find_attentions(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module: nothing calls F.scaled_dot_product_attention and no "
            "module is named like attention. Write the attention as a module that calls "
            "F.scaled_dot_product_attention."
        )
    patterns = [sites] if isinstance(sites, str) else list(sites)
    scopes = {name: _scope(model, name, found) for name in found}
    chosen = {
        name: module
        for name, module in found.items()
        if (attention == "all" or (attention == "cross") == is_cross(name, module))
        and any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(scopes[name], p) for p in patterns)
    }
    if not chosen:
        candidates = "\n  ".join(f"{n or '(the model itself)'}  [{kind_of(n, m)}]" for n, m in found.items())
        raise ValueError(
            f"no attention of {type(model).__name__} matches sites={sites!r}, attention={attention!r}. "
            f"Candidates:\n  {candidates}"
        )
    layers: dict[str, LayerPlan] = {}
    for name, module in chosen.items():
        scope = scopes[name]
        if scope not in layers:
            block = model.get_submodule(scope)
            callable_block = not isinstance(block, nn.ModuleList) and (scope != name or _is_whole_block(block))
            layers[scope] = LayerPlan(scope, block if callable_block else None)
            layers[scope].linears = _find_linears(model, scope, found, projections)
            layers[scope].branches = sum(n == scope or _inside(n, scope) for n in found) + (
                "ffn_out" in layers[scope].roles
            )
        layers[scope].attentions[name] = module
    return list(layers.values())


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attention modules by name: those that call the socket, then those that are only named like one."""
    modules = dict(model.named_modules())
    certain = {n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention) or calls_socket(type(m))}
    certain -= {n for n in certain if any(_inside(other, n) for other in certain)}
    named = {n for n, m in modules.items() if _NAME.search(type(m).__name__) and not isinstance(m, _LISTS)}
    named = {n for n in named if any(is_linear(m) for m in modules[n].modules())}  # not a helper of one (CvT)
    named -= {n for n in named if any(_inside(other, n) for other in named | certain)}
    named -= {n for n in named if any(n == c or _inside(n, c) for c in certain)}
    if not certain | named:  # maps of another kind (convolutions, quantized), or another name: the code tells
        named = {n for n, m in modules.items() if not isinstance(m, _LISTS) and computes_attention(type(m))}
        named -= {n for n in named if any(_inside(other, n) for other in named)}
    return {n: m for n, m in modules.items() if n in certain | named}


def calls_socket(cls: type) -> bool:
    """Whether the code of `cls.forward`, or of a method or function that it calls, mentions the socket."""
    forward = inspect.getattr_static(cls, "forward", None)
    return isinstance(forward, FunctionType) and _mentions(inspect.unwrap(forward), cls, depth=3)


def computes_attention(cls: type) -> bool:
    """Whether the code of `cls.forward`, or of what it calls, has a softmax and a product of two tensors."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__module__.startswith("torch."):
        return False
    code = inspect.unwrap(forward)
    return _mentions(code, cls, 2, _SOFTMAX) and (_mentions(code, cls, 2, _PRODUCTS) or _multiplies(code, cls, 2))


def stack_of(name: str) -> str:
    """The stack that a layer belongs to: everything up to its encoder or decoder.

    >>> stack_of("vision_model.encoder.layers.3"), stack_of("decoder.block.0"), stack_of("blocks.0")
    ('vision_model.encoder', 'decoder', '')
    """
    parts = name.split(".")
    ends = [i for i, part in enumerate(parts) if "encoder" in part or "decoder" in part]
    return ".".join(parts[: ends[0] + 1]) if ends else ""


def is_keyless(module: nn.Module) -> bool:
    """Whether an attention has no softmax over keys that are tokens, by the name of its class: it attends over channels
    (DaViT, XCiT), is linear, or samples points (deformable DETR)."""
    return bool(_KEYLESS.search(type(module).__name__))


def is_cross(name: str, module: nn.Module) -> bool:
    """Whether an attention reads its keys from another sequence, by its flag, its attribute or its class."""
    flag = getattr(module, "is_cross_attention", None)
    return (
        flag if isinstance(flag, bool) else bool(_CROSS.search(name.rsplit(".", 1)[-1] + " " + type(module).__name__))
    )


def kind_of(name: str, module: nn.Module) -> str:
    return "cross" if is_cross(name, module) else "self"


def _mentions(function: FunctionType, cls: type, depth: int, wanted: set[str] = _SOCKETS) -> bool:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if names & wanted:
        return True
    return depth > 0 and any(_mentions(inner, cls, depth - 1, wanted) for inner in _called(function, cls, names))


def _multiplies(function: FunctionType, cls: type, depth: int) -> bool:
    """Whether the code has an `@`."""
    codes = list(_codes(function.__code__))
    if any(i.opname == "BINARY_OP" and i.argrepr == "@" for code in codes for i in dis.get_instructions(code)):
        return True
    names = {name for code in codes for name in code.co_names}
    return depth > 0 and any(_multiplies(inner, cls, depth - 1) for inner in _called(function, cls, names))


def _called(function: FunctionType, cls: type, names: set[str]) -> Iterator[FunctionType]:
    """The functions and methods that a function names, torch's own left out."""
    for name in names:
        inner: Any = inspect.getattr_static(cls, name, None)
        if not isinstance(inner, FunctionType) or inner.__module__.startswith("torch."):
            inner = function.__globals__.get(name)
        if isinstance(inner, FunctionType) and not inner.__module__.startswith("torch."):
            unwrapped = inspect.unwrap(inner)
            if unwrapped is not function:
                yield unwrapped


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _inside(inner: str, outer: str) -> bool:
    """Whether the dotted name `inner` lies strictly below `outer`."""
    return inner != outer and (outer == "" or inner.startswith(outer + "."))


def _scope(model: nn.Module, name: str, attentions: Mapping[str, nn.Module]) -> str:
    """The name of the layer around an attention: the closest ancestor that also holds linear maps outside attention."""
    parts = name.split(".") if name else []
    for i in range(len(parts) - 1, 0, -1):
        ancestor = ".".join(parts[:i])
        module = model.get_submodule(ancestor)
        if _NAME.search(type(module).__name__) and not _holds_feed_forward(module, ancestor, attentions):
            continue  # a wrapper that adds the output projection (BERT) or the norm (T5) is not yet the layer
        if _outside_attention(model, ancestor, attentions):
            return _owner(model, parts, i)
    elements = [
        i for i in range(len(parts), 0, -1) if isinstance(model.get_submodule(".".join(parts[: i - 1])), _LISTS)
    ]
    for i in elements:  # no linear map beside it: the smallest element of a list that has other maps (convolutions)
        if _has_other_maps(model, ".".join(parts[:i]), attentions):
            return ".".join(parts[:i])
    if elements:
        return ".".join(parts[: elements[-1]])
    roles = feed_forward_roles(_outside_attention(model, "", attentions))
    return "" if {"ffn_in", "ffn_out"} <= set(roles.values()) and len(parts) == 1 else name


def _holds_feed_forward(module: nn.Module, name: str, attentions: Mapping[str, nn.Module]) -> bool:
    """Whether a module named like attention has both maps of a feed-forward beside the attention (MaxViT)."""
    maps = {
        n: m
        for n, m in module.named_modules()
        if is_linear(m) and not any(f"{name}.{n}" == a or _inside(f"{name}.{n}", a) for a in attentions)
    }
    return {"ffn_in", "ffn_out"} <= set(feed_forward_roles(maps).values())


def _has_other_maps(model: nn.Module, scope: str, attentions: Mapping[str, nn.Module]) -> bool:
    """Whether something below `scope`, outside attention, multiplies: a convolution, or a map of its own kind."""
    return any(
        p.ndim > 1 and not any(_inside(f"{scope}.{n}", a) for a in attentions)
        for n, p in model.get_submodule(scope).named_parameters()
    )


def _owner(model: nn.Module, parts: Sequence[str], end: int) -> str:
    """Where a layer's sublayers stand in a ModuleList (T5), the layer is the module that owns the list, if it is one
    of many."""
    inner, outer = ".".join(parts[:end]), ".".join(parts[: end - 1])
    if (
        isinstance(model.get_submodule(inner), nn.ModuleList)
        and end > 2
        and not isinstance(model.get_submodule(outer), _LISTS)
        and isinstance(model.get_submodule(".".join(parts[: end - 2])), _LISTS)
    ):
        return outer
    return inner


def _is_whole_block(module: nn.Module) -> bool:
    """Whether an attention module carries its own feed-forward, so that it is the block as well."""
    return {"ffn_in", "ffn_out"} <= set(_inner_feed_forward(module).values())


def _outside_attention(model: nn.Module, scope: str, attentions: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The linear maps below `scope` that belong to no attention, by their names inside the scope."""
    outside = {}
    prefix = scope + "." if scope else ""
    for name, module in model.get_submodule(scope).named_modules():
        if is_linear(module) and not _attention_above(prefix + name, scope, attentions, model):
            outside[name] = module
    return outside


def _attention_above(name: str, scope: str, attentions: Mapping[str, nn.Module], model: nn.Module) -> bool:
    """Whether a map lies in an attention module, or in a wrapper of one (BERT's output.dense)."""
    start = len(scope.split(".")) if scope else 0
    parts = name.split(".")
    for i in range(start + 1, len(parts)):
        above = ".".join(parts[:i])
        if above in attentions or (
            any(_inside(a, above) for a in attentions) and not isinstance(model.get_submodule(above), _LISTS)
        ):
            return True
    return False


def _find_linears(
    model: nn.Module, scope: str, attentions: Mapping[str, nn.Module], projections: Mapping[str, str] | None
) -> dict[str, LinearPlan]:
    """All linear maps of a layer with their roles."""
    plans: dict[str, LinearPlan] = {}
    prefix = scope + "." if scope else ""
    said = {local: role for role, local in (projections or {}).items()}
    outside = feed_forward_roles(_outside_attention(model, scope, attentions))
    for local, module in model.get_submodule(scope).named_modules():
        if not is_linear(module):
            continue
        name = prefix + local
        home = next((a for a in attentions if a == "" or _inside(name, a)), None)
        if home is not None:
            inner = name[len(home) + 1 :] if home else name
            role = said.get(inner) or attention_role(inner, dict(attentions[home].named_modules()))
            if role == "other" and local in (whole := _inner_feed_forward(attentions[home])):
                role = whole[local]
            plans[name] = LinearPlan(module, role, home)
        elif local in outside:
            plans[name] = LinearPlan(module, outside[local])
        else:  # in a wrapper of an attention: its output projection
            plans[name] = LinearPlan(module, "out")
    return plans


def _inner_feed_forward(module: nn.Module) -> dict[str, str]:
    return feed_forward_roles(
        {n: m for n, m in module.named_modules() if is_linear(m) and attention_role(n, {}) == "other"}
    )
