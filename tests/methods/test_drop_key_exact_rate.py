"""DropKey by block and cross at the realized rate: counted seeds, solved rate, counted masks, one compiled graph."""

import itertools

import pytest
import torch

import dampen
from dampen import DropKey, regularize
from dampen.functional.grid import cover, exact_seed_rate, hidden_share, reach
from dampen.masks import seed_rate
from tests.oracles import attention as reference

GRIDS = [(4, 4), (8, 8), (3, 7), (1, 5)]


def counted(rows, columns, window, unit):
    """c_ij by trying every single seed on the slow loops."""
    hide = reference.block_hidden if unit == "block" else reference.cross_hidden
    total = torch.zeros(rows, columns, dtype=torch.int64)
    for i, j in itertools.product(range(rows), range(columns)):
        seeds = torch.zeros(rows, columns, dtype=torch.bool)
        seeds[i, j] = True
        total += hide(seeds, window)
    return total


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("unit", ["block", "cross"])
@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_the_seeds_that_reach_a_place_are_counted_right(grid, unit, window):
    assert sorted(cover(*grid, window, unit).elements()) == sorted(
        counted(*grid, window, unit).flatten().tolist()
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("unit", ["block", "cross"])
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_the_mean_over_the_grid_is_the_rate(grid, unit, rate):
    """To ten digits, against the plain sum over places; as a number and as a tensor."""
    for window in (1, 2, 3):
        gamma = exact_seed_rate(rate, *grid, window, unit)
        c = counted(*grid, window, unit).double()
        assert (1 - (1 - gamma) ** c).mean().item() == pytest.approx(rate, abs=1e-12)
        assert hidden_share(gamma, *grid, window, unit) == pytest.approx(rate, abs=1e-12)
        as_tensor = exact_seed_rate(torch.tensor(rate, dtype=torch.float64), *grid, window, unit)
        assert as_tensor.item() == gamma


def test_today_a_small_grid_gets_less():
    assert hidden_share(seed_rate(0.3, 9), 4, 4, 3, "block") == pytest.approx(0.217, abs=5e-4)
    assert exact_seed_rate(0.3, 4, 4, 1, "block") == pytest.approx(
        0.3
    )  # single places have no border
    assert reach(5, 2) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("unit", "window"), [("block", 3), ("block", 2), ("cross", 1), ("cross", 2)]
)
@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_drawn_masks_hide_the_rate(unit, window, rate):
    """Counted over 40,000 draws of a 4 x 4 grid with a class token; five standard errors of the grids' own means."""
    torch.manual_seed(0)
    q, k = torch.zeros(100, 4, 100, 2), torch.zeros(100, 4, 17, 2)
    means = (
        DropKey(rate, unit=unit, window=window, exact_rate=True)
        .mask(q, k, dampen.Call())[..., 1:]
        .double()
        .mean(-1)
    )
    error = means.std() / means.numel() ** 0.5
    assert abs(means.mean() - rate) < 5 * error
    nominal = (
        DropKey(rate, unit=unit, window=window).mask(q, k, dampen.Call())[..., 1:].double().mean()
    )
    if (unit, window) != (
        "cross",
        1,
    ):  # every place of a grid has as many seeds in its row and column
        assert nominal < rate - 5 * error


def test_one_graph_over_a_schedule():
    model = dampen.models.ViT(image_size=8, patch_size=2, width=8, depth=2, heads=2, mlp=8).train()
    reg = regularize(
        model, DropKey(dampen.linear(0.4, 0.1), unit="block", window=2, exact_rate=True)
    )
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=count, fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    for progress in (0.0, 0.3, 0.6):
        reg.progress(progress)
        compiled(x)
    assert len(graphs) == 1


def test_where_there_is_nothing_to_correct_it_is_refused():
    for unit in ("element", "column"):
        with pytest.raises(ValueError, match=f"unit='{unit}' hides p as it is"):
            DropKey(0.1, unit=unit, exact_rate=True)
    assert "exact_rate=True" in repr(DropKey(0.1, unit="cross", exact_rate=True))
