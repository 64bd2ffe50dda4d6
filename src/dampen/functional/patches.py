"""Images cut into patches and put back together."""

from __future__ import annotations

from torch import Tensor


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
