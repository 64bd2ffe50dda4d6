"""A small DETR: a convolutional stem, a Transformer encoder over its tokens, a decoder of object
queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.models import ConvStem, Mlp, head_width, initialize


class Detections(NamedTuple):
    """What a detector returns for each query."""

    logits: Tensor  # (B, Q, classes): one yes or no per class; all no is 'no object'
    boxes: Tensor  # (B, Q, 4): center and size as fractions of the image
    earlier: tuple[
        tuple[Tensor, Tensor], ...
    ] = ()  # the same after each decoder layer before the last


class DETR(nn.Module):
    """Find objects: `model(images)` gives, for each of `queries` object queries, class logits and a
    box.

    After Carion et al. (arXiv 2005.12872), with what makes DETR learn on little data: each query
    starts from a box of its own (a learned anchor, at first on a grid over the image) that every
    decoder layer moves, as in DAB-DETR (arXiv 2201.12329), and each class is a yes or no of its own
    (focal loss), as in Deformable DETR (arXiv 2010.04159). The places of tokens and anchors enter
    queries and keys of every attention, never the values.

    >>> import torch
    >>> sizes = {"width": 16, "depth": 1, "decoder_depth": 2, "heads": 2, "mlp": 32}
    >>> model = DETR(image_size=(32, 48), classes=3, queries=6, **sizes)
    >>> found = model(torch.rand(2, 3, 32, 48))
    >>> found.logits.shape, found.boxes.shape, len(found.earlier)
    (torch.Size([2, 6, 3]), torch.Size([2, 6, 4]), 1)
    """

    positions: Tensor

    def __init__(
        self,
        image_size: int | tuple[int, int],
        classes: int,
        channels: int = 3,
        width: int = 96,
        depth: int = 2,
        decoder_depth: int = 2,
        heads: int = 4,
        mlp: int = 192,
        queries: int = 48,
    ):
        super().__init__()
        if width % 8:
            raise ValueError(
                f"Positions take the width in four parts of pairs: got width={width}, need a "
                "multiple of 8."
            )
        self.patch_embed = ConvStem(image_size, channels, width)
        rows, columns = self.patch_embed.grid_size
        self.register_buffer(
            "positions", place_code(grid_boxes(rows, columns), width), persistent=False
        )
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, mlp) for _ in range(depth))
        self.encoder_norm = nn.LayerNorm(width)
        self.anchors = nn.Parameter(_logit(anchor_boxes(queries, columns / rows)))
        self.content = nn.Parameter(torch.zeros(queries, width))
        self.place = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, mlp) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(width)
        self.label = nn.Linear(width, classes)
        self.shift = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
        initialize(self)
        nn.init.normal_(self.content, std=0.02)
        nn.init.constant_(
            self.label.bias, -math.log(99)
        )  # 'no object' at first: 1 % each, as focal loss wants it
        for parameter in self.shift[2].parameters():
            nn.init.zeros_(parameter)  # boxes begin at their anchors

    def encode(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) to the memory (B, N, D) that the queries read."""
        x = self.patch_embed(images)
        for layer in self.encoder:
            x = layer(x, self.positions)
        return cast(Tensor, self.encoder_norm(x))

    def forward(self, images: Tensor) -> Detections:
        memory = self.encode(images)
        x = self.content.expand(images.shape[0], -1, -1)
        anchors = self.anchors.expand(images.shape[0], -1, -1)  # before the sigmoid
        steps = []
        for layer in self.decoder:
            here = self.place(box_code(anchors.sigmoid(), x.shape[-1]))
            x = layer(x, memory, here, self.positions)
            read = self.decoder_norm(x)
            moved = anchors + self.shift(read)
            steps.append((self.label(read), moved.sigmoid()))
            anchors = moved.detach()  # each layer learns its own step
        return Detections(*steps[-1], tuple(steps[:-1]))


class PlacedAttention(nn.Module):
    """Attention whose queries and keys know their places: q and k read `x + place`, v reads `x`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        head_width(width, heads)
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, here: Tensor, memory: Tensor, there: Tensor) -> Tensor:
        q, k, v = self.q_proj(x + here), self.k_proj(memory + there), self.v_proj(memory)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v)
        return cast(Tensor, self.out_proj(o.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class EncoderLayer(nn.Module):
    """Tokens of the image read one another, then a feed-forward, each around a skip and after a
    norm.
    """

    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = PlacedAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y, place, y, place)
        return cast(Tensor, x + self.mlp(self.norm2(x)))


class DecoderLayer(nn.Module):
    """Queries read one another, then the image, then a feed-forward, each around a skip and after a
    norm.
    """

    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = PlacedAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.cross_attn = PlacedAttention(width, heads)
        self.norm3 = nn.LayerNorm(width)
        self.mlp = Mlp(width, mlp)

    def forward(self, x: Tensor, memory: Tensor, here: Tensor, there: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.self_attn(y, here, y, here)
        x = x + self.cross_attn(self.norm2(x), here, memory, there)
        return cast(Tensor, x + self.mlp(self.norm3(x)))


def grid_boxes(rows: int, columns: int) -> Tensor:
    """The boxes of the cells of a grid over the image, row by row, (rows * columns, 4)."""
    y, x = torch.meshgrid(
        (torch.arange(rows) + 0.5) / rows, (torch.arange(columns) + 0.5) / columns, indexing="ij"
    )
    size = torch.tensor([1 / columns, 1 / rows]).expand(rows * columns, 2)
    return torch.cat([torch.stack([x.flatten(), y.flatten()], dim=-1), size], dim=-1)


def anchor_boxes(queries: int, aspect: float) -> Tensor:
    """Where queries start: the first cells of the smallest grid of square cells that has as many,
    (queries, 4).
    """
    rows = max(1, math.ceil(math.sqrt(queries / aspect) - 1e-9))
    return grid_boxes(rows, math.ceil(queries / rows))[:queries]


def place_code(boxes: Tensor, width: int) -> Tensor:
    """Sines and cosines of the centers, (..., width): half of the channels for y, half for x, as
    DETR has them.
    """
    return torch.cat([_waves(boxes[..., 1], width // 2), _waves(boxes[..., 0], width // 2)], dim=-1)


def box_code(boxes: Tensor, width: int) -> Tensor:
    """Sines and cosines of center and size, (..., 2 * width)."""
    sizes = boxes[..., [2, 3, 2, 3]]
    return torch.cat([place_code(boxes, width), place_code(sizes, width)], dim=-1)


def _waves(values: Tensor, width: int) -> Tensor:
    """Values in [0, 1] as waves of half a period to eight periods over the image, as fine as a
    small grid can use.
    """
    frequency = math.pi * 16 ** torch.linspace(0, 1, width // 2, device=values.device)
    angle = values[..., None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1).to(values.dtype)


def _logit(boxes: Tensor) -> Tensor:
    return cast(Tensor, torch.special.logit(boxes, eps=1e-3))
