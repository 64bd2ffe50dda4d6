"""Blurred Attention Smoothing: a random Gaussian blur of the scores along the keys."""

from __future__ import annotations

import math
import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from dampen._torch import has_numbers
from dampen.functional.blur import (
    DENSE_UP_TO,
    Edge,
    Neighbors,
    apply_kernel,
    blur_all,
    kernel_weights,
    minus_squares,
    on_grid,
    on_line,
    seen_together,
)
from dampen.functional.explicit.reductions import as_wide
from dampen.functional.grid import check_grid, model_grid
from dampen.functional.learnable import count_heads, device_of, per_head, scale_divergence, spread
from dampen.regularizer import Call, Regularizer
from dampen.schedules import Value


class BlurredAttention(Regularizer):
    """Blur each query's scores along the keys with a Gaussian of random width: Blurred Attention
    Smoothing of AttentionDrop (arXiv 2504.12088).

    L <- L * G(w, s), s ~ U(0, sigma) once per forward of a layer, G the normalized Gaussian of odd
    width w.

    Blurring the content scores is blurring the keys, conv(Q K^T) = Q conv(K)^T, so no scores are
    needed and the fused kernel stays. A position bias (Swin, T5) is added afterwards and not
    blurred.

    Differences from the paper: a neighbor counts only if every query that sees a key sees the
    neighbor too, and the kernel is renormalized over those that count. This one rule leaves out
    padding, looks only backwards in causal attention, and does not reach across packed documents or
    sliding windows. Edges are renormalized likewise. With `grid` the patches are blurred in two
    dimensions and prefix tokens (CLS) left alone; without it the end of one row of patches mixes
    with the start of the next. The paper's w and sigma are not public: the defaults are ours. It
    reports that w above 9 hurts, so that warns.

    Learned sigma, which the paper names as future work: with `learn=True` each key head of each
    layer has its own, a parameter (`reg.parameters()`) that starts at `sigma`; s = u sigma_h with u
    ~ U(0, 1) is differentiable in it. The task alone would learn not to blur, so `prior_weight`
    times log(sigma_h / sigma) + sigma / sigma_h - 1, which is 0 at sigma and infinite at 0, is
    added to the loss.

    Args:
        width: w, odd.
        sigma: largest standard deviation, in keys; 0 is no blur.
        grid: (rows, columns) of the patch grid for a blur in two dimensions.
        edge: "renormalize", or "zero" where missing neighbors count as scores of 0.
        draw: one s for the whole "forward" of a layer, or one per "head" (per key head, if queries
            share keys).
        learn: make sigma a parameter per head and layer.
        heads: number of key heads, where `learn` cannot find it in the model.
        prior_weight: factor of the divergence from `sigma`.

    >>> from dampen import BlurredAttention
    >>> BlurredAttention(width=5, sigma=1.0)
    BlurredAttention(sigma=1, width=5)
    """

    acts_first = True
    sigma: Tensor
    prior_weight: Tensor

    def __init__(
        self,
        width: int = 5,
        sigma: Value = 1.0,
        grid: tuple[int, int] | None = None,
        edge: Edge = "renormalize",
        draw: Literal["forward", "head"] = "forward",
        learn: bool = False,
        heads: int | None = None,
        prior_weight: Value = 0.3,
    ) -> None:
        super().__init__()
        if isinstance(width, bool) or not isinstance(width, int) or width < 1 or width % 2 == 0:
            raise ValueError(
                f"BlurredAttention: width is an odd number of keys, 1 or more, got {width!r}."
            )
        if width > 9:
            warnings.warn(
                f"BlurredAttention: a width above 9 hurts (arXiv 2504.12088, ablations), got "
                f"{width}.",
                stacklevel=2,
            )
        if edge not in ("renormalize", "zero"):
            raise ValueError(
                f"BlurredAttention: edge must be 'renormalize' or 'zero', got {edge!r}."
            )
        if draw not in ("forward", "head"):
            raise ValueError(f"BlurredAttention: draw must be 'forward' or 'head', got {draw!r}.")
        self.scheduled("sigma", sigma, high=math.inf)
        self.width, self.grid = width, None if grid is None else check_grid(grid)
        # the grid that the model makes, if it is known
        self.patches: tuple[int, int] | None = None
        self.edge, self.draw, self.learn = edge, draw, learn
        self.log_sigma: nn.Parameter | None = None
        self._known: tuple[tuple[int, torch.device], Neighbors, Tensor | None] | None = None
        if learn:
            self.scheduled("prior_weight", prior_weight, high=math.inf)
            if heads is not None:
                self._make_parameter(heads, torch.device("cpu"))

    def inspect_model(self, model: nn.Module) -> None:
        self.patches = model_grid(model)

    def prepare(self, model: nn.Module) -> None:
        if self.learn and self.log_sigma is None:
            self._make_parameter(count_heads(self, key_heads=True), device_of(model))

    def _make_parameter(self, heads: int, device: torch.device) -> None:
        start = max(self.sigma.item(), 1e-3)
        value = torch.full((heads,), math.log(start), dtype=torch.float32, device=device)
        self.log_sigma = nn.Parameter(value)

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        near, squares = self._neighbors(k.shape[2], k.device)
        shape = (k.shape[1], 1, 1) if self.draw == "head" else ()
        drawn = torch.rand(shape, dtype=torch.float32, device=k.device)
        if squares is None or call.mask is not None or call.is_causal:
            weights = kernel_weights(
                near, seen_together(near, call), drawn * self._largest(k.shape[1]), self.edge
            )
            return q, apply_kernel(k, weights, near), v
        if drawn.ndim == 0 and not self.learn and drawn.device.type == "cpu" and has_numbers(drawn):
            return q, blur_all(k, squares, drawn.item() * self._numbers["sigma"]), v
        return q, blur_all(k, squares, drawn * self._largest(k.shape[1])), v

    def _neighbors(self, keys: int, device: torch.device) -> tuple[Neighbors, Tensor | None]:
        """The neighbors of each key, and as a matrix of distances where that is small and edges are
        renormalized: the same for every forward of that length."""
        kept = not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled()
        if kept and self._known is not None and self._known[0] == (keys, device):
            return self._known[1], self._known[2]
        if self.grid is None:
            near = on_line(keys, self.width, device)
        else:
            near = on_grid(keys, self.grid, self.width, device, self.patches)
        if not (keys <= DENSE_UP_TO and self.edge == "renormalize"):
            matrix = None
        else:
            matrix = minus_squares(near)
        if kept:
            self._known = (keys, device), near, matrix
        return near, matrix

    def _largest(self, heads: int) -> Tensor:
        """Sigma: the stated one, or one per key head (H, 1, 1)."""
        if not self.learn:
            return self.sigma
        if self.log_sigma is None:
            raise RuntimeError(
                "BlurredAttention(learn=True) has no parameter yet. Attach it, or say heads=."
            )
        value = scale_divergence(self.sigma, self.log_sigma)
        self.penalize(as_wide(self.current("prior_weight"), value) * value, "prior")
        return per_head(self.log_sigma, heads, "BlurredAttention", grouped=True).exp()

    @property
    def always_idle(self) -> bool:
        return self.width == 1 or super().always_idle

    zero_is_identity = True

    def neutral(self) -> None:
        self.learn = False
        super().neutral()

    def extra_repr(self) -> str:
        more = {"grid": self.grid, "edge": self.edge, "draw": self.draw, "learn": self.learn}
        usual = {"grid": None, "edge": "renormalize", "draw": "forward", "learn": False}
        said = [f"{k}={v}" for k, v in more.items() if v != usual[k]]
        sigma = f"{self.sigma.item():.3g}"
        if self.log_sigma is None:
            sigma = sigma
        else:
            sigma = spread(self.log_sigma.exp(), sigma)
        return ", ".join([f"sigma={sigma}", f"width={self.width}", *said])
