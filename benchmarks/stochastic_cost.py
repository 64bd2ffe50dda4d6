"""What the stochastic methods cost: ratios of a training step against the best plain step, beside each paper's own
formulation.

    python -m benchmarks.stochastic_cost [--only NAME ...] [--json benchmarks/records/stochastic_cost.json]

One process, interleaved rounds, median of paired ratios of processor time with a 95 % interval (`dampen.lab.timing`);
the best of fused and explicit attention counts as 1. The model is DESIGN's: ViT 7 x 384, 12 heads, 65 tokens, batch 64,
float32; the images are synthetic noise. With `--only` the named variants are measured (beside the plain ones) and put
into the record, so that it can be filled in several short runs. `stochastic_memory.py` measures memory at 4096 tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from benchmarks import reference_stochastic as papers
from dampen import (
    AttentionEntropy,
    BlurredAttention,
    Consistency,
    DropConnect,
    DropHead,
    DropKey,
    DropPath,
    HardMasking,
    HeadDiversity,
    LayerDrop,
    PatchDropout,
    RDrop,
    Regularizer,
)
from dampen.lab.timing import compare, machine
from dampen.methods.consistency import divergence

PLAIN = ("plain, fused", "plain, explicit")
TARGETS = {
    "HardMasking": 1.15,
    "BlurredAttention": 1.03,
    "BlurredAttention grid": 1.03,
    "DropHead": 1.02,
    "DropPath": 1.02,
    "LayerDrop": 1.02,
    "Consistency": 1.95,
    "RDrop": 1.95,
    "RDrop, upper half": 1.6,
}
Run = Callable[[], None]


class Explicit(nn.Module):
    """The model's attention with the matrix of scores, and what is done between scores and values."""

    def __init__(self, attention: nn.Module, mix: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.mix = attention, mix

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        heads = self.attention.heads
        q, k, v = self.attention.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        s = q @ k.mT * q.shape[-1] ** -0.5
        return self.attention.proj(self.mix(s, v).transpose(1, 2).flatten(-2))


class Bench:
    """Builds the variants of one model and batch."""

    def __init__(self, batch: int, depth: int, width: int) -> None:
        self.depth, self.width = depth, width
        self.images, self.labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return dampen.models.ViT(depth=self.depth, width=self.width).train()

    def task(self, out: Tensor) -> Tensor:
        return F.cross_entropy(out, self.labels)

    def plain(self, mix: Callable[[Tensor, Tensor], Tensor] | None = None) -> Run:
        """The model without dampen; `mix` writes its attention out."""
        model = self.model()
        for block in model.blocks if mix else ():  # type: ignore[union-attr]
            block.attn = Explicit(block.attn, mix)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            self.task(model(self.images)).backward()

        return run

    def ours(self, *methods: Regularizer) -> Run:
        model = self.model()
        reg = dampen.regularize(model, list(methods))

        def run() -> None:
            model.zero_grad(set_to_none=True)
            reg.loss(lambda: model(self.images), self.task)[0].backward()

        return run

    def two_passes(self) -> Run:
        """R-Drop written by hand around ordinary attention dropout."""
        model = self.model()
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn = Explicit(block.attn, lambda s, v: F.dropout(s.softmax(-1), 0.1) @ v)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            first, second = model(self.images), model(self.images)
            loss = (self.task(first) + self.task(second)) / 2 + divergence(first, second, symmetric=True)
            loss.backward()

        return run

    def variants(self) -> dict[str, Callable[[], Run]]:
        """Name -> how to build it."""
        upper = [0.0 if i < self.depth / 2 else 0.1 for i in range(self.depth)]
        return {
            "plain, fused": self.plain,
            "plain, explicit": lambda: self.plain(papers.attend_scores),
            "HardMasking": lambda: self.ours(HardMasking()),
            "HardMasking zero": lambda: self.ours(HardMasking(fill="zero")),
            "paper's hard masking": lambda: self.plain(lambda s, v: papers.hard_masking(s, v, 0.2, 7)),
            "BlurredAttention": lambda: self.ours(BlurredAttention()),
            "BlurredAttention grid": lambda: self.ours(BlurredAttention(grid=(8, 8))),
            "paper's blur": lambda: self.plain(lambda s, v: papers.blurred_attention(s, v, 0.5, 5)),
            "DropHead": lambda: self.ours(DropHead()),
            "DropPath": lambda: self.ours(DropPath()),
            "LayerDrop": lambda: self.ours(LayerDrop()),
            "DropConnect": lambda: self.ours(DropConnect()),
            "PatchDropout": lambda: self.ours(PatchDropout()),
            "AttentionEntropy": lambda: self.ours(AttentionEntropy()),
            "HeadDiversity": lambda: self.ours(HeadDiversity()),
            "Consistency": lambda: self.ours(DropKey(0.1, unit="column"), Consistency()),
            "RDrop": lambda: self.ours(DropKey(0.1, unit="column"), RDrop()),
            "RDrop, upper half": lambda: self.ours(DropKey(upper, unit="column"), RDrop()),
            "paper's two passes": self.two_passes,
        }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the record here, or put the variants measured into it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    known = Bench(options.batch, options.depth, options.width).variants()
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Known: {', '.join(known)}")
    chosen = dict.fromkeys([*PLAIN, *(options.only or known)])
    ratios = compare(
        {name: known[name]() for name in chosen},
        PLAIN,
        rounds=options.rounds,
        seconds=options.seconds,
        every=4,
        enough=0.03,
        clock=time.process_time,
    )
    for name, ratio in ratios.items():
        target = f"  target {TARGETS[name]}" if name in TARGETS else ""
        print(f"{name:<24} {ratio}{target}")
    if options.json:
        old = json.loads(options.json.read_text())["ratios"] if options.json.exists() else {}
        record = {
            "command": "python -m benchmarks.stochastic_cost --json benchmarks/records/stochastic_cost.json",
            "model": f"ViT {options.depth} x {options.width}, 12 heads, 65 tokens, batch {options.batch}, float32, "
            "synthetic images",
            "clock": f"processor time, {options.threads} thread(s); ratios to the best plain step of the same round",
            "targets": TARGETS,
            "machine": machine(),
            "ratios": {**old, **{name: vars(ratio) for name, ratio in ratios.items()}},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
