"""The Triton kernels as torch operators, so that a compiled graph can hold them.

The seed is drawn once per call from torch's global generator of the device, which a checkpoint
rewinds. Seed and rate stay tensors on the device: nothing waits for the GPU, and a schedule over
training does not compile anew.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dampen.kernels.triton import device
from dampen.kernels.triton.tiles import (
    BY_BITS,
    BY_KEY,
    BY_NONE,
    BY_QUERY,
    Tile,
    padded,
    tile_of,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    bias: Tensor | None,
    top: Tensor | None,
    causal: bool,
    scale: float,
    draws: int,
    rate: float | Tensor,
    guard: bool,
) -> Tensor:
    """softmax(q k^T scale + bias) v with keys hidden, or weights dropped, at random.

    Args:
        q: (B, H, N, D).
        k: (B, G, M, D), G a divisor of H.
        v: (B, G, M, D).
        keep: a bool mask, True may be seen, that broadcasts to (B, H, N, M); or its bits, int32
            (B, H, N, M / 32, rounded up), the first key in the lowest.
        bias: added to the scores; broadcasts likewise. It gets no gradient.
        top: (B, H, N), the score from which HIDE_TOP hides a key.
        causal: each query sees the keys up to its own place.
        scale: of the scores.
        draws: NOTHING, HIDE_KEYS, DROP_WEIGHTS or HIDE_TOP.
        rate: the probability of each draw.
        guard: give a query that lost all its keys one of them back.
    """
    seed = torch.randint(2**63 - 1, (), device=q.device)
    share = torch.as_tensor(rate, dtype=torch.float32, device=q.device)
    out: Tensor = torch.ops.dampen.gpu_attention(
        q, k, v, keep, bias, top, seed, share, causal, scale, draws, guard
    )[0]
    return out


def draws_of(shape: tuple[int, int, int, int], seed: Tensor, rate: Tensor, tile: Tile) -> Tensor:
    """What the kernels draw under a seed: bool (B, H, N, M), True where a key is hidden.

    Args:
        shape: B, H, N and M.
        seed: int64, on the device.
        rate: float32, on the device.
        tile: queries and keys of a tile, which do not change the result.
    """
    out = torch.empty(shape, dtype=torch.uint8, device=seed.device)
    batch, heads, queries, keys = shape
    grid = (-(-queries // tile.queries), -(-keys // tile.keys), batch * heads)
    with _on(out):
        device.write_draws[grid](
            out, seed, rate, heads, queries, keys, BM=tile.queries, BN=tile.keys
        )
    return out.view(torch.bool)


def _on(t: Tensor) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def _generation(t: Tensor) -> int:
    """The first number of the compute capability; 0 where there is none."""
    if not t.is_cuda or torch.version.hip:
        return 0
    return torch.cuda.get_device_capability(t.device)[0]


def _rows(t: Tensor) -> Tensor:
    """The channels of a token side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _by_token(t: Tensor) -> Tensor:
    """(B, H, N, D) laid out as (B, N, H, D), in which heads merge without a copy."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_by_token(t: Tensor) -> Tensor:
    batch, heads, tokens, size = t.shape
    return t.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _common(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, scale: float
) -> tuple[list[Tensor], list[Any]]:
    """What all three kernels take: mask and bias as tensors, and strides, sizes and scale."""
    shape = (*q.shape[:3], k.shape[2])
    mask = q
    if keep is not None:
        bits = keep.dtype is torch.int32
        mask = keep.expand(*shape[:3], -1) if bits else keep.view(torch.uint8).expand(shape)
    added = q if bias is None else bias.expand(shape)
    numbers = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask.stride(), *added.stride()]
    return [mask, added], [*numbers, q.shape[1], k.shape[1], q.shape[2], k.shape[2], scale]


def _constants(
    kernel: str, q: Tensor, keep: Tensor | None, bias: Tensor | None, causal: bool, draws: int,
    guard: bool,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel is compiled for."""
    size = q.shape[3]
    by_query = keep is not None and keep.shape[2] > 1
    masked = BY_NONE if keep is None else BY_QUERY if by_query else BY_KEY
    if keep is not None and keep.dtype is torch.int32:
        masked = BY_BITS
    tile = tile_of(
        kernel, size, q.element_size(), _generation(q), draws, guard, masked, bias is not None
    )
    exact = not (q.is_cuda and torch.backends.cuda.matmul.allow_tf32)
    return {
        "DRAWS": draws,
        "GUARD": guard,
        "CAUSAL": causal,
        "MASKED": masked,
        "BIASED": bias is not None,
        "PRECISION": "ieee" if exact else "tf32",
        "D": size,
        "BD": padded(size),
        "BM": tile.queries,
        "BN": tile.keys,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@torch.library.custom_op("dampen::gpu_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, bias: Tensor | None, top: Tensor | None,
    seed: Tensor, rate: Tensor, causal: bool, scale: float, draws: int, guard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = _rows(q), _rows(k), _rows(v)
    o = _empty_by_token(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    back = q.new_empty(q.shape[:3] if guard else (0,), dtype=torch.int32)
    masks, numbers = _common(q, k, v, keep, bias, scale)
    constants = _constants("attend", q, keep, bias, causal, draws, guard)
    grid = (-(-q.shape[2] // constants["BM"]) * q.shape[0] * q.shape[1],)
    with _on(q):
        device.attend[grid](
            q, k, v, *masks, lse if top is None else top, seed, rate, o, lse, back,
            *numbers, **constants,
        )  # fmt: skip
    return o, lse, back


@torch.library.custom_op("dampen::gpu_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, back: Tensor,
    keep: Tensor | None, bias: Tensor | None, top: Tensor | None, seed: Tensor, rate: Tensor,
    causal: bool, scale: float, draws: int, guard: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, grad = _rows(q), _rows(k), _rows(v), _by_token(grad)
    dq, dk, dv = _empty_by_token(q), _empty_by_token(k), _empty_by_token(v)
    delta = (grad.float() * o.float()).sum(-1)
    masks, numbers = _common(q, k, v, keep, bias, scale)
    inputs = (
        q, k, v, *masks, lse if top is None else top, seed, rate, lse, back, delta.contiguous(),
        grad,
    )  # fmt: skip
    for_q = _constants("to_queries", q, keep, bias, causal, draws, guard)
    for_k = _constants("to_keys", q, keep, bias, causal, draws, guard)
    with _on(q):
        grid = (-(-q.shape[2] // for_q["BM"]) * q.shape[0] * q.shape[1],)
        device.to_queries[grid](*inputs, dq, *numbers, **for_q)
        grid = (-(-k.shape[2] // for_k["BN"]) * k.shape[0] * k.shape[1],)
        device.to_keys[grid](*inputs, dk, dv, *numbers, **for_k)
    return dq, dk, dv


@_attention.register_fake
def _(q, k, v, keep, bias, top, seed, rate, causal, scale, draws, guard):  # type: ignore[no-untyped-def]
    lines = q.shape[:3]
    back = q.new_empty(lines if guard else (0,), dtype=torch.int32)
    return _empty_by_token(q), q.new_empty(lines, dtype=torch.float32), back


@_attention_backward.register_fake
def _(grad, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return _empty_by_token(q), _empty_by_token(k), _empty_by_token(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, keep, bias, top, seed, rate, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, keep, bias, top, seed, rate)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    back = torch.ops.dampen.gpu_attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*back, *[None] * 9)


_attention.register_autograd(_gradients, setup_context=_save)
