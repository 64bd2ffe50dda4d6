"""Measure where building the matrix of scores beats the fused kernel: the source of `kernels.kernel.PLAIN_BELOW`.

    python -m benchmarks.kernel_table [--threads 1] [--json PATH]

Forward and backward of attention alone, with a bool mask and without, interleaved; fused / plain above 1 means that
plain is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.kernels.kernel import _HALF_IN_HARDWARE
from dampen.studies.bench.timing import compare, machine
from dampen.studies.files import write_json

LENGTHS = (16, 32, 48, 65, 128, 197, 256, 512, 1024, 2048)


def measure(
    dtype: torch.dtype, keys: int, masked: bool, rounds: int, device: str = "cpu", size: int = 32
) -> float:
    """fused / plain of attention alone, forward and backward, interleaved."""
    batch = max(1, int(96 * (65 / keys) ** 1.5))  # about the same time at every length
    shape = (batch, 8, keys, size)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(q)
    keep = torch.rand(batch, 8, keys, keys, device=device) > 0.3 if masked else None

    def run(attention: Callable[..., Tensor]) -> Callable[[], None]:
        def call() -> None:
            torch.autograd.grad(attention(q, k, v, keep), (q, k, v), gradient)
            if device == "cuda":
                torch.cuda.synchronize()

        return call

    return compare({"plain": run(_plain), "fused": run(_fused)}, "plain", rounds=rounds)[
        "fused"
    ].median


def _plain(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    out: Tensor = (s if keep is None else s.masked_fill(~keep, torch.finfo(s.dtype).min)).softmax(
        -1
    ) @ v
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, keep)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
            print(
                f"{dtype!s:<15} {length:>5} keys  fused/plain {pair[0]:.2f}, with a mask {pair[1]:.2f}",
                flush=True,
            )
    if options.json:
        record = {
            "machine": machine(),
            "half_in_hardware": _HALF_IN_HARDWARE,
            "fused_over_plain": table,
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
