"""What the core itself costs, and DropKey: ratios of a training step against the best plain step, in one interleaved
run.

    python -m benchmarks.cost [--batch 64] [--rounds 15] [--threads 2] [--json PATH]

The model is DESIGN's: ViT 7 x 384, 12 heads, 65 tokens, float32. `dampen bench` measures every method.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from benchmarks import reference
from dampen import DropAttention, DropKey, FeedForwardDropout, Regularizer
from dampen.lab.timing import compare, machine


class PaperDropKey(nn.Module):
    """The published two-liner: a full-size random mask added to explicit scores, at each layer."""

    def __init__(self, attention: nn.Module, rate: float) -> None:
        super().__init__()
        self.attention, self.rate = attention, rate

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        heads = self.attention.heads
        q, k, v = self.attention.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        hidden = torch.bernoulli(torch.full((*q.shape[:3], k.shape[2]), self.rate)).bool()
        o = reference.drop_key(q, k, v, hidden)
        return self.attention.proj(o.transpose(1, 2).flatten(-2))


def step(
    model: nn.Module, images: Tensor, labels: Tensor, reg: dampen.Regularization | None = None
) -> Callable[[], None]:
    """One forward and backward."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        if reg is None:
            loss = F.cross_entropy(model(images), labels)
        else:
            loss, _ = reg.loss(lambda: model(images), lambda out: F.cross_entropy(out, labels))
        loss.backward()

    return run


def variants(batch: int, depth: int, width: int) -> dict[str, Callable[[], None]]:
    """The plain model, the model with regularizers attached and switched off, and DropKey in its forms."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return dampen.models.ViT(depth=depth, width=width).train()

    def regularized(*methods: Regularizer, off: bool = False) -> Callable[[], None]:
        model = build()
        reg = dampen.regularize(model, list(methods))
        if off:
            for layer in reg.layers:
                layer.enabled = False
        return step(model, images, labels, reg)

    paper = build()
    for block in paper.blocks:
        block.attn = PaperDropKey(block.attn, 0.1)
    return {
        "plain": step(build(), images, labels),
        "attached, off": regularized(DropKey(0.1), FeedForwardDropout(0.1), off=True),
        "DropKey element": regularized(DropKey(0.1)),
        "DropKey column": regularized(DropKey(0.1, unit="column")),
        "DropKey block": regularized(DropKey(0.1, unit="block", window=2)),
        "DropKey cross": regularized(DropKey(0.1, unit="cross")),
        "DropAttention": regularized(DropAttention(0.1, normalized=False)),
        "FeedForwardDropout": regularized(FeedForwardDropout(0.1)),
        "paper's DropKey": step(paper, images, labels),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    ratios = compare(
        variants(options.batch, options.depth, options.width), "plain", rounds=options.rounds, seconds=options.seconds
    )
    for name, ratio in ratios.items():
        print(f"{name:<20} {ratio}")
    if options.json:
        record = {
            "command": f"python -m benchmarks.cost --batch {options.batch} --rounds {options.rounds}",
            "model": f"ViT {options.depth} x {options.width}, 12 heads, 65 tokens, float32",
            "machine": machine(),
            "ratios": {name: vars(ratio) for name, ratio in ratios.items()},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
