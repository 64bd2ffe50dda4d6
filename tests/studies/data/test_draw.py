"""Stratified draws: exact counts, shares within one of each stratum's part, deterministic."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dampen.studies.data.splits import limited, stratified, train_and_valid


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.floats(0, 1, allow_nan=False),
    st.integers(0, 2**63),
)
@example([0, 1, 2, 3, 4, 5], 0.5, 0)  # strata with one member each
@example([0] * 50 + [1], 0.9, 2**63)
@example(list(range(77)) * 2, 0.2, 1)  # fewer draws than strata
def test_every_stratum_gives_its_share(strata, fraction, seed):
    drawn, rest = stratified(strata, fraction, seed)
    assert sorted([*drawn.tolist(), *rest.tolist()]) == list(range(len(strata)))
    assert drawn.tolist() == sorted(drawn.tolist())
    assert rest.tolist() == sorted(rest.tolist())
    assert len(drawn) == round(fraction * len(strata))
    keys = np.array(strata)
    for value in set(strata):
        share = (keys == value).sum() * len(drawn) / len(keys)
        assert abs((keys[drawn.numpy()] == value).sum() - share) < 1 + 1e-6
    again, _ = stratified(strata, fraction, seed)
    assert torch.equal(drawn, again)


def test_seeds_differ_and_neither_disturb_nor_read_the_global_generator():
    strata = np.repeat(np.arange(10), 20)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    draws = {tuple(stratified(strata, 0.7, seed)[0].tolist()) for seed in range(20)}
    assert (np.random.get_state()[1] == before).all()
    assert len(draws) == 20
    np.random.seed(2)
    assert tuple(stratified(strata, 0.7, 0)[0].tolist()) in draws


def test_tied_strata_take_turns_at_what_is_left_over():
    """One of three strata of three gives a second example; over seeds each does, about equally."""
    keys, extra = np.repeat(np.arange(3), 3), np.zeros(3)
    for seed in range(900):
        extra[np.bincount(keys[stratified(keys, 4 / 9, seed)[0].numpy()], minlength=3) == 2] += 1
    # Each count is binomial(900, 1/3): five standard deviations are 71.
    assert extra.sum() == 900
    assert (abs(extra - 300) < 71).all()


def test_draws_are_those_that_the_records_were_trained_on():
    """A new scikit-learn or NumPy that draws differently would detach records from their splits."""
    drawn, _ = stratified(np.repeat(np.arange(3), [4, 6, 5]), 0.5, seed=0)
    assert drawn.tolist() == [0, 2, 6, 7, 9, 11, 13, 14]


def test_every_member_is_equally_likely():
    counts = torch.zeros(10)
    for seed in range(2000):
        counts[stratified([0] * 4 + [1] * 6, 0.5, seed)[0]] += 1
    # Each count is binomial(2000, 1/2): five standard deviations are 112.
    assert ((counts - 1000).abs() < 112).all()


def test_seventy_thirty_of_a_limited_pool():
    strata = np.repeat(np.arange(10), 50)
    train, valid, words = train_and_valid(strata, 0.7, seed=3, limit=100)
    assert np.bincount(strata[train.numpy()]).tolist() == [7] * 10
    assert np.bincount(strata[valid.numpy()]).tolist() == [3] * 10
    assert not set(train.tolist()) & set(valid.tolist())
    assert words == ["only 100 of 500 examples outside the test set were used (limit=100)"]
    assert limited(strata, None, 0)[1] == limited(strata, 500, 0)[1] == []


def test_strata_that_a_split_lacks_are_noted():
    strata = [0] * 10 + [1] * 10 + [2]
    train, valid, notes = train_and_valid(strata, 0.7, seed=0, limit=None)
    assert (len(train), len(valid)) == (15, 6)
    assert 20 in train.tolist()
    assert notes == ["1 of 3 strata have no validation example"]
    *_, notes = train_and_valid(strata, 0.2, seed=0, limit=None)
    assert notes == ["1 of 3 strata have no training example"]
    *_, notes = train_and_valid(list(range(20)) * 2, 0.5, seed=0, limit=None)
    assert notes == []


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_fraction_that_leaves_a_part_empty_is_refused(fraction):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        train_and_valid([0, 1], fraction, 0, None)


def test_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="leave 1 to train and 0 to validate"):
        train_and_valid([0], 0.7, 0, None)
    with pytest.raises(ValueError, match="limit counts"):
        train_and_valid([0, 1, 2], 0.7, 0, 1)
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        stratified([0, 1], 1.5, 0)
    with pytest.raises(ValueError, match="one number per example"):
        stratified(np.zeros((2, 2)), 0.5, 0)
