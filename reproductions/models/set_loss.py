"""The loss of a set of detections: match queries to objects one to one, then score classes and
boxes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from reproductions.models.boxes import corners, generalized_iou
from reproductions.models.detr import Detections

COSTS = {"label": 2.0, "l1": 5.0, "giou": 2.0}
"""DETR's weights, with Deformable DETR's 2 for the classes; the same in the matching and in the
loss.
"""
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss (arXiv 1708.02002)


def set_loss(found: Detections, target: Tensor) -> Tensor:
    """The mean over objects of focal, L1 and generalized IoU loss, summed over the decoder's
    layers.

    `target` is (B, T, 5): class number, then center and size as fractions of the image; class -1
    where an image has fewer than T objects. Each layer is matched on its own (auxiliary losses,
    arXiv 2005.12872 section 3.2)."""
    losses = [
        layer_loss(logits, boxes, target)
        for logits, boxes in (*found.earlier, (found.logits, found.boxes))
    ]
    return torch.stack(losses).sum()


def layer_loss(logits: Tensor, boxes: Tensor, target: Tensor) -> Tensor:
    """The loss of one layer's detections (B, Q, classes) and (B, Q, 4)."""
    logits, boxes = logits.float(), boxes.float()
    image, query, thing = match(logits, boxes, target)
    objects = max(int((target[..., 0] >= 0).sum()), 1)
    wanted = torch.zeros_like(logits)
    wanted[image, query, target[image, thing, 0].long()] = 1.0
    mine, theirs = boxes[image, query], target[image, thing, 1:].to(boxes)
    label = focal(logits, wanted).sum()
    l1 = (mine - theirs).abs().sum()
    giou = (1 - generalized_iou(corners(mine), corners(theirs))).sum()
    return (COSTS["label"] * label + COSTS["l1"] * l1 + COSTS["giou"] * giou) / objects


def focal(logits: Tensor, wanted: Tensor) -> Tensor:
    """Focal loss of yes-or-no questions: FL = -alpha_t (1 - p_t)^gamma log p_t, p_t the probability
    of the truth.
    """
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    p = logits.sigmoid()
    miss = wanted * (1 - p) + (1 - wanted) * p  # 1 - p_t
    return (ALPHA * wanted + (1 - ALPHA) * (1 - wanted)) * miss**GAMMA * entropy


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cheapest one-to-one assignment of objects to queries in each image: (image, query,
    object), each 1-d.

    The Hungarian algorithm of scipy, on the processor. Where there are more objects than queries
    some stay without."""
    from scipy.optimize import linear_sum_assignment

    costs = match_costs(logits, boxes, target).cpu().numpy()
    counts = (target[..., 0] >= 0).sum(dim=1).tolist()  # objects come before the filling
    pairs = [linear_sum_assignment(cost[:, :n]) for cost, n in zip(costs, counts, strict=True)]
    rows = [torch.full((len(q),), i, dtype=torch.int64) for i, (q, _) in enumerate(pairs)]
    query, thing = (
        torch.cat([torch.as_tensor(p[k], dtype=torch.int64) for p in pairs]) for k in (0, 1)
    )
    return torch.cat(rows).to(logits.device), query.to(logits.device), thing.to(logits.device)


def match_costs(logits: Tensor, boxes: Tensor, target: Tensor) -> Tensor:
    """What giving object t to query q would cost, (B, Q, T): what the focal loss would change by,
    L1 and -GIoU.
    """
    label = target[..., 0].long().clamp(min=0)
    yes, no = focal(logits, torch.ones_like(logits)), focal(logits, torch.zeros_like(logits))
    change = (yes - no).gather(2, label[:, None].expand(-1, logits.shape[1], -1))
    truth = target[..., 1:].to(boxes)
    l1 = (boxes[:, :, None] - truth[:, None]).abs().sum(dim=-1)
    giou = generalized_iou(corners(boxes)[:, :, None], corners(truth)[:, None])
    return COSTS["label"] * change + COSTS["l1"] * l1 - COSTS["giou"] * giou
