"""Small encoders: of given feature vectors, and of texts as token ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dampen.models.block import Block, check_padding, initialize, visible_keys


class FeatureEncoder(nn.Module):
    """Classify a sequence of feature vectors as a whole, or each of its tokens.

    The 2-layer encoder of Explicit Dropout (arXiv 2604.20505) on THUMOS14 (`per_token=True`: one
    set of logits per frame) and GTZAN (`per_token=False`: the mean over unpadded tokens is
    classified). Positions are learned. `padding` is bool, True where a token is padded: such a
    token changes nothing but its own per-token logits.

    Args:
        features: size of a feature vector.
        classes: number of classes.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads; must divide the width.
        mlp: width of the feed-forward.
        max_tokens: longest sequence.
        per_token: classify each token instead of the sequence.
        norm_first: layer norm before each branch (pre-norm) instead of after the sum.

    >>> import torch
    >>> model = FeatureEncoder(features=64, classes=10, width=32, heads=4, mlp=64, max_tokens=120)
    >>> padding = torch.zeros(3, 100, dtype=torch.bool)
    >>> model(torch.rand(3, 100, 64), padding).shape
    torch.Size([3, 10])
    """

    def __init__(
        self,
        features: int,
        classes: int,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        mlp: int = 256,
        max_tokens: int = 128,
        per_token: bool = False,
        norm_first: bool = True,
    ):
        super().__init__()
        self.features = features
        self.max_tokens = max_tokens
        self.per_token = per_token
        self.embed = nn.Linear(features, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, max_tokens, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp, norm_first=norm_first) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, classes)
        initialize(self)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        self._check(x)
        check_padding(padding, x)
        x = self.embed(x) + self.pos_embed[:, : x.shape[1]]
        keep = visible_keys(padding)
        for block in self.blocks:
            x = block(x, keep)
        x = self.norm(x)
        out: Tensor = self.head(x if self.per_token else _mean(x, padding))
        return out

    def _check(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.features:
            raise ValueError(
                f"Feature tokens must come as (batch, tokens, {self.features}): got shape "
                f"{tuple(x.shape)}. "
                "Transpose the input, or build the model with features= as many as each token has."
            )
        if x.shape[1] > self.max_tokens:
            raise ValueError(
                f"The sequence is longer than the model's positions: got {x.shape[1]} tokens, "
                "max_tokens is "
                f"{self.max_tokens}. Cut the sequence into windows, or build the model with "
                f"max_tokens={x.shape[1]}."
            )


def _mean(x: Tensor, padding: Tensor | None) -> Tensor:
    """Mean over unpadded tokens; a sequence of padding alone gives zeros."""
    if padding is None:
        return x.mean(dim=1)
    count = (~padding).sum(dim=1, keepdim=True).clamp(min=1)
    return x.masked_fill(padding[..., None], 0.0).sum(dim=1) / count


class TextEncoder(nn.Module):
    """Classify a text, given as token ids (B, N): embeddings, learned positions, blocks, the mean
    over real tokens.

    `padding` is bool, True where a token is padded: such a token changes nothing. `types` are taken
    for the sake of models with token types and not used.

    Args:
        vocab: number of token ids.
        classes: number of classes.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads; must divide the width.
        mlp: width of the feed-forward.
        max_tokens: longest sequence.
        norm_first: layer norm before each branch (pre-norm) instead of after the sum.

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
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp, norm_first=norm_first) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, classes)
        initialize(self)

    def forward(
        self, tokens: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.max_tokens:
            raise ValueError(
                f"Tokens must be ids of shape (batch, up to {self.max_tokens}): got shape "
                f"{tuple(tokens.shape)}. "
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
