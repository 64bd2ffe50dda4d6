"""Where regularizers can sit: the layers of a model, found by structure.

A layer is one attention (or several, in a decoder block) with the feed-forward maps beside it. An attention module is
one whose `forward` calls `F.scaled_dot_product_attention`, directly or through Hugging Face's attention interface; by
name alone where the code does not tell (such a module must then prove itself on its first forward)."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from dampen.regularizer import ATTENTION_STAGES, BLOCK_STAGES
from dampen.sockets.roles import is_linear
from dampen.sockets.scope import LISTS, NAME, LinearPlan, find_linears, inside, is_whole_block, refine_scopes, scope_of
from dampen.sockets.source import calls_socket, computes_attention

_KEYLESS = re.compile(
    r"channel|xca|crosscov|outlook|deformableattention|linearattention|lightningattention", re.IGNORECASE
)
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|multihead_attn|encoder_attention", re.IGNORECASE)


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
    scopes = refine_scopes(model, {name: scope_of(model, name, found) for name in found})
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
            callable_block = not isinstance(block, nn.ModuleList) and (scope != name or is_whole_block(block))
            layers[scope] = LayerPlan(scope, block if callable_block else None)
            layers[scope].linears = find_linears(model, scope, found, projections)
            layers[scope].branches = sum(n == scope or inside(n, scope) for n in found) + (
                "ffn_out" in layers[scope].roles
            )
        layers[scope].attentions[name] = module
    return list(layers.values())


def find_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attention modules by name: those that call the socket, then those that are only named like one."""
    modules = dict(model.named_modules())
    certain = {n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention) or calls_socket(type(m))}
    certain -= {n for n in certain if any(inside(other, n) for other in certain)}
    named = {n for n, m in modules.items() if NAME.search(type(m).__name__) and not isinstance(m, LISTS)}
    named = {n for n in named if any(is_linear(m) for m in modules[n].modules())}  # not a helper of one (CvT)
    named -= {n for n in named if any(inside(other, n) for other in named | certain)}
    named -= {n for n in named if any(n == c or inside(n, c) for c in certain)}
    if not certain | named:  # maps of another kind (convolutions, quantized), or another name: the code tells
        named = {n for n, m in modules.items() if not isinstance(m, LISTS) and computes_attention(type(m))}
        named -= {n for n in named if any(inside(other, n) for other in named)}
    return {n: m for n, m in modules.items() if n in certain | named}


def stack_of(name: str) -> str:
    """The stack that a layer belongs to: everything up to its encoder or decoder. One that is an element of a list is a
    stage of the model (Nest), not a stack of its own.

    >>> stack_of("vision_model.encoder.layers.3"), stack_of("decoder.block.0"), stack_of("blocks.0")
    ('vision_model.encoder', 'decoder', '')
    >>> stack_of("levels.1.transformer_encoder.0")
    ''
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    ends = [i for i, part in enumerate(parts[:first]) if "encoder" in part or "decoder" in part]
    return ".".join(parts[: ends[0] + 1]) if ends else ""


def is_keyless(module: nn.Module) -> bool:
    """Whether an attention has no softmax over keys that are tokens, by the name of its class: it attends over channels
    (DaViT, XCiT), is linear, samples points (deformable DETR), or has weights without keys (VOLO's outlook)."""
    return bool(_KEYLESS.search(type(module).__name__))


def is_cross(name: str, module: nn.Module) -> bool:
    """Whether an attention reads its keys from another sequence, by its flag, its attribute or its class."""
    flag = getattr(module, "is_cross_attention", None)
    return (
        flag if isinstance(flag, bool) else bool(_CROSS.search(name.rsplit(".", 1)[-1] + " " + type(module).__name__))
    )


def kind_of(name: str, module: nn.Module) -> str:
    return "cross" if is_cross(name, module) else "self"
