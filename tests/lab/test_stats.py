"""Statistics against scipy, and against cases worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from dampen.lab import stats
from dampen.lab.report.paper import Published, against_paper


def paired(seed, n, shift=0.3):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n)
    return a + shift + rng.normal(scale=0.5, size=n), a


def as_row(values):
    return {str(i): float(v) for i, v in enumerate(values)}


@pytest.mark.parametrize("n", [3, 5, 8, 30])
def test_summary_equals_scipy(n):
    x, _ = paired(n, n)
    got = stats.summarize(list(x))
    assert (got.n, got.mean, got.sd) == (n, pytest.approx(x.mean()), pytest.approx(x.std(ddof=1)))
    interval = reference.t.interval(0.95, n - 1, loc=x.mean(), scale=reference.sem(x))
    assert stats.t_interval(list(x)) == pytest.approx(interval)


@pytest.mark.parametrize("n", [3, 5, 8, 30])
def test_paired_tests_equal_scipy(n):
    x, y = paired(n, n)
    got = stats.compare_paired(as_row(x), as_row(y))
    assert got.n == n
    assert got.difference == pytest.approx((x - y).mean())
    assert got.p == pytest.approx(reference.ttest_rel(x, y).pvalue)
    assert (got.low, got.high) == pytest.approx(tuple(reference.ttest_rel(x, y).confidence_interval(0.95)))
    if n < 6:
        assert got.wilcoxon_p is None  # it could not be below 0.05 whatever the data
    else:
        assert got.wilcoxon_p == pytest.approx(reference.wilcoxon(x - y).pvalue)


def test_wilcoxon_could_not_decide_below_six_pairs():
    assert reference.wilcoxon(np.arange(1, 6)).pvalue > 0.05 > reference.wilcoxon(np.arange(1, 7)).pvalue


def test_bootstrap_interval_agrees_with_scipy():
    x, y = paired(1, 20)
    d = x - y
    mine = stats.bootstrap_interval(list(d), draws=20_000)
    theirs = reference.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5))
    assert mine == pytest.approx(tuple(theirs.confidence_interval), abs=0.02)


def test_bootstrap_of_few_pairs_is_exact():
    # All 27 resamples of (0, 0, 3): means 0 (8 times), 1 (12), 2 (6), 3 (1). The 97.5 % quantile lies at place
    # 0.975 * 26 = 25.35 of the sorted means, between the last 2 and the 3.
    assert stats.bootstrap_interval([0.0, 0.0, 3.0]) == pytest.approx((0.0, 2.35))


def test_bootstrap_of_the_effect_size_agrees_with_scipy():
    x, y = paired(2, 20)
    d = x - y

    def g(sample, axis):
        return sample.mean(axis) / sample.std(axis, ddof=1) * (1 - 3 / (4 * 19 - 1))

    theirs = reference.bootstrap((d,), g, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5))
    assert stats.bootstrap_effect(list(d), draws=20_000) == pytest.approx(tuple(theirs.confidence_interval), abs=0.04)
    assert stats.hedges_g(list(d)) == pytest.approx(float(g(d, 0)))


def test_the_bootstrap_of_three_pairs_leaves_out_resamples_without_spread():
    low, high = stats.bootstrap_effect([1.0, 2.0, 3.0])
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert all(math.isnan(v) for v in stats.bootstrap_effect([1.0, 1.0, 1.0]))
    assert math.isnan(stats.hedges_g([1.0, 1.0, 1.0]))


def test_holm_by_hand():
    assert stats.holm([]) == []
    assert stats.holm([0.2]) == [0.2]
    assert stats.holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert stats.holm([0.5, 0.001, 0.6]) == pytest.approx([1.0, 0.003, 1.0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_the_step_down_procedure_rejects(p):
    adjusted = stats.holm(p)
    assert all(a >= b for a, b in zip(adjusted, p, strict=True))
    order = sorted(range(len(p)), key=lambda i: p[i])
    going = True
    for rank, i in enumerate(order):  # stop at the first p above alpha / (m - rank)
        going = going and p[i] * (len(p) - rank) < 0.05
        assert (adjusted[i] < 0.05) == going


def test_only_shared_seeds_count():
    row, plain = {"0": 1.0, "1": 2.0, "2": 3.5, "9": 100.0}, {"0": 0.0, "1": 1.5, "2": 2.0, "7": -50.0}
    got = stats.compare_paired(row, plain)
    assert got.n == 3
    assert got.difference == pytest.approx(1.0)


def test_verdicts():
    plain = {str(s): 0.5 + 0.01 * s for s in range(5)}
    jitter = dict(zip("01234", [0.001, -0.002, 0.0, 0.002, -0.001], strict=True))
    rows = {
        "plain": plain,
        "up": {s: v + 0.1 + jitter[s] for s, v in plain.items()},
        "down": {s: v - 0.1 + jitter[s] for s, v in plain.items()},
        "same": {s: v + jitter[s] for s, v in plain.items()},
        "few": {"0": 0.9, "1": 0.9},
        "other seeds": {f"1{s}": 0.9 for s in range(5)},
    }
    found = stats.compare_all(rows, "plain")
    assert {name: stats.decide(c.difference, c.corrected) for name, c in found.items()} == {
        "up": "better",
        "down": "worse",
        "same": "no difference shown",
        "few": "too few runs",
        "other seeds": "too few runs",
    }
    assert stats.decide(found["up"].difference, found["up"].corrected, "min") == "worse"


def test_equal_differences_do_not_pass_for_certainty():
    plain = {"0": 0.1, "1": 0.2, "2": 0.3}
    got = stats.compare_paired({s: v + 0.1 for s, v in plain.items()}, plain)  # in floating point not all exactly 0.1
    assert got.p == 0.25
    assert "equal" in got.test
    assert stats.decide(got.difference, got.p) == "no difference shown"
    same = stats.compare_paired(plain, plain)
    assert (same.difference, same.p) == (0.0, 1.0)


def test_correction_can_take_a_verdict_back():
    x, y = paired(2, 6, shift=0.5)
    alone = stats.compare_paired(as_row(x), as_row(y))
    assert stats.decide(alone.difference, alone.p) == "better"
    rng = np.random.default_rng(0)
    noise = {f"noise {i}": as_row(y + rng.normal(size=6)) for i in range(20)}
    together = stats.compare_all({"plain": as_row(y), "row": as_row(x), **noise}, "plain")["row"]
    assert together.corrected == pytest.approx(min(1.0, alone.p * 21), rel=1e-6)
    assert together.p == alone.p
    assert stats.decide(together.difference, together.corrected) == "no difference shown"


def test_an_unknown_reference_is_refused():
    with pytest.raises(ValueError, match="no row 'plain'"):
        stats.compare_all({"a": {"0": 1.0}}, "plain")


def test_nothing_and_one_value():
    assert stats.summarize([]).n == 0
    assert math.isnan(stats.summarize([1.0]).sd)
    assert all(math.isnan(v) for v in stats.t_interval([1.0]))
    assert stats.compare_paired({"0": 1.0}, {"0": 0.5}).difference == 0.5


def test_against_the_paper_uses_welch():
    x, _ = paired(3, 5)
    x = 86.0 + 0.3 * x
    ours = stats.summarize(list(x))
    for mean, word in [(86.1, "reproduced"), (90.0, "not reproduced"), (80.0, "not reproduced")]:
        got = against_paper(ours, Published(mean, 0.5, 5))
        p = reference.ttest_ind_from_stats(ours.mean, ours.sd, 5, mean, 0.5, 5, equal_var=False).pvalue
        assert got.word == word
        assert (p > 0.05) == (word == "reproduced")
        assert (got.low <= 0 <= got.high) == (p > 0.05)


def test_against_the_paper_without_a_published_deviation_is_a_one_sample_test():
    values = [92.1, 91.8, 92.4, 92.0]
    got = against_paper(stats.summarize(values), Published(92.0))
    low, high = reference.t.interval(0.95, 3, loc=np.mean(values) - 92.0, scale=reference.sem(values))
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))
    assert got.word == "reproduced"


def test_against_the_paper_says_why_not():
    ours = stats.summarize([80.0, 92.0, 86.0])
    wide = against_paper(ours, Published(86.0, 0.4, 5))
    assert wide.word == "not comparable"
    assert "too wide" in wide.reason
    few = against_paper(stats.summarize([86.0]), Published(86.0, 0.4, 5))
    assert few.word == "not comparable"
    assert "too few runs here: 1" in few.reason
    apart = against_paper(ours, Published(86.0), ["20 epochs instead of 200", "fewer images"])
    assert (apart.word, apart.reason) == ("not comparable", "20 epochs instead of 200; fewer images")
    assert against_paper(None, Published(86.0)).reason == "not measured here"
