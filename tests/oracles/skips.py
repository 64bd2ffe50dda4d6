"""Always Skip Attention (arXiv 2505.01996), written plainly: slow and obvious, for tests and comparisons.

Nothing here is fast or clever: one sample at a time, a real SVD, scipy's DCT, the whole Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy import fft
from torch import Tensor


def gray_svd(x: Tensor, eps: float, restore_scale: bool = True) -> Tensor:
    """SVD Token Graying of token matrices (B, N, D), by an SVD in the precision that comes."""
    out = []
    for matrix in x:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        top = s.max()
        scaled = (s / top) ** eps if top > 0 else s
        out.append(u @ torch.diag(scaled * (top if restore_scale else 1)) @ vh)
    return torch.stack(out)


def gray_dct(x: Tensor, eps: float, restore_scale: bool = True) -> Tensor:
    """DCT Token Graying of token matrices (B, N, D), by scipy's DCT in float64."""
    out = []
    for matrix in x.double().numpy():
        c = fft.dctn(matrix, type=2, norm="ortho")
        top = np.abs(c).max()
        scaled = (
            np.sign(c) * (np.abs(c) / top) ** eps * (top if restore_scale else 1) if top > 0 else c
        )
        out.append(torch.from_numpy(fft.idctn(scaled, type=2, norm="ortho")))
    return torch.stack(out)


def patches(image: Tensor, size: int) -> Tensor:
    """The patches of one image (C, H, W) as rows, by slicing."""
    _, height, width = image.shape
    rows = [
        image[:, i : i + size, j : j + size].flatten()
        for i in range(0, height, size)
        for j in range(0, width, size)
    ]
    return torch.stack(rows)


def linear_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Self-attention without softmax, as propositions 4.1 and 4.2 treat it: X Wq Wk^T X^T X Wv."""
    return x @ wq @ wk.mT @ x.mT @ x @ wv


def jacobian_spectrum(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """All singular values of the Jacobian of f at x, from the whole matrix."""
    whole = torch.autograd.functional.jacobian(f, x)
    return torch.linalg.svdvals(whole.reshape(-1, x.numel()))
