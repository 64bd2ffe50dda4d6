"""The bound of Always Skip Attention (arXiv 2505.01996), proposition 4.1, on attention without softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dampen.diagnostics import Condition
from dampen.diagnostics.probing import (
    LayerPlan,
    Probe,
    call,
    is_cross,
    probed,
    unwrapped,
    weight_of,
)


def linear_attention_condition(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """kappa of X Wq Wk^T X^T X Wv for tokens X (..., N, D) and weights (D, D), in float64.

    Args:
        x: tokens (..., N, D).
        wq: (D, D), y = x W.
        wk: (D, D).
        wv: (D, D).
    """
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    return kappa(x @ (wq @ wk.mT) @ (x.mT @ (x @ wv)))


def linear_attention_bound(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """An upper bound of that number: C kappa(X)^3 (proposition 4.1).

    With X = U S V^T the output is U S (V^T Wq Wk^T V) S^2 (V^T Wv), so C = kappa(V^T Wq Wk^T V)
    kappa(V^T Wv). With at least as many tokens as channels V is square and C at most kappa(Wq)
    kappa(Wk) kappa(Wv), the proposition's constant; with fewer tokens the constant has to look at
    the weights on the tokens' own space, as it does here, because Wq Wk^T may be singular there.

    Args:
        x: tokens (..., N, D).
        wq: (D, D), y = x W.
        wk: (D, D).
        wv: (D, D).
    """
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    _, s, vh = torch.linalg.svd(x, full_matrices=False)
    constant = kappa(vh @ (wq @ wk.mT) @ vh.mT) * kappa(vh @ wv)
    out: Tensor = constant * (s[..., 0] / s[..., -1]) ** 3
    return out


@torch.no_grad()
def measure_bound(
    model: nn.Module, inputs: Any, valid: Tensor | None = None
) -> tuple[dict[str, dict[str, Condition]], tuple[str, ...]]:
    """Condition numbers of each layer's attention without softmax, and their bound, by layer.

    All heads count as one, without biases. Where the tokens are singular, as behind a fresh
    LayerNorm with as many tokens as channels, the bound says nothing and the numbers are marked as
    capped.

    Args:
        model: any model; it runs once, in eval mode, and is left as it was.
        inputs: one batch, as for `dampen.diagnostics.measure_conditioning`.
        valid: (B, N) bool, False on padding; padded batches have no bound.

    Returns:
        By layer the conditions "linear_attention" and "bound", and remarks on what has none.
    """
    found: dict[str, dict[str, Condition]] = {}
    if valid is not None:
        return found, ("no bound: it is for batches without padding",)
    hooks = []
    try:
        with probed(unwrapped(model), Probe) as probes:
            for plan, _ in probes:
                for name, module in plan.attentions.items():
                    if is_cross(name, module) or len(plan.attentions) > 1:
                        continue
                    if (weights := _weights(plan, name, module)) is not None:
                        look = _hook(plan, weights, found)
                        hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
            call(unwrapped(model), inputs)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [plan.name for plan, _ in probes if plan.name not in found]
    if not missing:
        return found, ()
    why = "it is for self-attention of a sequence with three square maps"
    why += " (no grouped queries, no cross-attention)"
    return found, (f"no bound for {', '.join(missing)}: {why}",)


def _hook(plan: LayerPlan, weights: tuple[Tensor, Tensor, Tensor], found: dict[str, Any]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if x.dim() != 3:
            return
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            x = x.transpose(0, 1)
        ceiling = 1 / (torch.finfo(torch.float64).eps * max(x.shape[-2:]))
        found[plan.name] = {
            "linear_attention": Condition(
                tuple(linear_attention_condition(x, *weights).tolist()), None, ceiling
            ),
            "bound": Condition(tuple(linear_attention_bound(x, *weights).tolist()), None, ceiling),
        }

    return look


def _weights(plan: LayerPlan, name: str, module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """Wq, Wk, Wv as (D, D) with y = x W, where they are three square maps of one input."""
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is not None:
            parts = list(module.in_proj_weight.chunk(3))
        else:
            parts = []
    else:
        maps = {p.role: weight_of(p.module) for p in plan.linears.values() if p.attention == name}
        if "qkv" in maps:
            parts = list(maps["qkv"].chunk(3))
        else:
            parts = [maps[r] for r in "qkv" if r in maps]
    if len(parts) != 3 or any(w.shape[0] != w.shape[1] or w.shape != parts[0].shape for w in parts):
        return None
    return parts[0].detach().mT, parts[1].detach().mT, parts[2].detach().mT


def kappa(x: Tensor) -> Tensor:
    """The condition number of each matrix, at most what float64 can resolve.

    Args:
        x: matrices (..., N, D).
    """
    s = torch.linalg.svdvals(x)
    floor = torch.finfo(torch.float64).eps * max(x.shape[-2:])
    out: Tensor = s[..., 0] / torch.maximum(s[..., -1], floor * s[..., 0]).clamp(
        min=torch.finfo(torch.float64).tiny
    )
    return out
