"""Rates, widths and counts that are learned: soft forms of random decisions, and what keeps them
from going to zero.

A learned value is a real parameter with one entry per head, held by the clone of its layer. The
task alone would drive it to "no noise", so each is tied to its stated value by a divergence that
grows without bound towards zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dampen.functional.explicit.reductions import wide
from dampen.regularizer import Regularizer

_HEADS = ("num_heads", "heads", "num_attention_heads", "n_heads", "nhead", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


def count_heads(method: Regularizer, key_heads: bool = False) -> int:
    """How many heads (or key heads) the attention beside a placed clone has, by what its modules
    say."""
    for names in (_KEY_HEADS, _HEADS) if key_heads else (_HEADS,):
        for module in method.neighbors:
            for owner in (module, getattr(module, "config", None)):
                found = next(
                    (n for name in names if isinstance(n := getattr(owner, name, None), int)), None
                )
                if found:
                    return found
    where = f" at '{method.site.name}'" if method.site else ""
    raise ValueError(
        f"{type(method).__name__}(learn=...){where} needs to know the number of heads, and the "
        "attention does not show "
        f"it under a usual name ({', '.join(_HEADS)}). Say it: {type(method).__name__}(..., "
        "heads=8)."
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def logit(value: float) -> float:
    """log(p / (1 - p)), with p kept off 0 and 1."""
    p = min(max(value, 1e-3), 1 - 1e-3)
    return torch.logit(torch.tensor(p, dtype=torch.float32)).item()


def per_head(values: Tensor, heads: int, name: str, grouped: bool = False) -> Tensor:
    """One value per head as (H, 1, 1), or an error in the user's words.

    `grouped`: the heads may be copies, each value's side by side. transformers repeats keys for
    their queries where it does not leave that to the kernel.
    """
    if grouped and heads % values.shape[0] == 0:
        values = values.repeat_interleave(heads // values.shape[0])
    if values.shape[0] != heads:
        raise ValueError(
            f"{name}(heads={values.shape[0]}) learns one value per head, but this attention has "
            f"{heads}. Give heads="
            f"{heads}, or regularize the attentions with other numbers of heads separately "
            "(target_modules=)."
        )
    return values.float()[:, None, None]


def spread(values: Tensor, stated: str) -> str:
    """The learned values of all heads in short, for a person to read; `stated` where this process
    holds none of them.

    >>> spread(torch.tensor([0.2, 0.2]), "0.3"), spread(torch.tensor([0.11, 0.24]), "0.3")
    ('0.2', '0.11..0.24')
    """
    # a sharded parameter: no talking to other ranks to be printed
    here = getattr(values, "to_local", lambda: values)()
    if here.numel() == 0 or here.is_meta:
        return stated
    low, high = (f"{v.item():.3g}" for v in here.detach().float().aminmax())
    if low == high:
        return low
    return f"{low}..{high}"


def soft_bernoulli(log_odds: Tensor, shape: Any, temperature: float) -> Tensor:
    """A relaxed Bernoulli draw in (0, 1), differentiable in its log-odds: the concrete distribution
    (arXiv 1705.07832).

    sigmoid((logit p + log u - log(1 - u)) / T), u ~ U(0, 1); with T to 0 it is 1 with probability
    p, else 0.
    """
    u = torch.rand(shape, dtype=torch.float32, device=log_odds.device).clamp(1e-6, 1 - 1e-6)
    return ((log_odds + u.logit()) / temperature).sigmoid()


def soft_top(s: Tensor, keep: Tensor | None, share: Tensor, temperature: float) -> Tensor:
    """How much each score (B, H, N, M) belongs to the top `share` (H, 1, 1) of its row's visible
    keys, in [0, 1].

    sigmoid((share * m + 1/2 - rank) / T) with ranks 1, 2, ... among m visible keys: differentiable
    in the share, and with T to 0 the largest round(share * m) keys. At least one key belongs half.
    """
    if keep is None:
        s = s.detach()
    else:
        s = s.detach().masked_fill(~keep, float("-inf"))
    rank = s.argsort(dim=-1, descending=True).argsort(dim=-1) + 1
    seen = s.shape[-1] if keep is None else keep.sum(-1, keepdim=True)
    belongs = (((share * seen).clamp(min=1) + 0.5 - rank) / temperature).sigmoid()
    if keep is None:
        return belongs
    return belongs * keep


def rate_divergence(prior: Tensor, log_odds: Tensor) -> Tensor:
    """KL(Bernoulli(prior) || Bernoulli(p)), averaged over heads: 0 at p = prior, infinite at p = 0
    and 1."""
    prior = prior.clamp(1e-3, 1 - 1e-3)
    log_p, log_q = (
        nn.functional.logsigmoid(wide(log_odds)),
        nn.functional.logsigmoid(-wide(log_odds)),
    )
    return (prior * (prior.log() - log_p) + (1 - prior) * ((1 - prior).log() - log_q)).mean()


def scale_divergence(prior: Tensor, log_scale: Tensor) -> Tensor:
    """KL between exponential laws of means `prior` and s, log(s / prior) + prior / s - 1, averaged
    over heads."""
    ratio = prior.clamp(min=1e-3).log() - wide(log_scale)
    return (ratio.exp() - 1 - ratio).mean()
