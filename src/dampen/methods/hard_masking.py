"""Hard Attention Masking: drop some of the strongest keys of each query."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from dampen.masks import bernoulli
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value
from dampen.selection import kth_largest, largest


class HardMasking(Regularizer):
    """Drop each of the k strongest keys of a query with probability p: Hard Attention Masking of AttentionDrop
    (arXiv 2504.12088).

    T_i = the k keys with the largest L_ij; L_ij <- L_ij * m_ij for j in T_i, m_ij ~ Bernoulli(1 - p).

    `fill="zero"` is that, and needs the matrix of scores. `fill="-inf"` removes the key, keeps the fused kernel, and is
    the default, because a score of zero is no absence: softmax is invariant to shifts and zeroing is not, so a query
    whose top scores are negative would see its dropped keys *more*.

    Departures: k is taken among the keys that the query may see, over the full score (position bias included), as a
    count or as a fraction of those keys, rounded up; keys that tie with the k-th belong to the top; a query that would
    lose all its keys gets one back, at random. The paper's p and k are not public: the defaults are ours. It reports
    that p above 0.5 hurts, so that warns.

    Args:
        rate: p, the probability to drop a top key.
        top: k, a fraction of the visible keys in (0, 1], or a count of keys.
        fill: "-inf" removes a dropped key, "zero" sets its score to 0, as in the paper.

    >>> from dampen import HardMasking
    >>> HardMasking(0.2), sorted(HardMasking(0.2, fill="zero").stages)
    (HardMasking(rate=0.2, top=0.1, fill=-inf), ['logits'])
    """

    rate: Tensor

    def __init__(self, rate: Value = 0.2, top: float = 0.1, fill: Literal["-inf", "zero"] = "-inf") -> None:
        super().__init__()
        if fill not in ("-inf", "zero"):
            raise ValueError(
                f"HardMasking: fill must be '-inf' (remove the key) or 'zero' (the paper's), got {fill!r}."
            )
        self.top, self.fill = check_top(top), fill
        self.scheduled("rate", rate)
        self.stages = frozenset({"mask"} if fill == "-inf" else {"logits"})

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return self._dropped(transposed_scores(q, k, call), call).mT

    def logits(self, s: Tensor, call: Call) -> Tensor:
        return s.masked_fill(self._dropped(s.detach().float().mT.contiguous(), call).mT, 0)

    def _dropped(self, s: Tensor, call: Call) -> Tensor:
        """Which of the scores (B, H, M, N), keys first, are top ones and drawn: bool of that shape."""
        return in_top(s, call.keep, self.top) & bernoulli(s.shape, self.rate, s.device)

    def at(self, progress: float) -> None:
        super().at(progress)
        rate = self._schedules["rate"][0](0.0 if self.site is None else self.site.depth, progress)
        if rate > 0.5:
            warnings.warn(
                f"HardMasking: a rate above 0.5 hurts (arXiv 2504.12088, ablations), got {rate:.3g}.", stacklevel=2
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, top={self.top}, fill={self.fill}"


def transposed_scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """The scores with the model's bias as (B, H, M, N), in float32 and without gradient: only their order counts."""
    q, k = q.detach().float(), k.detach().float()
    with torch.autocast(q.device.type, enabled=False):
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = k @ q.mT
    return s if call.bias is None else s.mul_(call.scale).add_(call.bias.detach().mT)


def in_top(s: Tensor, keep: Tensor | None, top: int | float) -> Tensor:
    """Which scores (B, H, M, N), keys first, are among the k largest that `keep` (B, H, N, M) shows to their query."""
    keys = s.shape[-2]
    if isinstance(top, int):
        if top > keys:
            raise ValueError(
                f"HardMasking(top={top}) asks for more keys than the {keys} there are. Give a smaller count, or a "
                "fraction such as top=0.1."
            )
        k = top
    else:
        share = Fraction(str(top))  # exact: 0.1 * 30 is more than 3 in floating point, and would be rounded up to 4
        k = -(-keys * share.numerator // share.denominator)
    if keep is None:
        return s >= kth_largest(s, k)
    keep = keep.mT
    s = s.masked_fill(~keep, float("-inf"))
    seen = keep.sum(-2, keepdim=True)
    count = (
        seen.clamp(max=k)
        if isinstance(top, int)
        else (seen * share.numerator + share.denominator - 1) // share.denominator
    )
    lowest = largest(s, k).gather(-2, (count - 1).clamp(min=0).expand(*s.shape[:-2], 1, s.shape[-1]))
    return (s >= lowest) & keep


def check_top(top: float) -> float:
    """A count of keys, at least 1, or a fraction in (0, 1]."""
    if isinstance(top, bool) or not isinstance(top, int | float):
        raise TypeError(f"HardMasking: top is a count (int) or a fraction (float) of the keys, got {top!r}.")
    if (isinstance(top, int) and top < 1) or (isinstance(top, float) and not 0 < top <= 1):
        raise ValueError(f"HardMasking: top is a count of at least 1 or a fraction in (0, 1], got {top!r}.")
    return top
