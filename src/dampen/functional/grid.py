"""The patch grid behind a row of tokens."""

from __future__ import annotations

import math

from torch import nn

MAX_PREFIX = 8
"""Tokens before the patches (CLS, registers) at most."""


def grid_of(
    keys: int,
    grid: tuple[int, int] | None,
    prefix: int = MAX_PREFIX,
    patches: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """The patch grid within `keys` tokens: the one given, or the largest square with at most `prefix` tokens before it.

    `patches` is the grid that the model itself makes, where that is known: an attention over all of its patches must
    be told that one (windows have grids of their own).
    """
    if patches is not None and not 0 <= keys - patches[0] * patches[1] <= prefix:
        patches = None  # this attention sees something else
    if grid is None and patches is not None:
        return patches
    if grid is None:
        side = int(math.sqrt(keys))  # `isqrt` of a size that a graph leaves open is none; exact below 2^52
        grid = (side, side)
        if keys - side * side > prefix or side == 0:
            raise ValueError(
                f"{keys} keys are no square grid with up to {prefix} prefix tokens. Say the grid: grid=(rows, columns)."
            )
    if grid[0] * grid[1] > keys:
        raise ValueError(f"grid {grid} has {grid[0] * grid[1]} patches, but there are only {keys} keys.")
    if patches is not None and grid != patches:
        raise ValueError(f"grid {grid} does not match the model: its patches lie on {patches}. Give grid={patches}.")
    return grid


def model_grid(model: nn.Module) -> tuple[int, int] | None:
    """The grid of patches that a vision model makes of its images, if exactly one patch embedding tells it.

    >>> import dampen
    >>> model_grid(dampen.models.ViT(image_size=(8, 16), patch_size=2, width=8, depth=1, heads=2, mlp=8))
    (4, 8)
    """
    found = {grid for module in model.modules() if (grid := _grid_of_embedding(module)) is not None}
    return found.pop() if len(found) == 1 else None


def _grid_of_embedding(module: nn.Module) -> tuple[int, int] | None:
    if not isinstance(count := getattr(module, "num_patches", None), int):
        return None
    grid = getattr(module, "grid_size", None)
    if grid is None:
        sizes = [getattr(module, name, None) for name in ("image_size", "patch_size")]
        (height, width), (down, across) = (s if isinstance(s, tuple | list) else (s, s) for s in sizes)
        if not all(isinstance(n, int) and n > 0 for n in (height, width, down, across)):
            return None
        grid = (height // down, width // across)
    return tuple(grid) if isinstance(grid, tuple | list) and grid[0] * grid[1] == count else None


def check_grid(grid: tuple[int, int]) -> tuple[int, int]:
    """A grid as a pair of positive integers."""
    if (
        not isinstance(grid, tuple | list)
        or len(grid) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in grid)
    ):
        raise ValueError(f"grid is (rows, columns) of the patch grid, two positive integers, got {grid!r}.")
    return (grid[0], grid[1])
