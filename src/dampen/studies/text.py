"""Text in and out: byte-level BPE through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

PAD, BEGIN, END = 0, 1, 2
SPECIALS = ["<pad>", "<s>", "</s>"]


class Bpe:
    """Byte-level byte-pair encoding (arXiv 1508.07909): every text can be
    written, and read back exactly.

    The first three tokens are padding, begin and end.

    >>> bpe = Bpe.train(["low lower lowest", "new newer newest"] * 5, vocabulary=280)
    >>> bpe.decode(bpe.encode(["the newest ☃"]))
    ['the newest ☃']
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def train(cls, lines: Iterable[str], vocabulary: int) -> Bpe:
        """Learn the merges from lines of text; `vocabulary` counts the 256 bytes and
        the special tokens too."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if vocabulary < 256 + len(SPECIALS):
            raise ValueError(
                "A byte-level vocabulary has at least "
                f"{256 + len(SPECIALS)} tokens: got {vocabulary}."
            )
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
        tokenizer.encode_special_tokens = (
            True  # '<s>' in the text is four characters, not the begin token
        )
        return cls(tokenizer)

    def __len__(self) -> int:
        out: int = self.tokenizer.get_vocab_size()
        return out

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Token numbers of each line, without special tokens (text that looks like one is split
        into bytes)."""
        return [e.ids for e in self.tokenizer.encode_batch(list(lines), add_special_tokens=False)]

    def decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The text of each list of tokens; special tokens are left out."""
        out: list[str] = self.tokenizer.decode_batch(
            [list(t) for t in tokens], skip_special_tokens=True
        )
        return out

    def characters(self) -> Tensor:
        """How many characters each token covers, as (vocabulary,) of float64.

        A character of several bytes counts at its first byte, so sums over a text are exact
        wherever tokens are cut.
        """
        from tokenizers import pre_tokenizers

        alphabet = _byte_alphabet(pre_tokenizers)
        counts = torch.zeros(len(self), dtype=torch.float64)
        for token, number in self.tokenizer.get_vocab().items():
            if number >= len(SPECIALS):
                counts[number] = sum(
                    not 0x80 <= alphabet[c] < 0xC0 for c in token
                )  # not a UTF-8 continuation byte
        return counts


def _byte_alphabet(pre_tokenizers: Any) -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: printable latin-1 as itself, the rest
    from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError(
            "This version of `tokenizers` writes bytes in "
            "another alphabet; install one from 0.20 on."
        )
    return table


def pad_tokens(rows: Sequence[Sequence[int]]) -> Tensor:
    """Lists of tokens as one (rows, longest) tensor, padded on the right.

    >>> pad_tokens([[5, 6], [7]]).tolist()
    [[5, 6], [7, 0]]
    """
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    width = int(lengths.max()) if len(rows) else 0
    table = torch.full((len(rows), width), PAD, dtype=torch.int32)
    table[torch.arange(width) < lengths[:, None]] = torch.tensor(
        [t for row in rows for t in row], dtype=torch.int32
    )
    return table
