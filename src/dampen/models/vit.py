"""Vision Transformers, with the patch embedding and the convolutional stem that turn images into
tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from dampen.functional.grid import pair, patch_grid
from dampen.models.block import Block, initialize


class PatchEmbed(nn.Module):
    """Map each patch of an image to a token, (B, C, H, W) -> (B, N, D), or to a map (B, D, H', W')
    if not flattened.

    `patch_size` and `num_patches` are public; with `image_size=None` any size that splits evenly is
    taken.

    Args:
        image_size: that is checked; None: any.
        patch_size: height and width of a patch, or one number for both.
        channels: of an image.
        width: channels of a token.
        flatten: return tokens (B, N, D) instead of a grid.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] | None,
        patch_size: int | tuple[int, int],
        channels: int,
        width: int,
        flatten: bool = True,
    ):
        super().__init__()
        self.patch_size = pair(patch_size)
        self.image_size = None if image_size is None else pair(image_size)
        self.channels = channels
        self.flatten = flatten
        self.grid_size = (
            None if self.image_size is None else patch_grid(self.image_size, self.patch_size)
        )
        self.num_patches = None if self.grid_size is None else self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(channels, width, self.patch_size, stride=self.patch_size)
        # A patch embedding is a linear map of flattened patches: start it as the linear maps start.
        nn.init.xavier_uniform_(self.proj.weight.view(width, -1))
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        x = self.proj(images)
        out: Tensor = x.flatten(2).transpose(1, 2) if self.flatten else x
        return out

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4:
            raise ValueError(
                f"Images must come as (batch, channels, height, width): got shape "
                f"{tuple(images.shape)}. "
                "Add the missing dimension with unsqueeze, or flatten the surplus ones."
            )
        if images.shape[1] != self.channels:
            raise ValueError(
                f"The model was built for {self.channels} channel(s): got images with "
                f"{images.shape[1]}, "
                f"shape {tuple(images.shape)}. Build it with channels={images.shape[1]}, or "
                "convert the images."
            )
        h, w = images.shape[2:]
        if self.image_size is None:
            patch_grid((h, w), self.patch_size)
        elif (h, w) != self.image_size:
            raise ValueError(
                f"The model was built for images of {self.image_size[0]} x {self.image_size[1]}: "
                f"got {h} x {w}. "
                f"Build it with image_size=({h}, {w}), or resize the images."
            )


class ConvStem(nn.Module):
    """Map an image to tokens by three 3 x 3 convolutions of stride 2: (B, C, H, W) -> (B, H/8 *
    W/8, D).

    Convolutions see edges before the first attention does, which patches on little data have to
    learn: on a few thousand images of CIFAR-10 the same Transformer gains more than ten points
    (Xiao et al., arXiv 2106.14881).

    Args:
        image_size: height and width, or one number for both.
        channels: of an image.
        width: channels of a token.
    """

    def __init__(self, image_size: int | tuple[int, int], channels: int, width: int):
        super().__init__()
        # what one token covers, as in `PatchEmbed`
        self.patch_size = (8, 8)
        self.image_size = pair(image_size)
        self.grid_size = patch_grid(self.image_size, self.patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        widths = [channels, max(width // 4, 1), max(width // 2, 1), width]
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise(widths)):
            # A norm follows, so no bias; nothing but the Transformer's own norm follows the last
            # activation-free map.
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
            ]
            layers += [nn.GELU()] if i < 2 else []
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        if images.dim() != 4 or tuple(images.shape[2:]) != self.image_size:
            raise ValueError(
                f"The model was built for images of {self.image_size[0]} x {self.image_size[1]}: "
                "got shape "
                f"{tuple(images.shape)}. Build it with another image_size, or resize the images."
            )
        out: Tensor = self.layers(images).flatten(2).transpose(1, 2)
        return out


class ViT(nn.Module):
    """Classify images with a Transformer over patches.

    The defaults follow the model of Explicit Dropout (arXiv 2604.20505): 7 pre-norm layers, 384
    wide, 12 heads, feed-forward 384, patches of 4 x 4, a class token and learned positions.
    `pool="mean"` averages the patches instead of reading the class token; `classes=0` returns the
    pooled features. `stem="conv"` makes the tokens by three convolutions of stride 2 instead
    (`patch_size` is then 8, whatever it says): the better model on little data.

    Args:
        image_size: height and width, or one number for both.
        patch_size: height and width of a patch, or one number for both.
        channels: of an image.
        classes: number of classes.
        width: channels of a token.
        depth: number of blocks.
        heads: attention heads; must divide the width.
        mlp: width of the feed-forward.
        pool: "cls" or "mean": what the classifier reads.
        norm_first: layer norm before each branch (pre-norm) instead of after the sum.
        stem: "patch" or "conv": how an image becomes tokens.

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
            raise ValueError(
                f"pool says how tokens become one vector: got {pool!r}; use 'cls' or 'mean'."
            )
        self.pool = pool
        # the class token comes before the patches
        self.num_prefix_tokens = 1
        if stem not in ("patch", "conv"):
            raise ValueError(
                f"stem says how an image becomes tokens: got {stem!r}; use 'patch' or 'conv'."
            )
        patches = stem == "patch"
        self.patch_embed = (
            PatchEmbed(image_size, patch_size, channels, width)
            if patches
            else ConvStem(image_size, channels, width)
        )
        n = self.patch_embed.num_patches or 0
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + n, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, mlp, norm_first=norm_first) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.head = nn.Linear(width, classes) if classes else nn.Identity()
        initialize(self)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.pos_embed, std=0.02)

    def embed(self, images: Tensor) -> Tensor:
        """Patch tokens with their positions, (B, N, D), class token not yet there.

        Args:
            images: (B, C, H, W).
        """
        out: Tensor = self.patch_embed(images) + self.pos_embed[:, 1:]
        return out

    def encode(self, tokens: Tensor) -> Tensor:
        """Put the class token before any set of patch tokens and run the blocks: (B, 1 + N', D).

        Args:
            tokens: (B, N, ...).
        """
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
