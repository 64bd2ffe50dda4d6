"""Level and power of each kind of test that judges tables, by simulation: benchmarks/records/verdict_power.json.

    python -m benchmarks.verdict_power            # about two minutes on one core
    python -m benchmarks.verdict_power --quick    # a twentieth of the tables, printed and not recorded

Differences are drawn from a normal distribution (synthetic, as the name says). `fixed` is the paired t-test with Holm
over the rows, `sequential` the e-process looked at after every seed, with Holm at every look.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtr

from dampen.studies.files import write_json
from dampen.studies.stats import LEVEL, first_round, log_e_matrix

RECORD = Path(__file__).parent / "records" / "verdict_power.json"


def t_test_p(differences: np.ndarray) -> np.ndarray:
    """Two-sided p values of every prefix with n = 2, 3, ...: (..., seeds) to (..., seeds - 1)."""
    n = np.arange(1, differences.shape[-1] + 1)
    mean = differences.cumsum(axis=-1) / n
    square = (differences**2).cumsum(axis=-1)
    n, mean, square = n[1:], mean[..., 1:], square[..., 1:]
    variance = np.maximum(square - n * mean**2, 1e-300) / (n - 1)
    return 2 * stdtr(n - 1, -np.abs(mean) / np.sqrt(variance / n))


def e_process_p(differences: np.ndarray) -> np.ndarray:
    """1 / max E over the looks so far, of every prefix."""
    shape = differences.shape
    e = log_e_matrix(differences.reshape(-1, shape[-1]))
    return np.exp(-np.maximum(np.maximum.accumulate(e, axis=1), 0.0)).reshape(
        *shape[:-1], shape[-1] - 1
    )


def holm_decided(p: np.ndarray) -> np.ndarray:
    """Which rows Holm's method decides: p is (tables, rows, looks)."""
    rows = p.shape[1]
    order = p.argsort(axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    allowed = LEVEL / (rows - np.arange(rows))[None, :, None]
    going = np.logical_and.accumulate(ranked <= allowed, axis=1)
    decided = np.zeros_like(going)
    np.put_along_axis(decided, order, going, axis=1)
    return decided


def draws(
    tables: int, rows: int, seeds: int, effects: Sequence[float], seed: int, shared: float = 0.5
) -> np.ndarray:
    """Differences of rows to one reference: its runs are in all of them, so they correlate by `shared`."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((tables, 1, seeds)) * math.sqrt(shared)
    own = rng.standard_normal((tables, rows, seeds)) * math.sqrt(1 - shared)
    return common + own + np.asarray(effects, dtype=float)[None, :, None]


def false_claims_fixed(
    rows: int, seeds: int, tables: int, seed: int = 0, look_at_all: bool = False
) -> float:
    """The share of tables without any difference in which some row is called better or worse."""
    p = t_test_p(draws(tables, rows, seeds, [0.0] * rows, seed))
    p = p[..., 1:] if look_at_all else p[..., -1:]  # from three seeds on
    return float(holm_decided(p).any(axis=(1, 2)).mean())


def false_claims_sequential(rows: int, looks: int, tables: int, seed: int = 0) -> float:
    """The same for the e-process, at any of so many looks."""
    return float(
        holm_decided(e_process_p(draws(tables, rows, looks, [0.0] * rows, seed)))
        .any(axis=(1, 2))
        .mean()
    )


def power_fixed(effect: float, rows: int, seeds: int, tables: int, seed: int = 0) -> float:
    """How often one row with this standardized effect, among rows without any, is decided."""
    p = t_test_p(draws(tables, rows, seeds, [effect, *[0.0] * (rows - 1)], seed))
    return float(holm_decided(p[..., -1:])[:, 0, 0].mean())


def seeds_sequential(
    effect: float, rows: int, looks: int, tables: int, seed: int = 0
) -> dict[str, float | None]:
    """Seeds at which half and 80 % of such rows are decided, in rounds that begin with the first that can."""
    decided = holm_decided(
        e_process_p(draws(tables, rows, looks, [effect, *[0.0] * (rows - 1)], seed))
    )[:, 0]
    first = np.where(decided.any(axis=1), decided.argmax(axis=1) + 2, looks + 1)
    first = np.maximum(first, first_round(rows))
    found = {"median": np.quantile(first, 0.5), "80 %": np.quantile(first, 0.8, method="higher")}
    return {name: float(value) if value <= looks else None for name, value in found.items()}


def coverage(seeds: int, tables: int, level: float = LEVEL, seed: int = 0) -> float:
    """How often the sequential interval, at the last of so many looks, holds the true difference (here 0)."""
    return float((e_process_p(draws(tables, 1, seeds, [0.0], seed))[:, 0, -1] > level).mean())


def measure(scale: float = 1.0) -> dict[str, Any]:
    """All simulations."""
    many = max(100, int(10_000 * scale))
    some = max(100, int(4_000 * scale))
    return {
        "kind": "simulation",
        "command": "python -m benchmarks.verdict_power",
        "differences": "normal, spread 1, correlated by 0.5 between rows through the shared reference",
        "level": LEVEL,
        "tables": {"level": many, "power": some},
        "false claims, fixed plan": {
            f"{rows} rows, {n} seeds": false_claims_fixed(rows, n, many)
            for rows in (1, 9, 14)
            for n in (3, 5, 8)
        },
        "false claims, t-tests looked at after each of 100 seeds": {
            f"{rows} rows": false_claims_fixed(rows, 100, some, look_at_all=True) for rows in (1, 9)
        },
        "false claims, sequential, 100 looks": {
            f"{rows} rows": false_claims_sequential(rows, 100, some) for rows in (1, 5, 11)
        },
        "coverage, sequential interval after 100 looks": coverage(100, many),
        "power, fixed plan": {
            f"effect {effect:g}, {rows} rows": {
                f"{n} seeds": power_fixed(effect, rows, n, some) for n in (3, 5, 8, 10, 20)
            }
            for effect in (0.5, 1.0, 1.43, 2.0)
            for rows in (1, 9, 11)
        },
        "seeds to decide, sequential": {
            f"effect {effect:g}, {rows} rows": seeds_sequential(effect, rows, 100, some)
            for effect in (1.0, 1.5, 2.0)
            for rows in (1, 11)
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer tables, printed and not recorded"
    )
    options = parser.parse_args(arguments)
    found = measure(0.05 if options.quick else 1.0)
    for name, value in found.items():
        print(f"{name}: {value}")
    if not options.quick:
        write_json(RECORD, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
