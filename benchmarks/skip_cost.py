"""What Token Graying, SkipAblation and the condition probe cost: ratios of a training step against the plain step.

    python -m benchmarks.skip_cost [--batch 64] [--rounds 15] [--threads 1] [--json benchmarks/records/skip_cost.json]

One process, interleaved rounds, median of paired ratios of processor time (`studies/bench/timing.py`): other programs
on the machine do not count. The model is DESIGN's: ViT 7 x 384, 12 heads, 65 tokens, float32, on synthetic noise.
Beside the steps, graying alone is timed, because its share of a step is below the noise of a busy machine. The paper
(arXiv 2505.01996, ViT-B) reports 1.01x for dct and 6.3x for svd.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from dampen import Regularizer, SkipAblation, TokenGraying
from dampen.diagnostics.conditioning import ConditionProbe
from dampen.functional.graying import gray_images
from dampen.functional.grid import patchify, unpatchify
from dampen.studies.bench.timing import compare, machine
from dampen.studies.files import write_json
from tests.oracles import skips as reference_skip

TARGETS = {"TokenGraying dct": 1.02, "TokenGraying svd": 1.15}


class PlainSvd(Regularizer):
    """SVD Token Graying as anyone would write it first: one SVD per image."""

    in_eval = True

    def inputs(self, x: Tensor) -> Tensor:
        return unpatchify(reference_skip.gray_svd(patchify(x, 4), 0.7), 4, 32)


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """One forward and backward."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()

    return run


def variants(batch: int, depth: int, width: int) -> dict[str, Callable[[], object]]:
    """The plain step, the same step with each method, and what happens beside a step."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def build(*methods: Regularizer) -> nn.Module:
        torch.manual_seed(0)
        model = dampen.models.ViT(depth=depth, width=width).train()
        if methods:
            dampen.regularize(model, list(methods))
        return model

    probed, probe = build(), ConditionProbe(every=1, samples=16)
    return {
        "plain": step(build(), images, labels),
        "TokenGraying dct": step(build(TokenGraying("dct")), images, labels),
        "TokenGraying svd": step(build(TokenGraying("svd")), images, labels),
        "an SVD per image": step(build(PlainSvd()), images, labels),
        "SkipAblation both": step(build(SkipAblation(True, True)), images, labels),
        "dct alone": lambda: gray_images(images, 4, "dct"),
        "svd alone": lambda: gray_images(images, 4, "svd"),
        "condition probe alone, 16 images": lambda: probe(0, probed, (images, labels)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    ratios = compare(
        variants(options.batch, options.depth, options.width),
        "plain",
        rounds=options.rounds,
        seconds=options.seconds,
        clock=time.process_time,
    )
    for name, ratio in ratios.items():
        print(f"{name:<34} {ratio}  ({1000 * ratio.seconds:.1f} ms at best)")
    if options.json:
        record = {
            "command": f"python -m benchmarks.skip_cost --batch {options.batch} --threads {options.threads}",
            "model": f"ViT {options.depth} x {options.width}, 12 heads, 65 tokens, float32, synthetic images",
            "targets": TARGETS,
            "clock": "processor time, 1 thread"
            if options.threads == 1
            else f"processor time, {options.threads} threads",
            "machine": machine(),
            "ratios": {name: vars(ratio) for name, ratio in ratios.items()},
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
