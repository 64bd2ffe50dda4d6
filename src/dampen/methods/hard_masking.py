"""Hard Attention Masking: drop some of the strongest keys of each query."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dampen.functional.explicit.reductions import as_wide
from dampen.functional.learnable import (
    count_heads,
    device_of,
    logit,
    per_head,
    rate_divergence,
    soft_bernoulli,
    soft_top,
    spread,
)
from dampen.functional.top_k import (
    check_count,
    in_top,
    in_top_of_rows,
    top_share,
    transposed_scores,
)
from dampen.masks import bernoulli
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class HardMasking(Regularizer):
    """Drop each of the k strongest keys of a query with probability p: Hard Attention Masking of
    AttentionDrop (arXiv 2504.12088).

    T_i = the k keys with the largest L_ij; L_ij <- L_ij * m_ij for j in T_i, m_ij ~ Bernoulli(1 -
    p).

    `fill="zero"` is that, and needs the matrix of scores. `fill="-inf"` removes the key, keeps the
    fused kernel, and is the default, because a score of zero is no absence: softmax is invariant to
    shifts and zeroing is not, so a query whose top scores are negative would see its dropped keys
    *more*.

    Differences from the paper: k is taken among the keys that the query may see, over the full
    score (position bias included), as a count or as a fraction of those keys, rounded up; keys that
    tie with the k-th belong to the top; a query that would lose all its keys gets one back, at
    random. The paper's p and k are not public: the defaults are ours. It reports that p above 0.5
    hurts, so that warns.

    Learned p and k, which the paper names as future work: with `learn` they are parameters per head
    and layer (`reg.parameters()`) that start at `rate` and `top`. Decisions become soft, at
    `temperature`: a key belongs to the top by its rank and is dropped by a relaxed draw d in (0,
    1), as log(1 - d) on its score (fill "-inf") or as the factor 1 - d (fill "zero"); that needs
    the matrix of scores. The task alone would learn to drop nothing, so `prior_weight` times
    KL(Bernoulli(rate) || Bernoulli(p)), and likewise for the fraction, is added to the loss. Give
    them to the optimizer without weight decay, which would pull p towards 1/2.

    Args:
        rate: p, the probability to drop a top key.
        top: k, a fraction of the visible keys in (0, 1], or a count of keys.
        fill: "-inf" removes a dropped key, "zero" sets its score to 0, as in the paper.
        learn: "rate", "top" or both; nothing by default.
        heads: number of heads, where `learn` cannot find it in the model.
        temperature: of the soft decisions.
        prior_weight: factor of the divergence from `rate` and `top`.

    >>> from dampen import HardMasking
    >>> HardMasking(0.2), sorted(HardMasking(0.2, fill="zero").stages)
    (HardMasking(rate=0.2, top=0.1, fill=-inf), ['logits'])
    >>> HardMasking(0.2, learn=["rate", "top"], heads=8)
    HardMasking(rate=0.2, top=0.1, fill=-inf, learn=rate top)
    """

    per_sample = True
    rate: Tensor
    prior_weight: Tensor

    def __init__(
        self,
        rate: Value = 0.2,
        top: float = 0.1,
        fill: Literal["-inf", "zero"] = "-inf",
        learn: str | Sequence[str] = (),
        heads: int | None = None,
        temperature: float = 0.3,
        prior_weight: Value = 0.3,
    ) -> None:
        super().__init__()
        if fill not in ("-inf", "zero"):
            raise ValueError(
                f"HardMasking: fill must be '-inf' (remove the key) or 'zero' (the paper's), got "
                f"{fill!r}."
            )
        self.top, self.fill = check_top(top), fill
        self.share = top_share(self.top)  # here, because a compiled graph cannot make a fraction
        self.learn, self.temperature = check_learn(learn, top), temperature
        self.scheduled("rate", rate)
        self.per_sample = not self.learn
        if self.learn:
            if not temperature > 0:
                raise ValueError(f"HardMasking: temperature must be positive, got {temperature!r}.")
            self.scheduled("prior_weight", prior_weight, high=math.inf)
            if heads is not None:
                self._make_parameters(heads, torch.device("cpu"))
        self.stages = frozenset(
            {"qkv", "logits"} if self.learn else {"mask"} if fill == "-inf" else {"logits"}
        )

    def prepare(self, model: nn.Module) -> None:
        if self.learn and not self.log_odds:
            self._make_parameters(count_heads(self), device_of(model))

    def mask(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        if call.scores is not None and call.keep is None:
            belongs = in_top_of_rows(call.scores, self.share)
            if belongs is not None:
                # drawn keys first, as below: a graph of open length takes that way for every length
                shape = belongs.mT.shape
                return belongs & bernoulli(shape, self.current("rate"), belongs.device).mT
        return self._dropped(transposed_scores(q, k, call), call).mT

    def logits(self, s: Tensor, call: Call) -> Tensor:
        if not self.learn:
            return s.masked_fill(self._dropped(s.detach().float().mT.contiguous(), call).mT, 0)
        kept = 1 - self._softly_dropped(s, call)
        return (s * kept if self.fill == "zero" else s + kept.clamp(min=1e-6).log()).to(s.dtype)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Only to add the divergence once per attention, however many chunks `logits` sees."""
        priors = {"rate": self.rate, "top": torch.full_like(self.rate, self.top)}
        terms = [rate_divergence(priors[name], odds) for name, odds in self.log_odds.items()]
        value = torch.stack(terms).sum()
        self.penalize(as_wide(self.current("prior_weight"), value) * value, "prior")
        return q, k, v

    zero_is_identity = True

    def neutral(self) -> None:
        self.learn = frozenset()
        self.stages = frozenset({"mask"} if self.fill == "-inf" else {"logits"})
        super().neutral()

    def _dropped(self, s: Tensor, call: Call) -> Tensor:
        """Which of the scores (B, H, M, N), keys first, are top ones and drawn: bool of that
        shape."""
        return in_top(s, call.keep, self.share) & bernoulli(s.shape, self.current("rate"), s.device)

    def _softly_dropped(self, s: Tensor, call: Call) -> Tensor:
        """How far each score (B, H, N, M) is dropped, in (0, 1)."""
        if not self.log_odds:
            raise RuntimeError(
                "HardMasking(learn=...) has no parameters yet. Attach it, or say heads=."
            )
        learned = {
            name: per_head(odds, s.shape[1], "HardMasking") for name, odds in self.log_odds.items()
        }
        if "top" in learned:
            top = soft_top(s, call.keep, learned["top"].sigmoid(), self.temperature)
        else:
            top = in_top(s.detach().float().mT.contiguous(), call.keep, self.share).mT
        if "rate" in learned:
            return top * soft_bernoulli(learned["rate"], s.shape, self.temperature)
        return top * bernoulli(s.shape, self.current("rate"), s.device)

    def _make_parameters(self, heads: int, device: torch.device) -> None:
        start = {"rate": self.rate.item(), "top": self.top}
        for name in sorted(self.learn):
            value = torch.full((heads,), logit(start[name]), dtype=torch.float32, device=device)
            self.register_parameter(f"{name}_log_odds", nn.Parameter(value))

    @property
    def log_odds(self) -> dict[str, Tensor]:
        """The learned values by name, as log(p / (1 - p)) per head. They are parameters of the
        clone itself, because those of a child module would enter the model's state_dict."""
        return {n.removesuffix("_log_odds"): p for n, p in self.named_parameters(recurse=False)}

    def at(self, progress: float) -> None:
        super().at(progress)
        rate = self._schedules["rate"][0](0.0 if self.site is None else self.site.depth, progress)
        if rate > 0.5:
            warnings.warn(
                f"HardMasking: a rate above 0.5 hurts (arXiv 2504.12088, ablations), got "
                f"{rate:.3g}.",
                stacklevel=2,
            )

    def hiding_rate(self) -> float | Tensor | None:
        return self.current("rate")

    def native_hiding(self, keys: int) -> tuple[float | Tensor, tuple[int, int]]:
        return self.current("rate"), check_count(self.share, keys)

    def extra_repr(self) -> str:
        learn = f", learn={' '.join(sorted(self.learn))}" if self.learn else ""
        said = {"rate": f"{self.rate.item():.3g}", "top": str(self.top)}
        said |= {name: spread(odds.sigmoid(), said[name]) for name, odds in self.log_odds.items()}
        return f"rate={said['rate']}, top={said['top']}, fill={self.fill}{learn}"


def check_learn(learn: str | Sequence[str], top: float) -> frozenset[str]:
    """The names of the values to learn.

    Args:
        learn: names of what is learned.
        top: count or share of the keys.
    """
    names = frozenset([learn] if isinstance(learn, str) else learn)
    if names - {"rate", "top"}:
        raise ValueError(f"HardMasking: learn takes 'rate', 'top' or both, got {learn!r}.")
    if "top" in names and isinstance(top, int):
        raise ValueError(
            f"HardMasking: to learn top, give it as a fraction such as 0.1, got the count {top}."
        )
    return names


def check_top(top: float) -> float:
    """A count of keys, at least 1, or a fraction in (0, 1].

    Args:
        top: count or share of the keys.
    """
    if isinstance(top, bool) or not isinstance(top, int | float):
        raise TypeError(
            f"HardMasking: top is a count (int) or a fraction (float) of the keys, got {top!r}."
        )
    if (isinstance(top, int) and top < 1) or (isinstance(top, float) and not 0 < top <= 1):
        raise ValueError(
            f"HardMasking: top is a count of at least 1 or a fraction in (0, 1], got {top!r}."
        )
    return top
