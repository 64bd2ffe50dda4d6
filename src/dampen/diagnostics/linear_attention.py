"""The bound of Always Skip Attention (arXiv 2505.01996), proposition 4.1, on attention without softmax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dampen.hooks.find import LayerPlan, is_cross
from dampen.hooks.roles import weight_of


def linear_attention_condition(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """kappa of X Wq Wk^T X^T X Wv for tokens X (..., N, D) and weights (D, D), in float64."""
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    return _kappa(x @ (wq @ wk.mT) @ (x.mT @ (x @ wv)))


def linear_attention_bound(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """An upper bound of that number: C kappa(X)^3 (proposition 4.1).

    With X = U S V^T the output is U S (V^T Wq Wk^T V) S^2 (V^T Wv), so C = kappa(V^T Wq Wk^T V) kappa(V^T Wv). With
    at least as many tokens as channels V is square and C at most kappa(Wq) kappa(Wk) kappa(Wv), the proposition's
    constant; with fewer tokens the constant has to look at the weights on the tokens' own space, as it does here,
    because Wq Wk^T may be singular there.
    """
    x, wq, wk, wv = (t.double() for t in (x, wq, wk, wv))
    _, s, vh = torch.linalg.svd(x, full_matrices=False)
    constant = _kappa(vh @ (wq @ wk.mT) @ vh.mT) * _kappa(vh @ wv)
    out: Tensor = constant * (s[..., 0] / s[..., -1]) ** 3
    return out


@contextmanager
def linear_conditions(
    plans: Sequence[LayerPlan], valid: Tensor | None, enabled: bool = True
) -> Iterator[dict[str, dict[str, list[tuple[tuple[float, ...], None, float]]]]]:
    """While the body runs the model: kappa of each layer's attention without softmax, and its bound, per sample, each
    with the ceiling up to which float64 can tell.

    All heads count as one, without biases. Layers whose maps are not three square ones (grouped queries,
    cross-attention), and padded batches, are left out.
    """
    found: dict[str, dict[str, list[tuple[tuple[float, ...], None, float]]]] = {}
    hooks = []
    for plan in plans if enabled and valid is None else []:
        for name, module in plan.attentions.items():
            weights = None if is_cross(name, module) or len(plan.attentions) > 1 else _weights(plan, name, module)
            if weights is not None:
                hooks.append(module.register_forward_pre_hook(_hook(plan, weights, found), with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _hook(plan: LayerPlan, weights: tuple[Tensor, Tensor, Tensor], found: dict[str, Any]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        if x.dim() != 3:
            return
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            x = x.transpose(0, 1)
        here = found.setdefault(plan.name, {"linear_attention": [], "bound": []})
        ceiling = 1 / (torch.finfo(torch.float64).eps * max(x.shape[-2:]))
        for kind, measure in (("linear_attention", linear_attention_condition), ("bound", linear_attention_bound)):
            here[kind].append((tuple(measure(x, *weights).tolist()), None, ceiling))

    return look


def _weights(plan: LayerPlan, name: str, module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
    """Wq, Wk, Wv as (D, D) with y = x W, where they are three square maps of one input."""
    if isinstance(module, nn.MultiheadAttention):
        parts = list(module.in_proj_weight.chunk(3)) if module.in_proj_weight is not None else []
    else:
        maps = {p.role: weight_of(p.module) for p in plan.linears.values() if p.attention == name}
        parts = list(maps["qkv"].chunk(3)) if "qkv" in maps else [maps[r] for r in "qkv" if r in maps]
    if len(parts) != 3 or any(w.shape[0] != w.shape[1] or w.shape != parts[0].shape for w in parts):
        return None
    return parts[0].detach().mT, parts[1].detach().mT, parts[2].detach().mT


def _kappa(x: Tensor) -> Tensor:
    s = torch.linalg.svdvals(x)
    floor = torch.finfo(torch.float64).eps * max(x.shape[-2:])
    out: Tensor = s[..., 0] / torch.maximum(s[..., -1], floor * s[..., 0]).clamp(min=torch.finfo(torch.float64).tiny)
    return out
