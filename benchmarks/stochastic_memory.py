"""Peak memory of attention alone at 4096 tokens and 8 heads, forward and backward: each method inside it
against plain SDPA.

    python -m benchmarks.stochastic_memory [--tokens 4096] [--json benchmarks/records/stochastic_memory.json]

Each variant runs in a process of its own. What counts is the resident memory of the process at its highest (`VmHWM`,
reset through /proc/self/clear_refs after a small warm-up) less what it had before q, k and v were made, so the
kernels' workspaces are in it. glibc keeps much of what is freed, depending on the order of frees;
MALLOC_MMAP_THRESHOLD_ makes it give large blocks back at once, so that `bytes` is what is held. `default_malloc` is the
same without that setting: what a process takes from the machine if nothing is tuned. Linux only. The papers'
formulations, which build the matrix of scores, stand beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import dampen
from dampen.studies.bench.timing import machine
from dampen.studies.files import write_json
from tests.oracles import stochastic as reference_stochastic

LIMIT = 2.0
HELD = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(*methods: dampen.Regularizer, causal: bool = False) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = dampen.attention(q, k, v, is_causal=causal, regularizers=methods)
        terms = [value for m in methods for value in m.take_penalties().values()]
        return o if not terms else o + sum(terms)

    return run


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def drop_key_as_published(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Hide keys in the matrix of scores, as the paper's pseudocode does."""
    s = scores(q, k)
    return (s + torch.bernoulli(torch.full_like(s, 0.1)) * -1e12).softmax(-1) @ v


VARIANTS: dict[str, Callable[[], Attention]] = {
    "plain": lambda: F.scaled_dot_product_attention,
    "HardMasking": lambda: ours(dampen.HardMasking()),
    "HardMasking zero": lambda: ours(dampen.HardMasking(fill="zero")),
    "HardMasking learned": lambda: ours(dampen.HardMasking(learn=("rate", "top"), heads=8)),
    "HardMasking causal": lambda: ours(dampen.HardMasking(), causal=True),
    "BlurredAttention": lambda: ours(dampen.BlurredAttention()),
    "BlurredAttention grid": lambda: ours(dampen.BlurredAttention(grid=(64, 64))),
    "BlurredAttention learned": lambda: ours(dampen.BlurredAttention(learn=True, heads=8)),
    "DropKey": lambda: ours(dampen.DropKey()),
    "DropKey column": lambda: ours(dampen.DropKey(unit="column")),
    "DropKey block": lambda: ours(dampen.DropKey(unit="block")),
    "DropKey cross": lambda: ours(dampen.DropKey(unit="cross")),
    "DropKey causal": lambda: ours(dampen.DropKey(), causal=True),
    "DropAttention": lambda: ours(dampen.DropAttention()),
    "DropAttention column": lambda: ours(dampen.DropAttention(unit="column")),
    "DropAttention unnormalized": lambda: ours(dampen.DropAttention(normalized=False)),
    "DropHead": lambda: ours(dampen.DropHead()),
    "AttentionEntropy": lambda: ours(dampen.AttentionEntropy()),
    "HeadDiversity": lambda: ours(dampen.HeadDiversity()),
    "paper's hard masking": lambda: (
        lambda q, k, v: reference_stochastic.hard_masking(scores(q, k), v, 0.2, 410)
    ),
    "paper's drop key": lambda: drop_key_as_published,
    "paper's blur": lambda: (
        lambda q, k, v: reference_stochastic.blurred_attention(scores(q, k), v, 0.5, 5)
    ),
}


def memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this benchmark needs Linux.")


def measure(name: str, tokens: int, heads: int, width: int) -> dict[str, float]:
    """Peak bytes and seconds of one forward and backward, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    attention = VARIANTS[name]()
    small = [torch.randn(1, heads, 64, width, requires_grad=True) for _ in range(3)]
    if "grid" not in name and "paper" not in name:
        attention(*small).sum().backward()
    before = memory("VmRSS")
    q, k, v = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    out = attention(q, k, v)
    out.backward(torch.ones_like(out))
    return {"bytes": memory("VmHWM") - before, "seconds": time.process_time() - start}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    size = (options.tokens, options.heads, options.width)
    if options.one:
        print(json.dumps(measure(options.one, *size)))
        return
    found: dict[str, dict[str, float]] = {}
    for name in options.only or VARIANTS:
        command = [sys.executable, "-m", "benchmarks.stochastic_memory", "--one", name]
        for flag, value in zip(("--tokens", "--heads", "--width"), size, strict=True):
            command += [flag, str(value)]
        runs = [
            json.loads(subprocess.check_output(command, env=HELD)) for _ in range(options.repeats)
        ]
        found[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        found[name]["default_malloc"] = json.loads(subprocess.check_output(command))["bytes"]
        plain = found.get("plain", found[name])
        for key, ratio in (("bytes", "ratio"), ("default_malloc", "default_malloc_ratio")):
            found[name][ratio] = found[name][key] / plain[key]
        mark = "" if found[name]["ratio"] <= LIMIT or "paper" in name else "  over the limit"
        print(
            f"{name:<26} {found[name]['bytes'] / 2**20:8.1f} MiB  {found[name]['ratio']:5.2f}x  "
            f"{found[name]['seconds']:5.1f} s  (default malloc {found[name]['default_malloc_ratio']:.2f}x){mark}",
            flush=True,
        )
    if options.json:
        record = {
            "command": "python -m benchmarks.stochastic_memory",
            "what": f"attention alone, batch 1, {options.heads} heads of {options.width}, {options.tokens} tokens, "
            f"float32, forward and backward; peak resident memory above the state before q, k, v were made; median of "
            f"{options.repeats} processes",
            "limit": LIMIT,
            "machine": machine(),
            "variants": found,
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
