"""The stochastic methods as their papers write them: plain, slow, on the matrix of scores. Oracles of the tests, and
what the memory benchmark compares with."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_scores(s: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """softmax(s) v over the visible keys."""
    if visible is not None:
        s = s.masked_fill(~visible, float("-inf"))
    return s.softmax(-1) @ v


def top_keys(s: Tensor, visible: Tensor, top: int | float) -> Tensor:
    """Which keys are among the k largest visible ones of each query; k a count, or a fraction rounded up. By loops."""
    flat, seen = s.reshape(-1, s.shape[-1]), visible.expand_as(s).reshape(-1, s.shape[-1])
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    for row in range(len(flat)):
        keys = seen[row].nonzero().flatten().tolist()
        k = min(top, len(keys)) if isinstance(top, int) else math.ceil(round(top * len(keys), 9))
        for key in sorted(keys, key=lambda j: -flat[row, j].item())[:k]:
            chosen[row, key] = True
    return chosen.view_as(s)


def hard_masking(s: Tensor, v: Tensor, rate: float, k: int) -> Tensor:
    """Hard Attention Masking (arXiv 2504.12088): each row's k largest scores times Bernoulli(1 - p)."""
    index = s.topk(k, dim=-1).indices
    kept = torch.bernoulli(torch.full(index.shape, 1 - rate, device=s.device)).to(s.dtype)
    return (s * torch.ones_like(s).scatter(-1, index, kept)).softmax(-1) @ v


def gaussian(width: int, sigma: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The normalized Gaussian of odd width."""
    t = torch.arange(width, dtype=dtype) - width // 2
    g = torch.exp(-t.square() / (2 * sigma * sigma))
    return g / g.sum()


def blurred_attention(s: Tensor, v: Tensor, sigma: float, width: int) -> Tensor:
    """Blurred Attention Smoothing (arXiv 2504.12088): each row of scores convolved along the keys, then the softmax."""
    rows = s.reshape(-1, 1, s.shape[-1])
    g = gaussian(width, sigma, s.dtype).view(1, 1, -1)
    return F.conv1d(rows, g, padding=width // 2).view_as(s).softmax(-1) @ v


def blur_scores(
    s: Tensor,
    sigma: float,
    width: int,
    visible: Tensor | None = None,
    edge: str = "renormalize",
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Scores (N, M) blurred along the keys by METHODS' one rule, key by key: a neighbor counts if every query that sees
    the key sees the neighbor; the kernel is renormalized over those that count (edge "zero": not over the edge)."""
    n, m = s.shape
    sees = torch.ones(n, m, dtype=torch.bool) if visible is None else visible.expand(n, m)
    prefix = 0 if grid is None else m - grid[0] * grid[1]
    half = width // 2
    out = torch.zeros_like(s)
    for j in range(m):
        total = 0.0
        for weight, neighbor in _neighbors(j, m, half, sigma, grid, prefix):
            if neighbor is None:
                total += weight if edge == "zero" else 0.0
            elif not (sees[:, j] & ~sees[:, neighbor]).any():
                out[:, j] += weight * s[:, neighbor]
                total += weight
        out[:, j] /= total
    return out


def _neighbors(
    j: int, m: int, half: int, sigma: float, grid: tuple[int, int] | None, prefix: int
) -> list[tuple[float, int | None]]:
    def weight(squared: int) -> float:
        return math.exp(-squared / (2 * sigma * sigma)) if sigma else float(squared == 0)

    offsets = range(-half, half + 1)
    if grid is None:
        return [(weight(t * t), j + t if 0 <= j + t < m else None) for t in offsets]
    if j < prefix:
        return [(1.0, j)]
    row, column = divmod(j - prefix, grid[1])
    found: list[tuple[float, int | None]] = []
    for dy in offsets:
        for dx in offsets:
            r, c = row + dy, column + dx
            inside = 0 <= r < grid[0] and 0 <= c < grid[1]
            found.append((weight(dy * dy + dx * dx), prefix + r * grid[1] + c if inside else None))
    return found


def divergence(first: Tensor, second: Tensor, valid: Tensor | None = None) -> float:
    """KL(softmax(first) || softmax(second)), class by class, averaged over the valid predictions."""
    p, q = first.double().softmax(-1).flatten(0, -2), second.double().softmax(-1).flatten(0, -2)
    kept = range(len(p)) if valid is None else valid.flatten().nonzero().flatten().tolist()
    total = sum(
        p[i, c].item() * math.log(p[i, c] / q[i, c]) for i in kept for c in range(p.shape[1])
    )
    return total / len(kept)


def drop_head(o: Tensor, kept: Tensor) -> Tensor:
    """DropHead (arXiv 2004.13342): heads (B, H, N, D) with kept (B, H), rescaled by all over kept, sample by sample."""
    out = torch.zeros_like(o)
    for b in range(len(o)):
        for h in range(o.shape[1]):
            if kept[b, h]:
                out[b, h] = o[b, h] * o.shape[1] / kept[b].sum()
    return out


def attention_entropy(a: Tensor, visible: Tensor, valid: Tensor, floor: float) -> float:
    """mean over valid queries and heads of relu(floor log m - H(a)), row by row."""
    batch, heads, queries, _ = a.shape
    visible = visible.expand_as(a)
    gaps = []
    for b in range(batch):
        for n in range(queries):
            for h in range(heads):
                if valid[b, n]:
                    row = [p for p in a[b, h, n].tolist() if p > 0]
                    entropy = -sum(p * math.log(p) for p in row)
                    gaps.append(
                        max(0.0, floor * math.log(max(1, int(visible[b, h, n].sum()))) - entropy)
                    )
    return sum(gaps) / len(gaps)


def head_diversity(o: Tensor, valid: Tensor) -> float:
    """The mean squared cosine over pairs of heads and valid tokens, pair by pair."""
    values = []
    for b in range(len(o)):
        for n in range(o.shape[2]):
            for h in range(o.shape[1]):
                for g in range(h):
                    if valid[b, n]:
                        values.append(
                            F.cosine_similarity(o[b, h, n], o[b, g, n], dim=0).item() ** 2
                        )
    return sum(values) / len(values)


def mixout(w: Tensor, u: Tensor, back: Tensor, rate: float) -> Tensor:
    """Mixout (arXiv 1909.11299), entry by entry: u where `back`, else what keeps the mean at w."""
    used = torch.empty_like(w)
    for o in range(w.shape[0]):
        for j in range(w.shape[1]):
            used[o, j] = u[o, j] if back[o, j] else (w[o, j] - rate * u[o, j]) / (1 - rate)
    return used


def neftune_bound(alpha: float, valid: Tensor, width: int) -> Tensor:
    """The largest noise of NEFTune (arXiv 2310.05914) per sample, alpha / sqrt(n d), 0 on padded tokens: (B, N)."""
    bound = torch.zeros(valid.shape)
    for b in range(valid.shape[0]):
        n = int(valid[b].sum())
        for i in range(valid.shape[1]):
            bound[b, i] = alpha / math.sqrt(n * width) if valid[b, i] else 0.0
    return bound
