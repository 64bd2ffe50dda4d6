"""DropConnect: drop weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dampen.masks import drop
from dampen.regularizer import ROLES, LinearCall, Regularizer
from dampen.schedules import Value

GROUPS = {
    "attention": ("q", "k", "v", "qkv", "kv", "out"),
    "ffn": ("ffn_in", "ffn_out"),
    "all": ROLES,
}


class DropConnect(Regularizer):
    """Drop single weights of linear maps, one mask per forward (Wan et al., ICML 2013).

    y = (M * W / (1 - p)) x + b, M ~ Bernoulli(1 - p).

    The parameters stay where they are: only the product sees the thinned weight, so state_dict, DDP
    and FSDP know nothing of it. Differences from the paper: the paper samples the activations at
    test time from a Gaussian; here eval is the plain model, as with dropout, and `reg.mc_average`
    averages over masks.

    Args:
        rate: probability to drop a weight.
        targets: which maps: "ffn" (default), "attention", "all", or roles among q, k, v, qkv, kv,
            out, ffn_in, ffn_out.

    >>> from dampen import DropConnect
    >>> DropConnect(0.1, targets=["q", "k"])
    DropConnect(rate=0.1, targets=k q)
    """

    rate: Tensor

    def __init__(self, rate: Value = 0.1, targets: str | Sequence[str] = "ffn") -> None:
        super().__init__()
        self.scheduled("rate", rate)
        self.roles = check_targets(targets)

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        return x, drop(weight, self.current("rate"))

    def extra_repr(self) -> str:
        named = next(
            (name for name, roles in GROUPS.items() if set(roles) == self.roles),
            " ".join(sorted(self.roles)),
        )
        return f"{super().extra_repr()}, targets={named}"


def check_targets(targets: str | Sequence[str], who: str = "DropConnect") -> frozenset[str]:
    """Roles of linear maps, from roles and names of groups.

    Args:
        targets: roles of linear layers, or names of groups.
        who: name of the method, for the error.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    unknown = [n for n in names if n not in GROUPS and n not in ROLES]
    if unknown or not names:
        raise ValueError(
            f"{who}: targets are {', '.join(GROUPS)} or roles among {', '.join(ROLES)}, got "
            f"{targets!r}."
        )
    return frozenset(role for n in names for role in GROUPS.get(n, (n,)))
