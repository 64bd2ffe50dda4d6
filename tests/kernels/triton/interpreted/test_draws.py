"""What the kernels draw: Philox, place by place, whatever the tiles; and random enough."""

import math

import numpy as np
import pytest
import torch

from benchmarks.native_randomness import battery
from dampen.kernels.triton.ops import draws_of
from dampen.kernels.triton.tiles import Tile
from tests.full import FULL
from tests.kernels.triton.interpreted.philox import hidden, philox


def drawn(shape, seed, rate, queries=32, keys=32):
    tile = Tile(queries, keys, 4, 1)
    return draws_of(shape, torch.tensor(seed), torch.tensor(rate), tile)


def test_known_answer():
    """The vector that Random123 publishes for philox4x32-7, counter and key 0."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)


def test_draws_are_philox():
    seed, rate, (b, h, n, m) = 0x123456789ABCDEF, 0.3, (2, 2, 3, 37)
    expected = [
        [[[hidden(seed, rate, i, j, x, y) for y in range(m)] for x in range(n)] for j in range(h)]
        for i in range(b)
    ]
    assert drawn((b, h, n, m), seed, rate).tolist() == expected


def test_tiles_do_not_matter():
    shape = (1, 2, 70, 130)
    assert torch.equal(drawn(shape, 5, 0.3), drawn(shape, 5, 0.3, queries=64, keys=16))


def test_rate_is_right_on_average():
    """A rate between two multiples of 1/256: half of the seeds round it up, half down."""
    rate = 25.5 / 256
    shares = torch.stack([drawn((1, 1, 64, 64), s, rate, 64, 64).float().mean() for s in range(60)])
    assert abs(shares.mean().item() - rate) < 5 * math.sqrt(rate / 60 / 64**2 + 0.25 / 60 / 2**16)


def test_randomness():
    """The battery of the native kernels on the same Philox, at rates that need no rounding."""

    def draw(heads, queries, keys, rate, seed):
        places = np.ix_(
            *(np.arange(size, dtype=np.uint64) for size in (heads, queries, keys // 16))
        )
        words = philox((places[2], places[1], places[0], np.uint64(0)), (seed, 0))
        whole = np.stack(np.broadcast_arrays(*words), -1).astype("<u4")
        return torch.from_numpy(whole.view(np.uint8).reshape(heads, queries, keys) < rate * 256)

    assert torch.equal(draw(2, 20, 48, 0.25, 9), drawn((1, 2, 20, 48), 9, 0.25)[0])
    seeds = 60 if FULL else 20
    results = battery(seeds, draw, rates=(13 / 256, 51 / 256, 128 / 256))
    within = 4.5 * math.sqrt(2 / (3 * seeds))
    wrong = {
        name: value
        for name, value in results.items()
        if abs(value["variance"] - 1) > within or value["extreme"] > 5
    }
    assert not wrong


@pytest.mark.parametrize("rate", [0.0, 255 / 256])
def test_ends_of_the_range(rate):
    share = drawn((1, 1, 64, 256), 3, rate).float().mean().item()
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 2**14) + 1e-9)
