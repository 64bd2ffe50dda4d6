"""What attention looks at: its weights, their entropy, and how alike the heads are."""

from __future__ import annotations

from typing import Any

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
