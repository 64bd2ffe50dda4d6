"""What misleads a verdict, and what is done about it, by simulation: benchmarks/records/verdict_limits.json.

    python -m benchmarks.verdict_limits            # a few minutes on one core
    python -m benchmarks.verdict_limits --quick    # a twentieth of the tables, printed and not recorded

Every share and every mean stands with its Monte-Carlo standard error. All values are drawn at random, with fixed seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import fisher_exact, ttest_1samp, ttest_rel

from dampen.studies import prediction, stats
from dampen.studies.files import write_json
from dampen.studies.verdict import LATER, contenders, judge

RECORD = Path(__file__).parent / "records" / "verdict_limits.json"
LEVEL = stats.LEVEL
SEEDS = (3, 5, 8, 12, 16, 24)


def share(found: Sequence[bool] | np.ndarray) -> dict[str, float]:
    """A share with its Monte-Carlo error."""
    p, n = float(np.mean(found)), len(found)
    return {"share": round(p, 4), "error": round(math.sqrt(max(p * (1 - p), 1 / n) / n), 4)}


def average(found: Sequence[float] | np.ndarray) -> dict[str, float]:
    """A mean with its Monte-Carlo error."""
    error = float(np.std(found, ddof=1)) / math.sqrt(len(found))
    return {"mean": round(float(np.mean(found)), 4), "error": round(error, 4)}


def as_row(values: np.ndarray) -> dict[str, float]:
    return {str(i): float(v) for i, v in enumerate(values)}


# --- skewed differences


def lognormal(rng: np.random.Generator, shape: tuple[int, int], log_sd: float) -> np.ndarray:
    """Differences of mean 0 whose logarithm has this standard deviation."""
    return rng.lognormal(0.0, log_sd, shape) - math.exp(log_sd**2 / 2)


def sign_flip_p(differences: np.ndarray) -> np.ndarray:
    """The exact two-sided sign-flip test of the mean, over all 2^n flips."""
    n = differences.shape[1]
    flips = np.array(list(itertools.product((-1, 1), repeat=n)))
    means = np.abs(differences @ flips.T) / n
    observed = np.abs(differences.mean(axis=1))
    return (means >= observed[:, None] * (1 - 1e-12)).mean(axis=1)


def skewed(tables: int) -> dict[str, Any]:
    """False claims of the t test where nothing differs, and which of them are flagged."""
    found: dict[str, Any] = {}
    draws: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
        "normal": lambda rng, shape: rng.normal(size=shape),
        "lognormal 0.5": lambda rng, shape: lognormal(rng, shape, 0.5),
        "lognormal 1": lambda rng, shape: lognormal(rng, shape, 1.0),
    }
    for (name, draw), n in itertools.product(draws.items(), SEEDS):
        d = draw(np.random.default_rng(n), (tables, n))
        claims = ttest_1samp(d, 0.0, axis=1).pvalue <= LEVEL
        told = {"false claims": share(claims)}
        few = d[: max(200, tables // 10)]
        if n >= 4:
            flagged = np.array(
                [prediction.false_claims_to_expect(list(x)) is not None for x in few]
            )
            told["flagged"] = share(flagged)
            told["false claims where not flagged"] = share(claims[: len(few)][~flagged])
        if n == 8:
            told["false claims of the sign-flip test"] = share(sign_flip_p(few) <= LEVEL)
        found[f"{name}, {n} seeds"] = told
    d = np.random.default_rng(0).normal(1.0, 1.0, (max(200, tables // 10), 8))
    found["power at a standardized effect of 1, 8 seeds"] = {
        "t test": share(ttest_1samp(d, 0.0, axis=1).pvalue <= LEVEL),
        "sign-flip test": share(sign_flip_p(d) <= LEVEL),
    }
    return found


# --- a function that ignores its seed, and runs that fail


def constant(tables: int) -> dict[str, Any]:
    """Claims where baseline and method give one number each, whatever the seed."""
    rng = np.random.default_rng(0)
    words, tests = [], []
    for a, b in rng.normal(70, 2, (tables, 2)):
        rows = {"plain": as_row(np.full(8, a)), "row": as_row(np.full(8, b))}
        words.append(judge(rows, "plain", "score")["row"].verdict in ("better", "worse"))
        tests.append(stats.paired_p([b - a] * 8) <= LEVEL)
    return {"claims": share(words), "claims of the test alone": share(tests)}


def failing(tables: int) -> dict[str, Any]:
    """A method that is better by one standard deviation where it trains, and fails in some runs."""
    found: dict[str, Any] = {}
    for rate, n in itertools.product((0.05, 0.2, 0.5), (8, 16, 32)):
        rng = np.random.default_rng(n)
        better, bare, significant = [], [], []
        for _ in range(tables):
            d, fails = rng.normal(1.5, 1.0, n), rng.random(n) < rate
            kept = d[~fails]
            claim = len(kept) >= 3 and bool(ttest_1samp(kept, 0.0).pvalue <= LEVEL)
            better.append(claim and kept.mean() > 0)
            bare.append(better[-1] and not fails.any())
            k = int(fails.sum())
            significant.append(fisher_exact([[k, n - k], [0, n]]).pvalue <= LEVEL)
        found[f"{100 * rate:.0f} % of runs fail, {n} seeds"] = {
            "significantly better in its mean": share(better),
            "called better without a word of failures": share(bare),
            "failure rate significantly above the baseline's 0": share(significant),
        }
    return found


# --- looking, adding, selecting


def additions(tables: int, looks: int = 8, seeds: int = 8) -> dict[str, Any]:
    """A method is added after each look until one is significant; none has an effect."""
    values = np.random.default_rng(0).normal(size=(tables, looks + 1, seeds))
    p = ttest_rel(values[:, 1:], values[:, :1], axis=2).pvalue
    ours = LEVEL * np.where(np.arange(looks) > 0, LATER / 2.0 ** np.arange(looks), 1.0)
    return {
        "level for each addition": share((p <= ours).any(axis=1)),
        "Holm over all so far": share((p <= LEVEL / np.arange(1, looks + 1)).any(axis=1)),
        "all planned before": share((p <= LEVEL / looks).any(axis=1)),
    }


def intervals(tables: int) -> dict[str, Any]:
    """Sequential intervals after up to 40 seeds: do they hold the estimate, and the truth?"""
    rng = np.random.default_rng(0)
    estimate, truth = [], []
    for effect, n in zip(rng.normal(size=tables), rng.integers(6, 41, tables), strict=True):
        d = list(rng.normal(effect, 1.0, n))
        low, high = stats.sequential_interval(d)
        estimate.append(math.isnan(low) or low <= statistics.fmean(d) <= high)
        truth.append(math.isnan(low) or low <= effect <= high)
    return {"hold the estimate": share(estimate), "hold the truth": share(truth)}


def promises(tables: int) -> dict[str, Any]:
    """Inconclusive studies go on to the seeds that they were promised: how many are conclusive there?"""
    found: dict[str, Any] = {}
    spread = {
        "normal, sd 1": lambda rng: rng.normal(),
        "uniform, -2 to 2": lambda rng: rng.uniform(-2, 2),
    }
    for (prior, draw), n, test in itertools.product(
        spread.items(), (5, 8), ("fixed", "sequential")
    ):
        rng, ends, open_ = np.random.default_rng(n), ([], []), 0
        for _ in range(tables if test == "fixed" else tables // 4):
            d = rng.normal(draw(rng), 1.0, 100)
            if _conclusive(d[:n], test):
                continue
            open_ += 1
            promise = prediction.seeds_to_conclusion(
                list(d[:n]), LEVEL, LEVEL, None, test != "fixed"
            )
            for end, at in zip(ends, promise or (), strict=False):
                end.append(_conclusive(d[:at], test))
        found[f"effects {prior}, {n} seeds, {test}"] = {
            "promised": share(np.arange(open_) < len(ends[1])),
            "conclusive at the lower end (50 % promised)": share(ends[0]),
            "conclusive at the upper end (80 % promised)": share(ends[1]),
        }
    return found


def _conclusive(d: np.ndarray, test: str) -> bool:
    p = stats.sequential_p(list(d)) if test == "sequential" else ttest_1samp(d, 0.0).pvalue
    return bool(p <= LEVEL)


def best(tables: int) -> dict[str, Any]:
    """Whether the truly best of five configurations is among the contenders, and how many these are."""
    rng = np.random.default_rng(0)
    truth, held, sizes = np.array([0.0, 0.5, 1.0, 1.2, 1.3]), [], []
    for _ in range(tables):
        values = truth[:, None] + rng.normal(size=(5, 8)) + rng.normal(size=(1, 8))
        kept = contenders({str(i): as_row(v) for i, v in enumerate(values)}, "max")
        held.append("4" in kept)
        sizes.append(len(kept))
    return {"the best is among them": share(held), "contenders of five": average(sizes)}


def selected(tables: int) -> dict[str, Any]:
    """Significant differences of 8 seeds, as observed and shrunk, beside the true effect."""
    found = {}
    for effect in (0.25, 0.5, 1.0, 1.5):
        d = np.random.default_rng(0).normal(effect, 1.0, (tables, 8))
        chosen = d[ttest_1samp(d, 0.0, axis=1).pvalue <= LEVEL]
        shrunk = [prediction.shrunk_effect(list(x), LEVEL) for x in chosen]
        found[f"true effect {effect:g}"] = {
            "significant": share(np.arange(tables) < len(chosen)),
            "observed": average(chosen.mean(axis=1)),
            "shrunk": average(shrunk),
        }
    return found


def measure(scale: float = 1.0) -> dict[str, Any]:
    """All simulations.

    Args:
        scale: of the number of simulated tables.
    """
    many, some = max(2000, int(40_000 * scale)), max(200, int(4_000 * scale))
    return {
        "kind": "simulation",
        "command": "python -m benchmarks.verdict_limits",
        "level": LEVEL,
        "tables": {"skewed differences and additions": many, "others": some},
        "skewed differences, nothing differs": skewed(many),
        "a metric that does not vary with the seed": constant(some // 4),
        "failing runs, better by 1.5 standard deviations where it trains": failing(some // 4),
        "methods added after each of 8 looks, none has an effect": additions(many),
        "sequential intervals": intervals(some // 2),
        "seeds promised to inconclusive studies": promises(some),
        "contenders": best(some),
        "selected effects, 8 seeds": selected(some),
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
