"""A small encoder that classifies texts."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.models.block import Block, check_padding, initialize, visible_keys


class TextEncoder(nn.Module):
    """Classify a text, given as token ids (B, N): embeddings, learned positions, blocks, the mean over real tokens.

    `padding` is bool, True where a token is padded: such a token changes nothing. `types` are taken for the sake of
    models with token types and not used.

    >>> import torch
    >>> model = TextEncoder(vocab=300, classes=4, width=32, heads=4, mlp=64, max_tokens=16)
    >>> model(torch.randint(300, (2, 9)), torch.zeros(2, 9, dtype=torch.bool)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        vocab: int,
        classes: int,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        mlp: int = 256,
        max_tokens: int = 128,
        norm_first: bool = True,
    ):
        super().__init__()
        self.max_tokens = max_tokens
        self.token_embed = nn.Embedding(vocab, width)
        self.pos_embed = nn.Embedding(max_tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp, norm_first=norm_first) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(self, tokens: Tensor, padding: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.max_tokens:
            raise ValueError(
                f"Tokens must be ids of shape (batch, up to {self.max_tokens}): got shape {tuple(tokens.shape)}. "
                "Cut the texts, or build the model with a larger max_tokens."
            )
        x = self.token_embed(tokens) + self.pos_embed.weight[: tokens.shape[1]]
        check_padding(padding, x)
        keep = visible_keys(padding)
        for block in self.blocks:
            x = block(x, keep)
        x = self.norm(x)
        if padding is None:
            mean = x.mean(dim=1)
        else:
            count = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
            mean = x.masked_fill(padding[..., None], 0.0).sum(dim=1) / count
        out: Tensor = self.head(mean)
        return out
