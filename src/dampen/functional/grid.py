"""Patches and their grid: images cut into patches, the grid behind a row of tokens, and how much of
it seeds cover."""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from dampen.masks import Rate

# --- patches
#
# Images cut into patches and put back together.


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """A size as (height, width).

    Args:
        size: one number, or two.

    >>> pair(32), pair((64, 120))
    ((32, 32), (64, 120))
    """
    if isinstance(size, int):
        return (size, size)
    return (int(size[0]), int(size[1]))


def patch_grid(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """How many patches fit down and across, or a clear error.

    Args:
        image_size: height and width, or one number for both.
        patch_size: height and width of a patch, or one number for both.

    >>> patch_grid((32, 32), (4, 4))
    (8, 8)
    """
    (h, w), (ph, pw) = image_size, patch_size
    if min(h, w, ph, pw) < 1 or h % ph or w % pw:
        raise ValueError(
            f"The image must split evenly into patches: got an image of {h} x {w} and patches of "
            f"{ph} x {pw}. "
            "Choose a patch size that divides both sides, or pad or resize the images."
        )
    return h // ph, w // pw


def patchify(images: Tensor, patch_size: int | tuple[int, int]) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, N, C * ph * pw), row by row, channels first within a
    patch.

    Args:
        images: (B, C, H, W).
        patch_size: height and width of a patch, or one number for both.

    >>> import torch
    >>> patchify(torch.zeros(2, 3, 32, 32), 4).shape
    torch.Size([2, 64, 48])
    """
    ph, pw = pair(patch_size)
    b, c, h, w = images.shape
    gh, gw = patch_grid((h, w), (ph, pw))
    return (
        images.reshape(b, c, gh, ph, gw, pw)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(b, gh * gw, c * ph * pw)
    )


def unpatchify(
    patches: Tensor, patch_size: int | tuple[int, int], image_size: int | tuple[int, int]
) -> Tensor:
    """Put patches (B, N, C * ph * pw) back into images (B, C, H, W): the inverse of `patchify`.

    Args:
        patches: (B, N, D).
        patch_size: height and width of a patch, or one number for both.
        image_size: height and width, or one number for both.

    >>> import torch
    >>> images = torch.rand(2, 3, 8, 12)
    >>> torch.equal(unpatchify(patchify(images, 4), 4, (8, 12)), images)
    True
    """
    (ph, pw), (h, w) = pair(patch_size), pair(image_size)
    gh, gw = patch_grid((h, w), (ph, pw))
    b, n, d = patches.shape
    if n != gh * gw or d % (ph * pw):
        raise ValueError(
            f"The patches do not fill the image: got shape {tuple(patches.shape)} for an image of "
            f"{h} x {w} and "
            f"patches of {ph} x {pw}; expected (batch, {gh * gw}, channels * {ph * pw})."
        )
    return patches.reshape(b, gh, gw, -1, ph, pw).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, h, w)


# --- the grid
#
# The patch grid behind a row of tokens, and how much of it hidden seeds cover.
#
# A place near the border lies within reach of fewer seeds than one in the middle, so seeds
# drawn at the rate that suits the middle hide less of the grid than p. With c_ij the number of
# seeds that reach place (i, j), drawn at rate gamma, the grid's mean is 1 - mean (1 -
# gamma)^c_ij. In t = -log(1 - gamma) its logarithm is convex, so Newton's steps from the left
# (the rate that suits the middle) never overshoot.

MAX_PREFIX = 8
"""Tokens before the patches (CLS, registers) at most."""


def grid_of(
    keys: int,
    grid: tuple[int, int] | None,
    prefix: int = MAX_PREFIX,
    patches: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """The patch grid within `keys` tokens: the one given, or the largest square with at most
    `prefix` tokens before it.

    `patches` is the grid that the model itself makes, where that is known: an attention over all of
    its patches need that one as an argument (windows have grids of their own).

    Args:
        keys: M.
        grid: (rows, columns) of patches; None: found.
        prefix: tokens before the patches; None: found.
        patches: number of patches, where it is known.
    """
    if patches is not None and not 0 <= keys - patches[0] * patches[1] <= prefix:
        # this attention sees something else
        patches = None
    if grid is None and patches is not None:
        return patches
    if grid is None:
        # a graph has no `isqrt` of a size that it leaves open; this is exact below 2^52
        side = int(math.sqrt(keys))
        grid = (side, side)
        if keys - side * side > prefix or side == 0:
            raise ValueError(
                f"{keys} keys are no square grid with up to {prefix} prefix tokens. Say the grid: "
                "grid=(rows, columns)."
            )
    if grid[0] * grid[1] > keys:
        raise ValueError(
            f"grid {grid} has {grid[0] * grid[1]} patches, but there are only {keys} keys."
        )
    if patches is not None and grid != patches:
        raise ValueError(
            f"grid {grid} does not match the model: its patches lie on {patches}. Give "
            f"grid={patches}."
        )
    return grid


def model_grid(model: nn.Module) -> tuple[int, int] | None:
    """The grid of patches that a vision model makes of its images, if exactly one patch embedding
    has one.

    Args:
        model: any model.

    >>> import dampen
    >>> sizes = dict(image_size=(8, 16), patch_size=2, width=8, depth=1, heads=2, mlp=8)
    >>> model_grid(dampen.models.ViT(**sizes))
    (4, 8)
    """
    found = {grid for module in model.modules() if (grid := _grid_of_embedding(module)) is not None}
    if len(found) == 1:
        return found.pop()
    return None


def _grid_of_embedding(module: nn.Module) -> tuple[int, int] | None:
    if not isinstance(count := getattr(module, "num_patches", None), int):
        return None
    grid = getattr(module, "grid_size", None)
    if grid is None:
        sizes = [getattr(module, name, None) for name in ("image_size", "patch_size")]
        (height, width), (down, across) = (
            s if isinstance(s, tuple | list) else (s, s) for s in sizes
        )
        if not all(isinstance(n, int) and n > 0 for n in (height, width, down, across)):
            return None
        grid = (height // down, width // across)
    if isinstance(grid, tuple | list) and grid[0] * grid[1] == count:
        return tuple(grid)
    return None


def check_grid(grid: tuple[int, int]) -> tuple[int, int]:
    """A grid as a pair of positive integers.

    Args:
        grid: (rows, columns) of patches; None: found.
    """
    if (
        not isinstance(grid, tuple | list)
        or len(grid) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in grid)
    ):
        raise ValueError(
            f"grid is (rows, columns) of the patch grid, two positive integers, got {grid!r}."
        )
    return (grid[0], grid[1])


STEPS = 8
"""Newton's steps; from the rate that suits the middle, 5 reach the last digit on every grid and
rate tried."""


def reach(length: int, window: int) -> list[int]:
    """For each place along an axis, how many places of it have a window that covers this one, as
    `dilate` spreads.

    Args:
        length: places along one axis.
        window: width of what a seed hides.

    >>> reach(4, 3), reach(4, 2)
    ([2, 3, 3, 2], [1, 2, 2, 2])
    """
    before, after = window // 2, (window - 1) // 2
    return [min(length - 1, i + after) - max(0, i - before) + 1 for i in range(length)]


def cover(rows: int, columns: int, window: int, unit: Literal["block", "cross"]) -> Counter[int]:
    """The numbers of seeds that reach a place, each with how many places have it.

    Args:
        rows: of the grid.
        columns: of the grid.
        window: width of what a seed hides.
        unit: "block" or "cross".

    >>> sorted(cover(4, 4, 3, "block").items())
    [(4, 4), (6, 8), (9, 4)]
    """
    down, across = reach(rows, window), reach(columns, window)
    if unit == "block":
        return Counter(r * c for r in down for c in across)
    # a seed in both stripes counts once
    return Counter(r * columns + c * rows - r * c for r in down for c in across)


def exact_seed_rate(
    rate: Rate, rows: int, columns: int, window: int, unit: Literal["block", "cross"]
) -> Rate:
    """The rate of seeds at which the mean over the grid of the chance to be hidden is `rate`.

    A tensor stays one, so that a schedule does not change a compiled graph; numbers are remembered.

    Args:
        rate: share of the grid to hide.
        rows: of the grid.
        columns: of the grid.
        window: width of what a seed hides.
        unit: "block" or "cross".
    """
    if isinstance(rate, Tensor):
        return _newton(rate, rows, columns, window, unit)
    return _number(rate, rows, columns, window, unit)


@lru_cache(maxsize=1024)
def _number(
    rate: float, rows: int, columns: int, window: int, unit: Literal["block", "cross"]
) -> float:
    return _newton(torch.tensor(rate, dtype=torch.float64), rows, columns, window, unit).item()


def _newton(
    rate: Tensor, rows: int, columns: int, window: int, unit: Literal["block", "cross"]
) -> Tensor:
    """Solve log mean exp(-c t) = log(1 - p) for t; then gamma = 1 - exp(-t)."""
    counts = sorted(cover(rows, columns, window, unit).items())
    c = torch.tensor([c for c, _ in counts], dtype=torch.float64, device=rate.device)
    share = torch.tensor(
        [n / (rows * columns) for _, n in counts], dtype=torch.float64, device=rate.device
    )
    wanted = torch.log1p(-rate.double())
    t = -wanted / max(c for c, _ in counts)
    for _ in range(STEPS):
        weights = share * torch.exp(-c * t)
        mean = weights.sum()
        # d/dt log mean = -sum(weights c) / mean
        t = t + (mean.log() - wanted) * mean / (weights * c).sum()
    return -torch.expm1(-t).to(rate.dtype)


def hidden_share(
    gamma: float, rows: int, columns: int, window: int, unit: Literal["block", "cross"]
) -> float:
    """The mean over the grid of the chance to be hidden when seeds are drawn at rate `gamma`.

    Args:
        gamma: rate of the seeds.
        rows: of the grid.
        columns: of the grid.
        window: width of what a seed hides.
        unit: "block" or "cross".

    >>> from dampen.masks import seed_rate
    >>> # the rate suits the middle, so the grid as a whole gets less
    >>> round(hidden_share(seed_rate(0.3, 9), 4, 4, 3, "block"), 3)
    0.217
    """
    counts = cover(rows, columns, window, unit)
    return math.fsum(n * -math.expm1(c * math.log1p(-gamma)) for c, n in counts.items()) / (
        rows * columns
    )
