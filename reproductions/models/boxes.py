"""Boxes as fractions of an image: center and size (cx, cy, w, h), corners, and how much two of them
overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor


def corners(boxes: Tensor) -> Tensor:
    """(cx, cy, w, h) to (left, top, right, bottom).

    >>> corners(torch.tensor([0.5, 0.5, 0.2, 0.4]))
    tensor([0.4000, 0.3000, 0.6000, 0.7000])
    """
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([center - half, center + half], dim=-1)


def centers(boxes: Tensor) -> Tensor:
    """(left, top, right, bottom) to (cx, cy, w, h).

    >>> centers(torch.tensor([0.4, 0.3, 0.6, 0.7]))
    tensor([0.5000, 0.5000, 0.2000, 0.4000])
    """
    first, last = boxes[..., :2], boxes[..., 2:]
    return torch.cat([(first + last) / 2, last - first], dim=-1)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union minus the share of the common hull that neither covers; corners in,
    any leading shape.

    Rezatofighi et al. (arXiv 1902.09630). It lies in (-1, 1] and has a gradient where boxes do not
    touch. The shapes broadcast: `generalized_iou(a[:, None], b)` compares each with each.

    >>> generalized_iou(torch.tensor([0.0, 0.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, 3.0, 2.0]))
    tensor(0.3333)
    >>> generalized_iou(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([2.0, 0.0, 3.0, 1.0]))
    tensor(-0.3333)
    """
    common = _area(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    union = _area(a[..., :2], a[..., 2:]) + _area(b[..., :2], b[..., 2:]) - common
    hull = _area(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    tiny = torch.finfo(a.dtype).tiny  # two boxes of no size at one place: 0 / 0
    return common / union.clamp(min=tiny) - (hull - union) / hull.clamp(min=tiny)


def _area(first: Tensor, last: Tensor) -> Tensor:
    return (last - first).clamp(min=0).prod(dim=-1)
