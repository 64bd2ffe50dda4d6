"""The one place where tensors become pointers: what is asked of them first, and the calls of the C
functions.

Nothing else in dampen hands an address to C. `unreadable` says why a kernel may not see a tensor,
and its caller then stays on torch. What was let in is laid out as the kernels read it (`rows_of`),
its address goes out with the room behind it, and the C functions check sizes, strides and room once
more (`checks.h`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dampen._torch import in_forward_mode, in_functorch
from dampen.native.library import library

# The fields of `struct Problem` (attention.h) and `struct Tapped` (penalty.h), in order. To pack
# bytes is several times quicker than to fill a ctypes structure, and these calls are made in every
# layer.
_PROBLEM = struct.Struct("12q2dQ11Q28q11q")
_TAPPED = struct.Struct("4q7Q9q7qd")
_PLAIN = (Tensor, torch.nn.Parameter)
# numbers between two rows: `LARGEST` of checks.h
_LONGEST_ROW = 2**31 - 64
_NO_STRIDES = (0, 0, 0)


class NativeError(RuntimeError):
    """A kernel refused its arguments. Nothing was read or written; what should have been asked
    before was not."""


# --- what may be read


def unreadable(t: Tensor, dtype: torch.dtype = torch.float32) -> str:
    """Why no kernel may read this tensor, in a few words; "" where one may.

    In a graph only what a fake tensor knows is asked: the operator asks the rest of the numbers
    themselves."""
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
    if t.is_neg():
        return "a view that changes signs"
    address = t.data_ptr()
    if not address and t.numel():
        return "without memory (freed, or sharded away)"
    if address % dtype.itemsize:
        return "not aligned in memory"
    return ""


def transformed() -> str:
    """Why no kernel may run now, whatever the tensors are: they can be differentiated backward
    alone. "" if one may."""
    if torch.compiler.is_compiling():
        return ""
    if in_functorch():
        return "inside torch.func"
    if torch.jit.is_tracing():
        return "inside torch.jit.trace"
    if in_forward_mode():
        return "in forward-mode differentiation"
    return ""


def require(tensors: Iterable[Tensor | None], dtype: torch.dtype = torch.float32) -> None:
    """`NativeError` for the first tensor that is unreadable."""
    for t in tensors:
        if t is not None and (why := unreadable(t, dtype)):
            raise NativeError(
                f"dampen's native kernels were given a tensor of shape {tuple(t.shape)} that is "
                f"{why}. They read plain "
                f"{str(dtype).removeprefix('torch.')} tensors on the CPU; everything else runs on "
                "torch "
                "(DAMPEN_NATIVE=0 switches the kernels off)."
            )


# --- how it is laid out


def settled(t: Tensor) -> Tensor:
    """The same numbers as a kernel may read them: no change of signs on the way, aligned in
    memory."""
    t = t.resolve_neg()
    if t.data_ptr() % t.itemsize:
        return t.clone()
    return t


def rows_of(t: Tensor) -> Tensor:
    """(B, H, N, D) with rows that BLAS can read: numbers side by side, rows that do not overlap.

    An axis of one entry has whatever stride it has, here and after `contiguous`; C puts one there
    that fits (`fitting`)."""
    tokens, size = t.shape[2:]
    one, row = t.stride()[2:]
    if (row == 1 or size == 1) and (tokens == 1 or size <= one <= _LONGEST_ROW):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _at(t: Tensor | None) -> tuple[int, int]:
    """An address, and how many numbers lie from there to the end of the memory."""
    if t is None:
        return 0, 0
    size = t.itemsize
    return t.data_ptr(), int(t.untyped_storage().nbytes() // size - t.storage_offset())


# --- the calls


def _check(refused: bytes | None) -> None:
    if refused is not None:
        raise NativeError(
            f"dampen's native kernels refused what they were given: {refused.decode()}. Nothing "
            "was read or written. "
            "Please report this; DAMPEN_NATIVE=0 switches the kernels off until then."
        )


class AttentionSettings(NamedTuple):
    """What a call of the attention kernel is told besides its tensors."""

    seed: int
    rate: float
    causal: bool
    scale: float
    mode: int
    num: int
    den: int


def _problem(
    settings: AttentionSettings,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    keep: Tensor | None,
    top: Tensor,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    grads: Sequence[Tensor | None] = (None, None, None, None),
) -> bytes:
    """`struct Problem`. `grads`: that of the output, and those of q, k and v to be written."""
    (b, h, n, d), (_, g, m, _) = q.shape, k.shape
    pointers: list[int] = []
    strides: list[int] = []
    rooms: list[int] = []
    for t in (q, k, v, o, *grads):
        if t is None:
            pointers.append(0)
            strides += _NO_STRIDES
            rooms.append(0)
            continue
        pointers.append(t.data_ptr())
        strides += t.stride()[:3]
        rooms.append(int(t.untyped_storage().nbytes() // 4 - t.storage_offset()))
    (q_at, k_at, v_at, o_at, *to), (*rooms_in, room_o, room_go, room_dq, room_dk, room_dv) = (
        pointers,
        rooms,
    )
    keep_at, room_keep = _at(keep)
    lse_at, room_lse = _at(lse)
    top_at, room_top = _at(top)
    return _PROBLEM.pack(
        *(
            b,
            h,
            g,
            n,
            m,
            d,
            d if v is None else v.shape[3],
            torch.get_num_threads(),
            settings.mode,
            settings.causal,
        ),
        *(settings.num, settings.den, settings.scale, settings.rate, settings.seed),
        *(q_at, k_at, v_at, to[0], keep_at, o_at, lse_at, top_at, *to[1:]),
        *strides,
        *((0, 0, 0, 0) if keep is None else keep.stride()),
        *(*rooms_in, room_go, room_keep, room_o, room_lse, room_top, room_dq, room_dk, room_dv),
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    o: Tensor,
    lse: Tensor,
    top: Tensor,
    settings: AttentionSettings,
) -> None:
    """Write attention into o, the logarithms of its sums into lse and thresholds into top."""
    require((q, k, v))
    require((keep,), torch.bool)
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
    settings: AttentionSettings,
) -> None:
    """Write the gradients of q, k and v into the last three of `grads`, from that of o, the
    first."""
    require((q, k, v, grads[0], o, lse, top))
    require((keep,), torch.bool)
    _check(
        library().dampen_attention_backward(_problem(settings, q, k, v, keep, top, o, lse, grads))
    )


def kept_keys(
    q: Tensor, k: Tensor, keep: Tensor | None, top: Tensor, settings: AttentionSettings
) -> Tensor:
    """Which keys attention shows each query under a seed: bool (B, H, N, M)."""
    require((q, k, top))
    require((keep,), torch.bool)
    kept = torch.empty(*q.shape[:3], k.shape[2], dtype=torch.uint8, device="cpu")
    _check(library().dampen_kept(_problem(settings, q, k, None, keep, top), *_at(kept)))
    return kept.view(torch.bool)


def dropped(x: Tensor, seed: int, rate: float) -> Tensor:
    """Inverted dropout of a contiguous tensor."""
    require((x,))
    x = x.contiguous()
    y = torch.empty_like(x)
    _check(
        library().dampen_dropout(*_at(x), *_at(y), x.numel(), rate, seed, torch.get_num_threads())
    )
    return y


def factors(shape: Sequence[int], seed: int, rate: float) -> Tensor:
    """0 or 1 / (1 - rate): what `dropped` multiplies by under the same seed."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    _check(library().dampen_factors(*_at(out), out.numel(), rate, seed))
    return out


def hidden_keys(slabs: int, queries: int, keys: int, rate: float, seed: int) -> Tensor:
    """Which keys attention hides under a seed where the model shows all: bool (slabs, queries,
    keys), True hides."""
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


class TapJob(NamedTuple):
    """One tensor whose squares are summed up, as slabs, groups, rows and numbers; see `struct
    Tapped`."""

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
        require((self.y, self.through, None if self.bias is None else self.bias.of))
        at = (_at(self.y), _placed(self.bias), _at(self.through), _at(self.out), _at(self.total))
        pointers, rooms = zip(*at, _placed(self.sums), _placed(self.to_bias), strict=True)
        strides = (*self.strides, *self.through_strides, *self.out_strides)
        return _TAPPED.pack(*self.shape, *pointers, *strides, *rooms, self.scale)


def sum_squares(tapped: Sequence[TapJob]) -> None:
    """Add to each total, and write each sum."""
    _check(library().dampen_taps(b"".join(t.packed() for t in tapped), len(tapped)))


def spread_squares(tapped: Sequence[TapJob]) -> None:
    """Write each gradient, and those of the biases."""
    _check(library().dampen_taps_backward(b"".join(t.packed() for t in tapped), len(tapped)))
