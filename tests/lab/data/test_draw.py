"""Stratified draws: exact counts, shares within one of each stratum's part, deterministic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dampen.lab.data.stratified import limited, stratified, train_and_valid


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.floats(0, 1, allow_nan=False),
    st.integers(0, 2**32),
)
def test_every_stratum_gives_its_share(strata, fraction, seed):
    drawn, rest = stratified(strata, fraction, seed)
    assert sorted([*drawn.tolist(), *rest.tolist()]) == list(range(len(strata)))
    assert len(drawn) == round(fraction * len(strata))
    keys = np.array(strata)
    for value in set(strata):
        share = fraction * (keys == value).sum()
        assert abs((keys[drawn.numpy()] == value).sum() - share) < 1 + 1e-6
    again, _ = stratified(strata, fraction, seed)
    assert torch.equal(drawn, again)


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
