"""The selection network gives exactly what torch.topk gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dampen.functional import top_k as selection
from dampen.functional.top_k import (
    comparators,
    in_top,
    in_top_of_rows,
    kth_largest,
    largest,
    top_share,
)


@settings(max_examples=60, deadline=None)
@given(keys=st.integers(1, 90), data=st.data())
def test_largest_equals_topk(keys, data):
    k = data.draw(st.integers(1, min(keys, 40)))
    s = torch.randn(2, keys, 3, generator=torch.Generator().manual_seed(keys))
    expected = s.topk(k, dim=-2).values
    assert torch.equal(largest(s, k), expected)
    assert torch.equal(kth_largest(s, k), expected[..., -1:, :])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_comparators_sort_every_zero_one_input(size):
    """A network that sorts all sequences of zeros and ones sorts everything (Knuth's 0-1 principle)."""
    for bits in range(2**size):
        wires = [bits >> i & 1 for i in range(size)]
        for i, j in comparators(size):
            wires[i], wires[j] = max(wires[i], wires[j]), min(wires[i], wires[j])
        assert wires == sorted(wires, reverse=True)


def test_ties_and_minus_infinity():
    s = torch.tensor([1.0, float("-inf"), 1.0, 0.0, float("-inf")]).unsqueeze(-1)
    assert largest(s, 4).flatten().tolist() == [1.0, 1.0, 0.0, float("-inf")]


def test_large_k_and_long_rows_take_topk(monkeypatch):
    monkeypatch.setattr(selection, "_network", lambda s, k: pytest.fail("the network ran"))
    assert kth_largest(torch.randn(100, 2), selection.NETWORK_UP_TO + 1).shape == (1, 2)
    assert kth_largest(torch.randn(64, 2), 1).shape == (1, 2)


def test_compiles_whole():
    s = torch.randn(2, 17, 4)
    assert torch.equal(torch.compile(largest, fullgraph=True, backend="eager")(s, 3), largest(s, 3))


@settings(max_examples=60, deadline=None)
@given(keys=st.integers(1, 30), ties=st.booleans(), top=st.sampled_from([1, 2, 0.05, 0.1, 0.5]))
def test_the_two_largest_of_rows_are_those_of_the_network(keys, ties, top):
    if isinstance(top, int) and top > keys:
        return
    s = torch.randn(2, 3, 5, keys, generator=torch.Generator().manual_seed(keys))
    s = s.round() if ties else s
    found, expected = (
        in_top_of_rows(s, top_share(top)),
        in_top(s.mT.contiguous(), None, top_share(top)).mT,
    )
    assert found is None or torch.equal(found, expected)
    assert (found is None) == (keys * top > 2 if isinstance(top, float) else False)
