"""A small text-image model: a caption reads an image by cross-attention and says whether it is
true.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from dampen.models import Block, PatchEmbed, initialize
from reproductions.models.decoder import DecoderBlock


class CaptionMatcher(nn.Module):
    """Classify pairs of an image and a caption (B, N) of token numbers; token `pad` is padding.

    The image's patches pass through `depth` blocks; then the caption's tokens, in `depth` blocks of
    their own, read each other and the patches: the attention between the modalities is
    cross-attention, queries from the text, keys and values from the image. The mean over the
    caption's tokens is classified.

    >>> sizes = {"vocab": 20, "image_size": 8, "patch_size": 2, "channels": 1}
    >>> model = CaptionMatcher(**sizes, width=16, depth=1, heads=2, mlp=32)
    >>> model(torch.rand(3, 1, 8, 8), torch.randint(1, 20, (3, 5))).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        vocab: int,
        image_size: int = 8,
        patch_size: int = 2,
        channels: int = 1,
        classes: int = 2,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
        mlp: int = 64,
        max_tokens: int = 8,
        pad: int = 0,
    ):
        super().__init__()
        self.pad, self.max_tokens = pad, max_tokens
        self.patch_embed = PatchEmbed(image_size, patch_size, channels, width)
        self.image_positions = nn.Parameter(
            torch.zeros(1, self.patch_embed.num_patches or 0, width)
        )
        self.word_embed = nn.Embedding(vocab, width)
        self.word_positions = nn.Parameter(torch.zeros(1, max_tokens, width))
        self.image_blocks = nn.ModuleList(Block(width, heads, mlp) for _ in range(depth))
        self.image_norm = nn.LayerNorm(width)
        self.text_blocks = nn.ModuleList(DecoderBlock(width, heads, mlp) for _ in range(depth))
        self.text_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        initialize(self)
        nn.init.normal_(self.image_positions, std=0.02)
        nn.init.normal_(self.word_positions, std=0.02)

    def forward(self, images: Tensor, caption: Tensor) -> Tensor:
        if caption.shape[1] > self.max_tokens:
            raise ValueError(
                f"The caption has {caption.shape[1]} tokens, the model's positions are "
                f"{self.max_tokens}. "
                f"Build the model with max_tokens={caption.shape[1]}."
            )
        memory = self.patch_embed(images) + self.image_positions
        for block in self.image_blocks:
            memory = block(memory)
        memory, padding = self.image_norm(memory), caption == self.pad
        x, keep = (
            self.word_embed(caption) + self.word_positions[:, : caption.shape[1]],
            ~padding[:, None, None, :],
        )
        for block in self.text_blocks:
            x = block(x, memory, keep)
        counted = (~padding).to(x.dtype)[..., None]
        pooled = (self.text_norm(x) * counted).sum(1) / counted.sum(1).clamp(min=1)
        return cast(Tensor, self.head(pooled))
