"""Measure where building the matrix of scores beats the fused kernel: the source of `dampen.kernels.PLAIN_BELOW`.

    python -m benchmarks.kernel_table [--threads 1] [--json PATH]

Forward and backward of attention alone, with a bool mask and without, interleaved; fused / plain above 1 means that
plain is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.kernels import _HALF_IN_HARDWARE
from dampen.lab.timing import compare, machine

LENGTHS = (16, 32, 48, 65, 128, 197, 256, 512, 1024, 2048)


def plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    return (s if keep is None else s.masked_fill(~keep, torch.finfo(s.dtype).min)).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep)


def measure(dtype: torch.dtype, length: int, masked: bool, rounds: int, size: int = 32) -> float:
    """fused / plain, forward and backward."""
    batch = max(1, int(96 * (65 / length) ** 1.5))  # about the same time at every length
    q, k, v = (torch.randn(batch, 8, length, size, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)
    keep = torch.rand(batch, 8, length, length) > 0.3 if masked else None

    def run(attention: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(q, k, v, keep), (q, k, v), gradient)

    return compare({"plain": run(plain), "fused": run(fused)}, "plain", rounds=rounds)["fused"].median


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    table = {}
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            pair = [measure(dtype, length, masked, options.rounds) for masked in (False, True)]
            table[f"{str(dtype).removeprefix('torch.')} {length}"] = pair
            print(f"{dtype!s:<15} {length:>5} keys  fused/plain {pair[0]:.2f}, with a mask {pair[1]:.2f}", flush=True)
    if options.json:
        record = {"machine": machine(), "half_in_hardware": _HALF_IN_HARDWARE, "fused_over_plain": table}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
