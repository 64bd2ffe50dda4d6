"""What contracts compare, and the error of one that is broken."""

from __future__ import annotations

import torch
from torch import Tensor


class ContractBroken(AssertionError):
    """A regularizer does not keep what every regularizer promises."""


def require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise ContractBroken(message)


def same(a: Tensor, b: Tensor, message: str, tolerance: float | None = 0.0) -> None:
    """Equal to the bit (tolerance 0), or close."""
    require(a.shape == b.shape, f"{message}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if tolerance == 0.0:
        require(torch.equal(a, b), f"{message}: they differ by up to {_gap(a, b):.3g}")
    else:
        require(
            torch.allclose(a, b, rtol=tolerance or 0, atol=tolerance or 0), f"{message}: off by up to {_gap(a, b):.3g}"
        )


def same_gradients(a: dict[str, Tensor], b: dict[str, Tensor], message: str, tolerance: float = 1e-5) -> None:
    require(a.keys() == b.keys(), f"{message}: gradients of {sorted(a.keys() ^ b.keys())} exist only once")
    for name in a:
        same(a[name], b[name], f"{message}: gradient of {name}", tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
