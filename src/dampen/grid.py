"""The patch grid behind a row of tokens."""

from __future__ import annotations

import math


def grid_of(keys: int, grid: tuple[int, int] | None, prefix: int = 8) -> tuple[int, int]:
    """The patch grid within `keys` tokens: the one given, or the largest square with at most `prefix` tokens before
    it."""
    if grid is None:
        side = math.isqrt(keys)
        grid = (side, side)
        if keys - side * side > prefix or side == 0:
            raise ValueError(
                f"{keys} keys are no square grid with up to {prefix} prefix tokens. Say the grid: grid=(rows, columns)."
            )
    if grid[0] * grid[1] > keys:
        raise ValueError(f"grid {grid} has {grid[0] * grid[1]} patches, but there are only {keys} keys.")
    return grid


def check_grid(grid: tuple[int, int]) -> tuple[int, int]:
    """A grid as a pair of positive integers."""
    if (
        not isinstance(grid, tuple | list)
        or len(grid) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in grid)
    ):
        raise ValueError(f"grid is (rows, columns) of the patch grid, two positive integers, got {grid!r}.")
    return (grid[0], grid[1])
