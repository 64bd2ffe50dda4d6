"""How costs grow: attention alone over its length, and a training step over its batch.

A series ends where the next point would take too long or too much memory, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.regularizer import ATTENTION_STAGES
from dampen.studies.bench.rows import Variant
from dampen.studies.bench.subject import (
    DTYPES,
    available_memory,
    formulations,
    make_subject,
    peak_memory,
)
from dampen.studies.bench.timing import compare

if TYPE_CHECKING:
    from dampen.studies.bench.run import Options, Progress

LENGTHS = tuple(2**i for i in range(6, 15))  # 64 to 16384
BATCHES = (1, 4, 16, 64)
HEADS, SIZE = 8, 64
ATTENTION, BLOCK = "plain SDPA", "plain block"
CALLS = 6  # of each row at a length, at least: to try, to warm up, to time, to count memory

Row = Callable[[int], Callable[[], Any]]
"""From a length to something to call."""
Point = dict[str, Any]


def scale_attention(
    variants: list[Variant],
    options: Options,
    progress: Progress,
    lengths: tuple[int, ...] = LENGTHS,
) -> dict[str, Any]:
    """Time and peak memory, forward and backward, over n = 64 to 16384
    tokens, against what is plain.

    Methods that act inside attention run in `dampen.attention` alone, against plain SDPA; those
    that read the linear maps around it run in one block, against a plain block.

    Args:
        variants: the methods to measure.
        options: what to measure, and for how long.
        progress: called with what is done.
        lengths: numbers of tokens.
    """
    from dampen.studies.bench.run import CLOCKS

    families, stopped = _rows(variants, options)
    found: dict[str, list[Point]] = {name: [] for rows in families.values() for name in rows}
    left_out: dict[str, str] = {}
    start = time.perf_counter()
    for i, n in enumerate(lengths):
        progress("attention over its length", i, len(lengths))
        left = options.seconds - (time.perf_counter() - start)
        for name, reason in ({} if options.size else _too_much(found, stopped, n, left)).items():
            stopped[name] = reason
        share = (
            n * n / sum(m * m for m in lengths[i:])
        )  # of the time left: a length takes as long as its square
        for reference, rows in families.items():
            runs = _runnable(
                {name: make for name, make in rows.items() if name not in stopped}, n, left_out
            )
            if reference not in runs or len(runs) < 2:
                continue
            much = {"rounds": 9, "seconds": 3.0, "least": 3}
            if options.size:  # the request, and five rounds in any case; `_runnable` has warmed up
                much = {
                    "rounds": options.rounds,
                    "seconds": left * share * 0.7,
                    "least": 5,
                    "enough": 0.03,
                    "warm": False,
                }
            ratios = compare(runs, reference, clock=CLOCKS[options.clock], **much)
            memory = {name: peak_memory(run, options.device) for name, run in runs.items()}
            for name in runs:
                share = memory[name] / memory[reference]
                point = {"row": name, "against": reference, "n": n, **asdict(ratios[name])}
                found[name].append({**point, "bytes": memory[name], "memory_ratio": share})
    shape = f"batch 1, {HEADS} heads of {SIZE}, {options.dtype}, forward and backward"
    points = [point for series in found.values() for point in series]
    return {
        "what": f"{shape}; memory allocated inside the call",
        "points": points,
        "stopped": {**left_out, **stopped},
    }


def _runnable(
    rows: Mapping[str, Row], n: int, left_out: dict[str, str]
) -> dict[str, Callable[[], Any]]:
    """The rows that can run at length n, and in `left_out` why the others cannot: not every n is a
    grid of patches."""
    runs: dict[str, Callable[[], Any]] = {}
    for name, make in rows.items():
        try:
            runs[name] = make(n)
            runs[name]()
        except (ValueError, RuntimeError) as error:
            runs.pop(name, None)
            before = f"{left_out[name]}; " if name in left_out else "left out: "
            left_out[name] = f"{before}n = {n} ({str(error).splitlines()[0].split('. ')[0]})"
    return runs


def _rows(
    variants: list[Variant], options: Options
) -> tuple[dict[str, dict[str, Row]], dict[str, str]]:
    """The rows by what they are compared with, and which variants have no row."""
    from dampen.studies.methods_text import build_methods

    alone: dict[str, Row] = {ATTENTION: _alone(F.scaled_dot_product_attention, options)}
    blocks: dict[str, Row] = {BLOCK: _block([], options)}
    stopped: dict[str, str] = {}
    for variant in variants:
        regularizers = build_methods(variant.specs)
        if len(regularizers) > 1 or not regularizers[0].stages & set(ATTENTION_STAGES):
            stopped[variant.name] = "does nothing inside attention"
        elif regularizers[0].roles:
            blocks[variant.name] = _block(variant.specs, options)
        else:
            alone[variant.name] = _alone(_regularized(regularizers), options)
    methods = {variant.method for variant in variants}
    for published in formulations("papers").values() if not options.size else ():
        if published.attention is not None and published.ours in methods:
            alone[f"{published.ours}, as published"] = _alone(published.attention, options)
    return {ATTENTION: alone, BLOCK: blocks}, stopped


def _regularized(regularizers: list[Any]) -> Callable[..., Tensor]:
    from dampen.kernels.attend import attention

    return lambda q, k, v: attention(q, k, v, regularizers=regularizers)


def _alone(attention: Callable[..., Tensor], options: Options) -> Row:
    def make(n: int) -> Callable[[], Any]:
        shape, dtype = (1, HEADS, n, SIZE), DTYPES[options.dtype]
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=options.device, requires_grad=True)
            for _ in range(3)
        )
        gradient = torch.randn_like(q)

        def run() -> None:
            torch.autograd.grad(attention(q, k, v), (q, k, v), gradient)
            _wait(options.device)

        return run

    return make


def _block(specs: list[dict[str, Any]], options: Options) -> Row:
    def make(n: int) -> Callable[[], Any]:
        import dampen
        from dampen.models.block import Block
        from dampen.studies.methods_text import build_methods

        dtype, width = DTYPES[options.dtype], HEADS * SIZE
        block = Block(width, HEADS, width).to(device=options.device, dtype=dtype).train()
        x = torch.randn(1, n, width, dtype=dtype, device=options.device)
        reg = dampen.regularize(block, build_methods(specs)) if specs else None

        def run() -> None:
            loss = block(x).float().square().mean()
            (loss if reg is None else loss + reg.penalty()).backward()
            for p in block.parameters():
                p.grad = None
            _wait(options.device)

        return run

    return make


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _too_much(
    found: Mapping[str, list[Point]], stopped: Mapping[str, str], n: int, left: float
) -> dict[str, str]:
    """The rows that cannot run at length n, with the reason; the dearest go first
    until the rest fits the time.

    What is plain is needed as long as there is a row to compare with it.
    """
    reasons: dict[str, str] = {}
    running: dict[str, float] = {}  # seconds of a call at length n
    against: dict[str, str] = {}
    for name, points in found.items():
        if not points or name in stopped:
            continue
        growth = n / points[-1]["n"]
        grown = points[-1]["bytes"] / points[-2]["bytes"] if len(points) > 1 else growth**2
        expected, free = points[-1]["bytes"] * grown, available_memory()
        if expected > 0.5 * free:
            amount = f"about {expected / 2**30:.1f} GiB, more than half of the {free / 2**30:.1f} GiB free"
            reasons[name] = f"ends before n = {n}: {amount}"
        else:
            running[name] = points[-1]["seconds"] * growth**2
            against[name] = points[-1]["against"]

    def compared() -> list[str]:
        return [name for name in running if name != against[name]]

    def total() -> float:
        rows = compared()
        return sum(running.get(name, 0.0) for name in {*rows, *(against[name] for name in rows)})

    while compared() and CALLS * total() > left:
        dearest = max(compared(), key=lambda name: running[name])
        reasons[dearest] = (
            f"ends before n = {n}: about {running.pop(dearest):.1f} s "
            f"per call, with {max(0.0, left):.0f} s left"
        )
    for name in set(running) - {against[row] for row in compared()} - set(compared()):
        reasons[name] = f"ends before n = {n}: no method is left to compare with it"
    return reasons


def scale_batch(
    variants: list[Variant],
    options: Options,
    progress: Progress,
    batches: tuple[int, ...] = BATCHES,
) -> dict[str, Any]:
    """The cost of a training step over the size of its batch, each method in its default.

    Args:
        variants: the methods to measure.
        options: what to measure, and for how long.
        progress: called with what is done.
        batches: batch sizes.
    """
    from dampen.studies.bench.run import FUSED, UNFUSED, Step, plain_step, regularized_step

    points: list[Point] = []
    stopped, start, last = "", time.perf_counter(), 0.0
    for i, batch in enumerate(batches):
        progress("steps over the batch", i, len(batches))
        left = options.seconds - (time.perf_counter() - start)
        if last and last * batch / batches[i - 1] > left:
            stopped = f"ends before batch {batch}: too long for the {left:.0f} s left of {options.seconds:.0f}"
            break
        began = time.perf_counter()
        subject = make_subject(options.model, batch, options.dtype, options.device)
        steps: dict[str, Step] = {
            FUSED: plain_step(subject),
            UNFUSED: plain_step(subject, fused=False),
        }
        for variant in variants:
            if variant.name == variant.method:
                steps[variant.name] = regularized_step(subject, variant)
        ratios = compare(steps, (FUSED, UNFUSED), rounds=9, seconds=left / len(batches), every=6)
        points += [{"row": name, "batch": batch, **asdict(ratio)} for name, ratio in ratios.items()]
        last = time.perf_counter() - began
    return {
        "what": "one training step without the optimizer over the batch",
        "points": points,
        "stopped": stopped,
    }
