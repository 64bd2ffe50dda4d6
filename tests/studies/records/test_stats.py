"""Statistics against scipy, and against cases worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from dampen.studies import stats
from dampen.studies.metric import METRICS, describe
from dampen.studies.pairing import Published, against_paper
from dampen.studies.verdict import judge, sentence, words


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
    got = judge({"row": as_row(x), "plain": as_row(y)}, "plain", "accuracy")["row"]
    assert got.n == n
    assert got.difference == pytest.approx((x - y).mean())
    assert got.p == pytest.approx(reference.ttest_rel(x, y).pvalue)
    assert (got.low, got.high) == pytest.approx(
        tuple(reference.ttest_rel(x, y).confidence_interval(0.95))
    )
    if n < 6:
        assert got.wilcoxon_p is None  # it could not be below 0.05 whatever the data
    else:
        assert got.wilcoxon_p == pytest.approx(reference.wilcoxon(x - y).pvalue)


def test_wilcoxon_could_not_decide_below_six_pairs():
    assert (
        reference.wilcoxon(np.arange(1, 6)).pvalue
        > 0.05
        > reference.wilcoxon(np.arange(1, 7)).pvalue
    )


@pytest.mark.parametrize(("n", "delta"), [(3, 0.0), (3, 1.5), (5, 0.5), (8, 2.0)])
def test_intervals_of_the_effect_cover_as_they_say(n, delta):
    """4,000 simulated sets of differences, so that the share has a standard error of 0.34 points."""
    draws = np.random.default_rng(n).normal(delta, 1.0, (4000, n))
    factor = 1 - 3 / (4 * (n - 1) - 1)
    inside = 0
    for d in draws:
        low, high = stats.effect_interval(list(d))
        inside += low <= factor * delta <= high
    assert inside / len(draws) == pytest.approx(0.95, abs=0.012)


def test_the_interval_of_the_effect_is_exact():
    """At its ends the observed t is a 2.5 % and a 97.5 % quantile of the noncentral t distribution."""
    d = [1.0, 2.0, 2.5, 4.0]
    low, high = stats.effect_interval(d)
    t, factor = 2 * np.mean(d) / np.std(d, ddof=1), 1 - 3 / 11
    assert reference.nct.cdf(t, 3, 2 * low / factor) == pytest.approx(0.975)
    assert reference.nct.cdf(t, 3, 2 * high / factor) == pytest.approx(0.025)
    assert stats.effect_interval([-v for v in d]) == (pytest.approx(-high), pytest.approx(-low))
    assert all(math.isnan(v) for v in stats.effect_interval([1.0, 1.0, 1.0]))
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


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=8))
def test_levels_of_intervals_follow_the_step_down_procedure(p):
    levels, decided = stats.holm_levels(p)
    corrected = stats.holm(p)
    for own, level, yes, after in zip(p, levels, decided, corrected, strict=True):
        assert (own <= level) == yes
        assert (after <= 0.05 + 1e-12) == yes or after == pytest.approx(0.05)


rows_of_values = st.lists(
    st.lists(st.floats(-3, 3), min_size=4, max_size=4).filter(lambda d: max(d) - min(d) > 0.01),
    min_size=1,
    max_size=6,
)


@given(rows_of_values, st.sampled_from(["fixed", "sequential"]), st.floats(0.05, 3))
def test_no_interval_contradicts_its_verdict(rows, test, margin):
    plain = as_row([50.0, 51.0, 49.0, 50.5])
    table = {
        str(i): {s: v + d for (s, v), d in zip(plain.items(), row, strict=True)}
        for i, row in enumerate(rows)
    }
    for c in judge(
        {"plain": plain, **table}, "plain", "accuracy", margin=margin, test=test
    ).values():
        if math.isnan(c.low):
            assert c.verdict == "inconclusive"
            continue
        assert c.low <= c.high
        if c.verdict == "better":
            assert c.low > -1e-9
            assert c.small == (c.high < margin)
        elif c.verdict == "worse":
            assert c.high < 1e-9
            assert c.small == (c.low > -margin)
        else:
            assert c.low <= 1e-9
            assert c.high >= -1e-9
        if c.verdict == "equal":
            assert -margin < c.low
            assert c.high < margin


def test_only_shared_seeds_count():
    row, plain = (
        {"0": 1.0, "1": 2.0, "2": 3.5, "9": 100.0},
        {"0": 0.0, "1": 1.5, "2": 2.0, "7": -50.0},
    )
    got = judge({"row": row, "plain": plain}, "plain", "accuracy")["row"]
    assert got.n == 3
    assert got.difference == pytest.approx(1.0)


def test_verdicts():
    plain = {str(s): 50 + 1.0 * s for s in range(5)}
    jitter = dict(zip("01234", [0.1, -0.2, 0.0, 0.2, -0.1], strict=True))
    rows = {
        "plain": plain,
        "up": {s: v + 10 + jitter[s] for s, v in plain.items()},
        "a little": {s: v + 0.3 + 0.1 * jitter[s] for s, v in plain.items()},
        "down": {s: v - 10 + jitter[s] for s, v in plain.items()},
        "same": {s: v + 0.3 * jitter[s] for s, v in plain.items()},
        "noisy": {s: v + 10 * jitter[s] + 0.5 for s, v in plain.items()},
        "few": {"0": 90.0, "1": 90.0},
        "other seeds": {f"1{s}": 90.0 for s in range(5)},
    }
    found = judge(rows, "plain", "accuracy")
    assert {name: c.verdict for name, c in found.items()} == {
        "up": "better",
        "a little": "better",
        "down": "worse",
        "same": "equal",
        "noisy": "inconclusive",
        "few": "inconclusive",
        "other seeds": "inconclusive",
    }
    assert words(found["a little"], "accuracy") == "better, by less than the margin"
    assert words(found["same"], "accuracy") == "equal within 0.5 points"
    assert found["noisy"].needed is None
    assert "needs at least 3 shared seeds" in words(found["few"], "accuracy")
    assert sentence(found["up"], "accuracy").startswith("better: +10.00 points (")
    assert judge(rows, "plain", "nll", margin=0.5)["up"].verdict == "worse"
    assert judge(rows, "plain", "accuracy", margin=0.01)["same"].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("difference", "sd", "level"), [(1.0, 0.7, 0.05), (1.0, 0.7, 0.05 / 11), (0.5, 1.0, 0.01)]
)
def test_the_seeds_said_to_be_needed_decide_with_the_power_that_is_said(difference, sd, level):
    n = stats.seeds_needed(difference, sd, level)
    draws = np.random.default_rng(0).normal(difference, sd, (4000, n))
    p = reference.ttest_1samp(draws, 0, axis=1).pvalue
    assert (
        0.76 <= (p <= level).mean() <= 0.9
    )  # the formula is an approximation, a little on the safe side at small n
    assert stats.detectable(sd, n, level) <= difference < stats.detectable(sd, n - 1, level)


@pytest.mark.parametrize(
    ("n", "level", "power"), [(2, 0.05, 0.8), (3, 0.01, 0.9), (10, 0.05 / 7, 0.8)]
)
def test_the_detectable_difference_by_its_formula(n, level, power):
    t = reference.t(n - 1)
    expected = (t.ppf(1 - level / 2) + t.ppf(power)) * 0.7 / math.sqrt(n)
    assert stats.detectable(0.7, n, level, power) == pytest.approx(expected)
    assert math.isnan(stats.detectable(0.7, 1, level))
    assert math.isnan(stats.detectable(math.nan, n, level))


@pytest.mark.parametrize(("n", "decided"), [(2, False), (5, False), (6, True), (7, True)])
def test_equal_differences_decide_once_the_signs_alone_do(n, decided):
    """2 / 2^6 is the first below 0.05."""
    low, high = stats.paired_interval([0.5] * n)
    assert ((low, high) == (0.5, 0.5)) if decided else (math.isnan(low) and math.isnan(high))
    assert stats.paired_p([0.5] * n) == 2 / 2**n


def test_equal_differences_do_not_pass_for_certainty():
    plain = {"0": 0.1, "1": 0.2, "2": 0.3}
    higher = {s: v + 0.1 for s, v in plain.items()}  # in floating point not all exactly 0.1
    got = judge({"row": higher, "plain": plain}, "plain", "accuracy")["row"]
    assert got.p == 0.25
    assert "equal" in got.test
    assert got.verdict == "inconclusive"
    assert math.isnan(got.low)
    same = judge({"row": plain, "plain": plain}, "plain", "accuracy")["row"]
    assert (same.difference, same.p) == (0.0, 1.0)
    assert (
        judge({"row": higher, "plain": plain}, "plain", "accuracy", test="sequential")["row"].p
        == 1.0
    )


def test_correction_can_take_a_verdict_back_and_its_interval_with_it():
    x, y = paired(2, 6, shift=0.5)
    alone = judge({"row": as_row(x), "plain": as_row(y)}, "plain", "bleu")["row"]
    assert alone.verdict == "better"
    rng = np.random.default_rng(0)
    noise = {f"noise {i}": as_row(y + rng.normal(size=6)) for i in range(20)}
    together = judge({"plain": as_row(y), "row": as_row(x), **noise}, "plain", "bleu")["row"]
    assert together.corrected == pytest.approx(min(1.0, alone.p * 21), rel=1e-6)
    assert together.p == alone.p
    assert together.verdict == "inconclusive"
    assert alone.low > 0 > together.low


def test_an_unknown_reference_is_refused():
    with pytest.raises(ValueError, match="no row 'plain'"):
        judge({"a": {"0": 1.0}}, "plain", "accuracy")


def test_metrics_are_described_once():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.scale in (1.0, 100.0)
        assert metric.better in ("max", "min", None)
    assert describe("macro_f1").margin == 0.5
    assert describe("bpc").margin_at(1.5) == pytest.approx(0.015)
    assert describe("never_heard_of").margin_at(1.0) is None


def test_nothing_and_one_value():
    assert stats.summarize([]).n == 0
    assert math.isnan(stats.summarize([1.0]).sd)
    assert all(math.isnan(v) for v in stats.t_interval([1.0]))
    assert stats.paired_differences({"0": 1.0}, {"0": 0.5}) == [0.5]


def test_against_the_paper_uses_welch():
    x, _ = paired(3, 5)
    x = 86.0 + 0.3 * x
    ours = stats.summarize(list(x))
    for mean, word in [(86.1, "reproduced"), (90.0, "not reproduced"), (80.0, "not reproduced")]:
        got = against_paper(ours, Published(mean, 0.5, 5))
        p = reference.ttest_ind_from_stats(
            ours.mean, ours.sd, 5, mean, 0.5, 5, equal_var=False
        ).pvalue
        assert got.word == word
        assert (p > 0.05) == (word == "reproduced")
        assert (got.low <= 0 <= got.high) == (p > 0.05)


def test_against_the_paper_without_a_published_deviation_is_a_one_sample_test():
    values = [92.1, 91.8, 92.4, 92.0]
    got = against_paper(stats.summarize(values), Published(92.0))
    low, high = reference.t.interval(
        0.95, 3, loc=np.mean(values) - 92.0, scale=reference.sem(values)
    )
    assert (got.low, got.high) == (pytest.approx(low), pytest.approx(high))
    assert got.word == "reproduced"


def test_against_the_paper_says_why_not():
    ours = stats.summarize([80.0, 92.0, 86.0])
    wide = against_paper(ours, Published(86.0, 0.4, 5))
    assert wide.word == "not comparable"
    assert "standard deviation is too large" in wide.reason
    few = against_paper(stats.summarize([86.0]), Published(86.0, 0.4, 5))
    assert few.word == "not comparable"
    assert "too few runs here: 1" in few.reason
    apart = against_paper(ours, Published(86.0), ["20 epochs instead of 200", "fewer images"])
    assert (apart.word, apart.reason) == (
        "not comparable",
        "20 epochs instead of 200; fewer images",
    )
    assert against_paper(None, Published(86.0)).reason == "not measured here"
