"""How often a configuration's runs fail, against the baseline's: what a test of means cannot see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dampen.studies.stats import LEVEL, holm


@dataclass(frozen=True)
class FailureRate:
    """Runs that diverged, raised or returned no number, among those that ended, beside the baseline's.

    `low` to `high` is the exact 95 % interval of the rate (Clopper and Pearson), `p` Fisher's exact test against the
    baseline, `corrected` the same after Holm's correction over the configurations.
    """

    failed: int
    runs: int
    reference_failed: int = 0
    reference_runs: int = 0
    low: float = 0.0
    high: float = 1.0
    p: float | None = None
    corrected: float | None = None

    @property
    def in_excess(self) -> bool:
        """Whether runs failed here more often than the baseline's."""
        return self.failed * max(1, self.reference_runs) > self.reference_failed * self.runs

    @property
    def significant(self) -> bool:
        """Whether the rate differs from the baseline's."""
        return self.corrected is not None and self.corrected <= LEVEL

    def in_words(self) -> str:
        """Such as '3 of 8 runs failed'; empty where none did.

        >>> failure_rate(3, 8, 0, 8).in_words(), failure_rate(0, 8, 0, 8).in_words()
        ('3 of 8 runs failed', '')
        """
        if not self.failed:
            return ""
        told = f"{self.failed} of {self.runs} runs failed"
        if not self.significant:
            return told
        word = "more" if self.in_excess else "fewer"
        return f"{told}, significantly {word} than the baseline's {self.reference_failed} of {self.reference_runs}"


def failure_rate(
    failed: int, runs: int, reference_failed: int = 0, reference_runs: int = 0
) -> FailureRate:
    """A failure rate with its interval and its test.

    Args:
        failed: runs of the configuration without a result.
        runs: that ended, with a result or without.
        reference_failed: of the baseline.
        reference_runs: of the baseline.
    """
    if not runs:
        return FailureRate(failed, runs, reference_failed, reference_runs)
    from scipy.special import betaincinv
    from scipy.stats import fisher_exact

    low = betaincinv(failed, runs - failed + 1, LEVEL / 2) if failed else 0.0
    high = betaincinv(failed + 1, runs - failed, 1 - LEVEL / 2) if failed < runs else 1.0
    p = None
    if reference_runs:
        table = [[failed, runs - failed], [reference_failed, reference_runs - reference_failed]]
        p = float(fisher_exact(table).pvalue) if failed or reference_failed else 1.0
    return FailureRate(failed, runs, reference_failed, reference_runs, float(low), float(high), p)


def corrected_rates(rates: Mapping[str, FailureRate]) -> dict[str, FailureRate]:
    """The failure rates of a table's configurations, their p values corrected by Holm's method.

    Args:
        rates: by configuration.
    """
    corrected = holm([1.0 if r.p is None else r.p for r in rates.values()])
    return {
        name: replace(rate, corrected=None if rate.p is None else own)
        for (name, rate), own in zip(rates.items(), corrected, strict=True)
    }
