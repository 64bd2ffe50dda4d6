"""ConvMixer: patches and convolutions without attention, a counterexample to the need for skips."""

from __future__ import annotations

from torch import Tensor, nn

from dampen.models import PatchEmbed


class ConvMixerBlock(nn.Module):
    """Mix over space by a depthwise convolution (around a skip, if `skip`), then over channels."""

    def __init__(self, width: int, kernel: int, skip: bool = True):
        super().__init__()
        self.skip = skip
        self.depthwise = nn.Conv2d(width, width, kernel, groups=width, padding="same")
        self.norm1 = nn.BatchNorm2d(width)
        self.pointwise = nn.Conv2d(width, width, 1)
        self.norm2 = nn.BatchNorm2d(width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm1(self.act(self.depthwise(x)))
        x = x + branch if self.skip else branch
        out: Tensor = self.norm2(self.act(self.pointwise(x)))
        return out

    def extra_repr(self) -> str:
        return f"skip={self.skip}"


class ConvMixer(nn.Module):
    """Classify images with ConvMixer (Trockman and Kolter, arXiv 2201.09792), with or without its
    skips.

    Always Skip Attention (arXiv 2505.01996) reports that `skip=False` costs it nothing, unlike a
    Transformer.

    >>> import torch
    >>> model = ConvMixer(classes=10, width=16, depth=2, kernel=3, patch_size=4, skip=False).eval()
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 256,
        depth: int = 8,
        kernel: int = 5,
        patch_size: int | tuple[int, int] = 2,
        skip: bool = True,
        channels: int = 3,
    ):
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(
                f"kernel must be odd, so that a convolution has a center: got {kernel}."
            )
        self.patch_embed = PatchEmbed(None, patch_size, channels, width, flatten=False)
        self.act = nn.GELU()
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(ConvMixerBlock(width, kernel, skip) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.act(self.patch_embed(images)))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out
