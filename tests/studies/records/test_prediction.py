"""What is promised, shrunk, distrusted and set side by side, against simulations that share no code with it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from dampen.studies import prediction
from dampen.studies.pairing import corrected_rates, failure_rate
from dampen.studies.stats import sequential_interval
from dampen.studies.verdict import (
    LATER,
    NO_VARIATION,
    TURNED,
    contenders,
    judge,
    judge_pairs,
    words,
)


def as_row(values):
    return {str(i): float(v) for i, v in enumerate(values)}


def test_80_percent_are_conclusive_at_the_promised_number_of_seeds():
    """2,500 studies of 8 seeds with effects drawn from a normal distribution; each goes on to what it was promised."""
    rng = np.random.default_rng(0)
    at_half, at_most = [], []
    for effect in rng.normal(size=2500):
        d = rng.normal(effect, 1.0, 120)
        if reference.ttest_1samp(d[:8], 0).pvalue > 0.05:
            promise = prediction.seeds_to_conclusion(list(d[:8]), 0.05, 0.05, None)
            if promise is not None:
                for found, n in zip((at_half, at_most), promise, strict=True):
                    found.append(reference.ttest_1samp(d[:n], 0).pvalue <= 0.05)
    assert len(at_most) > 400
    assert np.mean(at_most) == pytest.approx(0.8, abs=0.05)
    assert 0.45 < np.mean(at_half) < 0.75


def test_an_effect_that_may_well_be_zero_is_promised_nothing():
    d = [1.0, -1.1, 0.9, -0.8, 1.2, -1.0, 0.3, -0.4]
    assert prediction.seeds_to_conclusion(d, 0.05, 0.05, None) is None
    row = {s: 50 + s_ + d_ for s, s_, d_ in zip("01234567", range(8), d, strict=True)}
    plain = {s: 50.0 + i for i, s in enumerate("01234567")}
    told = words(judge({"a": row, "b": plain}, "b", "score")["a"], "score")
    assert told == "inconclusive, likely still with 100 seeds"


def test_a_study_that_may_go_on_is_promised_more_seeds_than_a_fixed_one():
    d = [0.2, 1.4, -0.5, 1.1, 0.9, -0.6, 1.6, 0.3]
    fixed = prediction.seeds_to_conclusion(d, 0.05, 0.05, None)
    grown = prediction.seeds_to_conclusion(d, 0.05, 0.05, None, sequential=True)
    assert fixed < grown


def test_a_margin_can_end_a_study_earlier():
    d = list(np.random.default_rng(5).normal(0.0, 1.0, 12))
    assert prediction.seeds_to_conclusion(d, 0.05, 0.05, None) is None
    assert prediction.seeds_to_conclusion(d, 0.05, 0.05, 1.0) is not None


def test_selected_effects_are_optimistic_and_the_shrunk_ones_are_not():
    """The issue's case: 8 seeds, a true effect of 0.5, and only what is significant is looked at."""
    draws = np.random.default_rng(0).normal(0.5, 1.0, (4000, 8))
    chosen = draws[reference.ttest_1samp(draws, 0, axis=1).pvalue <= 0.05]
    shrunk = [prediction.shrunk_effect(list(d), 0.05) for d in chosen]
    assert chosen.mean() > 0.85
    assert np.mean(shrunk) == pytest.approx(0.5, abs=0.1)
    assert all(0 <= s / d.mean() <= 1 for s, d in zip(shrunk, chosen, strict=True))


def test_the_shrunk_effect_is_median_unbiased_given_significance():
    """By its definition, with scipy's noncentral t."""
    d = [1.0, 2.0, 0.5, 1.5, 1.2, 0.1]
    found = prediction.shrunk_effect(d, 0.05)
    t = math.sqrt(6) * np.mean(d) / np.std(d, ddof=1)
    critical, nc = reference.t.ppf(0.975, 5), found * math.sqrt(6) / np.std(d, ddof=1)
    selected = reference.nct.sf(critical, 5, nc) + reference.nct.cdf(-critical, 5, nc)
    assert reference.nct.sf(t, 5, nc) / selected == pytest.approx(0.5, abs=1e-6)
    assert math.isnan(prediction.shrunk_effect([1.0, -1.0, 0.5, 0.2], 0.05))
    assert prediction.shrunk_effect([-v for v in d], 0.05) == pytest.approx(-found)


def test_strongly_skewed_differences_are_said_with_what_to_expect():
    plain = as_row([70.0, 71, 69, 70.5, 70.2, 69.5, 71.2, 70.1])
    jumps = [0.1, 0.2, -0.1, 0.0, 0.15, -0.05, 0.1, -9.0]
    row = {s: v + d for (s, v), d in zip(plain.items(), jumps, strict=True)}
    found = judge({"row": row, "plain": plain}, "plain", "score")["row"]
    assert found.false_claims == prediction.FALSE_CLAIMS[8]
    assert found.outliers == ("7",)
    assert "far from the others: seed 7" in found.caution
    assert "at least 12 seeds" in found.caution
    even = {s: v + d for (s, v), d in zip(plain.items(), np.linspace(-1, 1.2, 8), strict=True)}
    assert judge({"row": even, "plain": plain}, "plain", "score")["row"].caution == ""


@pytest.mark.parametrize("n", [4, 5, 8, 20])
def test_one_normal_sample_in_twenty_is_called_skewed(n):
    draws = np.random.default_rng(n).normal(size=(4000, n))
    flagged = np.mean([prediction.false_claims_to_expect(list(d)) is not None for d in draws])
    assert flagged == pytest.approx(0.05, abs=0.015)
    assert prediction.skewness(draws[0]) == pytest.approx(reference.skew(draws[0], bias=False))


def test_a_metric_that_does_not_vary_with_the_seed_has_no_verdict():
    same = dict.fromkeys("01234567", 90.0)
    higher = dict.fromkeys("01234567", 92.0)
    varied = {s: 90.0 + int(s) for s in "01234567"}
    found = judge({"plain": same, "row": higher, "equal": dict(same)}, "plain", "accuracy")
    for name in ("row", "equal"):
        assert found[name].verdict == "inconclusive"
        assert found[name].p is None
        assert words(found[name], "accuracy") == f"no verdict: {NO_VARIATION}"
    other = judge({"plain": varied, "row": higher}, "plain", "accuracy")["row"]
    assert other.p is not None
    sequential = judge({"plain": same, "row": higher}, "plain", "accuracy", test="sequential")
    assert sequential["row"].because == NO_VARIATION


def test_methods_added_after_a_look_do_not_get_the_level_anew():
    """8 looks, one more method before each, nothing has an effect; corrected over all rows so far it is about 12 %."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4000, 9, 8))
    p = reference.ttest_rel(values[:, 1:], values[:, :1], axis=2).pvalue
    rows = {str(i): as_row(v) for i, v in enumerate(values[0])}
    pairs = {name: (row, rows["0"]) for name, row in rows.items() if name != "0"}
    found = judge_pairs(pairs, "score", added={str(i): i - 1 for i in range(2, 9)})
    levels = np.array([c.level for c in found.values()])
    assert (p <= levels).any(axis=1).mean() < 0.05 * (1 + LATER) + 0.01
    assert (p <= 0.05 / np.arange(1, 9)).any(axis=1).mean() > 0.1


def test_an_added_method_is_judged_at_its_own_level():
    rng = np.random.default_rng(0)
    plain = as_row(rng.normal(size=8))
    pairs = {name: (as_row(rng.normal(size=8)), plain) for name in "abc"}
    alone = judge_pairs({"a": pairs["a"]}, "score")["a"]
    together = judge_pairs(pairs, "score", added={"b": 1, "c": 1})
    assert (together["a"].level, together["a"].corrected) == (alone.level, alone.corrected)
    assert together["b"].level <= 0.05 * LATER / 2
    p = [together[n].p for n in "bc"]
    assert together["bc"[int(np.argmin(p))]].corrected == pytest.approx(min(1, min(p) * 2 * 10))


differences = st.lists(st.floats(-5, 5), min_size=3, max_size=12).filter(
    lambda d: np.std(d[:2]) > 0.01
)


@given(differences, st.floats(0.002, 0.2))
def test_an_estimate_lies_in_its_sequential_interval(d, level):
    low, high = sequential_interval(d, level)
    assert math.isnan(low) or low <= np.mean(d) + 1e-12
    assert math.isnan(high) or high >= np.mean(d) - 1e-12


EARLY = [1, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98]


def turned(later):
    """A row whose first seven differences are near 1, and the others as given; its reference varies."""
    d = np.array([*EARLY, *later])
    plain = 50 + 0.3 * (np.arange(len(d)) % 5)
    return as_row(plain), as_row(plain + d)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("better", ["max", "min"])
def test_evidence_for_one_direction_is_no_verdict_for_the_other(sign, better):
    plain, row = turned([-3.5] * 3)
    rows = {"plain": plain, "a": {s: plain[s] + sign * (v - plain[s]) for s, v in row.items()}}
    got = judge(rows, "plain", "accuracy", test="sequential", better=better)["a"]
    assert got.p < 0.05
    assert (got.verdict, got.because, got.needed) == ("inconclusive", TURNED, None)
    assert got.low < 0 < got.high
    assert TURNED in words(got, "accuracy")
    assert set(contenders(rows, better, "sequential")) == {"plain", "a"}


def test_a_sequential_interval_never_contradicts_its_verdict():
    """Sequences that drift and turn, in families of one to three rows."""
    rng = np.random.default_rng(0)
    seen = dict.fromkeys(("better", "worse", "equal", "inconclusive", "turned"), 0)
    for _ in range(500):
        n, rows = rng.integers(5, 14), {}
        plain = rng.normal(50, 1, n)
        for name in "abc"[: rng.integers(1, 4)]:
            turn, shift = rng.integers(1, n), rng.normal(0, 1.5)
            means = np.where(np.arange(n) < turn, shift, rng.choice([-1, 1, 1]) * shift)
            rows[name] = as_row(plain + means + rng.normal(0, rng.choice([0.1, 0.5]), n))
        judged = judge(
            {"plain": as_row(plain)} | rows, "plain", "score", margin=0.6, test="sequential"
        )
        for c in judged.values():
            word = "turned" if c.because == TURNED else c.verdict
            seen[word] = seen.get(word, 0) + 1
            agrees = {
                "better": c.low > 0 and c.difference > 0,
                "worse": c.high < 0 and c.difference < 0,
                "equal": max(-c.low, c.high) < 0.6,
                "inconclusive": math.isnan(c.low) or c.low <= 0 <= c.high,
                "no gain": c.high < 0.6 or "cannot reach" in c.because,
            }
            assert agrees[c.verdict], c
    assert all(seen.values()), seen


def test_the_best_configuration_is_among_the_contenders():
    """2,000 tables of five rows of 8 seeds that share their seeds' noise; the best is left out in under 5 %."""
    rng = np.random.default_rng(0)
    truth = np.array([0.0, 0.5, 1.0, 1.2, 1.3])
    missed, sizes = 0, []
    for _ in range(2000):
        values = truth[:, None] + rng.normal(size=(5, 8)) + rng.normal(size=(1, 8))
        kept = contenders({str(i): as_row(v) for i, v in enumerate(values)}, "max")
        missed += "4" not in kept
        sizes.append(len(kept))
    assert missed / 2000 < 0.05
    assert 1 < np.mean(sizes) < 5


def test_contenders_by_hand():
    rows = {
        "best": as_row([10.0, 11.0, 12.0, 13.0, 14.0]),
        "near": as_row([10.5, 10.5, 12.5, 12.0, 14.2]),
        "far": as_row([1.0, 2.1, 3.2, 3.9, 5.1]),
        "few": {"0": 3.0},
    }
    assert contenders(rows, "max") == ["best", "near", "few"]
    assert contenders({k: {s: -v for s, v in row.items()} for k, row in rows.items()}, "min") == [
        "best",
        "near",
        "few",
    ]
    assert contenders({}, "max") == []


@pytest.mark.parametrize(("failed", "of"), [(0, 8), (3, 8), (8, 8), (5, 20)])
def test_failure_rates_equal_scipy(failed, of):
    rate = failure_rate(failed, of, 1, 10)
    exact = reference.binomtest(failed, of).proportion_ci(method="exact")
    assert (rate.low, rate.high) == (pytest.approx(exact.low), pytest.approx(exact.high))
    p = reference.fisher_exact([[failed, of - failed], [1, 9]]).pvalue
    assert rate.p == pytest.approx(p)
    corrected = corrected_rates({"a": rate, "b": failure_rate(0, 8, 0, 8)})
    assert corrected["a"].corrected == pytest.approx(min(1.0, 2 * p))
