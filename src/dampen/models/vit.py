"""A small vision Transformer; its defaults are the 7-layer CIFAR model of the Explicit Dropout paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dampen.models.block import Block, initialize
from dampen.models.patches import ConvStem, PatchEmbed


class ViT(nn.Module):
    """Classify images with a Transformer over patches.

    The defaults follow the model of Explicit Dropout (arXiv 2604.20505): 7 pre-norm layers, 384 wide, 12 heads,
    feed-forward 384, patches of 4 x 4, a class token and learned positions.
    `pool="mean"` averages the patches instead of reading the class token; `classes=0` returns the pooled features.
    `stem="conv"` makes the tokens by three convolutions of stride 2 instead (`patch_size` is then 8, whatever it says):
    the better model on little data.

    >>> import torch
    >>> digits = ViT(image_size=8, patch_size=2, channels=1, width=48, depth=2, heads=4, mlp=96)
    >>> digits(torch.rand(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] = 32,
        patch_size: int | tuple[int, int] = 4,
        channels: int = 3,
        classes: int = 10,
        width: int = 384,
        depth: int = 7,
        heads: int = 12,
        mlp: int = 384,
        pool: str = "cls",
        norm_first: bool = True,
        stem: str = "patch",
    ):
        super().__init__()
        if pool not in ("cls", "mean"):
            raise ValueError(f"pool says how tokens become one vector: got {pool!r}; use 'cls' or 'mean'.")
        self.pool = pool
        self.num_prefix_tokens = 1  # the class token stands before the patches
        if stem not in ("patch", "conv"):
            raise ValueError(f"stem says how an image becomes tokens: got {stem!r}; use 'patch' or 'conv'.")
        patches = stem == "patch"
        self.patch_embed = (
            PatchEmbed(image_size, patch_size, channels, width) if patches else ConvStem(image_size, channels, width)
        )
        n = self.patch_embed.num_patches or 0
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + n, width))
        self.blocks = nn.ModuleList(Block(width, heads, mlp, norm_first=norm_first) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, classes) if classes else nn.Identity()
        initialize(self)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.02)

    def embed(self, images: Tensor) -> Tensor:
        """Patch tokens with their positions, (B, N, D), class token not yet there."""
        out: Tensor = self.patch_embed(images) + self.pos_embed[:, 1:]
        return out

    def encode(self, tokens: Tensor) -> Tensor:
        """Put the class token before any set of patch tokens and run the blocks: (B, 1 + N', D)."""
        cls_token = (self.cls_token + self.pos_embed[:, :1]).expand(tokens.shape[0], -1, -1)
        x = torch.cat([cls_token, tokens], dim=1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, images: Tensor) -> Tensor:
        x = self.encode(self.embed(images))
        pooled = x[:, 0] if self.pool == "cls" else x[:, 1:].mean(dim=1)
        out: Tensor = self.head(pooled)
        return out
