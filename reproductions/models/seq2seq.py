"""A small encoder-decoder Transformer for translation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dampen.models import Block, initialize, visible_keys
from reproductions.models.decoder import DecoderBlock


def sinusoids(length: int, width: int) -> Tensor:
    """Fixed positions of "Attention Is All You Need" (arXiv 1706.03762, section 3.5), shape
    (length, width).

    >>> sinusoids(3, 4)[0]
    tensor([0., 1., 0., 1.])
    """
    position = torch.arange(length, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: width // 2])
    return table


class Seq2Seq(nn.Module):
    """Translate token sequences: `model(source, target)` gives the logits of the token after each
    target token.

    Token `pad` is hidden from every attention, on both sides; position t of the target sees
    positions up to t. `tied=True` lets the output layer share the target embedding's weight. For
    search, encode once and decode as often as needed: `memory, padding = model.encode(source)`,
    then `model.decode(target, memory, padding)`.

    >>> import torch
    >>> model = Seq2Seq(source_vocab=20, target_vocab=30, width=16, depth=1, heads=2, mlp=32)
    >>> source, target = torch.randint(1, 20, (2, 7)), torch.randint(1, 30, (2, 5))
    >>> model(source, target).shape
    torch.Size([2, 5, 30])
    """

    positions: Tensor

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        width: int = 256,
        depth: int = 3,
        heads: int = 4,
        mlp: int = 1024,
        pad: int = 0,
        max_tokens: int = 512,
        tied: bool = True,
        norm_first: bool = True,
    ):
        super().__init__()
        if not 0 <= pad < min(source_vocab, target_vocab):
            raise ValueError(
                f"pad must be a token of both vocabularies: got pad={pad} with {source_vocab} "
                "source and "
                f"{target_vocab} target tokens."
            )
        self.pad = pad
        self.max_tokens = max_tokens
        self.scale = math.sqrt(width)
        self.source_embed = nn.Embedding(source_vocab, width)
        self.target_embed = nn.Embedding(target_vocab, width)
        self.register_buffer("positions", sinusoids(max_tokens, width), persistent=False)
        self.encoder = nn.ModuleList(
            Block(width, heads, mlp, norm_first=norm_first, fused=False) for _ in range(depth)
        )
        self.decoder = nn.ModuleList(
            DecoderBlock(width, heads, mlp, norm_first=norm_first) for _ in range(depth)
        )
        self.encoder_norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, target_vocab, bias=False)
        initialize(self)
        # Times sqrt(width) on the way in these have unit size, as the positions do; on the way out
        # logits start small.
        for embed in (self.source_embed, self.target_embed):
            nn.init.normal_(embed.weight, std=width**-0.5)
        if tied:
            self.head.weight = self.target_embed.weight

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Source tokens (B, M) to the memory (B, M, D) and its padding mask (B, M), True where
        padded.
        """
        padding = source == self.pad
        x = self._embed(source, self.source_embed, "source")
        for block in self.encoder:
            x = block(x, visible_keys(padding))
        return self.encoder_norm(x), padding

    def decode(self, target: Tensor, memory: Tensor, padding: Tensor | None = None) -> Tensor:
        """Target tokens (B, N) and an encoded source to next-token logits (B, N, vocabulary)."""
        x = self._embed(target, self.target_embed, "target")
        n = target.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool, device=target.device).tril()
        keep = causal & (target != self.pad)[:, None, None, :]  # (B, 1, N, N)
        memory_keep = visible_keys(padding)
        for block in self.decoder:
            x = block(x, memory, keep, memory_keep)
        out: Tensor = self.head(self.decoder_norm(x))
        return out

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))

    def _embed(self, tokens: Tensor, embed: nn.Embedding, side: str) -> Tensor:
        if tokens.dim() != 2:
            raise ValueError(
                f"The {side} must be token ids of shape (batch, length): got shape "
                f"{tuple(tokens.shape)}."
            )
        n = tokens.shape[1]
        if n > self.max_tokens:
            raise ValueError(
                f"The {side} is longer than the model's positions: got {n} tokens, max_tokens is "
                f"{self.max_tokens}. "
                f"Cut it, or build the model with max_tokens={n}."
            )
        out: Tensor = embed(tokens) * self.scale + self.positions[:n]
        return out
