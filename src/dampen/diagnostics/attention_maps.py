"""What attention looks at: its weights, their entropy, how alike the heads are, and attention
rollout as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.diagnostics.probing import Probe, call, map_tensors, probed, unwrapped
from dampen.regularizer import Call


class _WeightsProbe(Probe):
    """Keeps the attention weights of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def probs(self, a: Tensor, call: Call) -> Tensor:
        rows = call.rows
        # long sequences come in chunks of queries
        if rows is not None and rows.start:
            self.seen[-1] = torch.cat([self.seen[-1], a.detach().float()], dim=2)
        else:
            self.seen.append(a.detach().float())
        return a


@torch.no_grad()
def attention_weights(
    model: nn.Module, inputs: Any, samples: int | None = None
) -> dict[str, Tensor]:
    """The attention weights (B, H, N, M) of every layer, in order; the model runs once in eval and
    is left as it was.

    A layer that runs more than one attention (a decoder block, a shared layer) gives name, name#2,
    and so on. Window attention (Swin) has windows in place of samples.

    Args:
        model: any model that returns logits; left as it was.
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
        samples: how many of the batch's samples to run; None: all.

    >>> import dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=8)
    >>> weights = attention_weights(model, torch.randn(3, 3, 8, 8))  # synthetic images
    >>> {name: tuple(a.shape) for name, a in weights.items()}
    {'blocks.0': (3, 2, 5, 5), 'blocks.1': (3, 2, 5, 5)}
    """
    model = unwrapped(model)
    if samples is not None:
        inputs = map_tensors(inputs, lambda t: t[:samples])
    with probed(model, _WeightsProbe) as probes:
        call(model, inputs)
    return {
        plan.name if not i else f"{plan.name}#{i + 1}": weights
        for plan, probe in probes
        for i, weights in enumerate(probe.seen)
    }


def attention_entropy(weights: Tensor) -> Tensor:
    """Entropy of each query's weights in nats, averaged over samples and queries: one number per
    head, (H,).

    Args:
        weights: attention weights (B, H, N, M).

    >>> attention_entropy(torch.full((1, 1, 4, 4), 0.25)).exp()
    tensor([4.])
    """
    return -torch.xlogy(weights, weights).sum(-1).mean(dim=(0, 2))


def head_similarity(weights: Tensor) -> float:
    """Mean squared cosine between the weights of two heads for the same query, over all pairs; 1 if
    all heads agree.

    Args:
        weights: attention weights (B, H, N, M).

    >>> head_similarity(torch.eye(4).expand(1, 3, 4, 4))
    1.0
    """
    heads = weights.shape[1]
    if heads < 2:
        raise ValueError(f"head similarity compares heads: got {heads}.")
    unit = F.normalize(weights.double(), dim=-1).transpose(1, 2)  # (B, N, H, M)
    squares = (unit @ unit.mT).square()
    return ((squares.sum(dim=(-2, -1)) - heads) / (heads * (heads - 1))).mean().item()


def rollout(
    weights: Mapping[str, Tensor] | Sequence[Tensor],
    residual: float = 0.5,
    heads: Literal["mean", "max", "min"] = "mean",
) -> Tensor:
    """Attention rollout (Abnar and Zuidema, arXiv 2005.00928): how much each input token counts in
    each output token, (B, N, N).

    A' = residual I + (1 - residual) A per layer, rows normalized, multiplied from the first layer
    to the last. `residual=0` for a model without skips around attention. `heads` says how the heads
    of a layer become one matrix.

    Args:
        weights: by layer, as `attention_weights` returns them.
        residual: share of the skip connection in each layer.
        heads: how heads are joined: "mean", "max" or "min".

    >>> rollout([torch.full((1, 2, 3, 3), 1 / 3)]).sum(-1)
    tensor([[1., 1., 1.]])
    """
    if isinstance(weights, Mapping):
        layers = list(weights.values())
    else:
        layers = list(weights)
    if not layers:
        raise ValueError("attention rollout needs the weights of at least one layer: got none.")
    if not 0 <= residual < 1:
        raise ValueError(f"residual is the skip's share of a token, in [0, 1): got {residual}.")
    if heads not in ("mean", "max", "min"):
        raise ValueError(f"heads must be 'mean', 'max' or 'min': got {heads!r}.")
    shape = (layers[0].shape[0], layers[0].shape[-1], layers[0].shape[-1])
    total = torch.eye(shape[-1], device=layers[0].device).expand(shape)
    for a in layers:
        one = a.mean(1) if heads == "mean" else a.amax(1) if heads == "max" else a.amin(1)
        if one.shape != shape:
            raise ValueError(
                f"rollout multiplies self-attention over the same {shape[-1]} tokens "
                f"of {shape[0]} samples: got weights of shape {tuple(a.shape)}. It is "
                "not defined for window attention, cross-attention or dropped tokens."
            )
        mixed = residual * torch.eye(shape[-1], device=one.device) + (1 - residual) * one
        total = (mixed / mixed.sum(-1, keepdim=True)) @ total
    return total


def token_map(
    relevance: Tensor,
    query: int = 0,
    grid: tuple[int, int] | None = None,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """What one query looks at as images (B, rows, columns) in [0, 1]: from rollout, or one head's
    weights, (B, N, N).

    Tokens before the patch grid (CLS) are cut off; `size` enlarges to pixels.

    Args:
        relevance: (B, N, N), or one head's weights.
        query: index of the token that looks.
        grid: (rows, columns) of patches; None: a square.
        size: (height, width) to scale up to; None: one pixel a patch.

    >>> token_map(torch.rand(2, 17, 17), size=(32, 32)).shape
    torch.Size([2, 32, 32])
    """
    from dampen.functional.grid import grid_of

    rows, columns = grid_of(relevance.shape[-1], grid)
    values = relevance[:, query, relevance.shape[-1] - rows * columns :].unflatten(
        -1, (rows, columns)
    )
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    scaled = (values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
    if size is None:
        out: Tensor = scaled
        return out
    return (
        F.interpolate(scaled.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
        .squeeze(1)
        .clamp(0, 1)
    )


def overlay(images: Tensor, maps: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] darkened where a map (B, H, W) is low: (B, 3, H, W).

    Args:
        images: (B, C, H, W) in [0, 1].
        maps: (B, H, W) in [0, 1].
    """
    if images.shape[-2:] != maps.shape[-2:] or len(images) != len(maps):
        raise ValueError(
            f"images and maps must be of one size: got {tuple(images.shape)} "
            f"and {tuple(maps.shape)}. Give token_map a size=."
        )
    if images.shape[1] == 3:
        color = images
    else:
        color = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return color * (0.2 + 0.8 * maps.unsqueeze(1))


def save_images(images: Tensor, path: Path | str) -> Path:
    """Write images (B, 3, H, W) or maps (B, H, W) in [0, 1] side by side into one PNG file.

    Args:
        images: (B, 3, H, W) or (B, H, W), in [0, 1].
        path: of the PNG file; its folder must exist.
    """
    from PIL import Image

    if images.dim() == 4:
        strip = images
    else:
        strip = images.unsqueeze(1).expand(-1, 3, -1, -1)
    pixels = (
        (torch.cat(list(strip), dim=-1).clamp(0, 1) * 255)
        .round()
        .byte()
        .permute(1, 2, 0)
        .cpu()
        .numpy()
    )
    path = Path(path)
    Image.fromarray(pixels).save(path, format="PNG")
    return path
