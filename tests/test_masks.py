"""Random masks: exact rates, the keep-one guard, seeds and windows."""

import math
import threading

import pytest
import torch

from dampen.masks import (
    _hashed,
    bernoulli,
    causal_rows,
    dilate,
    drop,
    give_back_one,
    hides,
    keep_keys,
    memories,
    read_mask,
    seed_rate,
)


def within(count, total, p, sigmas=5.0):
    """Whether a count is within so many standard deviations of a binomial's mean, with room for tiny samples."""
    return abs(count - total * p) <= sigmas * math.sqrt(max(total * p * (1 - p), 1.0))


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.95, 0.999])
def test_marginal_rate(rate):
    torch.manual_seed(0)
    total = sum(int(bernoulli((500, 1000), torch.tensor(rate)).sum()) for _ in range(8))
    # each call dithers its threshold by up to 2^-16, which adds a little variance between calls
    assert abs(total / 4e6 - rate) <= 5 * math.sqrt(rate * (1 - rate) / 4e6) + 2**-16


def test_dithering_makes_small_rates_exact():
    """16 bits alone would turn 0.00001 into 0 or 0.0000153; over many calls the mean rate is right."""
    torch.manual_seed(0)
    rate, calls = 1e-5, 3000
    hits = sum(int(bernoulli((2000,), torch.tensor(rate)).sum()) for _ in range(calls))
    assert within(hits, calls * 2000, rate)


def test_draws_are_independent_between_neighbors():
    """The four 16-bit draws of one 64-bit number are independent of each other."""
    torch.manual_seed(0)
    m = bernoulli((200_000, 4), torch.tensor(0.3)).double()
    correlation = torch.corrcoef(m.t()) - torch.eye(4)
    assert correlation.abs().max() < 0.012


def test_rate_zero_hides_nothing_and_rates_may_differ_by_entry():
    assert not bernoulli((1000,), torch.tensor(0.0)).any()
    rates = torch.tensor([0.0, 0.5, 0.9999]).view(3, 1)
    m = bernoulli((3, 4000), rates)
    assert not m[0].any()
    assert within(int(m[1].sum()), 4000, 0.5)
    assert m[2].float().mean() > 0.99


@pytest.mark.parametrize("keys", [2, 3, 17, 65, 200])
@pytest.mark.parametrize("rate", [0.001, 0.3, 0.7, 0.95])
def test_realized_rate_position_by_position(rate, keys):
    """p - p^m / m for m visible keys, at every position."""
    torch.manual_seed(0)
    rows = 40_000 if keys < 100 else 8_000
    hidden = bernoulli((1, 1, rows, keys), torch.tensor(rate))
    keep = keep_keys(None, [hidden], keys)
    assert keep.any(-1).all()
    expected = rate - rate**keys / keys
    for j in range(keys):
        assert within(int((~keep[..., j]).sum()), rows, expected), f"key {j}"


def test_causal_rows_realize_their_own_rate():
    """Row i of a causal mask has i + 1 visible keys, so its own p - p^m / m; the future stays hidden."""
    torch.manual_seed(0)
    n, rate, batch = 6, 0.8, 20_000
    allowed = causal_rows(n, n, None, None)
    keep = keep_keys(allowed, [bernoulli((batch, 1, n, n), torch.tensor(rate))], n)
    assert not (keep & ~allowed).any()
    for i in range(n):
        m = i + 1
        for j in range(m):
            assert within(int((~keep[:, 0, i, j]).sum()), batch, rate - rate**m / m), (i, j)


def test_padding_is_never_given_back():
    torch.manual_seed(0)
    allowed = torch.tensor([[True, True, False, False], [False, False, False, False]]).view(
        2, 1, 1, 4
    )
    keep = keep_keys(allowed, [torch.ones(2, 3, 500, 4, dtype=torch.bool)], 4)
    assert (keep[0].sum(-1) == 1).all()
    assert not keep[0, ..., 2:].any()
    assert within(int(keep[0, ..., 0].sum()), 1500, 0.5)
    assert not keep[1].any()  # the model itself allows nothing here


def test_column_masks_stay_small():
    """One mask for all queries needs no N x M tensor."""
    hidden = bernoulli((2, 3, 1, 50), torch.tensor(0.5))
    assert keep_keys(None, [hidden], 50).shape == (2, 3, 1, 50)


def test_several_masks_merge():
    a, b = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    keep = keep_keys(None, [a.view(1, 1, 1, 3), b.view(1, 1, 1, 3)], 3)
    assert keep.flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("keys", [1, 3, 7, 8, 9, 16, 65])
@pytest.mark.parametrize("lay", ["contiguous", "expanded", "transposed", "one query"])
def test_only_rows_without_any_key_get_one_back(keys, lay):
    torch.manual_seed(0)
    shape = {
        "expanded": (30, 2, 40, 1),
        "transposed": (30, 2, keys, 40),
        "one query": (30, 2, keys, 1),
    }
    keep = (
        torch.rand(shape.get(lay, (30, 2, 40, keys))) < 1.5 / keys
    )  # some rows empty, some with one key, anywhere
    keep = (
        keep.transpose(-1, -2)
        if lay in ("transposed", "one query")
        else keep.expand(30, 2, 40, keys)
    )
    back = give_back_one(keep, None)
    empty = ~keep.any(-1, keepdim=True)
    assert empty.any() or keys == 1
    assert torch.equal(back & ~empty, keep)
    assert (back.sum(-1, keepdim=True)[empty] == 1).all()


def test_give_back_without_keys():
    assert give_back_one(torch.zeros(2, 3, 4, 0, dtype=torch.bool), None).shape == (2, 3, 4, 0)


def test_causal_rows_in_chunks():
    whole = causal_rows(7, 7, None, None)
    assert torch.equal(whole, torch.ones(7, 7, dtype=torch.bool).tril())
    assert torch.equal(
        torch.cat([causal_rows(7, 7, slice(0, 3), None), causal_rows(7, 7, slice(3, 7), None)]),
        whole,
    )


LOW = [
    -100.0,
    -1e4,
    -1e9,
    torch.finfo(torch.float16).min,
    torch.finfo(torch.float32).min,
    -math.inf,
]


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("top", [0.0, 7.5, -3.0])
def test_every_form_of_a_hidden_key_hides(low, top):
    keep, blind = hides(torch.tensor([[top, top - 5.0, low, top + low]]))
    assert keep.tolist() == [[True, True, False, False]]
    assert not blind.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_smallest_number_of_a_dtype_hides_and_a_row_of_it_stays(dtype):
    low = torch.finfo(dtype).min
    keep, blind = hides(torch.tensor([[0.0, low], [low, low], [1.0, 1.0]], dtype=dtype))
    assert keep.tolist() == [[True, False], [True, True], [True, True]]
    assert blind.flatten().tolist() == [False, True, False]


def test_the_border_is_80_below_the_largest_of_a_row():
    """Values that float32 holds exactly on both sides, wherever the largest of the row lies."""
    for top in (0.0, 10.0, -200.0):
        row = torch.tensor([[top, top - 79.9, top - 79.96875, top - 80.0, top - 80.1]])
        assert hides(row)[0].tolist() == [[True, True, True, False, False]]


def test_biases_stay_biases():
    distance = torch.arange(12.0)
    alibi = -0.5 * (distance - distance[:, None]).abs()
    relative = 4 * torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    for bias in (alibi, relative):
        read = read_mask(bias)
        assert read.keep.all()
        assert torch.equal(read.bias, bias)


def test_a_row_of_minus_infinity_sees_nothing():
    keep, blind = hides(torch.full((1, 3), -math.inf))
    assert not keep.any()
    assert blind.all()


def test_a_mask_without_keys():
    keep, blind = hides(torch.zeros(2, 3, 0))
    assert (keep.shape, blind.shape) == ((2, 3, 0), (2, 3, 1))


def test_a_mask_is_read_once_per_forward_and_again_when_it_changed():
    """By the memory that it is a view of and how often that was written to; never across forwards, never by `.data`."""
    mask = torch.zeros(1, 1, 4, 6)
    mask[..., 4:] = -1e9
    assert read_mask(mask) is not read_mask(mask)  # outside of a forward nothing is kept
    forward = threading.get_ident()
    memories[forward] = [None]  # a model's forward starts
    try:
        first = read_mask(mask)
        assert read_mask(mask) is first
        cut = read_mask(mask[..., :5])
        assert (
            read_mask(mask[..., :5]) is cut
        )  # a new view of the same numbers, as transformers makes one per layer
        assert cut.keep.shape == (1, 1, 4, 5)
        mask[..., 0] = -1e9
        assert read_mask(mask).keep[..., 0].any().item() is False
        assert read_mask(mask.clone()) is not read_mask(mask)
        learned = mask.clone().requires_grad_()
        assert read_mask(learned) is not read_mask(learned)  # each layer's graph makes its own
        memories[forward].append(None)  # a model inside a model
        inner = read_mask(mask)
        memories[forward].pop()
        assert read_mask(mask) is not inner
    finally:
        del memories[forward]
    assert read_mask(mask) is not read_mask(mask)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [-1, -2])
def test_dilate(width, dim):
    """Each True covers `width` places; checked against a loop."""
    torch.manual_seed(0)
    mask = torch.rand(5, 9, 8) < 0.15
    expected = torch.zeros_like(mask)
    for where in mask.nonzero().tolist():
        for offset in range(-((width - 1) // 2), width // 2 + 1):
            at = list(where)
            at[dim] += offset
            if 0 <= at[dim] < mask.shape[dim]:
                expected[tuple(at)] = True
    assert torch.equal(dilate(mask, width, dim), expected)


@pytest.mark.parametrize("covered", [1, 4, 9, 60])
def test_seed_rate(covered):
    p = torch.tensor(0.3, dtype=torch.float64)
    torch.testing.assert_close(1 - (1 - seed_rate(p, covered)) ** covered, p)


def test_drop_is_unbiased_and_keeps_dtype():
    torch.manual_seed(0)
    x = torch.ones(400_000, dtype=torch.bfloat16)
    y = drop(x, torch.tensor(0.25))
    assert y.dtype == x.dtype
    assert set(y.unique().tolist()) == {0.0, 1.3359375}
    assert abs(y.double().mean().item() - 1.0) < 0.01
    assert torch.equal(drop(x, torch.tensor(0.0)), x)
    x = torch.rand(400_000) + 1
    for dtype in (
        torch.bfloat16,
        torch.float32,
    ):  # 1 / 0.9 rounded to bfloat16 would be 0.16 % too small
        wide = x.to(dtype)
        y = drop(wide, torch.tensor(0.1)).double()
        assert (0.9 * y[y > 0].sum() / wide.double()[y > 0].sum()).item() == pytest.approx(
            1.0, abs=2e-4
        )


@pytest.mark.parametrize("seed", [0, 12345, 2**31 - 2])
def test_the_hash_of_the_guard_is_murmurs_finalizer_of_a_weyl_sequence(seed):
    """In Python's own integers. The draws of a seed are part of what a record says, so they may not change."""
    expected = []
    for i in range(6):
        h = (i * 0x9E3779B1 + seed) % 2**32
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        expected.append((h ^ h >> 16) / 2**32)
    assert _hashed(torch.tensor(seed), (2, 3)).flatten().tolist() == expected
