"""Whole keys hidden by eight more channels beside the same method with a mask, on this CPU.

    python -m benchmarks.gpu_columns [--write]

One attention, forward and backward, one thread, processor time: the median ratio of pairs that take
turns. `--write` renews benchmarks/records/gpu_columns.json, from which docs/gpu.md is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from datetime import date
from unittest import mock

import torch

from benchmarks.gpu_page import COLUMNS
from dampen import DropKey
from dampen.kernels import kernel
from dampen.kernels.attend import Needs, attend

KEYS = (1024, 2048, 4096)
HEADS, SIZE, PAIRS = 2, 64, 7


def seconds(keys: int, causal: bool, columns: bool) -> float:
    """Processor time of one forward and backward.

    Args:
        keys: queries and keys.
        causal: each query sees the keys up to its own place.
        columns: by more channels; otherwise by a mask.
    """
    q, k, v = (torch.randn(1, HEADS, keys, SIZE, requires_grad=True) for _ in range(3))
    with mock.patch.object(kernel, "_by_columns", return_value=columns):
        begin = time.process_time()
        needs = Needs([DropKey(0.2, unit="column")])
        out, _, ran = attend(q, k, v, None, 0.0, causal, None, False, needs, None)
        out.sum().backward()
        taken = time.process_time() - begin
    if (ran is not None and ran.way == "columns") != columns:
        raise RuntimeError(f"{ran} ran where columns={columns} was requested")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, list[float]] = {}
    for name, causal in (("causal", True), ("not causal", False)):
        for keys in KEYS:
            pairs = [
                seconds(keys, causal, columns=True) / seconds(keys, causal, columns=False)
                for _ in range(PAIRS + 1)
            ][1:]
            ratios.setdefault(name, []).append(round(statistics.median(pairs), 3))
            spread = f"{min(pairs):.2f} to {max(pairs):.2f}"
            print(f"{name}, {keys} keys: {ratios[name][-1]:.2f} ({spread})")
    record = {
        "command": "python -m benchmarks.gpu_columns --write",
        "machine": f"float32, {HEADS} heads of {SIZE}, {PAIRS} pairs, one thread of a CPU that "
        f"others used at a load of {os.getloadavg()[0]:.0f}, torch {torch.__version__}",
        "date": date.today().isoformat(),
        "keys": list(KEYS),
        "ratios": ratios,
    }
    if options.write:
        COLUMNS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
