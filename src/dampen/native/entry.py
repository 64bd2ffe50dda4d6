"""The one place where tensors become pointers: what is checked first, and the calls of the C
functions.

Nothing else in dampen hands an address to C. `unreadable` says why a kernel may not see a tensor,
and its caller then stays on torch. What was let in is laid out as the kernels read it (`rows_of`),
its address goes out with the room behind it, and the C functions check sizes, strides and room once
more (`checks.h`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dampen._torch import forward_level, functorch_level
from dampen.native import library

# The fields of `struct Problem` (attention.h) and `struct Tapped` (penalty.h), in order. To pack
# bytes is several times quicker than to fill a ctypes structure, and these calls are made in every
# layer.
_PROBLEM = struct.Struct("12q2dQ11Q28q11q")
_TAPPED = struct.Struct("4q7Q9q7qdQ3q")
_PLAIN = (Tensor, torch.nn.Parameter)
# numbers between two rows: `LARGEST` of checks.h
_LONGEST_ROW = 2**31 - 64
_NO_STRIDES = (0, 0, 0)


class NativeError(RuntimeError):
    """A kernel refused its arguments. Nothing was read or written; what should have been checked
    before was not."""


# --- what may be read


def unreadable(t: Tensor, dtype: torch.dtype = torch.float32) -> str:
    """Why no kernel may read this tensor, in a few words; "" where one may."""
    found = first_unreadable((t,), dtype)
    if found is None:
        return ""
    return found[1]


def first_unreadable(
    tensors: Sequence[Tensor | None], dtype: torch.dtype = torch.float32
) -> tuple[int, str] | None:
    """The first of several tensors that no kernel may read, and why; None where all can be read.

    One loop and no function per tensor: this runs for every tensor of every layer and step. In a
    graph only what a fake tensor knows is checked: the operator checks the rest of the numbers
    themselves.
    """
    compiling, size = torch.compiler.is_compiling(), dtype.itemsize
    for i, t in enumerate(tensors):
        if t is None:
            continue
        if t.dtype is not dtype:
            return i, str(t.dtype).removeprefix("torch.")
        if not t.is_cpu:
            return i, f"on {t.device}"
        if t.layout is not torch.strided:
            return i, str(t.layout).removeprefix("torch.")
        if compiling:
            continue
        if type(t) not in _PLAIN:
            return i, f"a {type(t).__name__}"
        if t.is_neg():
            return i, "a view that changes signs"
        address = t.data_ptr()
        if not address and t.numel():
            return i, "without memory (freed, or sharded away)"
        if address % size:
            return i, "not aligned in memory"
    return None


def transformed() -> str:
    """Why no kernel may run now, whatever the tensors are: they can be differentiated backward
    alone. "" if one may."""
    if torch.compiler.is_compiling():
        return ""
    if functorch_level() is not None:
        return "inside torch.func"
    if torch.jit.is_tracing():
        return "inside torch.jit.trace"
    return "in forward-mode differentiation" if forward_level() >= 0 else ""


def unfit_for_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """Why the attention kernel cannot run on these now, in a few words; "" where it can."""
    if why := transformed():
        return why
    if (found := first_unreadable((q, k, v))) is not None:
        return f"{'qkv'[found[0]]} is {found[1]}"
    if mask is not None and (found := first_unreadable((mask,), torch.bool)) is not None:
        return f"the mask is {found[1]}"
    return ""


def require(tensors: Sequence[Tensor | None], dtype: torch.dtype = torch.float32) -> None:
    """`NativeError` for the first tensor that is unreadable."""
    found = first_unreadable(tensors, dtype)
    if found is not None:
        i, why = found
        shape = tuple(tensors[i].shape)  # type: ignore[union-attr]
        raise NativeError(
            f"dampen's native kernels were given a tensor of shape {shape} that is {why}. They "
            f"read plain {str(dtype).removeprefix('torch.')} tensors on the CPU; all else runs on "
            "torch (DAMPEN_NATIVE=0 switches the kernels off)."
        )


# --- how it is laid out


def settled(t: Tensor) -> Tensor:
    """The same numbers as a kernel may read them: no change of signs on the way, aligned in
    memory."""
    t = t.resolve_neg()
    if t.data_ptr() % t.itemsize:
        return t.clone()
    return t


def rows_of(*tensors: Tensor) -> list[Tensor]:
    """Tensors (B, H, N, D) with rows that BLAS can read: numbers side by side, rows that do not
    overlap.

    An axis of one entry has whatever stride it has, here and after `contiguous`; C puts one there
    that fits (`fitting`)."""
    found = []
    for t in tensors:
        tokens, size = t.shape[2:]
        one, row = t.stride()[2:]
        if not ((row == 1 or size == 1) and (tokens == 1 or size <= one <= _LONGEST_ROW)):
            t = t.clone(memory_format=torch.contiguous_format)
        found.append(t)
    return found


def _at(t: Tensor | None) -> tuple[int, int]:
    """An address, and how many numbers lie from there to the end of the memory."""
    if t is None:
        return 0, 0
    size = t.itemsize
    return t.data_ptr(), int(t.untyped_storage().nbytes() // size - t.storage_offset())


def _extent(t: Tensor) -> int:
    """How many numbers lie from the first to the last of a tensor, which is no more than its memory
    holds. The storage itself is not read: a Python object for it would keep autograd from adding to
    a gradient in place."""
    extent = 1
    for n, step in zip(t.shape, t.stride(), strict=True):
        extent += (n - 1) * step
    return extent


# --- the calls


def _raise_refused(refused: bytes) -> NoReturn:
    raise NativeError(
        f"dampen's native kernels refused what they were given: {refused.decode()}. Nothing was "
        "read or written. "
        "Please report this; DAMPEN_NATIVE=0 switches the kernels off until then."
    )


class AttentionSettings(NamedTuple):
    """What a call of the attention kernel gets besides its tensors."""

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
    by_heads = (q, k, v, o, *grads)
    strides: list[int] = []
    for t in by_heads:
        strides += _NO_STRIDES if t is None else t.stride()[:3]
    # an address, and how many numbers lie from there to the end of the memory: `_at`, without the
    # calls
    pointers: list[int] = []
    rooms: list[Any] = []
    for t in (*by_heads, keep, lse, top):
        pointers.append(0 if t is None else t.data_ptr())
        rooms.append(
            0 if t is None else t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()
        )
    q_at, k_at, v_at, o_at, go_at, dq_at, dk_at, dv_at, keep_at, lse_at, top_at = pointers
    (
        room_q,
        room_k,
        room_v,
        room_o,
        room_go,
        room_dq,
        room_dk,
        room_dv,
        room_keep,
        room_lse,
        room_top,
    ) = rooms
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
        *(q_at, k_at, v_at, go_at, keep_at, o_at, lse_at, top_at, dq_at, dk_at, dv_at),
        *strides,
        *((0, 0, 0, 0) if keep is None else keep.stride()),
        *(
            room_q,
            room_k,
            room_v,
            room_go,
            room_keep,
            room_o,
            room_lse,
            room_top,
            room_dq,
            room_dk,
            room_dv,
        ),
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
    if keep is not None:
        require((keep,), torch.bool)
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_attention(_problem(settings, q, k, v, keep, top, o, lse)):
        _raise_refused(refused)


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
    if keep is not None:
        require((keep,), torch.bool)
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_attention_backward(
        _problem(settings, q, k, v, keep, top, o, lse, grads)
    ):
        _raise_refused(refused)


def kept_keys(
    q: Tensor, k: Tensor, keep: Tensor | None, top: Tensor, settings: AttentionSettings
) -> Tensor:
    """Which keys attention shows each query under a seed: bool (B, H, N, M)."""
    require((q, k, top))
    if keep is not None:
        require((keep,), torch.bool)
    kept = torch.empty(*q.shape[:3], k.shape[2], dtype=torch.uint8, device="cpu")
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_kept(_problem(settings, q, k, None, keep, top), *_at(kept)):
        _raise_refused(refused)
    return kept.view(torch.bool)


def dropped(x: Tensor, seed: int, rate: float) -> Tensor:
    """Inverted dropout of a contiguous tensor."""
    require((x,))
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_dropout(
        *_at(x), *_at(y), x.numel(), rate, seed, torch.get_num_threads()
    ):
        _raise_refused(refused)
    return y


def factors(shape: Sequence[int], seed: int, rate: float) -> Tensor:
    """0 or 1 / (1 - rate): what `dropped` multiplies by under the same seed."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu")
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_factors(*_at(out), out.numel(), rate, seed):
        _raise_refused(refused)
    return out


def hidden_keys(slabs: int, queries: int, keys: int, rate: float, seed: int) -> Tensor:
    """Which keys attention hides under a seed where the model shows all: bool (slabs, queries,
    keys), True hides."""
    out = torch.empty(slabs, queries, keys, dtype=torch.uint8, device="cpu")
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_mask(*_at(out), slabs, queries, keys, rate, seed):
        _raise_refused(refused)
    return out.view(torch.bool)


def draws(count: int, seed: int, stream: int = 0, slab: int = 0) -> Tensor:
    """The first 16-bit draws of a slab, as int16: for tests of their quality."""
    out = torch.empty(count, dtype=torch.int16, device="cpu")
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_draws(*_at(out), count, seed, stream, slab):
        _raise_refused(refused)
    return out


class Place(NamedTuple):
    """Where a row of numbers is: a tensor, and from which of its numbers on."""

    of: Tensor
    start: int = 0


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
    weights: Tensor | None = None  # of the vectors, by slab and row; None: all are 1
    weights_strides: tuple[int, int] = (0, 1)


def sum_squares(tapped: Sequence[TapJob]) -> None:
    """Add to each total, and write each sum."""
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_taps(_packed(tapped), len(tapped)):
        _raise_refused(refused)


def spread_squares(tapped: Sequence[TapJob]) -> None:
    """Write each gradient, and those of the biases."""
    kernels = library.loaded or library.library()
    if refused := kernels.dampen_taps_backward(_packed(tapped), len(tapped)):
        _raise_refused(refused)


def _packed(tapped: Sequence[TapJob]) -> bytes:
    """Several `struct Tapped`, one behind the other."""
    read: list[Tensor | None] = []
    for job in tapped:
        read += (job.y, job.through, None if job.bias is None else job.bias.of, job.weights)
    require(read)
    packed = []
    for job in tapped:
        pointers: list[int] = []
        rooms: list[Any] = []
        for place in (job.y, job.bias, job.through, job.out, job.total, job.sums, job.to_bias):
            if place is None:
                pointers.append(0)
                rooms.append(0)
                continue
            t, start = place if isinstance(place, Place) else (place, 0)
            size = t.itemsize
            pointers.append(t.data_ptr() + start * size)
            # called some hundred times a step, mostly of contiguous tensors
            rooms.append((t.numel() if t.is_contiguous() else _extent(t)) - start)
        strides = (*job.strides, *job.through_strides, *job.out_strides)
        w = job.weights
        weights = (0, 0, 0, 0)
        if w is not None:
            weights = (w.data_ptr(), *job.weights_strides, _extent(w))
        packed.append(_TAPPED.pack(*job.shape, *pointers, *strides, *rooms, job.scale, *weights))
    return b"".join(packed)
