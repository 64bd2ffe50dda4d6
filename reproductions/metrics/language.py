"""Likelihood of language models: bits per character, whatever the tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dampen.studies.plugins import Metrics, require_batches


class LanguageMetrics(Metrics):
    """`bpc` (bits per character), `nll` (nats per token), `perplexity` (per token) and next-token
    `accuracy`.

    `bpc` is the total negative log-likelihood in bits over the number of characters that the
    predicted tokens stand for; `characters` says how many that is for each token, so models with
    different vocabularies can be compared.

    >>> metrics = LanguageMetrics(torch.ones(4))
    >>> metrics.update(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    >>> round(metrics.compute()["bpc"], 6)
    2.0
    """

    def __init__(self, characters: Tensor):
        self.per_token = characters.double().cpu()
        self.totals = dict.fromkeys(("nll", "tokens", "characters", "right"), 0.0)

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        logits, target = logits.detach(), target.detach()
        keep = torch.ones_like(target, dtype=torch.bool) if valid is None else valid
        logits, target = logits[keep].float(), target[keep]
        nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        self.totals["nll"] += nll.double().sum().item()
        self.totals["tokens"] += len(target)
        self.totals["characters"] += self.per_token[target.cpu()].sum().item()
        self.totals["right"] += (logits.argmax(dim=-1) == target).sum().item()

    def compute(self) -> dict[str, float]:
        total = self.totals
        require_batches(total["tokens"])
        nll = total["nll"] / total["tokens"]
        return {
            "bpc": total["nll"] / math.log(2) / total["characters"],
            "nll": nll,
            "perplexity": math.exp(min(nll, 700.0)),
            "accuracy": total["right"] / total["tokens"],
        }
