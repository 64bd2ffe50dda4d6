"""Explicit Dropout written plainly: the oracles of the tests, and the formulation that the benchmarks compare with.

Three independent ways to the same numbers, each for ONE sample of n tokens (no batch, no padding, no chunks):

- `trace_*`: the paper's formulas, letter by letter (arXiv 2604.20505), d x d matrices and all;
- `enumerate_*`: the definition of the penalty, 1/2 E ||f(dropped) - f(kept)||^2, as a sum over every mask that there
is;
- `sample_*`: the same expectation from real `nn.Dropout`.

Weights are (out, in); a head's weight is that head's rows. `inverted=True` divides what is kept by 1 - p, as
`nn.Dropout` does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- the paper's traces ---------------------------------------------------------------------------


def trace_query(x: Tensor, wq: Tensor, wk: Tensor, p: float, xk: Tensor | None = None) -> Tensor:
    """J_q = 1/2 Tr(B Wq^T Wk X^T X Wk^T Wq), B = p^2 X^T X. In cross-attention the inner X is the keys' own input."""
    xk = x if xk is None else xk
    b = p**2 * x.T @ x
    return 0.5 * torch.trace(b @ wq.T @ wk @ xk.T @ xk @ wk.T @ wq)


def trace_key(x: Tensor, wq: Tensor, wk: Tensor, p: float, xk: Tensor | None = None) -> Tensor:
    """J_k = 1/2 Tr(B Wk^T Wq X^T X Wq^T Wk), B = p^2 X^T X of the keys' input."""
    xk = x if xk is None else xk
    b = p**2 * xk.T @ xk
    return 0.5 * torch.trace(b @ wk.T @ wq @ x.T @ x @ wq.T @ wk)


def trace_linear(x: Tensor, w: Tensor, p: float) -> Tensor:
    """J_v = 1/2 Tr(B Wv^T Wv) and J_ff = 1/2 Tr(B W^T W)."""
    b = p**2 * x.T @ x
    return 0.5 * torch.trace(b @ w.T @ w)


def trace_attended(a: Tensor, x: Tensor, wv: Tensor, p: float) -> Tensor:
    """J_av = 1/2 p^2 Tr(X^T A^T A X Wv^T Wv)."""
    return 0.5 * p**2 * torch.trace(x.T @ a.T @ a @ x @ wv.T @ wv)


def trace_convolution(x: Tensor, conv: nn.Conv1d | nn.Conv2d, p: float) -> Tensor:
    """The paper's trace on unfolded patches, group by group."""
    return sum(trace_linear(patches, w, p) for patches, w in unfold(x, conv))  # type: ignore[return-value]


# --- every mask there is --------------------------------------------------------------------------


def every_mask(count: int, p: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """All 2^count keep masks, one per row, and their probabilities (1-p)^kept p^dropped."""
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=like.dtype)] * count).reshape(
        -1, count
    )
    kept = masks.sum(1)
    return masks, (1 - p) ** kept * p ** (count - kept)


def expected_change(x: Tensor, f: Callable[[Tensor], Tensor], p: float, inverted: bool) -> Tensor:
    """1/2 E ||f(m * x) - f(x)||^2 over every mask m of the entries of x; f maps (masks, *x.shape) to (masks, ...)."""
    masks, probabilities = every_mask(x.numel(), p, x)
    dropped = masks.reshape(-1, *x.shape) * x / ((1 - p) if inverted else 1)
    change = (f(dropped) - f(x.unsqueeze(0))).flatten(1).square().sum(1)
    return 0.5 * (probabilities * change).sum()


def enumerate_linear(x: Tensor, w: Tensor, p: float, inverted: bool) -> Tensor:
    """Dropout on the input of a linear map."""
    return expected_change(x, lambda t: t @ w.T, p, inverted)


def enumerate_query(
    x: Tensor,
    xk: Tensor,
    wq: Tensor,
    wk: Tensor,
    p: float,
    inverted: bool,
    visible: Tensor | None = None,
) -> Tensor:
    """Dropout on the input of the queries; the scores of one head change, where they are visible."""
    visible = torch.ones(len(x), len(xk), dtype=x.dtype) if visible is None else visible
    return expected_change(x, lambda t: t @ wq.T @ (xk @ wk.T).T * visible, p, inverted)


def enumerate_key(
    x: Tensor,
    xk: Tensor,
    wq: Tensor,
    wk: Tensor,
    p: float,
    inverted: bool,
    visible: Tensor | None = None,
) -> Tensor:
    """Dropout on the input of the keys."""
    visible = torch.ones(len(x), len(xk), dtype=x.dtype) if visible is None else visible
    return expected_change(xk, lambda t: x @ wq.T @ (t @ wk.T).mT * visible, p, inverted)


def enumerate_query_key(
    x: Tensor,
    xk: Tensor,
    wq: Tensor,
    wk: Tensor,
    p: float,
    inverted: bool,
    visible: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """Dropout on both inputs, with two independent masks or one shared mask, over every mask of all entries.

    Only for toy sizes: 2^(2 n d) masks where they are independent.
    """
    visible = torch.ones(len(x), len(xk), dtype=x.dtype) if visible is None else visible
    if shared:
        return expected_change(x, lambda t: t @ wq.T @ (t @ wk.T).mT * visible, p, inverted)
    both = torch.cat([x.flatten(), xk.flatten()])

    def scores(t: Tensor) -> Tensor:
        left, right = (
            t[:, : x.numel()].reshape(-1, *x.shape),
            t[:, x.numel() :].reshape(-1, *xk.shape),
        )
        return left @ wq.T @ (right @ wk.T).mT * visible

    return expected_change(both, scores, p, inverted)


def enumerate_pairwise(
    x: Tensor,
    xk: Tensor,
    wq: Tensor,
    wk: Tensor,
    p: float,
    inverted: bool,
    visible: Tensor | None = None,
    shared: bool = False,
) -> Tensor:
    """As `enumerate_query_key`, pair by pair: a score depends on the masks of its own two tokens alone, 2^(2 d) of
    them."""
    total = x.new_zeros(())
    for i in range(len(x)):
        for j in range(len(xk)):
            if visible is None or visible[i, j]:
                one = shared and i == j
                total = total + enumerate_query_key(
                    x[i : i + 1], xk[j : j + 1], wq, wk, p, inverted, shared=one
                )
    return total


def enumerate_attended(
    a: Tensor, x: Tensor, wv: Tensor, p: float, inverted: bool, attended: str
) -> Tensor:
    """Dropout on X before the mixing by A ("pre") or on A X after it ("post"); the output A X Wv^T of one head
    changes."""
    if attended == "pre":
        return expected_change(x, lambda t: a @ t @ wv.T, p, inverted)
    return expected_change(a @ x, lambda t: t @ wv.T, p, inverted)


def enumerate_convolution(
    x: Tensor, conv: nn.Conv1d | nn.Conv2d, p: float, inverted: bool
) -> Tensor:
    """Dropout on the unfolded patches of a convolution's input: every mask of one patch, for each patch."""
    total = x.new_zeros(())
    for patches, w in unfold(x, conv):
        masks, probabilities = every_mask(patches.shape[1], p, x)
        dropped = masks.unsqueeze(1) * patches / ((1 - p) if inverted else 1)
        change = ((dropped - patches) @ w.T).square().sum((1, 2))
        total = total + 0.5 * (probabilities * change).sum()
    return total


def unfold(x: Tensor, conv: nn.Conv1d | nn.Conv2d) -> list[tuple[Tensor, Tensor]]:
    """For each group: the patches (positions, in / groups * kernel) of one input (C, ...), and the weight (out /
    groups, same)."""
    flat = isinstance(conv, nn.Conv1d)
    image = x.unsqueeze(-2) if flat else x
    kernel, dilation, stride, padding = (
        (1, v[0]) if flat and i != 3 else (0, v[0]) if flat else v
        for i, v in enumerate((conv.kernel_size, conv.dilation, conv.stride, conv.padding))
    )
    if conv.padding_mode != "zeros":
        image = F.pad(
            image[None], [padding[1], padding[1], padding[0], padding[0]], mode=conv.padding_mode
        )[0]
        padding = (0, 0)
    cut = F.unfold(image[None], kernel, dilation, padding, stride)[0].T  # (positions, C * kernel)
    groups = conv.groups
    weights = conv.weight.flatten(1).unflatten(0, (groups, -1))
    return list(zip(cut.unflatten(1, (groups, -1)).unbind(1), weights.unbind(0), strict=True))


# --- real dropout ---------------------------------------------------------------------------------


def sample_change(
    f: Callable[[Callable[[Tensor], Tensor]], Tensor], p: float, draws: int
) -> tuple[float, float]:
    """1/2 E ||f(dropout) - f(identity)||^2 from `draws` runs of `nn.Dropout(p)`: its mean and standard error.

    `f` takes a function to be applied wherever dropout acts, on tensors with a leading dimension of draws.
    """
    dropout = nn.Dropout(p).train()
    with torch.no_grad():
        change = 0.5 * (f(dropout) - f(lambda t: t)).flatten(1).square().sum(1)
    return change.mean().item(), (change.std() / draws**0.5).item()


def sample_query_key(
    x: Tensor, wq: Tensor, wk: Tensor, p: float, shared: bool, draws: int = 20_000
) -> tuple[float, float]:
    """Scores of one head under `nn.Dropout` before the projections: one call feeding both, or one call each."""
    many = x.expand(draws, *x.shape)

    def scores(drop: Callable[[Tensor], Tensor]) -> Tensor:
        left = drop(many)
        right = left if shared else drop(many)
        return left @ wq.T @ (right @ wk.T).mT

    return sample_change(scores, p, draws)


def sample_linear(x: Tensor, w: Tensor, p: float, draws: int = 20_000) -> tuple[float, float]:
    """A linear map behind `nn.Dropout`."""
    many = x.expand(draws, *x.shape)
    return sample_change(lambda drop: drop(many) @ w.T, p, draws)


def sample_attended(
    a: Tensor, x: Tensor, wv: Tensor, p: float, attended: str, draws: int = 20_000
) -> tuple[float, float]:
    """Attention output of one head with `nn.Dropout` before or after the mixing."""
    many = x.expand(draws, *x.shape)

    def output(drop: Callable[[Tensor], Tensor]) -> Tensor:
        return a @ drop(many) @ wv.T if attended == "pre" else drop(a @ many) @ wv.T

    return sample_change(output, p, draws)
