"""The kernels of attention, and the choice between them.

`fused` is `F.scaled_dot_product_attention`; `plain` builds the N x M matrix of scores. A
regularizer that overrides `logits` or `probs` needs the matrix. Otherwise the choice is made by
device, dtype and length from a small table that was measured. Where the matrix would be long, the
queries are taken in chunks and each chunk is computed again in the backward pass, so that memory
stays linear in N."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dampen._torch import half_in_hardware, on_gpu
from dampen.kernels.columns import COLUMNS_FROM, attend_columns, fits_columns
from dampen.kernels.long_sequences import (
    attend_flex,
    attention_by_blocks,
    exceeds_memory,
    fits_blocks,
    fits_flex,
    rows_in_memory,
)
from dampen.kernels.triton import fit
from dampen.masks import keep_keys, may_empty, rows_that_may_empty
from dampen.native.entry import unfit_for_attention
from dampen.native.library import available as native_available
from dampen.regularizer import Call, Regularizer, check_only_reads, needs_matrix

PLAIN_BELOW: dict[tuple[str, torch.dtype, bool], int] = {
    ("cpu", torch.float32, False): 48,
    ("cpu", torch.float32, True): 48,
    ("cpu", torch.bfloat16, True): 512,
    ("cpu", torch.float16, True): 512,
}
"""Keys below which `plain` is faster than `fused`, forward and backward, by device, dtype and
whether the device multiplies 16-bit matrices in hardware (AMX, AVX-512 BF16). Without that hardware
`fused` is 2.5 to 3 times faster in bfloat16; with it, 9 times slower at 65 keys. Measured with
torch 2.13 by `benchmarks/kernel_table.py`; what is not listed runs fused."""

HIDE = -1e30
"""What is added to a score to hide its key: no score matters beside it, and it is finite."""
NATIVE_UP_TO = 32
"""Keys and channels up to which the native kernel runs also for methods that hide no key: there it
has products of its own, and its attention takes less time than torch's, from 32 keys on as long or
longer (`LOG.md` has 17 to 448 keys). Where keys are hidden it takes less at every length."""
LONG = 2048
"""Keys from which a mask or matrix over all queries is taken in chunks; on a GPU its free memory
decides (`memory.py`)."""
CHUNK = 2**21
"""Entries of the B x H x rows x M matrix in one chunk; on a GPU as many as fit."""
COMPILED_CHUNKS = 8
"""Chunks at most in a compiled graph, where the loop is unrolled."""

_HALF_IN_HARDWARE = half_in_hardware()


class Kernel(NamedTuple):
    """Which kernel runs, whether in chunks over the queries, and why.

    `way` is a way to do without a mask or matrix: "columns" hides keys by more channels, "dropout"
    is the fused kernel's own, "bits" hands a mask to Triton in an eighth of a byte a score."""

    name: str
    chunked: bool
    why: str
    way: str = ""

    def __str__(self) -> str:
        return f"{self.name}{' in chunks' if self.chunked else ''} ({self.why})"


def choose_kernel(
    q: Tensor,
    k: Tensor,
    regularizers: Sequence[Regularizer],
    matrix: bool = False,
    native: bool = False,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    call: Call | None = None,
) -> Kernel:
    """The kernel for this device, dtype, length and set of stages; `native` where a native one
    could run, on these values (by default like the keys) and the model's mask.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        regularizers: methods at work, in order.
        matrix: the caller needs the attention weights.
        native: a native kernel may run.
        v: (B, Hk, M, dv).
        mask: the model's mask; None: there is none.
        call: the attention at work, where neither the model's dropout nor the caller wants weights.
    """
    keys = k.shape[-2]
    # a dynamic length under torch.compile must not be specialized: take the default
    static = isinstance(keys, int)
    by_row = any("mask" in r.stages and r.per_query for r in regularizers)
    unfit = None
    if call is not None and not matrix and on_gpu(q):
        found, unfit = _on_gpu(q, k, k if v is None else v, regularizers, call)
        if found is not None:
            return found
    instead = f"; not Triton: {unfit}" if unfit else ""
    if matrix or needs_matrix(regularizers):
        names = [r.name for r in regularizers if needs_matrix([r])] or ["the caller"]
        return Kernel(
            "plain",
            static and not matrix and _is_long(q, keys, matrix=True),
            f"{', '.join(names)} needs the matrix of scores{instead}",
        )
    if call is not None and _by_columns(q, k, keys, regularizers, call):
        why = "keys are hidden by more channels of q and k: no mask"
        return Kernel("fused", False, why, "columns")
    unfit = None
    if native and regularizers and native_available() and q.is_cpu:
        unfit = _unfit_for_native(q, k, k if v is None else v, mask, regularizers)
        if unfit == "":
            hides = any("mask" in r.stages for r in regularizers)
            why = "keys are hidden inside the kernel" if hides else "short rows"
            return Kernel("native", False, f"{why}, and nothing of N x M is kept")
        instead = f"; not native: {unfit}" if unfit else ""
    if fits_flex(q, k, regularizers, enabled=native):
        return Kernel("flex", False, "DAMPEN_FLEX=1: keys are hidden inside FlexAttention")
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = q.dtype
    chunked = static and by_row and _is_long(q, keys, matrix=False)
    limit = PLAIN_BELOW.get((device, dtype, _HALF_IN_HARDWARE), 0)
    if static and keys < limit:
        kind = str(dtype).removeprefix("torch.")
        return Kernel(
            "plain",
            chunked,
            f"faster than fused in {kind} on this {device} below {limit} keys{instead}",
        )
    if by_row:
        why = "a mask keeps the fused kernel"
    else:
        why = "no stage needs the matrix of scores"
    return Kernel("fused", chunked, why + instead)


def _on_gpu(
    q: Tensor, k: Tensor, v: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> tuple[Kernel | None, str | None]:
    """A kernel of a GPU that needs neither mask nor matrix; or None, and why Triton cannot."""
    matrix = [r for r in regularizers if needs_matrix([r])]
    if (
        len(matrix) == 1
        and matrix[0].stages.isdisjoint({"mask", "logits"})
        and isinstance(matrix[0].weight_dropout(), float)
    ):
        why = f"{matrix[0].name} is the kernel's own dropout"
        return Kernel("fused", False, why, "dropout"), None
    unfit = fit.unfit(q, k, v, regularizers, call)
    if unfit == "" and fit.hides_by_bits(regularizers, k.shape[2]):
        return Kernel("triton", False, "the mask is kept as one bit a score", "bits"), None
    if unfit == "":
        why = "keys or weights are dropped inside the kernel, and nothing of N x M is kept"
        return Kernel("triton", False, why), None
    return None, unfit


def _by_columns(
    q: Tensor, k: Tensor, keys: int, regularizers: Sequence[Regularizer], call: Call
) -> bool:
    """Whether keys are hidden by more channels: on a GPU wherever that can be, on a CPU where it
    was faster than a mask."""
    worth = on_gpu(q) or (isinstance(keys, int) and keys >= COLUMNS_FROM and call.is_causal)
    return worth and fits_columns(q, k, regularizers, call)


def _is_long(q: Tensor, keys: int, matrix: bool) -> bool:
    """Whether a mask or matrix over all queries is taken in chunks."""
    if on_gpu(q):
        return exceeds_memory(q, keys, matrix)
    return keys >= LONG


def run_kernel(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> Tensor:
    """softmax(q k^T * scale + bias) v with the stages mask, logits and probs open.

    Args:
        kernel: from `choose_kernel`.
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        dropout_p: the model's own dropout of attention weights.
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    if kernel.name == "flex":
        return attend_flex(q, k, v, regularizers, call)
    if kernel.way == "bits":
        return fit.attend_bits(
            q, k, v, call, lambda part, rows: _merge(part, k, regularizers, call.part(rows))
        )
    if kernel.name == "triton":
        return fit.attend(q, k, v, regularizers, call)
    if kernel.way == "columns":
        return attend_columns(q, k, v, dropout_p, regularizers, call)
    if kernel.way == "dropout":
        dropping = next(r for r in regularizers if needs_matrix([r]))
        rate = dropping.weight_dropout()
        assert isinstance(rate, float)
        return _fused(q, k, v, rate, [r for r in regularizers if r is not dropping], call)
    run = _fused if kernel.name == "fused" else _plain
    if not kernel.chunked:
        return run(q, k, v, dropout_p, regularizers, call)
    if kernel.name == "fused" and fits_blocks(q, k, v, dropout_p, regularizers, call):
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        keys = k.detach()
        return attention_by_blocks(
            q,
            k,
            v,
            call.scale,
            lambda part, rows: _added_mask(part, keys, regularizers, call.part(rows)),
        )
    parts, start = [], 0
    for part in q.split(_chunk_rows(q, call, run is _plain), dim=-2):
        rows = slice(start, start + part.shape[-2])
        parts.append(
            checkpoint(
                run, part, k, v, dropout_p, regularizers, call.part(rows), use_reentrant=False
            )
            if torch.is_grad_enabled()
            else run(part, k, v, dropout_p, regularizers, call.part(rows))
        )
        start = rows.stop
    return torch.cat(parts, dim=-2)


def attention_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> tuple[Tensor, Tensor]:
    """Output and the (B, H, N, M) weights, for callers that need the weights.

    Args:
        q: (B, H, N, d).
        k: (B, Hk, M, d).
        v: (B, Hk, M, dv).
        dropout_p: the model's own dropout of attention weights.
        regularizers: methods at work, in order.
        call: the attention at work.
    """
    shared = k
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = (q * call.scale) @ k.transpose(-2, -1)
    if call.bias is not None:
        s = s + call.bias
    # for who hides the largest, unless they are rounded
    call.scores = s.detach() if s.dtype is torch.float32 else None
    keep = _merge(q, shared, regularizers, call)
    call.scores = None
    own = True  # s is used nowhere else yet
    for r in regularizers:
        if "logits" in r.stages:
            s, own = r.logits(s, call), False
    if keep is not None:
        s = _hide(s, ~keep, own)
    a = s.softmax(-1)
    # a row in which the model allows nothing gives zeros, as in the fused kernel
    if call.mask is not None:
        a = a * call.mask.any(-1, keepdim=True)
    for r in regularizers:
        if "probs" in r.stages:
            a = check_only_reads(r, "probs", a, r.probs(a, call))
    a = F.dropout(a, dropout_p) if dropout_p else a
    return a.to(v.dtype) @ v, a


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> Tensor:
    return attention_weights(q, k, v, dropout_p, regularizers, call)[0]


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    regularizers: Sequence[Regularizer],
    call: Call,
) -> Tensor:
    hides = any("mask" in r.stages for r in regularizers)
    causal = call.is_causal and not hides and call.rows is None
    mask = None if causal else _merge(q, k, regularizers, call)
    if call.bias is not None:
        if mask is None:
            mask = call.bias
        else:
            mask = call.bias.masked_fill(~mask, float("-inf"))
    elif mask is not None and call.mask is None and not call.is_causal and adds_to_hide(q):
        # the kernel would make this of a bool mask itself, in three times the time
        mask = (~mask).view(torch.uint8).to(q.dtype).mul_(HIDE)
    gqa = k.shape[1] != q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p, causal, scale=call.scale, enable_gqa=gqa
    )


def _added_mask(
    q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call
) -> Tensor | None:
    """What is added to the scores of a block of queries: the model's bias, and what hides keys."""
    keep = _merge(q, k, regularizers, call)
    if keep is None:
        if call.bias is None:
            return None
        return call.bias.to(q.dtype)
    if call.bias is not None:
        return call.bias.to(q.dtype).masked_fill(~keep, float("-inf"))
    if call.mask is None and not call.is_causal and adds_to_hide(q):
        return (~keep).view(torch.uint8).to(q.dtype).mul_(HIDE)  # bytes: see `_fused`
    return q.new_zeros(()).masked_fill(~keep, float("-inf"))


def _unfit_for_native(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, regularizers: Sequence[Regularizer]
) -> str | None:
    """Why dampen's own kernel cannot do this, in a few words; "" where it can, and None
    where another is simply faster. It does at most one method that hides keys, in float32, on a
    CPU."""
    if torch.is_autocast_enabled("cpu"):
        return "autocast"
    if why := unfit_for_attention(q, k, v, mask):
        return why
    compiling, keys, size = torch.compiler.is_compiling(), k.shape[2], q.shape[3]
    if not (isinstance(keys, int) and isinstance(size, int)):
        return "a length that changes inside a graph"
    if size == 0:
        return "vectors without numbers"
    hiding = [r for r in regularizers if "mask" in r.stages]
    if len(hiding) > 1:
        return f"{' and '.join(r.name for r in hiding)} both hide keys"
    # the kernel itself can be differentiated once
    if any(r.takes_jacobian for r in regularizers):
        return "the attention is differentiated twice"
    if hiding:
        if hiding[0].native_hiding(keys) is not None:
            return ""
        return f"{hiding[0].name} hides keys together"
    # a graph has its own ways with torch's attention, and a comparison would close an open length
    if compiling:
        return None
    return "" if keys <= NATIVE_UP_TO and size <= NATIVE_UP_TO else None


def _hide(s: Tensor, hidden: Tensor, own: bool) -> Tensor:
    """The scores with what is hidden far below all others: a finite number, because a row without
    any key must not become NaN, nor its gradient."""
    if own and adds_to_hide(s) and hidden.is_contiguous():
        # softmax gives these places no weight and no gradient, so an addition will do, whose
        # backward is free
        return s.add_(hidden.view(torch.uint8), alpha=HIDE)
    return s.masked_fill(hidden, torch.finfo(s.dtype).min)


def adds_to_hide(t: Tensor) -> bool:
    """Whether `HIDE` can be added to scores of this dtype, outside a graph, which makes one loop
    of it anyway.

    Args:
        t: the scores.
    """
    return t.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()


def _merge(q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call) -> Tensor | None:
    """What the model allows less what the regularizers hide; None: everything is visible."""
    maskers = [r for r in regularizers if "mask" in r.stages]
    hidden = [h for r in maskers if (h := r.mask(q, k, call)) is not None]
    if not hidden:
        return call.keep
    keys, rows = k.shape[-2], q.shape[0] * q.shape[1] * q.shape[2]
    rates = [r.hiding_rate() for r in maskers]
    # a model's own mask leaves some rows few keys to lose; how few is not known without looking
    guard = call.keep is not None or may_empty(rates, keys, rows)
    first = None
    if call.is_causal and call.mask is None:
        start = 0 if call.rows is None else call.rows.start
        first = rows_that_may_empty(rates, q.shape[0] * q.shape[1], start, keys)
    return keep_keys(call.keep, hidden, keys, guard=guard, first=first)


def _chunk_rows(q: Tensor, call: Call, matrix: bool) -> int:
    batch, heads, queries, keys = call.shape
    if on_gpu(q):
        rows = rows_in_memory(q, keys, matrix)
    else:
        rows = max(1, CHUNK // max(1, batch * heads * keys))
    if torch.compiler.is_compiling():
        return max(rows, -(-queries // COMPILED_CHUNKS))
    return rows
