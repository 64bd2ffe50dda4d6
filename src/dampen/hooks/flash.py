"""Attention functions of other packages: flash_attn (2, 3 and 4), torch's varlen_attn, xformers.

A model that calls one of them keeps it for methods that act on queries, keys, values and head
outputs, and for those that hide whole keys (by more channels of q and k). What needs a mask by
query or the matrix of scores runs dampen's own attention instead. Sequences packed without padding
are padded for the methods, so that each sample draws for itself.

The functions are found by name in what the code of an attention module uses, and are wrapped only
while a forward is under way. So are the entries of Hugging Face's attention registry that look into
no scores (`flash_attention_*`, `flex_attention`; `library_backend.py` decides when they stay). No
such package was at hand: the tests use stand-ins with the same signatures that compute densely.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import without_modes
from dampen.kernels.attend import Needs, attend, fill_call, run_heads
from dampen.kernels.columns import fits_columns, kept_columns, widened
from dampen.regularizer import Call, Regularizer, needs_matrix

FUNCTIONS = frozenset(
    {"flash_attn_func", "flash_attn_varlen_func", "varlen_attn", "memory_efficient_attention"}
)
_UNSUPPORTED = (
    "attn_bias alibi_slopes block_table seqused_k qv learnable_sink mask_mod score_mod".split()
)


_WIDEST = 256  # channels of a head that flash attention takes


class FlashFunction:
    """Where a function is kept: a module's globals, by name.

    Args:
        namespace: the globals.
        name: of the function there.
    """

    def __init__(self, namespace: dict[str, Any], name: str) -> None:
        self.namespace, self.name = namespace, name

    def __deepcopy__(self, memo: dict[int, Any]) -> FlashFunction:
        return self  # a copy of a model calls the same function

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_module, (self.namespace["__name__"], self.name)


def _in_module(module: str, name: str) -> FlashFunction:
    return FlashFunction(vars(importlib.import_module(module)), name)


class RegistryEntry(FlashFunction):
    """A back end in Hugging Face's attention registry.

    Args:
        module: the file of a model that looks back ends up.
        name: of the back end.
    """

    def __init__(self, module: str, name: str) -> None:
        registry = importlib.import_module(module).ALL_ATTENTION_FUNCTIONS
        # what one file has overwritten comes first
        local = registry._local_mapping
        super().__init__(local if name in local else registry._global_mapping, name)
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return RegistryEntry, (self.module, self.name)


def flash_functions(module: nn.Module) -> list[FlashFunction]:
    """The functions of `FUNCTIONS` that the code of a module, or of those inside it, calls.

    Args:
        module: an attention.
    """
    found: dict[tuple[int, str], FlashFunction] = {}
    for m in module.modules():
        for cls in type(m).__mro__:
            forward = vars(cls).get("forward")
            if not isinstance(forward, FunctionType) or cls.__module__.startswith("torch."):
                continue
            space = forward.__globals__
            for name in forward.__code__.co_names:
                value = space.get(name)
                if isinstance(value, ModuleType):
                    for inner in FUNCTIONS & set(forward.__code__.co_names) & set(vars(value)):
                        found[id(vars(value)), inner] = FlashFunction(vars(value), inner)
                elif callable(value) and getattr(value, "__name__", "") in FUNCTIONS:
                    found[id(space), name] = FlashFunction(space, name)
    return list(found.values())


_lock = threading.Lock()
_wrapped: dict[tuple[int, str], list[Any]] = {}  # -> the function itself, and how many use it now
_here = threading.local()


@contextmanager
def hooked(functions: Sequence[FlashFunction], run: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, calls of the functions in this thread go to `run(function, ...)`.

    Args:
        functions: from `flash_functions`.
        run: run(function, *args, **kwargs) -> what the function returns.
    """
    with _lock:
        for f in functions:
            space, name = f.namespace, f.name
            entry = _wrapped.setdefault((id(space), name), [space[name], 0])
            if entry[1] == 0:
                entry[0] = space[name]
                space[name] = _wrapper(entry[0])
            entry[1] += 1
    before, _here.run = getattr(_here, "run", None), run
    try:
        yield
    finally:
        _here.run = before
        with _lock:
            for f in functions:
                space, name = f.namespace, f.name
                entry = _wrapped[id(space), name]
                entry[1] -= 1
                if entry[1] == 0:
                    space[name] = entry[0]


def _wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        run = getattr(_here, "run", None)
        if run is None:
            return function(*args, **kwargs)
        _here.run = None  # what the function calls itself is its own affair
        try:
            return run(function, *args, **kwargs)
        finally:
            _here.run = run

    call.__name__ = function.__name__
    return call


class Packed:
    """The samples of a packed sequence (T, H, D), as (B, H, N, D) with padding.

    Args:
        starts: (B + 1), where each sample begins and the last one ends.
    """

    def __init__(self, starts: Tensor) -> None:
        lengths = starts.diff().long()
        self.longest = int(lengths.max())
        self.valid = torch.arange(self.longest, device=starts.device) < lengths.unsqueeze(1)

    def pad(self, t: Tensor) -> Tensor:
        """(T, H, D) -> (B, H, N, D)."""
        out = t.new_zeros(*self.valid.shape, *t.shape[1:])
        return out.masked_scatter(self.valid[..., None, None], t).transpose(1, 2)

    def pack(self, t: Tensor) -> Tensor:
        """(B, H, N, D) -> (T, H, D)."""
        return t.transpose(1, 2)[self.valid]


def run_flash(
    function: Callable[..., Any],
    regularizers: Sequence[Regularizer],
    call: Call,
    where: str,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, str]:
    """One call of an attention function, with the methods at work; and what ran, in words.

    Args:
        function: the model's.
        regularizers: methods at work, in order.
        call: what is known of this attention.
        where: the name of the attention.
        args: as the model passed them.
        kwargs: as the model passed them.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    names = [n if n in given else long for n, long in zip("qkv", ("query", "key", "value"))]  # noqa: B905
    operands = [given[n] for n in names]
    starts = [
        next((given[n] for n in (f"cu_seqlens_{x}", f"cu_seq_{x}") if n in given), None)
        for x in "qk"
    ]
    packs = [None if s is None else Packed(s) for s in (starts[0], starts[1], starts[1])]
    if starts[0] is not None and starts[1] is None:
        packs = [packs[0]] * 3
    q, k, v = (
        t.transpose(1, 2) if p is None else p.pad(t) for t, p in zip(operands, packs, strict=True)
    )
    scale = next((given[n] for n in ("softmax_scale", "scale") if given.get(n) is not None), None)
    window = tuple(given.get("window_size") or (-1, -1))
    causal = bool(given.get("causal", False)) or window == (-1, 0)
    rate_name = next((n for n in ("dropout_p", "p") if n in given), None)
    rate = 0.0 if rate_name is None else given[rate_name]
    needs = Needs(regularizers, rate)
    keep = None if packs[1] is None else packs[1].valid[:, None, None]
    fill_call(call, q, k, keep, causal, scale, needs.valid)
    call.value_size = v.shape[3]
    columns = [r for r in needs.inside if "mask" in r.stages]
    kept = not needs.reading and not needs_matrix(regularizers)
    # a soft cap would lift the scores of hidden keys again
    plain_scores = not given.get("softcap")
    fits = plain_scores and widest(q, k) and fits_columns(q, k, needs.inside, call)
    kept = kept and (not columns or fits)
    if not kept:
        _check_known(function, given, window, where)
        mask = _mask(q, k, keep, causal)
        grouped = k.shape[1] != q.shape[1]
        o, _, kernel = attend(q, k, v, mask, rate, False, scale, grouped, needs, call)
        out = o.transpose(1, 2) if packs[0] is None else packs[0].pack(o)
        return _as_returned(function, given, out), f"{kernel}; instead of {function.__name__}"
    for r in (*needs.read_operands, *needs.change_operands):
        q, k, v = r.qkv(q, k, v, call)
    size = v.shape[3]
    if columns:
        q, k, v = widened(q, k, v, kept_columns(q, k, needs.inside, call))
        given["softmax_scale" if "softmax_scale" in given else "scale"] = call.scale
    for name, t, p in zip(names, (q, k, v), packs, strict=True):
        given[name] = t.transpose(1, 2) if p is None else p.pack(t)
    # its own torch functions are not the model's
    with without_modes():
        returned = function(*bound.args, **bound.kwargs)
    out = (returned[0] if isinstance(returned, tuple) else returned)[..., :size]
    o = out.transpose(1, 2) if packs[0] is None else packs[0].pad(out)
    o = run_heads(o, needs.heads, call)
    out = o.transpose(1, 2) if packs[0] is None else packs[0].pack(o)
    how = ", whole keys hidden by more channels" if columns else ""
    told = f"{function.__name__} of the model (no method needs a mask by query or the matrix{how})"
    return (out, *returned[1:]) if isinstance(returned, tuple) else out, told


def run_registered(
    function: Callable[..., Any],
    regularizers: Sequence[Regularizer],
    call: Call,
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, str]:
    """One call of a back end in Hugging Face's attention registry, which stays; and what ran, in
    words.

    Args:
        function: the back end.
        regularizers: methods at work, in order; none needs a mask by query or the matrix.
        call: what is known of this attention.
        where: the name of the attention.
        q: (B, H, N, d).
        k: (B, G, M, d).
        v: (B, G, M, dv).
        mask: what the model has prepared for the back end: (B, M), a BlockMask, or None.
        kwargs: as the model passed them.
    """
    needs = Needs(regularizers)
    keep = None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        keep = mask.bool()[:, None, None]
    module: Any = call.module
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = bool(getattr(module, "is_causal", False))
    fill_call(call, q, k, keep, causal, kwargs.get("scaling"), needs.valid)
    call.value_size = v.shape[3]
    columns = any("mask" in r.stages for r in regularizers)
    if columns and not fits_columns(q, k, regularizers, call):
        raise RuntimeError(
            f"'{where}' scales its scores by {call.scale:g}, too little for hiding keys inside "
            f"'{function.__name__}'. Load the model with attn_implementation='sdpa'."
        )
    for r in (*needs.read_operands, *needs.change_operands):
        q, k, v = r.qkv(q, k, v, call)
    size = v.shape[3]
    if columns:
        q, k, v = widened(q, k, v, kept_columns(q, k, needs.inside, call))
        kwargs = {**kwargs, "scaling": call.scale}
    with without_modes():  # its own torch functions are not the model's
        out, weights = function(module, q, k, v, mask, **kwargs)
    o = run_heads(out[..., :size].transpose(1, 2), needs.heads, call)
    how = ", whole keys hidden by more channels" if columns else ""
    told = f"{function.__name__} of the model (no method needs a mask by query or the matrix{how})"
    return (o.transpose(1, 2), weights), told


def widest(q: Tensor, k: Tensor) -> bool:
    """Whether flash attention takes heads with the channels that hide keys.

    Args:
        q: (B, H, N, d).
        k: (B, G, M, d).
    """
    return fits_widened(q.shape[3], q.shape[1] // k.shape[1])


def fits_widened(size: int, shared: int) -> bool:
    """Whether a head of `size` channels leaves room for those that hide keys.

    Args:
        size: of a head.
        shared: heads of queries to a head of keys.
    """
    return size + -(-shared // 8) * 8 <= _WIDEST


def _mask(q: Tensor, k: Tensor, keep: Tensor | None, causal: bool) -> Tensor | None:
    """What a query may see; the last query sees the last key, as flash attention aligns them."""
    if not causal:
        return keep
    if keep is None:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(
            k.shape[2] - q.shape[2]
        )[None, None]
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "A packed causal attention with more keys than queries has no mask of dampen's. Use "
            "methods that keep the model's attention function: on heads, or on whole keys."
        )
    return keep & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def _check_known(
    function: Callable[..., Any], given: dict[str, Any], window: tuple[Any, ...], where: str
) -> None:
    """Raise where dampen's attention would compute something else than the function."""
    used = [n for n in _UNSUPPORTED if given.get(n) is not None]
    used += ["softcap"] * bool(given.get("softcap")) + ["window_size"] * (
        window not in ((-1, -1), (None, None), (-1, 0))
    )
    if used:
        raise RuntimeError(
            f"'{where}' calls {function.__name__} with {', '.join(used)}, which dampen's attention "
            "does not have, and a method needs a mask by query or the matrix of scores there. Use "
            "methods on heads, queries or whole keys, or leave this attention out."
        )


def _as_returned(function: Callable[..., Any], given: dict[str, Any], out: Tensor) -> Any:
    if given.get("return_attn_probs") or given.get("return_aux") or given.get("return_lse"):
        raise RuntimeError(
            f"{function.__name__} is to return more than its output, and a method needs dampen's "
            "attention, which returns nothing else. Leave that argument out in training."
        )
    # flash attention 4 always returns the logarithms of the sums too
    return (out, None) if "learnable_sink" in given else out
