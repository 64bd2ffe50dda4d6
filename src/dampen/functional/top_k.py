"""The largest scores of each query, by a selection network instead of a sort of every row.

With the keys on the outer axis, one comparator of a sorting network is one `maximum` and one
`minimum` over all queries at once. For the few keys of a top-k that is a third of the time of
`torch.topk` on a CPU, it compiles to a handful of fused loops, and it is exact."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from dampen._torch import is_static
from dampen.regularizer import Call

Share = tuple[int, int]
"""How many keys are the top: a share of them as numerator and denominator, or a count and 0."""

NETWORK_UP_TO = 64
"""The largest k for which the network is taken: on a CPU it has then two thirds of the time of
`torch.topk` or less, at 65 to 1024 keys (`dampen bench`). From 64 k keys on, `topk` keeps a short
heap and is as fast."""
COMPILED_UP_TO = 8
"""The same in a compiled graph, where each comparator is a node."""


def largest(s: Tensor, k: int) -> Tensor:
    """The k largest entries along the last axis but one, sorted downwards: (..., M, N) -> (..., k,
    N).

    Args:
        s: scores (..., M).
        k: how many of each row.

    >>> largest(torch.tensor([[3.0], [1.0], [2.0]]), 2).flatten().tolist()
    [3.0, 2.0]
    """
    if _by_network(s, k):
        return torch.cat(_network(s, k)[:k], dim=-2)
    return s.topk(k, dim=-2).values


def kth_largest(s: Tensor, k: int) -> Tensor:
    """The k-th largest entry along the last axis but one: (..., M, N) -> (..., 1, N).

    Args:
        s: scores (..., M).
        k: how many of each row.

    >>> kth_largest(torch.tensor([[3.0], [1.0], [2.0]]), 2).item()
    2.0
    """
    if _by_network(s, k):
        return _network(s, k)[k - 1]
    return s.mT.contiguous().topk(k, sorted=False).values.amin(-1).unsqueeze(-2)


def _by_network(s: Tensor, k: int) -> bool:
    limit = COMPILED_UP_TO if torch.compiler.is_compiling() else NETWORK_UP_TO
    return is_static(k) and k <= limit and s.shape[-2] < 64 * k and s.device.type == "cpu"


def transposed_scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """The scores with the model's bias as (B, H, M, N), in float32 and without gradient: only their
    order counts.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        call: the attention at work.
    """
    if call.scores is not None:
        return call.scores.detach().float().mT.contiguous()
    q, k = q.detach().float(), k.detach().float()
    with torch.autocast(q.device.type, enabled=False):
        if k.shape[1] != q.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = k @ q.mT
    if call.bias is None:
        return s
    return s.mul_(call.scale).add_(call.bias.detach().mT)


def top_share(top: int | float) -> Share:
    """The share of the keys that `top` means, as numerator and denominator; a count as the count
    and 0.

    Exact: 0.1 * 30 is more than 3 in floating point, and would be rounded up to 4.

    Args:
        top: share of the keys, or their number.

    >>> top_share(0.1), top_share(4)
    ((1, 10), (4, 0))
    """
    if isinstance(top, int):
        return top, 0
    share = Fraction(str(top))
    return share.numerator, share.denominator


def check_count(share: Share, keys: int) -> Share:
    """The same share; raise where it is a count larger than the number of keys.

    Args:
        share: of the keys that are the top; see `top_share`.
        keys: M.
    """
    count, denominator = share
    if denominator == 0 and count > keys:
        raise ValueError(
            f"HardMasking(top={count}) needs more keys than the {keys} there are. Give a "
            "smaller count, or a fraction such as top=0.1."
        )
    return share


def in_top_of_rows(s: Tensor, share: Share) -> Tensor | None:
    """Which scores (B, H, N, M) are among the largest of their rows; None where those are more than
    two, for which `in_top` is quicker. Exact with ties: the largest is taken out once, wherever it
    is.

    Args:
        s: scores (..., M).
        share: of the keys that are the top; see `top_share`.
    """
    num, den = check_count(share, s.shape[-1])
    k = -(-s.shape[-1] * num // den) if den else num
    if not is_static(k) or k > 2:
        return None
    if k == 2:
        rest = s.scatter(-1, s.max(-1, keepdim=True).indices, float("-inf"))
        return s >= rest.amax(-1, keepdim=True)
    return s >= s.amax(-1, keepdim=True)


def in_top(s: Tensor, keep: Tensor | None, share: Share) -> Tensor:
    """Which scores (B, H, M, N), keys first, are among the k largest that `keep` (B, H, N, M) shows
    to their query.

    Args:
        s: scores (..., M).
        keep: bool, True may be seen; None: all.
        share: of the keys that are the top; see `top_share`.
    """
    keys = s.shape[-2]
    num, den = check_count(share, keys)
    k = -(-keys * num // den) if den else num
    if keep is None:
        return s >= kth_largest(s, k)
    keep = keep.mT
    s = s.masked_fill(~keep, float("-inf"))
    seen = keep.sum(-2, keepdim=True)
    count = (seen * num + den - 1) // den if den else seen.clamp(max=k)
    lowest = largest(s, k).gather(
        -2, (count - 1).clamp(min=0).expand(*s.shape[:-2], 1, s.shape[-1])
    )
    return (s >= lowest) & keep


def _network(s: Tensor, k: int) -> list[Tensor]:
    """Sort groups of P keys (P the power of two from k on), then merge the groups pairwise, keeping
    the upper P."""
    size = 1 << (k - 1).bit_length()
    groups, rest = divmod(s.shape[-2], size)
    waiting: list[list[Tensor]] = []
    if rest:
        lowest = s.new_full((), float("-inf")).expand(*s.shape[:-2], 1, s.shape[-1])
        singles = list(s[..., groups * size :, :].split(1, dim=-2))
        waiting.append(_sort(singles + [lowest] * (size - rest)))
    if groups == 0:
        return waiting[0]
    # wire i: the i-th largest of each group
    wires = _sort(list(s[..., : groups * size, :].split(groups, dim=-2)))
    while groups > 1:
        half, odd = divmod(groups, 2)
        if odd:
            waiting.append([w[..., 2 * half :, :] for w in wires])
        wires = _merge(
            [w[..., :half, :] for w in wires], [w[..., half : 2 * half, :] for w in wires]
        )
        groups = half
    for others in waiting:
        wires = _merge(wires, others)
    return wires


def _sort(wires: list[Tensor]) -> list[Tensor]:
    for i, j in _PAIRS[len(wires)]:
        _exchange(wires, i, j)
    return wires


def _merge(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """The upper half of two falling lists, falling: max(a_i, b_(P-1-i)) holds it as a bitonic list,
    which P/2 log P comparators sort."""
    wires = [torch.maximum(x, y) for x, y in zip(a, reversed(b), strict=True)]
    step = len(wires) // 2
    while step:
        for i in range(len(wires)):
            if i & step == 0:
                _exchange(wires, i, i + step)
        step //= 2
    return wires


def _exchange(wires: list[Tensor], i: int, j: int) -> None:
    wires[i], wires[j] = torch.maximum(wires[i], wires[j]), torch.minimum(wires[i], wires[j])


def comparators(size: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort for a power of two: pairs of wires, the larger number goes to
    the first.

    Args:
        size: numbers to sort.

    >>> comparators(4)
    ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))
    """
    pairs, run = [], 1
    while run < size:
        step = run
        while step:
            for start in range(step % run, size - step, 2 * step):
                for i in range(start, min(start + step, size - step)):
                    if i // (2 * run) == (i + step) // (2 * run):
                        pairs.append((i, i + step))
            step //= 2
        run *= 2
    return tuple(pairs)


_PAIRS = {1 << i: comparators(1 << i) for i in range(NETWORK_UP_TO.bit_length())}
