"""How much of a training step DropPath(skip=True) saves: processor time, interleaved in one process.

python -m benchmarks.drop_path_saving [--rate 0.4] [--rounds 6]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import dampen


def make_step(method: dampen.Regularizer | None) -> Callable[[], None]:
    """One training step of a ViT of 4 x 384 on 16 images of 65 tokens.

    Args:
        method: None for the plain model.
    """
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=32, patch_size=4, width=384, depth=4, heads=6, mlp=1536)
    if method is not None:
        dampen.regularize(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(16, 3, 32, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.4)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = {
        "plain": make_step(None),
        "multiply": make_step(dampen.DropPath(options.rate)),
        "skip": make_step(dampen.DropPath(options.rate, skip=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(options.rounds + 1):
        for name, step in steps.items():
            began = time.process_time()
            step()
            if i:  # the first round warms up
                times[name].append(time.process_time() - began)
    for name in ("multiply", "skip"):
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        print(
            f"{name}: {statistics.median(ratios):.3f} of a plain step "
            f"[{min(ratios):.3f}, {max(ratios):.3f}], n = {len(ratios)}"
        )


if __name__ == "__main__":
    main()
