"""Are the random numbers of the native kernels random enough? A battery over masks, written down as a record.

    python -m benchmarks.native_randomness [--json benchmarks/records/native_randomness.json]

Each test is a z score of the standardized mask x (0 in the mean, 1 in variance) that is standard normal where draws are
independent: the marginal rate, products of neighbors at several lags along keys, queries, heads and seeds next to each
other, the variance of row and column counts, and 2 x 2 patterns. Over many seeds the scores themselves must look like a
normal sample: none beyond 5, and a mean square within 4.5 standard deviations of 1. The 16-bit draws are checked with a
chi-square over their 256 high and low bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dampen.native import build
from dampen.native.ops import draws, hidden_keys
from dampen.studies.bench.timing import machine
from dampen.studies.files import write_json

SHAPE = (32, 96, 96)  # heads, queries, keys
RATES = (0.05, 0.2, 0.5)
LAGS = (1, 2, 7, 8, 15, 16, 32)


Draw = Callable[[int, int, int, float, int], Tensor]
"""From heads, queries, keys, rate and seed to a mask."""


def standardized(rate: float, seed: int, draw: Draw) -> Tensor:
    """A mask as numbers of mean 0 and variance 1."""
    return (draw(*SHAPE, rate, seed).double() - rate) / math.sqrt(rate * (1 - rate))


def scores(rate: float, seed: int, draw: Draw) -> Iterator[tuple[str, float]]:
    """Every test of one mask: its name and z score."""
    x, after = standardized(rate, seed, draw), standardized(rate, seed + 1, draw)

    def z(t: Tensor) -> float:
        return float(t.mean() * math.sqrt(t.numel()))

    yield "rate", z(x)
    for lag in LAGS:
        yield f"keys, lag {lag}", z(x[..., lag:] * x[..., :-lag])
        yield f"queries, lag {lag}", z(x[:, lag:] * x[:, :-lag])
    yield "heads", z(x[1:] * x[:-1])
    yield "diagonal", z(x[:, 1:, 1:] * x[:, :-1, :-1])
    yield "2 x 2", z(x[:, 1:, 1:] * x[:, :-1, :-1] * x[:, 1:, :-1] * x[:, :-1, 1:])
    yield "seeds next to each other", z(x * after)
    kurtosis = (1 - 6 * rate * (1 - rate)) / (
        rate * (1 - rate)
    )  # of one draw, beyond the normal's 3
    for name, counts in (("row counts", x.sum(-1)), ("column counts", x.sum(-2))):
        n, size = counts.numel(), SHAPE[-1]
        yield (
            f"variance of {name}",
            float((counts.square().mean() / size - 1) / math.sqrt((2 + kurtosis / size) / n)),
        )


def byte_scores(seeds: int) -> dict[str, float]:
    """Chi-square of the high and the low bytes of the draws over 256 cells, as z scores."""
    numbers = torch.cat([draws(2**18, seed) for seed in range(seeds)]).long() & 0xFFFF
    found = {}
    for name, part in (("high byte", numbers >> 8), ("low byte", numbers & 255)):
        counts, expected = torch.bincount(part, minlength=256).double(), numbers.numel() / 256
        found[name] = float(
            ((counts - expected).square().sum() / expected - 255) / math.sqrt(2 * 255)
        )
    return found


def battery(
    seeds: int, draw: Draw = hidden_keys, rates: Sequence[float] = RATES
) -> dict[str, dict[str, float]]:
    """Per test the variance and the extreme of its z scores over seeds and rates."""
    found: dict[str, list[float]] = {}
    for group, rate in enumerate(
        rates
    ):  # seeds of its own for each rate: no draw is looked at twice
        for seed in range(seeds):
            for name, value in scores(rate, 1000 * group + 2 * seed, draw):
                found.setdefault(name, []).append(value)
    return {
        name: {
            "variance": statistics.fmean(v * v for v in values),
            "extreme": max(map(abs, values)),
            "n": len(values),
        }
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    build()
    results, single = battery(options.seeds), byte_scores(8)
    n = len(RATES) * options.seeds
    spread = 4.5 * math.sqrt(2 / n)  # of the mean square of n normal numbers
    bad = [k for k, v in results.items() if abs(v["variance"] - 1) > spread or v["extreme"] > 5]
    bad += [k for k, v in single.items() if abs(v) > 5]
    for name, value in results.items():
        print(
            f"{name:28s} variance {value['variance']:.3f}  largest |z| {value['extreme']:.2f}  n={value['n']}"
        )
    print(*(f"{name}: z {value:.2f}" for name, value in single.items()), sep="\n")
    print(f"outside what chance allows: {', '.join(bad) or 'none'}")
    if options.json:
        record = {
            "machine": machine(),
            "shape": SHAPE,
            "rates": RATES,
            "seeds": options.seeds,
            "tests": results,
        }
        write_json(options.json, {**record, "bytes": single, "outside": bad})
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
