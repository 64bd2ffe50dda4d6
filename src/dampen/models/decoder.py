"""A small causal language model."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.models.block import Block, initialize


class LanguageModel(nn.Module):
    """Predict each next token from those before it: (B, N) token ids to (B, N, vocab) logits.

    Pre-norm blocks, learned positions, output layer tied to the embedding (`tied=False` separates
    them). Attention is called with `is_causal=True` and no mask, so the fused kernel needs no n x n
    tensor. Padding belongs on the right, where no real token can see it.

    Args:
        vocab: number of token ids.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads; must divide the width.
        mlp: width of the feed-forward.
        context: longest sequence.
        tied: the output layer shares the embedding's weight.
        norm_first: layer norm before each branch (pre-norm) instead of after the sum.

    >>> import torch
    >>> model = LanguageModel(vocab=65, width=32, depth=2, heads=4, mlp=64, context=16)
    >>> model(torch.randint(65, (2, 16))).shape
    torch.Size([2, 16, 65])
    """

    def __init__(
        self,
        vocab: int,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        mlp: int = 1024,
        context: int = 256,
        tied: bool = True,
        norm_first: bool = True,
    ):
        super().__init__()
        self.context = context
        self.token_embed = nn.Embedding(vocab, width)
        self.pos_embed = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp, causal=True, norm_first=norm_first) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, vocab, bias=False)
        initialize(self)
        if tied:
            self.head.weight = self.token_embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.dim() != 2:
            raise ValueError(
                f"Tokens must be ids of shape (batch, length): got shape {tuple(tokens.shape)}."
            )
        n = tokens.shape[1]
        if n > self.context:
            raise ValueError(
                f"The sequence is longer than the context: got {n} tokens, context is "
                f"{self.context}. "
                f"Cut it into windows, or build the model with context={n}."
            )
        x = self.token_embed(tokens) + self.pos_embed.weight[:n]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out
