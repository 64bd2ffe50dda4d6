"""Translation: likelihood of the reference, and BLEU of what beam search finds."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dampen.studies.plugins import Bpe, Metrics, Split
from reproductions.data.parallel import PairSplit
from reproductions.metrics.beam_search import Translator, beam_search
from reproductions.metrics.language import LanguageMetrics


class TranslationMetrics(Metrics):
    """`nll` (nats per token), `perplexity` and next-token `accuracy` from `update`; `bleu` and
    `chrf` from `finish`.

    BLEU and chrF are sacreBLEU's (arXiv 1804.08771) on detokenized text against the untouched
    reference."""

    def __init__(
        self, split: Split, bpe: Bpe, max_tokens: int = 64, beam: int = 4, batch_size: int = 64
    ):
        if not isinstance(split, PairSplit):
            raise TypeError(
                f"Translations are measured on a PairSplit: got {type(split).__name__}."
            )
        self.split, self.bpe, self.max_tokens = split, bpe, max_tokens
        self.beam, self.batch_size = beam, batch_size
        self.likelihood = LanguageMetrics(torch.ones(len(bpe)))
        self.scores: dict[str, float] = {}
        self.hypotheses: list[str] = []

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        self.likelihood.update(logits, target, valid)

    def finish(self, model: nn.Module) -> None:
        """Translate the split's sources and compare with its references."""
        self.hypotheses = translate(
            model,
            self.split,
            self.bpe,
            beam=self.beam,
            max_tokens=self.max_tokens,
            batch_size=self.batch_size,
        )
        self.scores = corpus_scores(self.hypotheses, self.split.target_text)

    def compute(self) -> dict[str, float]:
        numbers = self.likelihood.compute()
        return {name: numbers[name] for name in ("nll", "perplexity", "accuracy")} | self.scores


def translate(
    model: nn.Module,
    split: PairSplit,
    bpe: Bpe,
    *,
    beam: int = 4,
    max_tokens: int = 64,
    alpha: float = 0.6,
    batch_size: int = 64,
) -> list[str]:
    """Translate every source of a split by beam search, in eval mode (the model's mode is
    restored).
    """
    if not (hasattr(model, "encode") and hasattr(model, "decode")):
        raise TypeError(
            f"Beam search needs a model with encode and decode: {type(model).__name__} lacks them."
        )
    device = next(model.parameters()).device
    lengths = (split.source != split.pad).sum(dim=1)
    order = lengths.argsort(
        descending=True, stable=True
    )  # sentences of like length together waste no padding
    texts: list[str] = [""] * len(split)
    mode = model.training
    model.eval()
    try:
        for rows in order.split(batch_size):
            source = split.batch(rows)["inputs"][0].to(device)
            tokens = beam_search(
                cast(Translator, model), source, beam=beam, max_tokens=max_tokens, alpha=alpha
            )
            for row, text in zip(rows.tolist(), bpe.decode(tokens), strict=True):
                texts[row] = text.strip()
    finally:
        model.train(mode)
    return texts


def corpus_scores(hypotheses: list[str], references: list[str]) -> dict[str, float]:
    """sacreBLEU's BLEU (13a tokens, case kept) and chrF, both 0 to 100.

    >>> corpus_scores(["the cat sat on the mat"], ["the cat sat on the mat"])["bleu"]
    100.0
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"One hypothesis per reference: got {len(hypotheses)} and {len(references)}."
        )
    bleu, chrf = (metric.corpus_score(hypotheses, [references]).score for metric in _scorers())
    return {"bleu": round(bleu, 6), "chrf": round(chrf, 6)}


def bleu_signature() -> str:
    """How BLEU was computed, in sacreBLEU's notation, for the record."""
    bleu = _scorers()[0]
    bleu.corpus_score(["a"], [["a"]])
    return str(bleu.get_signature())


def _scorers() -> tuple[Any, Any]:
    from sacrebleu.metrics import BLEU, CHRF

    return BLEU(), CHRF()
