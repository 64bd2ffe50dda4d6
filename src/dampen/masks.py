"""Random masks, and the one place where masks are merged.

Draws come from the global random number generator only: a private `torch.Generator` is not rewound by activation
checkpointing and would give wrong gradients with no error.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 2**63


def bernoulli(shape: Sequence[int], rate: Tensor, device: torch.device | None = None) -> Tensor:
    """A bool mask that is True with probability `rate` (a tensor that broadcasts to `shape`), independently per
    entry.

    Each 64-bit random number gives four 16-bit draws, at a third of the cost of `bernoulli_`. One uniform number per
    call dithers the threshold, so that the marginal rate is exact and not rounded to a multiple of 2^-16."""
    device = rate.device if device is None else device
    size = math.prod(shape)
    words = torch.randint(-_WORD, _WORD - 1, ((size + 3) // 4,), device=device)
    draws = words.view(torch.int16)[:size].view(tuple(shape))
    threshold = (rate.float() * 65536 + torch.rand((), device=device)).floor() - 32768
    return draws < threshold.clamp(max=32767).to(torch.int16)


def drop(x: Tensor, rate: Tensor) -> Tensor:
    """Inverted dropout with a tensor as its rate: zero with probability `rate`, else divided by 1 - rate."""
    return zero_and_rescale(x, bernoulli(x.shape, rate, x.device), rate)


def zero_and_rescale(x: Tensor, dropped: Tensor, rate: Tensor) -> Tensor:
    """Zero what was dropped and divide the rest by 1 - rate.

    One product with a factor of 0 or 1 / (1 - rate), kept until the backward pass as in `F.dropout`: on a CPU half the
    time of `masked_fill` and a product. In 16 bits that factor would be rounded, so there the mask and the scale are
    two products, the second with a number of full precision."""
    scale = 1 / (1 - rate)
    return x * ~dropped * scale if x.dtype.itemsize == 2 else x * (~dropped * scale.to(x.dtype))


def seed_rate(rate: Tensor, covered: int) -> Tensor:
    """The rate of seeds, each hiding `covered` places, at which a place is hidden with probability `rate`.

    1 - (1 - p)^(1 / covered).
    """
    return -torch.expm1(torch.log1p(-rate) / covered)


def dilate(mask: Tensor, width: int, dim: int) -> Tensor:
    """Spread each True over the `width` places around it along `dim`."""
    if width == 1:
        return mask
    before, after = width // 2, (width - 1) // 2  # an even window reaches one place further back
    padding = [0, 0] * (-dim - 1) + [before, after]
    padded, length = F.pad(mask, padding), mask.shape[dim]
    spread = padded.narrow(dim, 0, length)
    for offset in range(1, width):
        spread = spread | padded.narrow(dim, offset, length)
    return spread


def any_in_row(mask: Tensor) -> Tensor:
    """Which rows of (..., M) have a True, as (..., 1); eight entries at a time, because `any` over bools is slow on a
    CPU."""
    padded = F.pad(mask, (0, -mask.shape[-1] % 8)).contiguous()
    words = padded.view(-1, padded.shape[-1]).view(torch.int64)
    return (words.amax(-1) != 0).view(*mask.shape[:-1], 1)


def causal_rows(queries: int, keys: int, rows: slice | None, device: torch.device | None) -> Tensor:
    """The (N, M) bool mask that `is_causal=True` stands for, or only the given rows of it."""
    start, stop = (0, queries) if rows is None else (rows.start, rows.stop)
    return torch.arange(keys, device=device) <= torch.arange(start, stop, device=device).unsqueeze(-1)


def visible(mask: Tensor | None) -> Tensor | None:
    """A model's mask, bool (True may be seen) or float (added to the scores), as bool. None: everything is visible."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask > torch.finfo(mask.dtype).min / 2


def keep_keys(allowed: Tensor | None, hidden: Sequence[Tensor], keys: int) -> Tensor:
    """Merge what the model allows with what the regularizers hide; a row that lost all keys gets back one, at random.

    `allowed` and each of `hidden` broadcast to (B, H, N, keys). A row in which the model itself allows
    nothing stays empty. With m visible keys and rate p the realized rate is p - p^m / m.
    """
    dropped = hidden[0]
    for h in hidden[1:]:
        dropped = dropped | h
    keep = ~dropped if allowed is None else allowed & ~dropped
    if keep.shape[-1] != keys:  # the same fate for every key
        keep = keep.expand(*keep.shape[:-1], keys)
    return give_back_one(keep, allowed)


def give_back_one(keep: Tensor, allowed: Tensor | None) -> Tensor:
    """Where a row of `keep` is all False, make one random key of those `allowed` True again."""
    if keep.shape[-1] == 0:
        return keep
    empty = ~any_in_row(keep)
    draw = torch.rand(empty.shape, device=keep.device)
    if allowed is None:
        key = (draw * keep.shape[-1]).long().clamp(max=keep.shape[-1] - 1)
        back = empty
    else:
        count = allowed.sum(-1, keepdim=True)
        rank = (draw * count).long().minimum((count - 1).clamp(min=0))
        by_visibility = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)  # the visible keys come first
        key = by_visibility.expand(*keep.shape[:-1], -1).gather(-1, rank)
        back = empty & (count > 0)
    return keep.scatter(-1, key, keep.gather(-1, key) | back)
