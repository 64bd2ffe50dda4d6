"""The sequential test and races of rows; all numbers here are simulated."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verdict_power import false_claims_fixed, false_claims_sequential
from dampen.studies import stats as sequential
from dampen.studies.errors import ConfigError
from dampen.studies.sequential import race, seconds
from dampen.studies.stats import holm
from dampen.studies.verdict import judge, words

differences = st.lists(st.floats(-5, 5), min_size=3, max_size=12).filter(
    lambda d: np.std(d[:2]) > 0.01
)


def slow_e(d):
    """The mixture by numerical integration: standardized effect ~ N(0, g), scale with the prior 1 / sigma.

    Given effect and scale the differences are normal; the marginal likelihood ratio against effect 0 is E_n.
    """
    n, d = len(d), np.asarray(d)
    effects, scales = np.linspace(-8, 8, 801), np.exp(np.linspace(-5, 5, 801))
    prior = np.exp(-(effects**2) / 2)
    prior /= prior.sum()

    def likelihood(effect):
        square = ((d[None] - effect * scales[:, None]) ** 2).sum(axis=1)
        return np.exp(-square / (2 * scales**2) - n * np.log(scales)).sum()  # d log sigma

    return sum(p * likelihood(e) for p, e in zip(prior, effects, strict=True)) / likelihood(0.0)


@pytest.mark.parametrize("d", [[1.0, 1.4, 0.7, 1.2], [0.5, -0.6, 0.1, 0.2, -0.3], [2.0, 1.0, 3.0]])
def test_the_formula_is_the_mixture_that_it_says(d):
    t = math.sqrt(len(d)) * np.mean(d) / np.std(d, ddof=1)
    assert math.exp(sequential.log_e(t * t, len(d))) == pytest.approx(slow_e(d), rel=1e-3)
    assert math.exp(sequential.log_e_matrix(np.array([d]))[0, -1]) == pytest.approx(
        slow_e(d), rel=1e-3
    )


@given(differences, st.floats(0.002, 0.2))
def test_the_interval_holds_what_is_not_rejected(d, level):
    low, high = sequential.sequential_interval(d, level)
    if math.isnan(low):
        assert sequential.sequential_p(d) > level - 1e-9
        return
    middle = (low + high) / 2
    if abs(np.mean(d) - low) > 1e-9 and abs(np.mean(d) - high) > 1e-9:  # not widened to the mean
        assert sequential.sequential_p([v - middle for v in d]) > level - 1e-9
    for outside in (low - 1e-6 - 0.01 * (high - low), high + 1e-6 + 0.01 * (high - low)):
        assert sequential.sequential_p([v - outside for v in d]) <= level + 1e-9


def test_one_look_and_all_looks_agree():
    d = list(np.random.default_rng(0).normal(0.8, 1, 30))
    e = np.exp(sequential.log_e_matrix(np.array([d]))[0])
    assert sequential.sequential_p(d) == pytest.approx(1 / max(1.0, e.max()))


@pytest.mark.parametrize("rows", [1, 5, 11])
def test_fewer_seeds_than_the_first_round_decide_nothing(rows):
    n = sequential.first_round(rows)
    sure = np.array([[1.0 + 1e-9 * i for i in range(n)]])
    assert math.exp(sequential.log_e_matrix(sure)[0, -1]) >= rows / 0.05
    assert math.exp(sequential.log_e_matrix(sure[:, :-1])[0, -1]) < rows / 0.05


def test_false_claims_stay_below_five_percent_under_a_hundred_looks_with_holm():
    """800 simulated races of 8 rows without any difference, looked at 100 times: a standard error of 0.8 points."""
    assert false_claims_sequential(rows=8, looks=100, tables=800, seed=1) <= 0.05
    assert false_claims_fixed(rows=8, seeds=5, tables=800, seed=1) <= 0.05 + 2 * 0.0077
    # The same t-tests, looked at after every seed, would claim something far more often: the test can fail.
    assert false_claims_fixed(rows=8, seeds=40, tables=200, seed=1, look_at_all=True) > 0.10


def simulated(effects, seed=0, spread=1.0, reference="plain"):
    """A race's `run` and `values` with normal differences; what `run` was asked for is kept."""
    rng, found, asked = np.random.default_rng(seed), {reference: {}, **{r: {} for r in effects}}, []
    base = rng.normal(70, 2, 1000)

    def run(pairs):
        for row, s in pairs:
            asked.append((row, s))
            found[row][str(s)] = base[s] + (
                0 if row == reference else effects[row] + spread * rng.normal()
            )
        return True

    return run, lambda: found, asked


def test_open_rows_get_seeds_and_decided_ones_do_not():
    effects = {"great": 8.0, "useless": -0.02, "harmful": -8.0, "hard": 1.0}
    run, values, asked = simulated(effects, spread=0.8)
    done = race(list(effects), "plain", run, values, "accuracy", margin=1.5)
    assert done.why == "all decided"
    words = {row: c.verdict for row, c in done.verdicts.items()}
    assert (words["great"], words["harmful"]) == ("better", "worse")
    assert words["useless"] in ("equal", "no gain")
    assert done.seeds["great"] == done.seeds["harmful"] == sequential.first_round(4)
    assert done.seeds["plain"] == max(done.seeds.values())
    assert done.runs == len(asked) == len(set(asked))  # no run twice
    again = judge(values(), "plain", "accuracy", margin=1.5, test="sequential")
    assert {row: c.verdict for row, c in again.items()} == words  # the page says what the race said


def test_a_row_that_cannot_reach_the_best_is_dropped():
    effects = {"great": 10.0, "some": 1.2}
    run, values, _ = simulated(effects, seed=3, spread=1.5)
    done = race(list(effects), "plain", run, values, "accuracy", margin=0.01)
    assert done.verdicts["some"].verdict in ("no gain", "better")
    if done.verdicts["some"].verdict == "no gain":
        assert "cannot reach great" in done.verdicts["some"].because


def test_a_race_ends_when_its_time_is_used():
    run, values, asked = simulated({"hard": 0.2})
    now = [0.0]

    def slow(pairs):
        now[0] += 10.0
        return run(pairs)

    done = race(
        ["hard"], "plain", slow, values, "accuracy", margin=0.01, budget=65.0, clock=lambda: now[0]
    )
    assert done.why == "time used"
    assert now[0] <= 65.0
    assert len(asked) == 2 * 6


def test_a_race_ends_at_the_most_seeds_and_where_it_is_stopped():
    run, values, _ = simulated({"hard": 0.0})
    assert (
        race(["hard"], "plain", run, values, "accuracy", margin=0.001, most=9).why == "most seeds"
    )
    run, values, asked = simulated({"hard": 0.0})
    stopped = race(
        ["hard"], "plain", lambda pairs: run(pairs) and len(asked) < 5, values, "accuracy"
    )
    assert stopped.why == "stopped"


def test_a_row_that_fails_leaves_the_race_and_the_others_go_on():
    run, values, _ = simulated({"good": 5.0, "broken": 0.0})

    def only_some(pairs):
        return run([(row, s) for row, s in pairs if row != "broken"])

    done = race(["good", "broken"], "plain", only_some, values, "accuracy")
    assert (done.why, done.failed, done.verdicts["good"].verdict) == (
        "all decided",
        ["broken"],
        "better",
    )
    run, values, _ = simulated({"good": 5.0})
    lost = race(
        ["good"],
        "plain",
        lambda pairs: run([p for p in pairs if p[0] != "plain"]),
        values,
        "accuracy",
    )
    assert lost.why == "no reference"


def test_a_row_that_does_nothing_at_all_leaves_after_the_first_round():
    run, values, _ = simulated({"good": 5.0, "nothing": 0.0})

    def copying(pairs):
        run(pairs)
        values()["nothing"].update(
            {s: v for s, v in values()["plain"].items() if s in values()["nothing"]}
        )
        return True

    done = race(["good", "nothing"], "plain", copying, values, "accuracy")
    assert (done.why, done.seeds["nothing"]) == ("all decided", sequential.first_round(2))
    assert (
        words(done.verdicts["nothing"], "accuracy") == "inconclusive, no seed differs"
    )  # and promises nothing


def test_a_race_says_how_many_seeds_it_took():
    run, values, _ = simulated({"a": 50.0})
    told = race(["a"], "plain", run, values, "accuracy").told()
    assert re.match(
        r"\d+ runs in 1 round, \d+ seeds each: every comparison is conclusive\.", told
    ), told


def test_more_rows_dropped_do_not_make_the_others_easier():
    """Dropped rows stay in the number of tests: p values of a race are corrected for all of its rows."""
    run, values, _ = simulated({"a": 5.0, "b": 0.0, "c": 0.0})
    done = race(["a", "b", "c"], "plain", run, values, "accuracy", margin=3.0)
    p = [c.p for c in done.verdicts.values()]
    assert [c.corrected for c in done.verdicts.values()] == pytest.approx(holm(p))


@pytest.mark.parametrize("text", ["", "soon", "-3m", "0", "5d"])
def test_a_budget_that_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="--budget"):
        seconds(text)


def test_a_race_that_goes_on_counts_what_was_run_before() -> None:
    """Recorded values are all there at the first look, so fewer are asked for; the number of runs must not shrink."""
    recorded = {
        "plain": {str(s): 80.0 + s % 3 for s in range(12)},
        "better": {str(s): 86.0 + s % 3 + 0.1 * (s % 2) for s in range(12)},
    }
    found = race(["better"], "plain", lambda pairs: True, lambda: recorded, "accuracy", margin=1.0)
    assert found.why == "all decided"
    assert found.runs == 24
