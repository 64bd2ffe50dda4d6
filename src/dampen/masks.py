"""Random masks, and the one place where masks are merged.

Draws come from the global random number generator only: a private `torch.Generator` is not rewound by activation
checkpointing and would give wrong gradients with no error.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen._torch import has_numbers
from dampen.native.entry import transformed, unreadable
from dampen.native.library import available as native_available

_WORD = 2**63

Rate = float | Tensor
"""A probability: a plain number in eager mode, a tensor under `torch.compile` (see `Regularizer.current`)."""

NEGLIGIBLE = 1e-8
"""Where the chance that any row of a call loses all its keys is below this, the rows are not searched for it. Masks
are finite numbers added to the scores, so the row that a very long training meets after all sees every key alike."""


def bernoulli(shape: Sequence[int], rate: Rate, device: torch.device | None = None) -> Tensor:
    """A bool mask that is True with probability `rate` (a number, or a tensor that broadcasts to `shape`),
    independently per entry.

    Each 64-bit random number gives four 16-bit draws, at a third of the cost of `bernoulli_`. One uniform number per
    call dithers the threshold, so that the marginal rate is exact and not rounded to a multiple of 2^-16."""
    draws, threshold = _draws(shape, rate, device)
    if isinstance(threshold, Tensor):
        return draws < threshold
    # Comparing into bytes is vectorized on a CPU, comparing into bools is not: a third of the time
    return torch.lt(draws, threshold, out=torch.empty(draws.shape, dtype=torch.uint8, device=draws.device)).view(
        torch.bool
    )


def keep_factor(shape: Sequence[int], rate: Rate, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """The factor of inverted dropout: 0 with probability `rate`, else 1 / (1 - rate), independently per entry."""
    scale = 1 / (1 - rate)
    draws, threshold = _draws(shape, rate, device)
    if isinstance(threshold, Tensor):
        return (draws >= threshold) * (scale.to(dtype) if isinstance(scale, Tensor) else scale)
    return torch.ge(draws, threshold, out=torch.empty(draws.shape, dtype=dtype, device=draws.device)).mul_(scale)


def few_kept(shape: Sequence[int], rate: Rate, device: torch.device | None = None, guard: bool = False) -> Tensor:
    """1.0 with probability 1 - rate, else 0.0, for what is one draw per sample, head or layer: three operations.

    Few numbers need no packing: each has 24 bits of its own. With `guard` the largest draw of a row always stays: where
    a row would be left empty that is one entry at random, and elsewhere it has stayed anyway."""
    draws = torch.rand(tuple(shape), device=device)
    if not guard:
        return draws.ge_(rate)
    largest = draws.amax(-1, keepdim=True)
    limit = torch.minimum(largest, rate) if isinstance(rate, Tensor) else largest.clamp_(max=rate)
    return draws.ge_(limit)


def _draws(shape: Sequence[int], rate: Rate, device: torch.device | None) -> tuple[Tensor, Tensor | int]:
    """Uniform 16-bit numbers, and the threshold below which a share `rate` of them lies: an int where that is cheap.

    An int needs the dither as a Python number. Other devices would have to wait for it, and compiled graphs, fake
    tensors and `vmap` have none: there the threshold is a tensor.
    """
    if device is None:
        device = rate.device if isinstance(rate, Tensor) else None
    size = math.prod(shape)
    words = torch.randint(-_WORD, _WORD - 1, ((size + 3) // 4,), device=device)
    draws = words.view(torch.int16)
    draws = (draws if size % 4 == 0 else draws[:size]).view(tuple(shape))
    dither = torch.rand((), device=device)  # floor(t + u) is t in the mean, floor(t) would make 0.1 a rate of 0.09999
    if isinstance(rate, Tensor) or words.device.type != "cpu" or not has_numbers(words):
        threshold = torch.as_tensor((rate * 65536 + dither).floor() - 32768)
        return draws, threshold.clamp(max=32767).to(torch.int16)
    return draws, int(rate * 65536 + dither.item()) - 32768


def drop(x: Tensor, rate: Rate) -> Tensor:
    """Inverted dropout with a tensor or a number as its rate: zero with probability `rate`, else divided by 1 - rate.

    One product with a factor of 0 or 1 / (1 - rate), kept until the backward pass as in `F.dropout`: on a CPU half the
    time of `masked_fill` and a product. In 16 bits that factor would be rounded; see `zero_and_rescale`."""
    if native_available() and not (unreadable(x) or transformed()):
        from dampen.native.ops import dropout  # only where it was built

        return dropout(x, rate)
    if x.dtype.itemsize == 2:
        return zero_and_rescale(x, bernoulli(x.shape, rate, x.device), rate)
    return x * keep_factor(x.shape, rate, x.dtype, x.device)


def zero_and_rescale(x: Tensor, dropped: Tensor, rate: Rate) -> Tensor:
    """Zero what was dropped and divide the rest by 1 - rate.

    In 16 bits a factor of 0 or 1 / (1 - rate) would be rounded, so there the mask and the scale are two products, the
    second with a number of full precision."""
    scale = 1 / (1 - rate)
    kept = (~dropped).view(torch.uint8)  # a product with bytes is vectorized on a CPU, one with bools is not
    if x.dtype.itemsize == 2:
        return x * kept * scale
    return x * (kept.to(x.dtype) * (scale.to(x.dtype) if isinstance(scale, Tensor) else scale))


def seed_rate(rate: Rate, covered: int) -> Rate:
    """The rate of seeds, each hiding `covered` places, at which a place is hidden with probability `rate`.

    1 - (1 - p)^(1 / covered).
    """
    if isinstance(rate, Tensor):
        return -torch.expm1(torch.log1p(-rate) / covered)
    return -math.expm1(math.log1p(-rate) / covered)


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


def keep_keys(allowed: Tensor | None, hidden: Sequence[Tensor], keys: int, *, guard: bool = True) -> Tensor:
    """Merge what the model allows with what the regularizers hide; a row that lost all keys gets back one, at random.

    `allowed` and each of `hidden` broadcast to (B, H, N, keys). A row in which the model itself allows
    nothing stays empty. With m visible keys and rate p the realized rate is p - p^m / m. `guard=False` leaves empty
    rows alone, for callers who know that there are none (`may_empty`).
    """
    dropped = hidden[0]
    for h in hidden[1:]:
        dropped = dropped | h
    keep = ~dropped if allowed is None else allowed & ~dropped
    if keep.shape[-1] != keys:  # the same fate for every key
        keep = keep.expand(*keep.shape[:-1], keys)
    return give_back_one(keep, allowed, search=guard)


def may_empty(rates: Sequence[Rate | None], keys: int, rows: int) -> bool:
    """Whether independent draws at these rates could plausibly hide all of `keys` keys from one of `rows` rows.

    >>> may_empty([0.4], keys=17, rows=2176), may_empty([0.4], keys=65, rows=2176), may_empty([None], 65, 1)
    (True, False, True)
    """
    if any(rate is None or isinstance(rate, Tensor) for rate in rates):  # unknown, or not to be known in a graph
        return True
    shown = math.prod(1 - rate for rate in rates if isinstance(rate, float))
    return bool((1 - shown) ** keys * rows > NEGLIGIBLE)


def give_back_one(keep: Tensor, allowed: Tensor | None, *, search: bool = True) -> Tensor:
    """Where a row of `keep` is all False, make one random key of those `allowed` True again.

    A query without a key has no softmax: plain attention gives NaN there and fused kernels give zeros, so that the same
    draw would mean two things. One key back, and not all, leaves the rate as near to the one asked for as can be."""
    if keep.shape[-1] == 0:
        return keep
    # drawn whether it is needed or not: a compiled graph cannot look, and must draw what eager mode draws
    seed = torch.randint(_WORD - 1, (), device=keep.device)
    if not search:
        return keep
    empty = ~any_in_row(keep)
    if keep.device.type == "cpu" and has_numbers(empty) and not empty.any():
        return keep  # nearly always: the rest is needed once in many thousand calls
    draw = _hashed(seed, empty.shape)
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


def _hashed(seed: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1), one per place, from one seed: the finalizer of MurmurHash3 on 32 bits."""
    low = 0xFFFFFFFF
    h = torch.arange(math.prod(shape), device=seed.device) * 0x9E3779B1 + seed & low
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
    return ((h ^ (h >> 16)).double() / 2**32).view(tuple(shape))
