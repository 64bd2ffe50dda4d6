"""What Explicit Dropout costs: a training step with it against the plain step, beside the paper's traces written out.

    python benchmarks/explicit_cost.py            # a few minutes; writes benchmarks/records/explicit_cost.json

One process, one model per row (ViT 7 x 384, 12 heads, 65 tokens, batch 64, float32, the model of arXiv 2604.20505).
In each round every row takes one step, in a new random order; a row's cost is the median over rounds of its time
divided by the plain step's of the same round, with a bootstrap interval of that median. Processor time of a single
thread is taken, not the clock on the wall, so that neighbors on the machine disturb less. "trace" rows are the
published formulation: X^T X and W^T W built and multiplied (query and value, as the authors' public code regularizes).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from dampen import ExplicitDropout

VALUE_FFN: dict[str, Any] = {"value": 0.05, "ffn": 0.05}
ALL: dict[str, Any] = {**VALUE_FFN, "query": 0.05, "key": 0.05, "attended_value": 0.05, "query_key": 0.05}
ROWS: dict[str, tuple[dict[str, Any], float | None]] = {  # settings and target of DESIGN section 6
    "value + ffn, paper": (VALUE_FFN, 1.03),
    "all terms, paper": (ALL, 1.12),
    "value + ffn, exact": ({**VALUE_FFN, "form": "exact"}, 1.06),
    "all terms, exact": ({**ALL, "form": "exact"}, 1.60),
    "value + ffn, inverted": ({**VALUE_FFN, "form": "inverted"}, None),
    "all terms, inverted": ({**ALL, "form": "inverted"}, None),
}
TRACES = {"trace q": ("q",), "trace v": ("v",), "trace q + v": ("q", "v")}
"""The published formulation, by what it penalizes."""


def vit(depth: int) -> nn.Module:
    """The paper's CIFAR model; all rows start from the same weights."""
    torch.manual_seed(0)
    return dampen.models.ViT(depth=depth).train()


def trace_penalties(model: nn.Module, terms: tuple[str, ...], p: float = 0.2) -> Callable[[], Tensor]:
    """The paper's J_q and J_v as traces of d x d matrices, batched over samples and heads, collected by hooks."""
    kept: list[Tensor] = []

    def hook(attention: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0]
        wq, wk, wv = attention.qkv.weight.unflatten(0, (3, attention.heads, -1)).unbind(0)  # (H, dh, d)
        gram = x.mT @ x  # X^T X: (B, d, d)
        b = (p**2 * gram).unsqueeze(1)
        if "q" in terms:
            c = wq.mT @ wk  # Wq^T Wk: (H, d, d)
            # Tr(M N) = sum(M * N^T)
            kept.append(0.5 * ((b @ c) * (c @ gram.unsqueeze(1)).conj()).sum() / x.shape[0])
        if "v" in terms:
            kept.append(0.5 * (b * (wv.mT @ wv)).sum() / x.shape[0])

    for module in model.modules():
        if type(module).__name__ == "SelfAttention":
            module.register_forward_hook(hook)

    def collect() -> Tensor:
        total = torch.stack(kept).sum()
        kept.clear()
        return total

    return collect


def step_of(model: nn.Module, penalty: Callable[[], Tensor] | None, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One training step: forward, loss, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        if penalty is not None:
            loss = loss + 1e-3 * penalty()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build(names: list[str], x: Tensor, y: Tensor, depth: int = 7) -> dict[str, Callable[[], None]]:
    """A step per row, each with a model of its own."""
    steps = {"plain": step_of(vit(depth), None, x, y)}
    for name in names:
        model = vit(depth)
        if name in TRACES:
            penalty = trace_penalties(model, TRACES[name])
        else:
            penalty = dampen.regularize(model, ExplicitDropout(**ROWS[name][0], rate=0.2)).penalty
        steps[name] = step_of(model, penalty, x, y)
    return steps


def measure(steps: dict[str, Callable[[], None]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each step in each round, until the rounds or the time are used up."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, start = list(steps), time.monotonic()
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            before = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - before)
        if time.monotonic() - start > seconds:
            break
    return times


def summarize(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median of the paired ratios and a 95 % bootstrap interval of that median."""
    rows = {}
    for name, seconds in times.items():
        ratios = [s / p for s, p in zip(seconds, times["plain"], strict=True)]
        medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
        rows[name] = {
            "ratio": statistics.median(ratios),
            "low": medians[50],
            "high": medians[1949],
            "seconds": statistics.median(seconds),
            "rounds": len(ratios),
        }
    return rows


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "clock": "processor time of one thread",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=270.0, help="stop after the round in which this time is over")
    parser.add_argument("--rows", nargs="*", default=[*ROWS, *TRACES], choices=[*ROWS, *TRACES])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "explicit_cost.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(1)
    x, y = torch.randn(args.batch, 3, 32, 32), torch.randint(0, 10, (args.batch,))
    rows = summarize(measure(build(args.rows, x, y, args.depth), args.rounds, args.seconds))
    print(f"{'':24}{'ratio':>8}{'95 % interval':>18}{'target':>9}{'seconds':>9}")
    for name, row in rows.items():
        target = ROWS.get(name, ({}, None))[1]
        row["target"] = target  # type: ignore[assignment]
        shown = "" if target is None else f"{target:.2f} {'met' if row['ratio'] <= target else 'MISSED'}"
        print(
            f"{name:24}{row['ratio']:8.3f}   {row['low']:.3f} to {row['high']:.3f}{shown:>14}{row['seconds']:9.3f}",
            flush=True,
        )
    record = {
        "what": "ExplicitDropout, one training step against the plain step",
        "model": f"ViT {args.depth} x 384, 12 heads, 65 tokens, batch {args.batch}, float32",
        "machine": machine(),
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
