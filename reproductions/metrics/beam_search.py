"""Beam search: the most likely translation of a sentence."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dampen.studies.plugins import BEGIN, END, PAD


class Translator(Protocol):
    """What beam search needs of a model; `reproductions.models.seq2seq.Seq2Seq` has it."""

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]: ...

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor: ...


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, *, beam: int = 4, max_tokens: int = 64, alpha: float = 0.6
) -> list[list[int]]:
    """The best translation of each source row (B, M), as tokens without begin and end.

    Hypotheses are ranked by `log P / ((5 + length) / 6)^alpha` (GNMT, arXiv 1609.08144, eq. 14),
    the end token counted. A sentence is done when `beam` hypotheses have ended within its beam, or
    at `max_tokens`, where the end is forced. The prefix is decoded anew at each step: simple, and
    right for any model with `encode` and `decode`."""
    if beam < 1 or max_tokens < 1:
        raise ValueError(f"beam and max_tokens count from 1: got {beam} and {max_tokens}.")
    memory, padding = model.encode(source)
    batch, device = len(source), source.device
    best_score = torch.full((batch,), -torch.inf, device=device)
    best: list[list[int]] = [[] for _ in range(batch)]
    ended = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.arange(
        batch, device=device
    )  # sentences still searched; the tensors below hold these alone
    memory, padding = memory.repeat_interleave(beam, 0), padding.repeat_interleave(beam, 0)
    prefix = torch.full((batch, beam, 1), BEGIN, dtype=torch.int64, device=device)
    score = torch.full((batch, beam), -torch.inf, device=device)
    score[:, 0] = 0.0  # at first all hypotheses are the same: only one may grow
    for length in range(1, max_tokens + 1):
        logits = model.decode(prefix.flatten(0, 1), memory, padding)[:, -1].float()
        gain = logits.log_softmax(dim=-1).view(len(alive), beam, -1)
        vocabulary = gain.shape[-1]
        gain[..., [PAD, BEGIN]] = -torch.inf
        if length == max_tokens:
            gain[..., torch.arange(vocabulary, device=device) != END] = -torch.inf
        # Each hypothesis can end in one way only, so 2 * beam candidates hold at least beam that go
        # on.
        total, flat = (
            (score[..., None] + gain).flatten(1).topk(min(2 * beam, beam * vocabulary), dim=1)
        )
        parent, token = flat // vocabulary, flat % vocabulary

        ends = (
            (token == END) & (torch.arange(token.shape[1], device=device) < beam) & total.isfinite()
        )
        normalized = torch.where(ends, total / ((5 + length) / 6) ** alpha, -torch.inf)
        top, which = normalized.max(dim=1)
        for row in torch.nonzero(top > best_score[alive]).flatten().tolist():
            sentence = int(alive[row])
            best_score[sentence] = top[row]
            best[sentence] = prefix[row, parent[row, which[row]], 1:].tolist()
        ended[alive] += ends.sum(dim=1)

        go_on = torch.where(token == END, -torch.inf, total)
        score, pick = go_on.topk(beam, dim=1)
        parent, token = parent.gather(1, pick), token.gather(1, pick)
        prefix = torch.cat(
            [prefix.gather(1, parent[..., None].expand(-1, -1, length)), token[..., None]], dim=2
        )
        keep = torch.nonzero((ended[alive] < beam) & score.isfinite().any(dim=1)).flatten()
        if not len(keep):
            break
        if len(keep) < len(alive):
            rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
            alive, prefix, score = alive[keep], prefix[keep], score[keep]
            memory, padding = memory[rows], padding[rows]
    return best
