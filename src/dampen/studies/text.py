"""Text in and out: byte-level BPE through the `tokenizers` library, and beam search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PAD, BEGIN, END = 0, 1, 2
SPECIALS = ["<pad>", "<s>", "</s>"]


class Bpe:
    """Byte-level byte-pair encoding (arXiv 1508.07909): every text can be written, and read back exactly.

    The first three tokens are padding, begin and end.

    >>> bpe = Bpe.train(["low lower lowest", "new newer newest"] * 5, vocabulary=280)
    >>> bpe.decode(bpe.encode(["the newest ☃"]))
    ['the newest ☃']
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def train(cls, lines: Iterable[str], vocabulary: int) -> Bpe:
        """Learn the merges from lines of text; `vocabulary` counts the 256 bytes and the special tokens too."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocabulary < 256 + len(SPECIALS):
            raise ValueError(f"A byte-level vocabulary has at least {256 + len(SPECIALS)} tokens: got {vocabulary}.")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        tokenizer.encode_special_tokens = True  # '<s>' in the text is four characters, not the begin token
        return cls(tokenizer)

    def __len__(self) -> int:
        out: int = self.tokenizer.get_vocab_size()
        return out

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Token numbers of each line, without special tokens (text that looks like one is split into bytes)."""
        return [e.ids for e in self.tokenizer.encode_batch(list(lines), add_special_tokens=False)]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens; special tokens are left out."""
        out: list[str] = self.tokenizer.decode_batch([list(t) for t in tokens], skip_special_tokens=True)
        return out

    def characters(self) -> Tensor:
        """How many characters each token stands for, as (vocabulary,) of float64.

        A character of several bytes counts at its first byte, so sums over a text are exact wherever tokens are cut.
        """
        from tokenizers import pre_tokenizers

        alphabet = _byte_alphabet(pre_tokenizers)
        counts = torch.zeros(len(self), dtype=torch.float64)
        for token, number in self.tokenizer.get_vocab().items():
            if number >= len(SPECIALS):
                counts[number] = sum(not 0x80 <= alphabet[c] < 0xC0 for c in token)  # not a UTF-8 continuation byte
        return counts


def _byte_alphabet(pre_tokenizers: Any) -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: printable latin-1 as itself, the rest from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("This version of `tokenizers` writes bytes in another alphabet; install one from 0.20 on.")
    return table


def pad_tokens(rows: Sequence[Sequence[int]]) -> Tensor:
    """Lists of tokens as one (rows, longest) tensor, padded on the right.

    >>> pad_tokens([[5, 6], [7]]).tolist()
    [[5, 6], [7, 0]]
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    width = int(lengths.max()) if len(rows) else 0
    table = torch.full((len(rows), width), PAD, dtype=torch.int32)
    table[torch.arange(width) < lengths[:, None]] = torch.tensor([t for row in rows for t in row], dtype=torch.int32)
    return table


class Translator(Protocol):
    """What beam search needs of a model; `dampen.models.Seq2Seq` has it."""

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]: ...

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor: ...


@torch.no_grad()
def beam_search(
    model: Translator, source: Tensor, *, beam: int = 4, max_tokens: int = 64, alpha: float = 0.6
) -> list[list[int]]:
    """The best translation of each source row (B, M), as tokens without begin and end.

    Hypotheses are ranked by `log P / ((5 + length) / 6)^alpha` (GNMT, arXiv 1609.08144, eq. 14), the end token counted.
    A sentence is done when `beam` hypotheses have ended within its beam, or at `max_tokens`, where the end is forced.
    The prefix is decoded anew at each step: simple, and right for any model with `encode` and `decode`.
    """
    if beam < 1 or max_tokens < 1:
        raise ValueError(f"beam and max_tokens count from 1: got {beam} and {max_tokens}.")
    memory, padding = model.encode(source)
    batch, device = len(source), source.device
    best_score = torch.full((batch,), -torch.inf, device=device)
    best: list[list[int]] = [[] for _ in range(batch)]
    ended = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.arange(batch, device=device)  # sentences still searched; the tensors below hold these alone
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
        # Each hypothesis can end in one way only, so 2 * beam candidates hold at least beam that go on.
        total, flat = (score[..., None] + gain).flatten(1).topk(min(2 * beam, beam * vocabulary), dim=1)
        parent, token = flat // vocabulary, flat % vocabulary

        ends = (token == END) & (torch.arange(token.shape[1], device=device) < beam) & total.isfinite()
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
        prefix = torch.cat([prefix.gather(1, parent[..., None].expand(-1, -1, length)), token[..., None]], dim=2)
        keep = torch.nonzero((ended[alive] < beam) & score.isfinite().any(dim=1)).flatten()
        if not len(keep):
            break
        if len(keep) < len(alive):
            rows = (keep[:, None] * beam + torch.arange(beam, device=device)).flatten()
            alive, prefix, score = alive[keep], prefix[keep], score[keep]
            memory, padding = memory[rows], padding[rows]
    return best
