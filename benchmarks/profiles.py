"""Where the cost of a method goes: what it adds to a plain training step, operation by operation.

    python -m benchmarks.profiles [--methods drop_key,hard_masking] [--threads 1 2] [--rounds 9]
                                  [--json benchmarks/records/profiles.json]

The steps are those of `dampen bench` (`--methods` takes the same words), in its ViT with two layers. Plain step and
step with the method alternate under torch's profiler; of each operation the median time over the rounds is taken.
An operation is its name with the shapes of its inputs: those that both steps call equally often are left out, because
between two plain steps they differ as much. The fused kernels are kept in, because a mask makes them slower. All
numbers are percent of the plain step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dampen.studies.bench.rows import find_variants
from dampen.studies.bench.run import plain_step, regularized_step
from dampen.studies.bench.subject import make_subject
from dampen.studies.bench.timing import machine
from dampen.studies.files import write_json
from dampen.studies.processes import describe_malloc, keep_freed_memory

METHODS = "drop_key,drop_attention,hard_masking,blurred_attention,explicit_dropout,feed_forward_dropout,token_graying"
MODEL = "vit(depth=2)"
BATCH = 64
FUSED = "_scaled_dot_product_flash_attention"
SMALLEST = 0.1  # percent of a step: less is not listed

Operation = tuple[str, str]
"""Name and shapes."""
Cost = tuple[float, float]
"""Milliseconds and calls."""


def profiled(step: Callable[[], object]) -> dict[Operation, Cost]:
    """Own time and calls of each operation in one step."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    return {
        (e.key.removeprefix("aten::"), str(e.input_shapes)): (e.self_cpu_time_total / 1000, e.count)
        for e in found.key_averages(group_by_input_shape=True)
    }


def median(rounds: Sequence[Mapping[Operation, Cost]]) -> dict[Operation, Cost]:
    """Of each operation, over the rounds; an operation that did not occur took no time."""
    names = dict.fromkeys(name for found in rounds for name in found)
    return {
        name: (
            statistics.median(found.get(name, (0.0, 0))[0] for found in rounds),
            statistics.median(found.get(name, (0.0, 0))[1] for found in rounds),
        )
        for name in names
    }


def added(plain: Mapping[Operation, Cost], ours: Mapping[Operation, Cost]) -> dict[str, float]:
    """Percent of the plain step by name, largest first, of operations called more or less often than before.

    >>> small, large = "[[2]]", "[[9, 9]]"
    >>> plain = {("mm", large): (90.0, 8), ("copy_", large): (10.0, 2)}
    >>> added(plain, plain | {("mm", large): (93.0, 8), ("copy_", small): (1.0, 3), ("random_", small): (2.0, 1)})
    {'random_': 2.0, 'copy_': 1.0}
    """
    whole = sum(time for time, _ in plain.values())
    found: dict[str, float] = {}
    for operation in {*plain, *ours}:
        before, now = plain.get(operation, (0.0, 0)), ours.get(operation, (0.0, 0))
        name = operation[0]
        if before[1] != now[1] or name.startswith(FUSED):
            found[name] = found.get(name, 0.0) + 100 * (now[0] - before[0]) / whole
    return dict(sorted(found.items(), key=lambda entry: (-abs(entry[1]), entry[0])))


def measure(methods: str, threads: int, rounds: int, batch: int) -> dict[str, Any]:
    """For each variant of the methods: what it adds in all, and by operation."""
    torch.set_num_threads(threads)
    subject = make_subject(MODEL, batch)
    plain = plain_step(subject)
    found = {}
    for variant in find_variants(methods):
        ours = regularized_step(subject, variant)
        for step in (plain, ours):  # warm up
            step()
        both = [(profiled(plain), profiled(ours)) for _ in range(rounds)]
        costs = added(median([a for a, _ in both]), median([b for _, b in both]))
        low, _, high = statistics.quantiles((sum(added(a, b).values()) for a, b in both), n=4)
        found[variant.name] = {
            "added": sum(costs.values()),
            "quartiles": [low, high],  # of the rounds taken singly
            "by": {name: cost for name, cost in costs.items() if abs(cost) >= SMALLEST},
        }
        told = ", ".join(
            f"{name} {cost:+.1f}" for name, cost in list(found[variant.name]["by"].items())[:6]
        )
        print(
            f"{threads} threads  {variant.name:<34} {found[variant.name]['added']:+6.1f} %  {told}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    keep_freed_memory()  # else the profile shows where pages are faulted in
    found = {
        str(n): measure(options.methods, n, options.rounds, options.batch) for n in options.threads
    }
    if options.json:
        words = [f"--methods {options.methods!r}"] if options.methods != METHODS else []
        words += [f"--threads {' '.join(map(str, options.threads))}", f"--rounds {options.rounds}"]
        words += [f"--batch {options.batch}"] if options.batch != BATCH else []
        record = {
            "command": f"python -m benchmarks.profiles {' '.join(words)}",
            "model": f"{MODEL}, batch {options.batch}, float32, synthetic data",
            "what": "own time of operations called more or less often than in the plain step, in percent of it",
            "machine": {**machine(), "threads": options.threads, "malloc": describe_malloc()},
            "threads": found,
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
