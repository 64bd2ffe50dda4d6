"""The committed simulations of what misleads a verdict: a fast run agrees with them, and they show what is claimed."""

import json

import pytest

from benchmarks import verdict_limits
from dampen.studies.prediction import FALSE_CLAIMS

RECORD = json.loads(verdict_limits.RECORD.read_text())


def entries(found, path=()):
    """Every share and mean with its error, by its place in the record."""
    if isinstance(found, dict) and "error" in found:
        yield path, found.get("share", found.get("mean")), found["error"]
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from entries(value, (*path, name))


def test_a_fast_run_agrees_with_the_record():
    """Within five Monte-Carlo errors, the fast run's and the record's together."""
    committed = {path: (value, error) for path, value, error in entries(RECORD)}
    fast = list(entries(verdict_limits.measure(0.02)))
    assert {path for path, _, _ in fast} == set(committed)
    apart = [
        (path, value, committed[path][0])
        for path, value, error in fast
        if abs(value - committed[path][0]) > 5 * (error**2 + committed[path][1] ** 2) ** 0.5
    ]
    assert not apart


def test_the_false_claims_to_expect_are_those_of_the_record():
    found = RECORD["skewed differences, nothing differs"]
    for n, rates in FALSE_CLAIMS.items():
        for log_sd, rate in zip(("0.5", "1"), rates, strict=True):
            assert found[f"lognormal {log_sd}, {n} seeds"]["false claims"][
                "share"
            ] == pytest.approx(rate, abs=0.001)


def test_what_is_promised_is_kept():
    for name, found in RECORD["seeds promised to inconclusive studies"].items():
        share = found["conclusive at the upper end (80 % promised)"]["share"]
        if name.endswith("fixed"):
            assert share == pytest.approx(0.8, abs=0.05), name
        else:
            assert 0.75 < share < 0.95, (
                name
            )  # a sequential study is promised too many rather than too few


def test_the_remedies_hold_their_level():
    added = RECORD["methods added after each of 8 looks, none has an effect"]
    assert added["level for each addition"]["share"] < 0.06
    assert added["Holm over all so far"]["share"] > 0.09
    assert RECORD["a metric that does not vary with the seed"]["claims"]["share"] == 0
    assert RECORD["sequential intervals"]["hold the estimate"]["share"] == 1
    assert RECORD["contenders"]["the best is among them"]["share"] > 0.95
    chosen = RECORD["selected effects, 8 seeds"]["true effect 0.5"]
    assert chosen["observed"]["mean"] > 0.85
    assert chosen["shrunk"]["mean"] == pytest.approx(0.5, abs=0.1)
