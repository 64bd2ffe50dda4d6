"""Random masks, and the one place where masks are merged.

Draws come from the global random number generator only: a private `torch.Generator` is not rewound
by activation checkpointing and would give wrong gradients with no error.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen._torch import has_numbers, on_gpu, version_of
from dampen.native.entry import transformed, unreadable
from dampen.native.library import available as native_available

_WORD = 2**63

Rate = float | Tensor
"""A probability: a plain number in eager mode, a tensor under `torch.compile` (see
`Regularizer.current`)."""

NEGLIGIBLE = 1e-8
"""Where the chance that any row of a call loses all its keys is below this, the rows are not
searched for it. Masks are finite numbers added to the scores, so the row that a very long training
meets after all sees every key alike."""


def bernoulli(shape: Sequence[int], rate: Rate, device: torch.device | None = None) -> Tensor:
    """A bool mask that is True with probability `rate` (a number, or a tensor that broadcasts to
    `shape`), independently per entry.

    Each 64-bit random number gives four 16-bit draws, at a third of the cost of `bernoulli_`. One
    uniform number per call dithers the threshold, so that the marginal rate is exact and not
    rounded to a multiple of 2^-16.

    Args:
        shape: of the result.
        rate: probability, a number or a tensor that broadcasts.
        device: of the result.
    """
    draws, threshold = _draws(shape, rate, device)
    if isinstance(threshold, Tensor):
        return _below(draws, threshold)
    # Comparing into bytes is vectorized on a CPU, comparing into bools is not: a third of the time
    out = torch.empty(draws.shape, dtype=torch.uint8, device=draws.device)
    if threshold == _ABOVE_ALL:
        out = out.fill_(1)
    else:
        out = torch.lt(draws, threshold, out=out)
    return out.view(torch.bool)


def keep_factor(
    shape: Sequence[int], rate: Rate, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """The factor of inverted dropout: 0 with probability `rate`, else 1 / (1 - rate), independently
    per entry.

    Args:
        shape: of the result.
        rate: probability, a number or a tensor that broadcasts.
        dtype: of the result.
        device: of the result.
    """
    scale = 1 / (1 - rate)
    draws, threshold = _draws(shape, rate, device)
    if isinstance(threshold, Tensor):
        return ~_below(draws, threshold) * (scale.to(dtype) if isinstance(scale, Tensor) else scale)
    out = torch.empty(draws.shape, dtype=dtype, device=draws.device)
    if threshold == _ABOVE_ALL:
        return out.zero_()
    return torch.ge(draws, threshold, out=out).mul_(scale)


def few_kept(
    shape: Sequence[int], rate: Rate, device: torch.device | None = None, guard: bool = False
) -> Tensor:
    """1.0 with probability 1 - rate, else 0.0, for what is one draw per sample, head or layer:
    three operations.

    Few numbers need no packing: each has 24 bits of its own. With `guard` the largest draw of a row
    always stays: where a row would be left empty that is one entry at random, and elsewhere it has
    stayed anyway.

    Args:
        shape: of the result.
        rate: probability, a number or a tensor that broadcasts.
        device: of the result.
        guard: keep at least one of each row.
    """
    draws = torch.rand(tuple(shape), dtype=torch.float32, device=device)
    if not guard:
        return draws.ge_(rate)
    largest = draws.amax(-1, keepdim=True)
    if isinstance(rate, Tensor):
        limit = torch.minimum(largest, rate)
    else:
        limit = largest.clamp_(max=rate)
    return draws.ge_(limit)


def _draws(
    shape: Sequence[int], rate: Rate, device: torch.device | None
) -> tuple[Tensor, Tensor | int]:
    """Uniform 16-bit numbers, and the threshold below which a share `rate` of them lies: an int
    where that is cheap. Above 1 - 2^-16 it may be `_ABOVE_ALL`, which no int16 holds.

    An int needs the dither as a Python number. Other devices would have to wait for it, and
    compiled graphs, fake tensors and `vmap` have none: there the threshold is a tensor.
    """
    if device is None:
        device = rate.device if isinstance(rate, Tensor) else None
    size = math.prod(shape)
    words = torch.randint(-_WORD, _WORD - 1, ((size + 3) // 4,), device=device)
    draws = words.view(torch.int16)
    # in a graph the cut is free, and a question about an open size would close it
    if torch.compiler.is_compiling() or size % 4:
        draws = draws[:size]
    draws = draws.view(tuple(shape))
    # floor(t + u) is t in the mean, floor(t) would make 0.1 a rate of 0.09999
    dither = torch.rand((), dtype=torch.float32, device=device)
    if isinstance(rate, Tensor) or words.device.type != "cpu" or not has_numbers(words):
        threshold = torch.as_tensor((rate * 65536 + dither).floor() - 32768)
        within = not isinstance(rate, Tensor) and rate <= 1 - 2**-16
        return draws, threshold.to(torch.int16) if within else threshold
    return draws, int(rate * 65536 + dither.item()) - 32768


_ABOVE_ALL = 2**15


def _below(draws: Tensor, threshold: Tensor) -> Tensor:
    """draws < threshold, for one of int16 or for any."""
    if threshold.dtype is torch.int16:
        return draws < threshold
    return (draws < threshold.clamp(max=_ABOVE_ALL - 1).to(torch.int16)) | (threshold == _ABOVE_ALL)


def drop(x: Tensor, rate: Rate) -> Tensor:
    """Inverted dropout with a tensor or a number as its rate: zero with probability `rate`, else
    divided by 1 - rate.

    One product with a factor of 0 or 1 / (1 - rate), kept until the backward pass as in
    `F.dropout`: on a CPU half the time of `masked_fill` and a product. In 16 bits that factor would
    be rounded; see `zero_and_rescale`.

    Args:
        x: any tensor.
        rate: probability, a number or a tensor that broadcasts.
    """
    if on_gpu(x) and isinstance(rate, float):
        return F.dropout(x, rate)  # one kernel where the rest of this function is six
    if native_available() and not (unreadable(x) or transformed()):
        from dampen.native.ops import dropout  # only where it was built

        return dropout(x, rate)
    if x.dtype.itemsize == 2:
        return zero_and_rescale(x, bernoulli(x.shape, rate, x.device), rate)
    return x * keep_factor(x.shape, rate, x.dtype, x.device)


def zero_and_rescale(x: Tensor, dropped: Tensor, rate: Rate) -> Tensor:
    """Zero what was dropped and divide the rest by 1 - rate.

    In 16 bits a factor of 0 or 1 / (1 - rate) would be rounded, so there the mask and the scale are
    two products, the second with a number of full precision.

    Args:
        x: any tensor.
        dropped: bool, True where a number goes.
        rate: probability, a number or a tensor that broadcasts.
    """
    scale = 1 / (1 - rate)
    # a product with bytes is vectorized on a CPU, one with bools is not
    kept = (~dropped).view(torch.uint8)
    if x.dtype.itemsize == 2:
        return x * kept * scale
    return x * (kept.to(x.dtype) * (scale.to(x.dtype) if isinstance(scale, Tensor) else scale))


def seed_rate(rate: Rate, covered: int) -> Rate:
    """The rate of seeds, each hiding `covered` places, at which a place is hidden with probability
    `rate`.

    1 - (1 - p)^(1 / covered).

    Args:
        rate: probability, a number or a tensor that broadcasts.
        covered: places that one seed hides.
    """
    if isinstance(rate, Tensor):
        return -torch.expm1(torch.log1p(-rate) / covered)
    return -math.expm1(math.log1p(-rate) / covered)


def dilate(mask: Tensor, width: int, dim: int) -> Tensor:
    """Spread each True over the `width` places around it along `dim`.

    Args:
        mask: bool (..., M).
        width: places that one True covers.
        dim: the dimension to spread along.
    """
    if width == 1:
        return mask
    # an even window reaches one place further back
    before, after = width // 2, (width - 1) // 2
    padding = [0, 0] * (-dim - 1) + [before, after]
    padded, length = F.pad(mask, padding), mask.shape[dim]
    spread = padded.narrow(dim, 0, length)
    for offset in range(1, width):
        spread = spread | padded.narrow(dim, offset, length)
    return spread


def any_in_row(mask: Tensor) -> Tensor:
    """Which rows of (..., M) have a True, as (..., 1); eight entries at a time, because `any` over
    bools is slow on a CPU.

    Args:
        mask: bool (..., M).
    """
    padded = F.pad(mask, (0, -mask.shape[-1] % 8)).contiguous()
    words = padded.view(-1, padded.shape[-1]).view(torch.int64)
    return (words.amax(-1) != 0).view(*mask.shape[:-1], 1)


def causal_rows(queries: int, keys: int, rows: slice | None, device: torch.device | None) -> Tensor:
    """The (N, M) bool mask that `is_causal=True` means, or only the given rows of it.

    Args:
        queries: N.
        keys: M.
        rows: the queries that are needed; None: all.
        device: of the result.
    """
    start, stop = (0, queries) if rows is None else (rows.start, rows.stop)
    return torch.arange(keys, device=device) <= torch.arange(start, stop, device=device).unsqueeze(
        -1
    )


HIDDEN = 80.0
"""A float mask hides a key where its value lies this far or further below the largest of its row:
the key's weight is then below 2e-35. So -100, -1e4, -1e9, the smallest number of any dtype and -inf
all hide, and biases (relative positions, ALiBi) stay biases. A row of one and the same number hides
nothing: the softmax does not see it, unless it is -inf, of which SDPA makes zeros."""


class ModelMask:
    """A model's mask, read once: which keys each query sees, and what else it adds to the
    scores.

    Args:
        keep: bool, True is seen.
        bias: added to the scores.
        blind: rows in which no key is seen.
    """

    def __init__(
        self, keep: Tensor, bias: Tensor | None = None, blind: Tensor | None = None
    ) -> None:
        self.keep = keep  # bool, True may be seen
        # added to the scores, 0 at hidden keys; None for a bool mask
        self.bias = bias
        # (..., 1), rows that a number hides from everything: their query is padding, if anything
        self.blind = blind
        # whether every key was found to be seen by some query; False: nobody has looked
        self.shows_all = False


def read_mask(mask: Tensor) -> ModelMask:
    """The rule above for a mask (..., M), bool (True may be seen) or float (added to the scores).
    The last few float masks of a model's forward are remembered, because all its layers get the
    same.

    Args:
        mask: bool (True may be seen) or float (added to the scores), (..., M).
    """
    if mask.dtype == torch.bool:
        return ModelMask(mask)
    memory = _memory_for(mask)
    known = None if memory is None else memory.find([mask])
    if known is None:
        keep, blind = hides(mask)
        # hidden places hold no number that could spread
        known = ModelMask(keep, mask.masked_fill(~keep, 0.0), blind)
        if memory is not None:
            memory.keep([mask], known)
    return known


@torch.no_grad()
def hides(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of a float mask (..., M): the keys that are seen, and the rows (..., 1) in which no key is
    meant to be.

    Args:
        mask: float (..., M).

    >>> keep, blind = hides(torch.tensor([[0.0, -79.9, -80.1], [-1e9, -1e9, -1e9]]))
    >>> keep.tolist(), blind.flatten().tolist()
    ([[True, True, False], [True, True, True]], [False, True])
    """
    if mask.shape[-1] == 0:
        return torch.ones_like(mask, dtype=torch.bool), mask.new_zeros(
            (*mask.shape[:-1], 1), dtype=torch.bool
        )
    largest = mask.amax(-1, keepdim=True)
    # the difference is compared, not the sum: the smallest number less 80 is the smallest number,
    # and -inf + inf hides
    return mask - largest > -HIDDEN, largest <= -HIDDEN


class MaskMemory:
    """What was read of the masks of one forward. A mask is known by its memory and by how often
    that was written to."""

    def __init__(self) -> None:
        self.entries: list[tuple[list[Any], list[int], Any]] = []

    def find(self, parts: Sequence[Any]) -> Any:
        """What was kept for the same tensors, unchanged, and other parts that are equal; else
        None.

        Args:
            parts: what the mask was made of.
        """
        if not _counted(parts):
            return None
        for known, versions, value in self.entries:
            if (
                len(known) == len(parts)
                and all(map(_same, known, parts))
                and versions == versions_of(parts)
            ):
                return value
        return None

    def keep(self, parts: Sequence[Any], value: Any) -> None:
        """Keep what was read of a mask; of many different ones (a bias per layer) only the last
        few."""
        if _counted(parts):
            self.entries = [
                *self.entries[1 - MASKS_KEPT :],
                (list(parts), versions_of(parts), value),
            ]


MASKS_KEPT = 4
"""Enough for an encoder-decoder, or for layers with and without a window in turn."""

# thread -> those of the forwards under way
memories: dict[int, list[MaskMemory | None]] = {}
"""Thread -> those of the models' forwards under way, the innermost last. Whoever runs a forward
appends None and takes the last one away at its end; a memory is made for the
first mask that is read."""


def _memory_for(mask: Tensor) -> MaskMemory | None:
    """Where this mask may be remembered: inside a model's forward, and not where the graph needs it
    anew (a checkpoint's recompute would save other tensors than its forward)."""
    if mask.requires_grad or not has_numbers(mask):
        return None
    return mask_memory()


def mask_memory() -> MaskMemory | None:
    """That of the innermost forward of this thread; None outside of one, in graphs and under
    inference mode."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return None
    under_way = memories.get(threading.get_ident())
    if not under_way:
        return None
    found = under_way[-1]
    if found is None:
        found = under_way[-1] = MaskMemory()
    return found


def _same(a: Any, b: Any) -> bool:
    """Whether two parts are one: tensors that are the same view of the same memory, anything else
    by value."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a is b:
        return True
    views = a._base is not None and a._base is b._base and a.dtype is b.dtype
    return (
        views
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def _counted(parts: Sequence[Any]) -> bool:
    """Whether torch counts how often the tensors are written to: not those made under inference
    mode."""
    return not any(isinstance(t, Tensor) and t.is_inference() for t in parts)


def versions_of(parts: Sequence[Any]) -> list[int]:
    """How often each tensor among some values was written to.

    Args:
        parts: tensors and other values.
    """
    return [version_of(t) for t in parts if isinstance(t, Tensor)]


def keep_keys(
    allowed: Tensor | None,
    hidden: Sequence[Tensor],
    keys: int,
    *,
    guard: bool = True,
    first: int | None = None,
) -> Tensor:
    """Merge what the model allows with what the regularizers hide; a row that lost all keys gets
    back one, at random.

    `allowed` and each of `hidden` broadcast to (B, H, N, keys). A row in which the model itself
    allows nothing stays empty. With m visible keys and rate p the realized rate is p - p^m / m.
    `guard=False` leaves empty rows alone, for callers who know that there are none (`may_empty`).

    Args:
        allowed: what the model allows: bool, True may be seen; None: everything.
        hidden: what regularizers hide: bool, True is hidden.
        keys: M.
        guard: keep at least one of each row.
        first: only so many rows from the first on can be left without keys; None: all.
    """
    dropped = hidden[0]
    for h in hidden[1:]:
        dropped = dropped | h
    keep = ~dropped if allowed is None else allowed & ~dropped
    if keep.shape[-1] != keys:  # the same fate for every key
        keep = keep.expand(*keep.shape[:-1], keys)
    return give_back_one(keep, allowed, search=guard, first=first)


def may_empty(rates: Sequence[Rate | None], keys: int, rows: int) -> bool:
    """Whether independent draws at these rates could plausibly hide all of `keys` keys from one of
    `rows` rows.

    Args:
        rates: of the methods that hide keys; None: unknown.
        keys: M.
        rows: how many rows there are.

    >>> short, long = may_empty([0.4], keys=17, rows=2176), may_empty([0.4], keys=65, rows=2176)
    >>> short, long, may_empty([None], 65, 1)
    (True, False, True)
    """
    # unknown, or not to be known in a graph
    if any(rate is None or isinstance(rate, Tensor) for rate in rates):
        return True
    shown = math.prod(1 - rate for rate in rates if isinstance(rate, float))
    return bool((1 - shown) ** keys * rows > NEGLIGIBLE)


def rows_that_may_empty(
    rates: Sequence[Rate | None], lines: int, start: int, keys: int
) -> int | None:
    """In a causal attention, how many queries from `start` on could plausibly lose all their keys:
    the query at place i sees i + 1 keys, or all where there are fewer. None where any query could,
    or where that is not known.

    Args:
        rates: of the methods that hide keys; None: unknown.
        lines: samples times heads.
        start: the place of the first query.
        keys: how many there are.

    >>> rows_that_may_empty([0.1], lines=256, start=0, keys=64)
    11
    >>> rows_that_may_empty([0.1], lines=256, start=0, keys=4)  # later queries see 4 keys as well
    """
    if any(rate is None or isinstance(rate, Tensor) for rate in rates):
        return None
    hidden = 1 - math.prod(1 - rate for rate in rates if isinstance(rate, float))
    if hidden == 0:
        return 0
    # the chances of the rows beyond sum to at most lines * hidden^(m + 1) / (1 - hidden)
    seen = math.log(NEGLIGIBLE * (1 - hidden) / max(1, lines)) / math.log(hidden)
    few = math.ceil(seen)
    return None if few > keys else max(0, few - start)


def give_back_one(
    keep: Tensor, allowed: Tensor | None, *, search: bool = True, first: int | None = None
) -> Tensor:
    """Where a row of `keep` is all False, make one random key of those `allowed` True again.

    A query without a key has no softmax: plain attention gives NaN there and fused kernels give
    zeros, so that the same draw would mean two things. One key back, and not all, leaves the rate
    as near to the requested one as can be.

    Args:
        keep: bool, True is seen.
        allowed: what the model allows: bool, True may be seen; None: everything.
        search: False where no row can be empty: nothing changes.
        first: look at so many rows only, from the first on; None: at all.
    """
    if keep.shape[-1] == 0:
        return keep
    # drawn whether it is needed or not: a compiled graph cannot look, and must draw what eager mode
    # draws
    seed = torch.randint(_WORD - 1, (), device=keep.device)
    if not search:
        return keep
    rows = keep.shape[-2]
    if first is not None and first < rows and (allowed is None or allowed.shape[-2] == rows):
        part = keep[..., :first, :]
        seen = None if allowed is None else allowed[..., :first, :]
        given = _give_back(part, seen, seed, rows)
        if given is part:
            return keep
        return torch.cat([given, keep[..., first:, :]], dim=-2)
    return _give_back(keep, allowed, seed, rows)


def _give_back(keep: Tensor, allowed: Tensor | None, seed: Tensor, rows: int) -> Tensor:
    """`give_back_one` for all rows of `keep`, which are the first of `rows`."""
    empty = ~any_in_row(keep)
    if keep.device.type == "cpu" and has_numbers(empty) and not empty.any():
        # nearly always: the rest is needed once in many thousand calls
        return keep
    # by the place among all rows, whether all of them are looked at or not
    draw = _hashed(seed, (*keep.shape[:-2], rows, 1))[..., : keep.shape[-2], :]
    if allowed is None:
        key = (draw * keep.shape[-1]).long().clamp(max=keep.shape[-1] - 1)
        back = empty
    else:
        count = allowed.sum(-1, keepdim=True)
        rank = (draw * count).long().minimum((count - 1).clamp(min=0))
        # the visible keys come first
        by_visibility = (~allowed).to(torch.uint8).argsort(dim=-1, stable=True)
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
