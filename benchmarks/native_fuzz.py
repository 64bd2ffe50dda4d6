"""Random calls of the native kernels against float64: shapes, layouts, dtypes, masks, default dtype and device.

    python -m benchmarks.native_fuzz [--cases 2000] [--first 0] [--guarded] [--sanitize] [--record]

A case is a function of its number: `--first 1234 --cases 1` runs one again. `--guarded` puts what
the kernels read at the end of its memory, with a page without access behind it: a read past the end
ends the process. `--sanitize` builds the kernels with AddressSanitizer and
UndefinedBehaviorSanitizer in a cache of their own and runs under them. `--record` runs the cases in
processes of 2,500, so that one that crashes is counted, and keeps the counts in
`benchmarks/records/native_fuzz.json`. The same command continues an interrupted record.

Attention is compared with `F.scaled_dot_product_attention` in float64, forward and backward, with
the mask that was drawn: the same call under the same seed, on values that are the unit vectors,
gives the weights, and a weight of 0 is a hidden key. That mask must lie in the model's, leave every
query a key, and hide as many keys as the rate says. Dropout and the penalties' taps are compared
with their formulas. What the kernels must not read has to run on torch, and give the same numbers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import math
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import dampen
from dampen import DropKey, HardMasking
from dampen.functional.explicit import layers
from dampen.functional.explicit import squares as taps
from dampen.kernels.attend import Needs, attend
from dampen.native import library
from dampen.regularizer import Regularizer

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of a number of size 1 and of a sum of sizes that grow with it."""
MAP_NORESERVE = 0x4000
"""Linux: Python 3.11 has no name for it. Address space is taken, memory is not."""
CHUNK = 2_500
"""Cases of one process under `--record`."""
RECORD = Path(__file__).parent / "records" / "native_fuzz.json"
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -g -O1"


# --- layouts ----------------------------------------------------------------------------------------------------------

Make = Callable[[random.Random, tuple[int, int, int, int], torch.dtype], Tensor]


def _normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    t = torch.randn(shape, dtype=torch.float32, device="cpu").to(dtype)
    return t.masked_fill_(t == 0, 1.0)  # a zero does not tell whether it was dropped


def _permuted(*order: int) -> Make:
    """Axes that lie in memory in another order."""

    def make(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        back = [order.index(axis) for axis in range(4)]
        return _normal(tuple(shape[axis] for axis in order), dtype).permute(back)

    return make


def _expanded(axis: int) -> Make:
    def make(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
        return _normal(tuple(1 if a == axis else n for a, n in enumerate(shape)), dtype).expand(
            shape
        )

    return make


def _cut(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Channels out of the middle of longer rows."""
    b, h, n, d = shape
    before, after = draw.randrange(5), draw.randrange(5)
    return _normal((b, h, n, before + d + after), dtype)[..., before : before + d]


def _every_second_token(
    draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    b, h, n, d = shape
    return _normal((b, h, 2 * n, d), dtype)[:, :, 1::2]


def _every_second_channel(
    draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    b, h, n, d = shape
    return _normal((b, h, n, 2 * d), dtype)[..., 1::2]


def _odd_single_axes(
    draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    """Strides that mean nothing, where an axis has one entry; torch lets them through everything."""
    t = _normal(shape, dtype)
    strides = [
        draw.choice([0, 1, 3, 2**40]) if n == 1 else s
        for n, s in zip(t.shape, t.stride(), strict=True)
    ]
    return t.as_strided(t.shape, strides) if t.numel() else t


def _fused(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """One third of a fused projection."""
    b, h, n, d = shape
    return _normal((b, n, 3, h, d), dtype)[:, :, draw.randrange(3)].transpose(1, 2)


def _windows(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Tokens that overlap in memory."""
    b, h, n, d = shape
    t = _normal((b, h, n + d), dtype)
    return t.unfold(-1, d, 1)[:, :, :n]


def _negated(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    return torch._neg_view(_normal(shape, dtype))


def _conjugated(
    draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    """The imaginary part of a conjugate: every second number, with a sign that is changed when it is read."""
    whole = torch.float64 if dtype is torch.float64 else torch.float32
    imaginary = torch.complex(_normal(shape, whole), _normal(shape, whole)).conj().imag
    return imaginary if imaginary.dtype is dtype else _negated(draw, shape, dtype)


def _misaligned(t: Tensor) -> Tensor:
    if not t.numel():
        return t
    room = bytearray(t.numel() * t.itemsize + 1)
    odd = torch.frombuffer(room, dtype=t.dtype, offset=1).view(t.shape)
    odd.copy_(t)
    return odd


def _off_by_a_byte(
    draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor:
    return _misaligned(_normal(shape, dtype))


def _far_apart(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """One axis whose stride does not fit into 32 bits, in memory that exists only where it is written."""
    t = _normal(shape, dtype)
    long = [axis for axis in range(3) if shape[axis] > 1]
    if not long or not t.numel():
        return t
    strides, axis = list(t.stride()), draw.choice(long)
    strides[axis] = 2**31 + draw.randrange(16) * t.stride(2)
    span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    room = mmap.mmap(-1, span * t.itemsize, flags=flags)
    far = torch.frombuffer(room, dtype=dtype, count=span).as_strided(shape, strides)
    return far.copy_(t)


LAYOUTS: dict[str, Make] = {
    "contiguous": _permuted(0, 1, 2, 3),
    "heads last": _permuted(0, 2, 1, 3),
    "tokens last": _permuted(0, 1, 3, 2),
    "channels first": _permuted(0, 3, 2, 1),
    "reversed": _permuted(3, 2, 1, 0),
    "same for all samples": _expanded(0),
    "same for all heads": _expanded(1),
    "same for all tokens": _expanded(2),
    "same in all channels": _expanded(3),
    "cut from longer rows": _cut,
    "every second token": _every_second_token,
    "every second channel": _every_second_channel,
    "single axes with odd strides": _odd_single_axes,
    "fused projection": _fused,
    "overlapping tokens": _windows,
    "negative bit": _negated,
    "part of a conjugate": _conjugated,
    "off by a byte": _off_by_a_byte,
    "gigabytes apart": _far_apart,
}
READ_ON_TORCH = {"negative bit", "part of a conjugate", "off by a byte"}
"""Layouts that no kernel may read."""


# --- memory with a guard behind it ------------------------------------------------------------------------------------


def guarded(t: Tensor) -> Tensor:
    """The same numbers in the same strides, at the very end of memory that has a page without access behind it."""
    if t.is_neg() or t.data_ptr() % t.itemsize or not t.numel():
        return t
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if span > 2**31:  # too large to be copied
        return t
    size, page = span * t.itemsize, mmap.PAGESIZE
    room = mmap.mmap(-1, (size + page - 1) // page * page + page)
    end = len(room) - page
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + end), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(room, dtype=t.dtype, count=span, offset=end - size)
    flat.copy_(t.detach().as_strided((span,), (1,)))
    return flat.as_strided(t.shape, t.stride())


# --- a case -----------------------------------------------------------------------------------------------------------


class Wrong(AssertionError):
    """A case whose numbers are not those of its reference."""


@dataclass
class Counts:
    """What was run, by kind, layout and kernel; and keys that could be hidden, that were, and that should have been."""

    runs: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[str] = field(default_factory=list)
    hidden: int = 0
    expected: float = 0.0
    variance: float = 0.0

    def add(self, more: dict[str, Any]) -> None:
        """Count what another process has counted, as its fields."""
        self.runs.update(more["runs"])
        self.failed += more["failed"]
        self.hidden += more["hidden"]
        self.expected += more["expected"]
        self.variance += more["variance"]

    def z(self) -> float:
        """How far the number of hidden keys is from the rates, in standard deviations."""
        return (self.hidden - self.expected) / math.sqrt(self.variance) if self.variance else 0.0


def close(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise unless the numbers agree; not finite must be where it should."""
    if found.shape != expected.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    ours, theirs = found.detach().double(), expected.detach()
    if not torch.equal(ours.isnan(), theirs.isnan()):
        raise Wrong(
            f"{what}: NaN in {int(ours.isnan().sum())} places, expected in {int(theirs.isnan().sum())}"
        )
    there = ~theirs.isnan()
    if not there.any():
        return
    size = max(1.0, float(theirs[there].abs().max()))
    off = float((ours - theirs)[there].abs().max())
    if not off <= tolerance * size:
        raise Wrong(f"{what}: off by {off:.3g}, where numbers reach {size:.3g}")


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Another default dtype and device, as a user's program may have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if device == "cpu":
            yield
        else:
            with torch.device(device):
                yield
    finally:
        torch.set_default_dtype(before)


SIZES = (1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 24, 31, 32, 33, 40, 64, 65, 70)
CHANNELS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 32, 33, 48, 64, 65)
DTYPES = (torch.float32,) * 10 + (torch.float64, torch.bfloat16, torch.float16)


def _mask(draw: random.Random, shape: tuple[int, int, int, int]) -> Tensor | None:
    """A model's mask, in one of the layouts that models make."""
    b, h, n, m = shape
    show = lambda *size: (  # noqa: E731
        torch.rand(size, device="cpu", dtype=torch.float32) < draw.choice([0.2, 0.7])
    )
    kind = draw.randrange(8)
    if kind == 1:
        return show(b, 1, 1, m)
    if kind == 2:
        return show(b, h, n, m)
    if kind == 3:
        return show(m, n).t()[None, None]
    if kind == 4:
        return show(b, 1, n, 2 * m)[..., ::2]
    if kind == 5:
        return show(1, h, 1, 1).expand(b, h, n, m)
    return None


def _method(draw: random.Random, keys: int) -> Regularizer | None:
    kind = draw.randrange(7)
    if kind == 0:
        return None
    if kind < 5:
        return DropKey(draw.choice([1e-9, 0.1, 0.3, 0.5, 0.9, 0.99]))
    top: float = draw.choice([0.1, 0.5, 1.0])
    return HardMasking(
        draw.choice([0.1, 0.3, 0.5]), top=min(keys, draw.choice([1, 3, 9])) if kind == 5 else top
    )


def attention_case(draw: random.Random, guard: bool, counts: Counts) -> None:
    """One call of attention with its gradients."""
    b, heads = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 4])
    groups = draw.choice([g for g in (1, 2, 4) if heads % g == 0])
    n, m, d = draw.choice(SIZES), draw.choice(SIZES), draw.choice(CHANNELS)
    e = d if draw.random() < 0.7 else draw.choice(CHANNELS)
    if draw.random() < 0.02:
        m = draw.choice([260, 513, 700])
    empty = draw.random() < 0.03
    if empty:
        b, n, m = draw.choice([(0, n, m), (b, 0, m), (b, n, 0)])
    dtype = draw.choice(DTYPES)
    v_dtype = draw.choice(DTYPES) if draw.random() < 0.05 else dtype
    chosen = [draw.choice(list(LAYOUTS)) if draw.random() < 0.6 else "contiguous" for _ in range(3)]
    shapes = ((b, heads, n, d), (b, groups, m, d), (b, groups, m, e))
    tensors = [
        LAYOUTS[name](draw, shape, kind)
        for name, shape, kind in zip(chosen, shapes, (dtype, dtype, v_dtype), strict=True)
    ]
    method = None if empty else _method(draw, m)
    causal = draw.random() < 0.15
    mask = None if causal or empty else _mask(draw, (b, heads, n, m))
    poisoned = (
        not empty and not isinstance(method, HardMasking) and dtype is v_dtype is torch.float32
    )
    poisoned = poisoned and draw.random() < 0.03
    if poisoned:
        bad = draw.randrange(3)
        tensors[bad] = tensors[bad].clone()
        tensors[bad][
            0, 0, draw.randrange(tensors[bad].shape[2]), draw.randrange(tensors[bad].shape[3])
        ] = float("nan")
        chosen[bad] = "contiguous"
    if guard:
        tensors = [guarded(t) for t in tensors]
        mask = None if mask is None else guarded(mask)
    tensors = [t.detach().requires_grad_(draw.random() < 0.9) for t in tensors]
    q, k, v = tensors
    scale, seed = draw.choice([0.1, 0.3, d**-0.5]), draw.randrange(2**62)
    reach = q.detach().double() @ k.detach().double().repeat_interleave(heads // groups, 1).mT
    if reach.numel():  # a weight that is too small for its dtype would look hidden
        most = 7 if torch.float16 in (dtype, v_dtype) else 30
        scale = min(scale, most / max(1.0, float(reach.nan_to_num().abs().max())))
    methods = [] if method is None else [method.train()]
    torch.set_num_threads(draw.choice([1, 1, 1, 2]))
    elsewhere = (
        draw.choice([torch.float32, torch.float64, torch.bfloat16]),
        draw.choice(["cpu", "cpu", "meta"]),
    )

    def run(values: Tensor) -> tuple[Tensor, str]:
        torch.manual_seed(seed)
        with defaults(*elsewhere):
            o, _, kernel = attend(
                q, k, values, mask, 0.0, causal, scale, groups != heads, Needs(methods), None
            )
        return o, "none" if kernel is None else kernel.name

    if (
        v_dtype is not dtype
    ):  # torch's own attention refuses that too, unless a method's path takes it
        try:
            out, kernel = run(v)
        except (RuntimeError, ValueError):
            counts.runs["attention: refused as torch does"] += 1
            return
    else:
        out, kernel = run(v)
    fit = dtype is v_dtype is torch.float32 and not set(chosen) & READ_ON_TORCH and bool(methods)
    if (kernel == "native") != fit and not empty:
        raise Wrong(f"the kernel that ran is {kernel}, of {chosen}, {dtype}")
    unfit = {"overlapping tokens", "gigabytes apart"} & set(chosen)
    if kernel != "native" and (poisoned or unfit):
        # torch's fused kernel hands such rows to a product of matrices that refuses them, and gives garbage
        counts.runs["attention: torch's own, not compared"] += 1
        return
    counts.runs[f"attention: {kernel}"] += 1
    for name in chosen:
        counts.runs[f"layout: {name}"] += 1
    wide = [t.detach().double().requires_grad_() for t in tensors]
    if empty:
        expected = F.scaled_dot_product_attention(*_repeated(wide, heads // groups), scale=scale)
        close(out, expected.nan_to_num(), "output", 0.0)
        return
    allowed = torch.ones(n, m, dtype=torch.bool, device="cpu").tril() if causal else mask
    allowed = (
        torch.ones(b, heads, n, m, dtype=torch.bool)
        if allowed is None
        else allowed.expand(b, heads, n, m)
    )
    kept = allowed
    if methods:
        one = torch.eye(m, dtype=v_dtype, device="cpu").expand(b, groups, m, m)
        like_v = (
            torch._neg_view(-one)
            if v.is_neg()
            else _misaligned(one)
            if v.data_ptr() % v.itemsize
            else one
        )
        weights = run(like_v)[0].detach()
        # a row of NaN does not tell its mask, and needs none to be NaN
        kept = torch.where(weights.isnan().any(-1, keepdim=True), allowed, weights != 0)
        own = Counts() if poisoned else counts  # rows of NaN would count as rows that lost nothing
        _check_mask(kept, allowed, method, wide[0], _repeated(wide, heads // groups)[1], own)
    loose = TOLERANCE[dtype if TOLERANCE[dtype] > TOLERANCE[v_dtype] else v_dtype]
    again = kernel == "native" and draw.random() < 0.1
    expected = _reference(wide, kept, scale, heads // groups, again)
    close(out, expected, "output", loose * (1 + m**0.5 / 8))
    wanted = [(t, w) for t, w in zip(tensors, wide, strict=True) if t.requires_grad]
    if not wanted or poisoned:
        return
    grad = _gradient(draw, out)
    ours = torch.autograd.grad(out, [t for t, _ in wanted], grad, create_graph=again)
    theirs = torch.autograd.grad(
        expected, [w for _, w in wanted], grad.double(), create_graph=again
    )
    for a, t in zip(ours, theirs, strict=True):
        close(a, t, "gradient", 4 * loose * (1 + max(n, m) ** 0.5 / 4))
    if again:
        directions = [torch.randn_like(t.detach()) for t in theirs]
        ours, theirs = (
            torch.autograd.grad(
                sum((g * u).sum() for g, u in zip(found, directions, strict=True)),
                inputs,
                allow_unused=True,
            )
            for found, inputs in ((ours, [t for t, _ in wanted]), (theirs, [w for _, w in wanted]))
        )
        for a, t in zip(ours, theirs, strict=True):
            if t is not None and a is not None:
                close(a, t, "second derivative", 1e-3)
            elif (t is None) != (a is None):
                raise Wrong("second derivative: one has none")
        counts.runs["attention: differentiated twice"] += 1


def _repeated(tensors: list[Tensor], times: int) -> list[Tensor]:
    q, k, v = tensors
    return [q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)]


def _reference(wide: list[Tensor], kept: Tensor, scale: float, times: int, again: bool) -> Tensor:
    q, k, v = _repeated(wide, times)
    if not again and all(bool(t.isfinite().all()) for t in (q, k, v)):
        return F.scaled_dot_product_attention(q, k, v, kept, scale=scale)
    scores = (q @ k.mT * scale).masked_fill(
        ~kept, float("-inf")
    )  # SDPA adds -inf to NaN, which does not hide it,
    some = kept.any(-1, keepdim=True)  # and its fused backward has no derivative
    return (scores.masked_fill(~some, 0.0).softmax(-1) * some) @ v


def _check_mask(
    kept: Tensor, allowed: Tensor, method: Regularizer | None, q: Tensor, k: Tensor, counts: Counts
) -> None:
    """Only what the model shows is kept, every query that is shown a key keeps one, and as many go as should."""
    if bool((kept & ~allowed).any()):
        raise Wrong("a key is seen that the model hides")
    if bool((allowed.any(-1) & ~kept.any(-1)).any()):
        raise Wrong("a query lost all its keys")
    gone, rate = allowed & ~kept, float(method.rate) if method is not None else 0.0
    if isinstance(method, HardMasking):
        scores = (q @ k.mT).detach()
        seen = scores.masked_fill(~allowed, float("-inf"))
        least = seen.masked_fill(~gone, float("inf")).amin(-1)  # of the scores that were dropped
        # scores closer than rounding can be, whatever the order in which float32 sums a product, and a few in a row
        terms = float(q.detach().norm(dim=-1).amax() * k.detach().norm(dim=-1).amax())
        tie = 1e-4 + 1e-5 * scores.abs().amax() + 8 * (q.shape[-1] + 1) * 2**-24 * terms
        larger = (seen > least.unsqueeze(-1) + tie).sum(-1)
        visible = allowed.sum(-1)
        top = method.top
        most = (
            (visible * top).ceil()
            if isinstance(top, float) and top <= 1
            else visible.clamp(max=int(top))
        )
        if bool(((larger >= most) & gone.any(-1)).any()):
            raise Wrong("a key was dropped that is none of the largest")
        return
    visible = allowed.sum(-1).double()
    visible = visible[visible > 2]  # of one or two keys, one is often given back
    share = rate - rate**visible / visible
    rows = allowed.sum(-1) > 2
    counts.hidden += int(gone[rows].sum())
    counts.expected += float((visible * share).sum())
    counts.variance += float((visible * rate * (1 - rate)).sum())


def _gradient(draw: random.Random, out: Tensor) -> Tensor:
    """What comes back to an output, as autograd may give it: expanded, in another order, with a sign to change."""
    kind = draw.randrange(5)
    if kind == 0:
        return torch.ones((), dtype=out.dtype, device="cpu").expand(out.shape)
    name = ("contiguous", "tokens last", "negative bit", "every second channel")[kind - 1]
    return LAYOUTS[name](draw, tuple(out.shape), out.dtype)  # type: ignore[arg-type]


def dropout_case(draw: random.Random, guard: bool, counts: Counts) -> None:
    """Inverted dropout: zeros and multiples, as many as the rate says, and a gradient with the same factors."""
    shape = (
        draw.choice([1, 2, 3]),
        draw.choice([1, 2, 4]),
        draw.choice(SIZES),
        draw.choice(CHANNELS),
    )
    if draw.random() < 0.03:
        shape = (2, 3, 700, 70)  # beyond `FACTORS_UP_TO`
    if draw.random() < 0.03:
        shape = (0, *shape[1:])
    dtype, name = draw.choice(DTYPES), draw.choice(list(LAYOUTS))
    x = LAYOUTS[name](draw, shape, dtype)
    x = (guarded(x) if guard else x).detach().requires_grad_()
    rate, seed = draw.choice([1e-7, 0.1, 0.5, 0.9]), draw.randrange(2**62)
    torch.set_num_threads(draw.choice([1, 1, 1, 2]))
    torch.manual_seed(seed)
    with defaults(
        draw.choice([torch.float32, torch.float64, torch.bfloat16]),
        draw.choice(["cpu", "cpu", "meta"]),
    ):
        y = dampen.masks.drop(x, rate)
    kept = (y != 0).double()
    wide = x.detach().double()
    close(y, wide * kept / (1 - rate), "dropout", TOLERANCE[dtype])
    grad = _gradient(draw, y)
    (to_x,) = torch.autograd.grad(y, x, grad, create_graph=True)
    close(to_x, grad.double() * kept / (1 - rate), "gradient of dropout", TOLERANCE[dtype])
    counts.runs["dropout"] += 1
    counts.hidden += int((kept == 0).sum())
    counts.expected += rate * x.numel()
    counts.variance += rate * (1 - rate) * x.numel()


def tap_case(draw: random.Random, guard: bool, counts: Counts) -> None:
    """A penalty in the middle of a layer, and those of several maps at once."""
    b, h, n, d = (
        draw.choice([1, 1, 2, 3]),
        draw.choice([1, 2, 4]),
        draw.choice(SIZES),
        draw.choice(CHANNELS),
    )
    dtype, name = draw.choice(DTYPES), draw.choice(list(LAYOUTS))
    y, bias = LAYOUTS[name](draw, (b, h, n, d), dtype), None
    kind = draw.randrange(3)
    if kind:
        y = y.reshape(b, h * n, d) if kind == 1 else y.reshape(-1, d)
    if draw.random() < 0.7:
        bias = _normal((h, 1, d) if kind == 0 else (d,), dtype)
        bias = (torch._neg_view(bias) if draw.random() < 0.05 else bias).requires_grad_()
    y = (guarded(y) if guard else y).detach().requires_grad_()
    factor, inputs = draw.choice([0.1, 1.0, -0.5]), [t for t in (y, bias) if t is not None]
    with defaults(
        draw.choice([torch.float32, torch.float64, torch.bfloat16]),
        draw.choice(["cpu", "cpu", "meta"]),
    ):
        out, value = taps.tap(y, bias, None, factor)
        grad = _gradient(draw, out) if out.ndim == 4 else torch.ones_like(out)
        ours = torch.autograd.grad(
            (out, value), inputs, (grad, torch.ones_like(value)), allow_unused=True
        )
    wide = [t.detach().double().requires_grad_() for t in inputs]
    bare = wide[0] if bias is None else wide[0] - wide[1]
    expected = factor * bare.square().sum()
    theirs = torch.autograd.grad(
        (wide[0] * 1, expected), wide, (grad.double(), torch.ones_like(expected))
    )
    loose = 10 * TOLERANCE[dtype]
    close(value, expected, "penalty", loose)
    for a, t in zip(ours, theirs, strict=True):
        close(a, t, "gradient of a penalty", loose)
    counts.runs["tap"] += 1


def together_case(draw: random.Random, guard: bool, counts: Counts) -> None:
    """Several maps whose penalties are summed up at once, some of them a cut of a fused map."""
    penalties, leaves, expected, wide_leaves = [], [], [], []
    for _ in range(draw.randint(1, 3)):
        parts, value = [], torch.zeros((), dtype=torch.float64, device="cpu")
        for _ in range(draw.randint(1, 3)):
            b, n, width = draw.choice([1, 2]), draw.choice(SIZES), draw.choice(CHANNELS)
            heads, size = draw.choice([1, 2, 4]), draw.choice([1, 3, 8, 12])
            x, weight = (
                _normal((b, n, width), torch.float32),
                _normal((3 * heads * size, width), torch.float32),
            )
            bias = _normal((weight.shape[0],), torch.float32) if draw.random() < 0.7 else None
            made = [t if t is None else guarded(t) if guard else t for t in (x, weight, bias)]
            x, weight = (t.requires_grad_() for t in made[:2])  # type: ignore[union-attr]
            bias = None if made[2] is None else made[2].requires_grad_()
            y, cut = F.linear(x, weight, bias), None
            if draw.random() < 0.5:
                cut = (draw.randrange(3) * heads * size, heads * size)
                y = y[..., cut[0] : sum(cut)].unflatten(-1, (heads, size)).transpose(1, 2)
            factor = draw.choice([0.1, 1.0])
            rows = None  # or 0 for padding, and weights between
            if draw.random() < 0.5:
                rows = torch.rand(b, n, device="cpu").mul_(2).sub_(0.7).clamp_(0, 1)
                rows = guarded(rows) if guard else rows
            parts.append(layers.Tapped(y, bias, factor, cut, x, weight, y._version, rows))
            wide = [t.detach().double().requires_grad_() for t in (x, weight)]
            own = wide[1] if cut is None else wide[1][cut[0] : sum(cut)]
            squares = (wide[0] @ own.mT).square().sum(-1)
            value = value + factor * (squares if rows is None else squares * rows).sum()
            leaves += [x, weight] + ([] if bias is None else [bias])
            wide_leaves += [*wide] + (
                [] if bias is None else [torch.zeros_like(bias, dtype=torch.float64)]
            )
        penalties.append(tuple(parts))
        expected.append(value)
    with defaults(
        draw.choice([torch.float32, torch.float64, torch.bfloat16]),
        draw.choice(["cpu", "cpu", "meta"]),
    ):
        values = layers.sum_up(penalties)
        ours = torch.autograd.grad(sum(values), leaves, allow_unused=True)  # type: ignore[arg-type]
    theirs = torch.autograd.grad(
        sum(expected), [w for w in wide_leaves if w.requires_grad], allow_unused=True
    )
    for a, t in zip(values, expected, strict=True):
        close(a, t, "penalties of several maps", 2e-4)
    back = iter(theirs)
    for a, w in zip(ours, wide_leaves, strict=True):
        t = next(back) if w.requires_grad else w  # what a bias adds is in no penalty
        if a is not None and t is not None:
            reach = max(1.0, float(max(g.abs().max() for g in theirs if g is not None)))
            close(a / reach, t / reach, "gradients of several maps", 2e-4)
        elif t is not None and w.requires_grad:
            raise Wrong("a gradient of several maps is missing")
    counts.runs["taps of several maps"] += 1


KINDS = (attention_case,) * 14 + (dropout_case,) * 3 + (tap_case,) * 3 + (together_case,)


def run(cases: int, first: int = 0, guard: bool = False) -> Counts:
    """That many cases from a number on. Nothing is raised: what fails is counted and named."""
    counts, threads = Counts(), torch.get_num_threads()
    for number in range(first, first + cases):
        draw = random.Random(number)
        kind = draw.choice(KINDS)
        torch.manual_seed(number)
        try:
            kind(draw, guard, counts)
        except Exception as error:  # any exception is a finding here
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            counts.failed.append(f"case {number}, {kind.__name__}: {said}")
    torch.set_num_threads(threads)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--guarded", action="store_true")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, with --record")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)  # of one process of a record
    options = parser.parse_args()
    if options.record:
        raise SystemExit(record(options))
    if options.sanitize and "DAMPEN_FUZZ_SANITIZED" not in os.environ:
        with tempfile.TemporaryDirectory() as cache:
            raise SystemExit(_process(sys.argv[1:], sanitized_environment(Path(cache))))
    library.build()
    counts = run(options.cases, options.first, options.guarded)
    for name, number in sorted(counts.runs.items()):
        print(f"{number:8d}  {name}")
    print(*counts.failed[:20], sep="\n")
    bad = len(counts.failed) + (abs(counts.z()) > 5)
    print(f"{options.cases} cases, {len(counts.failed)} wrong; hidden keys: z {counts.z():.2f}")
    if options.json:
        options.json.write_text(json.dumps(vars(counts)), encoding="utf-8")
    raise SystemExit(bool(bad))


def record(options: argparse.Namespace) -> int:
    """Run the cases in chunks, each in a process of its own, and keep the counts after each chunk."""
    how = "sanitized" if options.sanitize else "guarded" if options.guarded else "bare"
    command = f"python -m benchmarks.native_fuzz --cases {options.cases} --first {options.first}"
    command += " --sanitize" * options.sanitize + " --guarded" * options.guarded + " --record"
    row = _recorded().get(how, {})
    if row.get("command") != command:
        row = {"command": command, "done": [], "crashes": [], "counts": vars(Counts())}
    firsts = range(options.first, options.first + options.cases, CHUNK)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        environment = {**os.environ, "DAMPEN_CACHE": str(Path(folder, "cache"))}
        if options.sanitize:
            environment = sanitized_environment(Path(folder, "cache"))
        end = options.first + options.cases
        left = [
            pool.submit(
                _chunk, first, min(CHUNK, end - first), options.guarded, folder, environment
            )
            for first in firsts
            if first not in row["done"]
        ]
        for chunk in as_completed(left):
            _keep(how, row, *chunk.result())
    return int(bool(row["crashes"] or row["counts"]["failed"]) or abs(row["z"]) > 5)


def _chunk(
    first: int, count: int, guarded: bool, folder: str, environment: dict[str, str]
) -> tuple[int, int, Path]:
    """Some cases in another process: their first, its exit code, and where it wrote the counts."""
    found = Path(folder, f"{first}.json")
    flags = ["--guarded"] * guarded
    arguments = ["--first", str(first), "--cases", str(count), *flags, "--json", str(found)]
    return first, _process(arguments, environment), found


def _keep(how: str, row: dict[str, Any], first: int, code: int, found: Path) -> None:
    """Add the counts of a chunk to the record."""
    from dampen.studies.bench.timing import machine
    from dampen.studies.files import write_json

    counts = Counts(**row["counts"])
    counts.runs = collections.Counter(counts.runs)
    if found.exists():
        counts.add(json.loads(found.read_text()))
    else:
        row["crashes"].append(f"cases from {first}: exit code {code}")
    row["done"] = sorted([*row["done"], first])
    row |= {"cases": len(row["done"]) * CHUNK, "z": counts.z()}
    row |= {"counts": vars(counts), "machine": machine()}
    write_json(RECORD, _recorded() | {how: row})


def _recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _process(arguments: list[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "benchmarks.native_fuzz", *arguments]
    return subprocess.run(command, env=environment).returncode


def sanitized_environment(cache: Path) -> dict[str, str]:
    """Of a process with the sanitizers' runtime in front of everything, and a cache of its own.

    Args:
        cache: the folder for the instrumented kernels.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("--sanitize needs g++, or a compiler that CXX names.")
    # libstdc++ too, because Python does not bring it and the runtime looks for its exceptions when it starts
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libstdc++.so.6")]
    found = [
        subprocess.run([compiler, name], capture_output=True, text=True, check=True).stdout
        for name in names
    ]
    return {
        **os.environ,
        "DAMPEN_CACHE": str(cache),
        "DAMPEN_NATIVE_FLAGS": SANITIZERS,
        "DAMPEN_FUZZ_SANITIZED": "1",
        "LD_PRELOAD": " ".join(str(Path(path.strip()).resolve()) for path in found),
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


if __name__ == "__main__":
    main()
