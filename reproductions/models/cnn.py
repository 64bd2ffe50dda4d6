"""A plain convolutional network, with or without skips: what a Transformer without skips is
compared with.
"""

from __future__ import annotations

from torch import Tensor, nn


class CNNBlock(nn.Module):
    """A convolution with batch norm and GELU, around a skip if `skip`."""

    def __init__(self, width: int, kernel: int, skip: bool):
        super().__init__()
        self.skip = skip
        self.conv = nn.Conv2d(width, width, kernel, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.act(self.norm(self.conv(x)))
        return x + branch if self.skip else branch

    def extra_repr(self) -> str:
        return f"skip={self.skip}"


class CNN(nn.Module):
    """Classify images with a stack of equal convolutions and one pooling in the middle.

    Always Skip Attention (arXiv 2505.01996) says that networks of convolutions, unlike
    Transformers, can do without their skips (`skip=False`); `ConvMixer` is the paper's own example.

    >>> import torch
    >>> model = CNN(classes=10, width=8, depth=4, skip=False).eval()
    >>> model(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        width: int = 64,
        depth: int = 8,
        kernel: int = 3,
        skip: bool = True,
        channels: int = 3,
    ):
        super().__init__()
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(
                f"kernel must be odd, so that a convolution has a center: got {kernel}."
            )
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, kernel, padding="same", bias=False),
            nn.BatchNorm2d(width),
            nn.GELU(),
        )
        self.blocks = nn.ModuleList(CNNBlock(width, kernel, skip) for _ in range(depth))
        self.pool = nn.AvgPool2d(2, ceil_mode=True)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for i, block in enumerate(self.blocks):
            x = block(self.pool(x) if 2 * i == len(self.blocks) else x)
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out
