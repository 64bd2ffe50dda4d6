"""`attention`: a drop-in for `F.scaled_dot_product_attention` with the stages of regularizers
open."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen._torch import refuse_nested
from dampen.kernels.kernel import Kernel, attention_weights, choose_kernel, run_kernel
from dampen.masks import read_mask
from dampen.native import library
from dampen.native.entry import unfit_for_attention
from dampen.regularizer import ATTENTION_STAGES, Call, Regularizer, check_only_reads, in_order


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    regularizers: Sequence[Regularizer] = (),
    call: Call | None = None,
) -> Tensor:
    """softmax(q k^T * scale + mask) v, with every stage of `regularizers` open, in whatever order
    they are given.

    Takes the arguments of `F.scaled_dot_product_attention`, broadcasting and all. Without
    regularizers the result is the same; with them, the fused kernel runs unless one of them needs
    the matrix of scores.

    Args:
        query: (B, H, N, d).
        key: (B, Hk, M, d).
        value: (B, Hk, M, dv).
        attn_mask: bool (True may be seen) or float (added to the scores), as torch takes it.
        dropout_p: the model's own dropout of attention weights.
        is_causal: each query sees the keys up to its own place.
        scale: of the scores; None: 1 / sqrt(d).
        enable_gqa: fewer heads in key and value than in query.
        regularizers: methods to apply.
        call: what is known of this attention; None: made here.

    Returns:
        the attention output, (B, H, N, dv).

    >>> import torch, dampen
    >>> q = k = v = torch.randn(2, 4, 5, 8)
    >>> dampen.attention(q, k, v, regularizers=[dampen.DropKey(0.2)]).shape
    torch.Size([2, 4, 5, 8])
    """
    needs = Needs(in_order(regularizers), dropout_p)
    return attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, needs, call
    )[0]


class Needs:
    """What some methods need of an attention, worked out once for all forwards in which they are at
    work.

    The kernel that was chosen is kept here per shape, dtype and device, so that each site decides
    once.

    Args:
        regularizers: the methods at work, in their order.
        dropout: the model's own rate of dropout on the weights.
    """

    def __init__(self, regularizers: Sequence[Regularizer], dropout: float | bool = 0.0) -> None:
        self.regularizers, self.drops = regularizers, bool(dropout)
        self.reading = reads_apart(regularizers, dropout)
        self.inside = [r for r in regularizers if r not in self.reading]
        at_operands = [r for r in regularizers if "qkv" in r.stages]
        self.read_operands = [r for r in at_operands if r.only_reads]
        self.change_operands = [r for r in at_operands if not r.only_reads]
        self.hiding = [r for r in self.inside if "mask" in r.stages]
        self.heads = [r for r in self.inside if "heads" in r.stages]
        self.valid = any(r.needs_valid for r in regularizers)
        self.jacobian = any(r.takes_jacobian for r in regularizers)
        self.kernels: dict[Any, Kernel] = {}

    def kernel(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, matrix: bool, native: bool, drops: bool
    ) -> Kernel:
        """The kernel for these operands.

        Args:
            q: (B, H, N, D).
            k: (B, G, M, D).
            v: (B, G, M, E).
            call: the attention at work.
            matrix: whether the caller wants the weights.
            native: whether dropout, mask and device leave a native kernel possible.
            drops: whether the model drops weights itself.
        """
        mask = call.mask
        ours = None if matrix or drops else call
        # a graph is chosen for once, when it is traced
        if torch.compiler.is_compiling():
            return choose_kernel(q, k, self.inside, matrix, native, v, mask, ours)
        device = q.device.type
        # what may differ from call to call although the shapes are the same
        if not (native and q.is_cpu and (library.loaded is not None or library.available())):
            unfit = None
        else:
            unfit = unfit_for_attention(q, k, v, mask)
        if torch.is_autocast_enabled(device):
            half = torch.get_autocast_dtype(device)
        else:
            half = q.dtype
        by_key = mask is None or mask.shape[2] == 1
        bias = None if call.bias is None else call.bias.requires_grad
        key = (
            *(q.shape, k.shape, v.shape, half, q.device, mask is None, matrix, native, unfit),
            *(drops, by_key, bias, call.is_causal, call.scale),
        )
        kernel = self.kernels.get(key)
        if kernel is None:
            kernel = choose_kernel(q, k, self.inside, matrix, native, v, mask, ours)
            self.kernels[key] = kernel
        return kernel


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    needs: Needs,
    call: Call | None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Kernel | None]:
    """As `attention`, of methods in their order; also the weights (if requested) and the
    kernel that ran.

    Args:
        query: (B, H, N, d).
        key: (B, Hk, M, d).
        value: (B, Hk, M, dv).
        attn_mask: bool (True may be seen) or float (added to the scores), as torch takes it.
        dropout_p: the model's own dropout of attention weights.
        is_causal: each query sees the keys up to its own place.
        scale: of the scores; None: 1 / sqrt(d).
        enable_gqa: fewer heads in key and value than in query.
        needs: the methods by hook point, in order.
        call: what is known of this attention; None: made here.
        need_weights: also return the attention weights.
    """
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attention: give attn_mask or is_causal=True, not both (as in "
            "F.scaled_dot_product_attention)."
        )
    if needs.regularizers and query.is_nested:
        refuse_nested(query, "attention")
    q, k, v, mask, leading = _four_dims(query, key, value, attn_mask, enable_gqa)
    if not (q.shape[:2] == k.shape[:2] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        k, v = _fitting(q, k, v)
    # a batch of no samples, or no tokens: nothing to act on
    if not torch.compiler.is_compiling() and not (q.numel() and k.numel()):
        needs = Needs(())
    native = dropout_p == 0 and not need_weights and (mask is None or mask.dtype is torch.bool)
    native = native and not (q.is_cuda and (is_causal or mask is not None))
    if not needs.regularizers:
        kernel = choose_kernel(q, k, (), need_weights, native)
        if kernel.name == "fused":
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            return out, None, kernel
    call = fill_call(Call() if call is None else call, q, k, mask, is_causal, scale, needs.valid)
    call.value_size = v.shape[3]
    for r in needs.read_operands:
        q, k, v = r.qkv(q, k, v, call)
    apart = _read(needs.reading, q, k, v, call) if needs.reading else ""
    for r in needs.change_operands:
        q, k, v = r.qkv(q, k, v, call)
    # by what the kernel is given in the end
    if needs.regularizers:
        kernel = needs.kernel(q, k, v, call, need_weights, native, bool(dropout_p))
    if apart:
        kernel = kernel._replace(why=f"{kernel.why}; {apart}")
    weights = None
    if need_weights:
        o, weights = attention_weights(q, k, v, dropout_p, needs.inside, call)
    elif kernel.name == "native":
        o = _native(q, k, v, needs.hiding, call)
    else:
        o = run_kernel(kernel, q, k, v, dropout_p, needs.inside, call)
    for r in needs.heads:
        o = check_only_reads(r, "heads", o, r.heads(o, call))
    return (o if len(leading) == 2 else o.reshape(*leading, *o.shape[-2:])), weights, kernel


def _native(q: Tensor, k: Tensor, v: Tensor, hiding: Sequence[Regularizer], call: Call) -> Tensor:
    from dampen.native.ops import Hiding, attention  # only where it was built

    how = None
    for r in hiding:
        if how is None and (found := r.native_hiding(k.shape[2])) is not None:
            how = Hiding(*found)
    return attention(
        q, k, v, None if call.is_causal else call.mask, call.is_causal, call.scale, how
    )


def reads_apart(
    regularizers: Sequence[Regularizer], dropout: float | bool = 0.0
) -> list[Regularizer]:
    """The methods that read weights or outputs of an attention which other methods, or the model's
    own dropout, change first: they are given one without them. Mostly none.

    Args:
        regularizers: methods to apply.
        dropout: whether the model drops weights itself.
    """
    reading = [
        r for r in regularizers if r.only_reads and not r.stages.isdisjoint(ATTENTION_STAGES[1:])
    ]
    if not reading or (len(reading) == len(regularizers) and not dropout):
        return []
    changed = [i for r in regularizers if not r.only_reads for i in _places(r)]
    first = min(
        [*changed, ATTENTION_STAGES.index("probs")] if dropout else changed,
        default=len(ATTENTION_STAGES),
    )
    late = any(i > first for r in reading for i in _places(r))
    if late:
        return reading
    return []


def _places(r: Regularizer) -> list[int]:
    """The stages of an attention at which a method is, by their order."""
    return [i for i, stage in enumerate(ATTENTION_STAGES) if stage in r.stages]


def _read(reading: Sequence[Regularizer], q: Tensor, k: Tensor, v: Tensor, call: Call) -> str:
    """Run an attention for those who read it, as the model alone would compute it; returns the
    kernel in words."""
    own = choose_kernel(q, k, reading)
    run_heads(run_kernel(own, q, k, v, 0.0, reading, call), reading, call)
    names = ", ".join(r.name for r in reading)
    return f"{own.name} once more for {names}, without what changes it"


def run_heads(o: Tensor, regularizers: Sequence[Regularizer], call: Call) -> Tensor:
    """The stage heads.

    Args:
        o: head outputs (B, H, N, dv).
        regularizers: methods to apply.
        call: what is known of this attention; None: made here.
    """
    for r in regularizers:
        if "heads" in r.stages:
            o = check_only_reads(r, "heads", o, r.heads(o, call))
    return o


def _fitting(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with the same number of heads; raise where the three do not fit, because a kernel
    would read past their ends. SDPA repeats each for itself: a library may have repeated the values
    alone (Nemotron's speech encoder)."""
    (b, h, _, d), (bk, hk, m, dk), (bv, hv, mv, _) = q.shape, k.shape, v.shape
    if bk != b or bv != b or mv != m or dk != d or h % hk or h % hv:
        raise ValueError(
            f"attention: q, k and v of the shapes {tuple(q.shape)}, {tuple(k.shape)} and "
            f"{tuple(v.shape)} do not fit "
            "together: they need the same batch, q and k the same channels, k and v the same "
            "tokens, and the heads of "
            "q must be a multiple of those of k and of v (with enable_gqa=True)."
        )
    if hk == hv:
        return (k, v)
    return (k.repeat_interleave(h // hk, 1), v.repeat_interleave(h // hv, 1))


def fill_call(
    call: Call,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    need_valid: bool,
) -> Call:
    """Write into the call what is known once q and k are.

    Args:
        call: filled in and returned.
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        mask: bool (True may be seen) or float (added to the scores).
        is_causal: each query sees the keys up to its own place.
        scale: of the scores; None: 1 / sqrt(d).
        need_valid: also find the padded tokens.
    """
    call.shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    call.kv_heads, call.head_size, call.device = k.shape[1], q.shape[3], q.device
    call.scale = q.shape[-1] ** -0.5 if scale is None else scale
    call.is_causal, call.mask, call.bias, call.blind = is_causal, None, None, None
    call.shows_all = False
    if mask is not None:
        known = read_mask(mask)
        call.mask, call.bias, call.blind = known.keep, known.bias, known.blind
    if need_valid:
        if call.mask is not None:
            call.seen = call.valid_keys
        call.valid = call.valid if call.cross else call.seen
    return call


def _four_dims(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Sequence[int]]:
    """Views of the operands as (B, H, ., D) and of the mask as (B or 1, H or 1, N or 1, M); and
    the leading shape."""
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ValueError(
            f"attention: q, k and v need at least two dimensions (tokens, channels), got shapes "
            f"{tuple(q.shape)}, "
            f"{tuple(k.shape)}, {tuple(v.shape)}."
        )
    leading = q.shape[:-2]
    # axes at the end that are each operand's own: with grouped keys the heads too
    if gqa:
        own = 3
    else:
        own = 2
    same = q.ndim == k.ndim == v.ndim == 4 and q.shape[:-own] == k.shape[:-own] == v.shape[:-own]
    if same and (mask is None or mask.ndim == 4):
        # the usual call needs no views
        return q, k, v, mask, leading
    if not gqa:
        leading = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (t.expand(*leading, *t.shape[-2:]) for t in (q, k, v))
    elif min(q.ndim, k.ndim, v.ndim) > 2:
        outer = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        q, k, v = (t.expand(*outer, *t.shape[-3:]) for t in (q, k, v))
        leading = q.shape[:-2]
    batch = math.prod(leading[:-1])
    q, k, v = (t.reshape(batch, t.shape[-3] if t.ndim > 2 else 1, *t.shape[-2:]) for t in (q, k, v))
    if mask is not None:
        if mask.ndim > 2 and len(leading) > 2:
            mask = mask.expand(*leading, *mask.shape[-2:]).reshape(
                batch, leading[-1], *mask.shape[-2:]
            )
        else:
            mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return q, k, v, mask, leading
