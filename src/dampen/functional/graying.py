"""Token Graying as pure functions: the patch tokens of an image with a flatter spectrum, and so a
smaller condition number."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dampen.functional.grid import pair, patchify, unpatchify

Kind = Literal["svd", "dct"]
DEFAULT_EPS = {"svd": 0.7, "dct": 0.95}
SVD_FLOOR = 1e-13
"""Squared singular values below this part of the largest one are rounding errors of the Gram
matrix, and are not raised further."""
DCT_FLOOR = 1e-6
"""Coefficients below this part of the largest one (3 in 10,000 of CIFAR's) are not raised further:
in float32 they are rounding errors, and the gradient stays finite at 0."""


def gray_svd(x: Tensor, eps: float = 0.7, restore_scale: bool = True) -> Tensor:
    """Flatten the singular values of each token matrix: X = U S V^T becomes U (S / max S)^eps V^T.

    After Token Graying (arXiv 2505.01996): kappa(X') = kappa(X)^eps. Without an SVD: U S^eps V^T =
    X (X^T X)^((eps-1)/2), from one batched `eigh` of the smaller Gram matrix, in float64 because
    the Gram matrix squares the condition number. `restore_scale` multiplies max S back.
    Differentiable, also where singular values coincide or vanish.

    Args:
        x: tokens (..., N, D).
        eps: exponent of the spectrum; 1 changes nothing.
        restore_scale: multiply the largest singular value or amplitude back.

    >>> x = torch.diag(torch.tensor([16.0, 4.0, 1.0]))
    >>> gray_svd(x, eps=0.5).diagonal()
    tensor([16.,  8.,  4.])
    """
    check_eps(eps)
    if eps == 1 and restore_scale:
        return x
    wide = x.shape[-2] < x.shape[-1]
    tall = (x.mT if wide else x).double()
    try:
        if tall.requires_grad and torch.is_grad_enabled():
            y = cast(Tensor, _GraySvd.apply(tall, eps, restore_scale))
        else:
            y = _gray_tall(tall, eps, restore_scale)[0]
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            "Token Graying by SVD found no eigenvalues: the tokens hold NaN or infinity. Look at "
            "the images that go in."
        ) from error
    return (y.mT if wide else y).to(x.dtype)


def gray_dct(x: Tensor, eps: float = 0.95, restore_scale: bool = True) -> Tensor:
    """Flatten the 2-D cosine spectrum of each token matrix: c becomes sign(c) (|c| / max |c|)^eps,
    then back.

    The cheap form of Token Graying (arXiv 2505.01996); the paper does not publish its amplification
    formula, this one is ours. `restore_scale` multiplies max |c| back.

    Args:
        x: tokens (..., N, D).
        eps: exponent of the spectrum; 1 changes nothing.
        restore_scale: multiply the largest singular value or amplitude back.

    >>> x = torch.ones(4, 4) + torch.eye(4)
    >>> (torch.linalg.cond(gray_dct(x, eps=0.5)) < torch.linalg.cond(x)).item()
    True
    """
    check_eps(eps)
    if eps == 1 and restore_scale:
        return x
    work = x if x.dtype == torch.float64 else x.float()
    rows = dct_matrix(x.shape[-2], work.dtype, work.device)
    columns = dct_matrix(x.shape[-1], work.dtype, work.device)
    with torch.autocast(x.device.type, enabled=False):
        c = rows @ work @ columns.mT
        size = c.abs()
        largest = size.amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(work.dtype).tiny)
        # sign(c) m (|c| / m)^eps = c (|c| / m)^(eps - 1), which needs no sign and is linear below
        # the floor
        c = c * (size / largest).clamp(min=DCT_FLOOR).pow(eps - 1)
        y = rows.mT @ (c if restore_scale else c / largest) @ columns
    return y.to(x.dtype)


def gray_tokens(
    x: Tensor, kind: Kind = "dct", eps: float | None = None, restore_scale: bool = True
) -> Tensor:
    """Token matrices (..., N, D), grayed one by one. `eps` None: 0.95 for dct, 0.7 for svd.

    Args:
        x: tokens (..., N, D).
        kind: svd or dct.
        eps: exponent of the spectrum; 1 changes nothing.
        restore_scale: multiply the largest singular value or amplitude back.
    """
    check_kind(kind)
    if x.dim() < 2 or not x.is_floating_point():
        raise TypeError(
            "Token Graying takes floating-point tokens (..., tokens, "
            f"channels), got {x.dtype} of shape {tuple(x.shape)}."
        )
    eps = DEFAULT_EPS[kind] if eps is None else eps
    if kind == "svd":
        return gray_svd(x, eps, restore_scale)
    return gray_dct(x, eps, restore_scale)


def gray_images(
    images: Tensor,
    patch_size: int | tuple[int, int],
    kind: Kind = "dct",
    eps: float | None = None,
    restore_scale: bool = True,
) -> Tensor:
    """Images (B, C, H, W) or one image (C, H, W): cut into patches, patches grayed as tokens, put
    together again.

    Args:
        images: (B, C, H, W).
        patch_size: height and width of a patch, or one number for both.
        kind: svd or dct.
        eps: exponent of the spectrum; 1 changes nothing.
        restore_scale: multiply the largest singular value or amplitude back.

    >>> gray_images(torch.rand(2, 3, 8, 8), patch_size=4, kind="svd").shape
    torch.Size([2, 3, 8, 8])
    """
    if images.dim() not in (3, 4) or not images.is_floating_point():
        raise TypeError(
            f"Token Graying takes floating-point images (batch, channels, height, width), got "
            f"{images.dtype} of shape "
            f"{tuple(images.shape)}. Convert with images.float() / 255; for tokens there is "
            "gray_tokens, and "
            "TokenGraying(patch_size='tokens')."
        )
    batch = images if images.dim() == 4 else images.unsqueeze(0)
    tokens = gray_tokens(patchify(batch, patch_size), kind, eps, restore_scale)
    out = unpatchify(tokens, patch_size, (batch.shape[2], batch.shape[3]))
    if images.dim() == 4:
        return out
    return out.squeeze(0)


class GrayImages:
    """Token Graying as a transform of the data loader: it runs once per image instead of once per
    step.

    Put it last, behind augmentation and normalization: it then gives the model what the regularizer
    `TokenGraying` would.

    Args:
        patch_size: height and width of a patch, or one number for both.
        kind: svd or dct.
        eps: exponent of the spectrum; 1 changes nothing.
        restore_scale: multiply the largest singular value or amplitude back.

    >>> transform = GrayImages(patch_size=4, kind="svd", eps=0.7)
    >>> transform(torch.rand(3, 32, 32)).shape
    torch.Size([3, 32, 32])
    >>> transform
    GrayImages(patch_size=(4, 4), kind='svd', eps=0.7, restore_scale=True)
    """

    def __init__(
        self,
        patch_size: int | tuple[int, int],
        kind: Kind = "dct",
        eps: float | None = None,
        restore_scale: bool = True,
    ) -> None:
        self.patch_size, self.kind = pair(patch_size), check_kind(kind)
        self.eps = check_eps(DEFAULT_EPS[kind] if eps is None else eps)
        self.restore_scale = restore_scale

    def __call__(self, images: Tensor) -> Tensor:
        return gray_images(images, self.patch_size, self.kind, self.eps, self.restore_scale)

    def __repr__(self) -> str:
        return (
            f"GrayImages(patch_size={self.patch_size}, kind={self.kind!r}, eps={self.eps}, "
            f"restore_scale={self.restore_scale})"
        )


def dct_matrix(
    n: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> Tensor:
    """The orthonormal DCT-II of length n as a matrix: row k holds sqrt(2/n) cos(pi (2 j + 1) k / (2
    n)), row 0 sqrt(1/n).

    Args:
        n: its size.
        dtype: of the result.
        device: of the result.

    >>> c = dct_matrix(5)
    >>> torch.allclose(c @ c.mT, torch.eye(5, dtype=torch.float64))
    True
    """
    k = torch.arange(n, dtype=torch.float64, device=device)
    angles = math.pi / (2 * n) * k.unsqueeze(1) * (2 * k + 1)
    scale = ((2 - (k == 0).double()) / n).sqrt().unsqueeze(1)
    return (scale * angles.cos()).to(dtype)


def check_kind(kind: Any) -> Kind:
    """`kind`, or an error.

    Args:
        kind: svd or dct.
    """
    if kind not in DEFAULT_EPS:
        raise ValueError(f"Token Graying: kind must be 'svd' or 'dct', got {kind!r}.")
    return cast(Kind, kind)


def check_eps(eps: Any) -> float:
    """`eps`, or an error.

    Args:
        eps: exponent of the spectrum; 1 changes nothing.
    """
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(
            f"Token Graying: eps must be a number in (0, 1], got {eps!r} of type "
            f"{type(eps).__name__}."
        )
    if not 0 < eps <= 1:
        raise ValueError(
            f"Token Graying: eps must lie in (0, 1], where 1 changes nothing, got {eps}."
        )
    return float(eps)


def _gray_tall(x: Tensor, eps: float, restore_scale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Y = X V diag(r^((eps-1)/2)) V^T with r = (S / max S)^2, and the eigenvalues S^2 and
    eigenvectors V of X^T X."""
    squares, v = torch.linalg.eigh(x.mT @ x)  # ascending
    gains, largest = _gains(squares, eps)
    y = x @ ((v * gains.unsqueeze(-2)) @ v.mT)
    return (y if restore_scale else y / largest.sqrt().unsqueeze(-1)), squares, v


def _gains(squares: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    largest = squares[..., -1:].clamp(min=1e-200)  # an all-zero image has none
    return (squares / largest).clamp(min=SVD_FLOOR).pow((eps - 1) / 2), largest


class _GraySvd(torch.autograd.Function):
    """`_gray_tall` with the derivative of a matrix function (Daleckii and Krein), which needs no
    gap between eigenvalues as that of `eigh` does. Attacks on the pixels of a grayed model come
    this way; training does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, restore_scale: bool) -> Tensor:
        y, squares, v = _gray_tall(x, eps, restore_scale)
        ctx.save_for_backward(x, y, squares, v)
        ctx.eps, ctx.restore_scale = eps, restore_scale
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, y, squares, v = ctx.saved_tensors
        gains, largest = _gains(squares, ctx.eps)
        power = (ctx.eps - 1) / 2
        raised = squares / largest > SVD_FLOOR
        # f(l) = (l / largest)^power above the floor: its slope, and the slopes of its chords
        slope = torch.where(raised, power * gains / squares.clamp(min=1e-200), 0.0)
        rise = gains.unsqueeze(-1) - gains.unsqueeze(-2)
        run = squares.unsqueeze(-1) - squares.unsqueeze(-2)
        apart = run.abs() > 1e-6 * torch.maximum(
            squares.unsqueeze(-1), squares.unsqueeze(-2)
        ).clamp(min=1e-200)
        chords = torch.where(
            apart,
            rise / torch.where(apart, run, 1.0),
            (slope.unsqueeze(-1) + slope.unsqueeze(-2)) / 2,
        )
        scale = 1.0 if ctx.restore_scale else largest.rsqrt().unsqueeze(-1)
        inner = v.mT @ (x.mT @ (gradient * scale)) @ v
        gram = v @ (chords * inner) @ v.mT
        # the largest eigenvalue moves every f(l) by -power f(l) / largest
        moved = -(power / largest) * torch.where(raised, gains, 0.0)
        d_largest = (moved * inner.diagonal(dim1=-2, dim2=-1)).sum(-1, keepdim=True)
        if not ctx.restore_scale:
            d_largest = d_largest - (gradient * y).sum(dim=(-2, -1)).unsqueeze(-1) / (2 * largest)
        top = v[..., -1]
        gram = gram + d_largest.unsqueeze(-1) * top.unsqueeze(-1) * top.unsqueeze(-2)
        weights = (v * gains.unsqueeze(-2)) @ v.mT
        return gradient @ weights * scale + x @ (gram + gram.mT), None, None
