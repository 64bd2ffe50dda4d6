"""The one place where tensors become pointers: what is asked of them first, and the calls of the C functions.

Nothing else in dampen hands an address to C. `unreadable` says why a kernel may not see a tensor, and its caller then
stays on torch. What was let in is laid out as the kernels read it (`rows_of`, `strides_of`), its address goes out with
the room behind it, and the C functions check sizes, strides and room once more (`checks.h`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dampen._torch import in_forward_mode, in_functorch
from dampen.native.library import library

# The fields of `struct Problem` (attention.h) and `struct Tapped` (penalty.h), in order. To pack bytes is several times
# quicker than to fill a ctypes structure, and these calls are made in every layer.
_PROBLEM = struct.Struct("12q2dQ11Q28q11q")
_TAPPED = struct.Struct("4q7Q9q7qd")
_PLAIN = (Tensor, torch.nn.Parameter)
_LONGEST_ROW = 2**31 - 64  # numbers between two rows: `LARGEST` of checks.h
_NO_STRIDES = (0, 0, 0)


class NativeError(RuntimeError):
    """A kernel refused its arguments. Nothing was read or written; what should have been asked before was not."""


# --- what may be read -------------------------------------------------------------------------------------------------


def unreadable(t: Tensor, dtype: torch.dtype = torch.float32) -> str:
    """Why no kernel may read this tensor, in a few words; "" where one may.

    In a graph only what a fake tensor knows is asked: the operator asks the rest of the numbers themselves."""
    if t.dtype is not dtype:
        return str(t.dtype).removeprefix("torch.")
    if not t.is_cpu:
        return f"on {t.device}"
    if t.layout is not torch.strided:
        return str(t.layout).removeprefix("torch.")
    if torch.compiler.is_compiling():
        return ""
    if type(t) not in _PLAIN:
        return f"a {type(t).__name__}"
    if t.is_neg() or t.is_conj():
        return "a view that changes signs"
    if t.untyped_storage().nbytes() == 0 and t.numel():
        return "without memory (freed, or sharded away)"
    return "not aligned in memory" if t.data_ptr() % t.itemsize else ""


def transformed() -> str:
    """Why no kernel may run now, whatever the tensors are: they can be differentiated backward alone. "" if one may."""
    if torch.compiler.is_compiling():
        return ""
    if in_functorch():
        return "inside torch.func"
    return "in forward-mode differentiation" if in_forward_mode() else ""


def require(dtype: torch.dtype = torch.float32, **tensors: Tensor | None) -> None:
    """`NativeError` for the first tensor that is unreadable."""
    for name, t in tensors.items():
        if t is not None and (why := unreadable(t, dtype)):
            raise NativeError(
                f"dampen's native kernels were given {name} as {why}. They read plain {dtype} tensors on the CPU; "
                "everything else runs on torch (DAMPEN_NATIVE=0 switches the kernels off)."
            )


# --- how it is laid out -----------------------------------------------------------------------------------------------


def settled(t: Tensor) -> Tensor:
    """The same numbers as a kernel may read them: no change of signs on the way, aligned in memory."""
    t = t.resolve_neg()
    return t.clone() if t.data_ptr() % t.itemsize else t


def rows_of(t: Tensor) -> Tensor:
    """(B, H, N, D) with rows that BLAS can read: numbers side by side, rows that do not overlap.

    An axis of one entry has whatever stride it has, here and in `contiguous`; `strides_of` says one that fits."""
    tokens, size = t.shape[2:]
    one, row = t.stride()[2:]
    if (row == 1 or size == 1) and (tokens == 1 or size <= one <= _LONGEST_ROW):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def strides_of(t: Tensor) -> tuple[int, int, int]:
    """The strides of (B, H, N, D) but the last; where an axis has one entry, those that it would have in rows."""
    (batch, heads, tokens, size), (s0, s1, s2, _) = t.shape, t.stride()
    return s0 if batch > 1 else 0, s1 if heads > 1 else 0, s2 if tokens > 1 else size


def _at(t: Tensor | None) -> tuple[int, int]:
    """An address, and how many numbers lie from there to the end of the memory."""
    if t is None:
        return 0, 0
    size = t.itemsize
    return t.data_ptr(), t.untyped_storage().nbytes() // size - t.storage_offset()


# --- the calls --------------------------------------------------------------------------------------------------------


def _check(refused: bytes | None) -> None:
    if refused is not None:
        raise NativeError(
            f"dampen's native kernels refused what they were given: {refused.decode()}. Nothing was read or written. "
            "Please report this; DAMPEN_NATIVE=0 switches the kernels off until then."
        )


class Settings(NamedTuple):
    """What a call of the attention kernel is told besides its tensors."""

    seed: int
    rate: float
    causal: bool
    scale: float
    mode: int
    num: int
    den: int


def _problem(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    top: Tensor,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    grads: Sequence[Tensor] = (),
) -> bytes:
    """`struct Problem`. `grads`: that of the output, and those of q, k and v to be written."""
    (b, h, n, d), (_, g, m, _) = q.shape, k.shape
    go, *to = grads or (None, None, None, None)
    pointers, rooms = zip(*(_at(t) for t in (q, k, v, go, keep, o, lse, top, *to)), strict=True)
    strides = [s for t in (q, k, v, o, go, *to) for s in (_NO_STRIDES if t is None else strides_of(t))]
    return _PROBLEM.pack(
        *(b, h, g, n, m, d, d if v is None else v.shape[3], torch.get_num_threads(), settings.mode, settings.causal),
        *(settings.num, settings.den, settings.scale, settings.rate, settings.seed),
        *pointers,
        *strides,
        *((0, 0, 0, 0) if keep is None else keep.stride()),
        *rooms,
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, o: Tensor, lse: Tensor, top: Tensor, settings: Settings
) -> None:
    """Write attention into o, the logarithms of its sums into lse and thresholds into top."""
    require(q=q, k=k, v=v)
    require(torch.bool, mask=keep)
    _check(library().dampen_attention(_problem(settings, q, k, v, keep, top, o, lse)))


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    o: Tensor,
    lse: Tensor,
    top: Tensor,
    grads: Sequence[Tensor],
    settings: Settings,
) -> None:
    """Write the gradients of q, k and v into the last three of `grads`, from that of o, the first."""
    require(q=q, k=k, v=v, grad=grads[0], output=o, lse=lse, top=top)
    require(torch.bool, mask=keep)
    _check(library().dampen_attention_backward(_problem(settings, q, k, v, keep, top, o, lse, grads)))


def kept_keys(q: Tensor, k: Tensor, keep: Tensor | None, top: Tensor, settings: Settings) -> Tensor:
    """Which keys attention shows each query under a seed: bool (B, H, N, M)."""
    require(q=q, k=k, top=top)
    require(torch.bool, mask=keep)
    kept = torch.empty(*q.shape[:3], k.shape[2], dtype=torch.uint8, device="cpu")
    _check(library().dampen_kept(_problem(settings, q, k, None, keep, top), *_at(kept)))
    return kept.view(torch.bool)


def dropped(x: Tensor, seed: int, rate: float) -> Tensor:
    """Inverted dropout of a contiguous tensor."""
    require(x=x)
    x = x.contiguous()
    y = torch.empty_like(x)
    _check(library().dampen_dropout(*_at(x), *_at(y), x.numel(), rate, seed, torch.get_num_threads()))
    return y


def factors(shape: Sequence[int], seed: int, rate: float) -> Tensor:
    """0 or 1 / (1 - rate): what `dropped` multiplies by under the same seed."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    _check(library().dampen_factors(*_at(out), out.numel(), rate, seed))
    return out


def hidden_keys(slabs: int, queries: int, keys: int, rate: float, seed: int) -> Tensor:
    """Which keys attention hides under a seed where the model shows all: bool (slabs, queries, keys), True hides."""
    out = torch.empty(slabs, queries, keys, dtype=torch.uint8, device="cpu")
    _check(library().dampen_mask(*_at(out), slabs, queries, keys, rate, seed))
    return out.view(torch.bool)


def draws(count: int, seed: int, stream: int = 0, slab: int = 0) -> Tensor:
    """The first 16-bit draws of a slab, as int16: for tests of their quality."""
    out = torch.empty(count, dtype=torch.int16, device="cpu")
    _check(library().dampen_draws(*_at(out), count, seed, stream, slab))
    return out


class Place(NamedTuple):
    """Where a row of numbers stands: a tensor, and from which of its numbers on."""

    of: Tensor
    start: int = 0


def _placed(place: Place | None) -> tuple[int, int]:
    if place is None:
        return 0, 0
    address, room = _at(place.of)
    return address + place.start * place.of.itemsize, room - place.start


class Tapped(NamedTuple):
    """One tensor whose squares are summed up, as slabs, groups, rows and numbers; see `struct Tapped`."""

    shape: tuple[int, int, int, int]
    y: Tensor
    strides: tuple[int, ...]
    scale: float
    bias: Place | None = None
    total: Tensor | None = None
    sums: Place | None = None
    through: Tensor | None = None
    through_strides: tuple[int, ...] = _NO_STRIDES
    out: Tensor | None = None
    out_strides: tuple[int, ...] = _NO_STRIDES
    to_bias: Place | None = None

    def packed(self) -> bytes:
        require(output=self.y, through=self.through, bias=None if self.bias is None else self.bias.of)
        at = (_at(self.y), _placed(self.bias), _at(self.through), _at(self.out), _at(self.total))
        pointers, rooms = zip(*at, _placed(self.sums), _placed(self.to_bias), strict=True)
        strides = (*self.strides, *self.through_strides, *self.out_strides)
        return _TAPPED.pack(*self.shape, *pointers, *strides, *rooms, self.scale)


def sum_squares(tapped: Sequence[Tapped]) -> None:
    """Add to each total, and write each sum."""
    _check(library().dampen_taps(b"".join(t.packed() for t in tapped), len(tapped)))


def spread_squares(tapped: Sequence[Tapped]) -> None:
    """Write each gradient, and those of the biases."""
    _check(library().dampen_taps_backward(b"".join(t.packed() for t in tapped), len(tapped)))
