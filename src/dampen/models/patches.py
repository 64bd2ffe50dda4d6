"""Images to patches: the patch embedding of the vision models, and the plain cutting into patches."""

from __future__ import annotations

from torch import Tensor, nn


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """A size as (height, width).

    >>> pair(32), pair((64, 120))
    ((32, 32), (64, 120))
    """
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def patch_grid(image_size: tuple[int, int], patch_size: tuple[int, int]) -> tuple[int, int]:
    """How many patches fit down and across, or a clear error.

    >>> patch_grid((32, 32), (4, 4))
    (8, 8)
    """
    (h, w), (ph, pw) = image_size, patch_size
    if min(h, w, ph, pw) < 1 or h % ph or w % pw:
        raise ValueError(
            f"The image must split evenly into patches: got an image of {h} x {w} and patches of {ph} x {pw}. "
            "Choose a patch size that divides both sides, or pad or resize the images."
        )
    return h // ph, w // pw


def patchify(images: Tensor, patch_size: int | tuple[int, int]) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, N, C * ph * pw), row by row, channels first within a patch.

    >>> import torch
    >>> patchify(torch.zeros(2, 3, 32, 32), 4).shape
    torch.Size([2, 64, 48])
    """
    ph, pw = pair(patch_size)
    b, c, h, w = images.shape
    gh, gw = patch_grid((h, w), (ph, pw))
    return images.reshape(b, c, gh, ph, gw, pw).permute(0, 2, 4, 1, 3, 5).reshape(b, gh * gw, c * ph * pw)


def unpatchify(patches: Tensor, patch_size: int | tuple[int, int], image_size: int | tuple[int, int]) -> Tensor:
    """Put patches (B, N, C * ph * pw) back into images (B, C, H, W): the inverse of `patchify`.

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
            f"The patches do not fill the image: got shape {tuple(patches.shape)} for an image of {h} x {w} and "
            f"patches of {ph} x {pw}; expected (batch, {gh * gw}, channels * {ph * pw})."
        )
    return patches.reshape(b, gh, gw, -1, ph, pw).permute(0, 3, 1, 4, 2, 5).reshape(b, -1, h, w)


class PatchEmbed(nn.Module):
    """Map each patch of an image to a token, (B, C, H, W) -> (B, N, D), or to a map (B, D, H', W') if not flattened.

    `patch_size` and `num_patches` are public; with `image_size=None` any size that splits evenly is taken.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] | None,
        patch_size: int | tuple[int, int],
        channels: int,
        width: int,
        flatten: bool = True,
    ):
        super().__init__()
        self.patch_size = pair(patch_size)
        self.image_size = None if image_size is None else pair(image_size)
        self.channels = channels
        self.flatten = flatten
        self.grid_size = None if self.image_size is None else patch_grid(self.image_size, self.patch_size)
        self.num_patches = None if self.grid_size is None else self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(channels, width, self.patch_size, stride=self.patch_size)
        # A patch embedding is a linear map of flattened patches: start it as the linear maps start.
        nn.init.xavier_uniform_(self.proj.weight.view(width, -1))
        nn.init.zeros_(self.proj.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        self._check(images)
        x = self.proj(images)
        return x.flatten(2).transpose(1, 2) if self.flatten else x

    def _check(self, images: Tensor) -> None:
        if images.dim() != 4:
            raise ValueError(
                f"Images must come as (batch, channels, height, width): got shape {tuple(images.shape)}. "
                "Add the missing dimension with unsqueeze, or flatten the surplus ones."
            )
        if images.shape[1] != self.channels:
            raise ValueError(
                f"The model was built for {self.channels} channel(s): got images with {images.shape[1]}, "
                f"shape {tuple(images.shape)}. Build it with channels={images.shape[1]}, or convert the images."
            )
        h, w = images.shape[2:]
        if self.image_size is None:
            patch_grid((h, w), self.patch_size)
        elif (h, w) != self.image_size:
            raise ValueError(
                f"The model was built for images of {self.image_size[0]} x {self.image_size[1]}: got {h} x {w}. "
                f"Build it with image_size=({h}, {w}), or resize the images."
            )
