"""Measure where building the matrix of scores beats the fused kernel: the source of `kernels.kernel.PLAIN_BELOW`.

    python -m benchmarks.kernel_table [--threads 1] [--json PATH]

Forward and backward of attention alone, with a bool mask and without, interleaved; fused / plain above 1 means that
plain is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from dampen.kernels.kernel import _HALF_IN_HARDWARE
from dampen.kernels.timing import machine
from dampen.kernels.tuning import LENGTHS, measure
from dampen.studies.files import write_json


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
        write_json(options.json, record)


if __name__ == "__main__":
    main()
