"""Attention that a library computes: Hugging Face's registry, and the functions of flash_attn,
torch and xformers."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import forward_hooks, in_backward, without_modes
from dampen.hooks.context import sees_attention
from dampen.hooks.discover.source import names_any
from dampen.kernels.attend import Needs, attend, fill_call, reads_apart, run_heads
from dampen.kernels.columns import fits_columns, kept_columns, widened
from dampen.regularizer import Call, Regularizer, needs_matrix

if TYPE_CHECKING:
    from dampen.hooks.context import Layer


# --- attention functions of other packages
#
# Attention functions of other packages: flash_attn (2, 3 and 4), torch's varlen_attn, xformers.
#
# A model that calls one of them keeps it for methods that act on queries, keys, values and head
# outputs, and for those that hide whole keys (by more channels of q and k). What needs a mask
# by query or the matrix of scores runs dampen's own attention instead. Sequences packed without
# padding are padded for the methods, so that each sample draws for itself.
#
# The functions are found by name in what the code of an attention module uses, and are wrapped
# only while a forward is under way. So are the entries of Hugging Face's attention registry that
# look into no scores (see the second part). No such package was at hand: the tests use stand-ins
# with the same signatures that compute densely.

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
        # torch's flag means the same where there are as many keys as queries: then no mask is built
        flag = causal and keep is None and q.shape[2] == k.shape[2]
        mask = None if flag else _mask(q, k, keep, causal)
        grouped = k.shape[1] != q.shape[1]
        o, _, kernel = attend(q, k, v, mask, rate, flag, scale, grouped, needs, call)
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


# --- back ends of Hugging Face's attention registry
#
# Back ends of Hugging Face's attention registry that hide the scores, flex_attention and the
# flash_attention family: the training forward runs another entry of the same registry, one that
# can be hooked, where a method needs a mask by query or the matrix of scores. For methods on
# queries, keys, values, head outputs and whole keys the back end stays, and its entry is wrapped.
# flex_attention keeps its padding in a BlockMask, which no method reads: it stays for head outputs
# and whole keys. A graph of torch.compile always switches, because it cannot trace the wrapping.
#
# Which entry a model takes is written in its config, and it decides twice: the model prepares its
# masks for it, and each attention looks it up. So it is switched around the whole forward of
# the library's model, which then builds the masks of the new back end itself (causal, padding,
# sliding windows, packed sequences), and given back afterwards: eval and the config never see
# it. A recompute of activation checkpointing runs an attention alone, with the masks of its
# forward, so there each attention is switched by itself.
#
# The entry taken is `sdpa`; `eager` where the attention hands something to the registry that
# SDPA has no place for (a cap on scores, attention sinks). flex_attention and flash run on
# CUDA, and nothing here was tried on one: the tests stand in for them.

# of a config of transformers; its property would set those below it too
WANTED = "_attn_implementation_internal"
_ONLY_EAGER = {"softcap", "s_aux"}


def is_hidden(implementation: object) -> bool:
    """Whether an entry of the registry computes attention where no socket can open."""
    return isinstance(implementation, str) and (
        implementation == "flex_attention" or "flash" in implementation
    )


class LibraryBackend:
    """The configs of one model that name a hidden back end, and what they name
    during a training forward."""

    def __init__(
        self, configs: Sequence[Any], instead: Sequence[str], layers: Sequence[Layer]
    ) -> None:
        self.configs, self.instead, self.layers = list(configs), list(instead), list(layers)
        self.before = [getattr(config, WANTED) for config in configs]
        self.under_way = (
            0  # forwards that have it switched; another thread may be in the same model
        )
        self.wrapped = False  # whether every attention's entry of the registry can be wrapped
        self.widens = False  # whether more channels of q and k can hide keys there

    def wanted(self, module: nn.Module) -> bool:
        """Whether a method at work in this forward needs another back end."""
        at_work = [layer.active(module) for layer in self.layers]
        if not any(sees_attention(r) for active in at_work for r in active):
            return False
        return torch.compiler.is_compiling() or not self.stays(at_work)

    def stays(self, at_work: Iterable[Sequence[Regularizer]]) -> bool:
        """Whether methods can act while the model's own back end runs.

        Args:
            at_work: the methods of each layer.
        """
        return self.wrapped and all(
            not reads_apart(active, dropout=True) and all(self._acts_around(r) for r in active)
            for active in at_work
        )

    def _acts_around(self, r: Regularizer) -> bool:
        """Whether a method needs nothing from inside the attention."""
        if needs_matrix([r]) or r.takes_jacobian:
            return False
        if "mask" in r.stages:
            return self.widens and not r.per_query
        flex = any("flex" in name for name in self.before)  # its padding is in a BlockMask
        return not flex or not (r.needs_valid or "qkv" in r.stages)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A forward during which the configs name a back end with a hook; they name their own again
        once no forward needs the other any more."""
        if self.under_way == 0:  # not what they named at first: a user may have changed it since
            self.before = [getattr(config, WANTED) for config in self.configs]
        self.under_way += 1
        try:
            self._ask(self.instead)
            return forward(*args, **kwargs)
        finally:
            self.under_way -= 1
            if self.under_way == 0:
                self._ask(self.before)

    def _ask(self, names: Sequence[str]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            setattr(config, WANTED, name)

    def run_model(
        self, base: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of a model of the library, which prepares masks."""
        return (
            self.run(base, module, *args, **kwargs)
            if self.wanted(module)
            else base(module, *args, **kwargs)
        )

    def run_attention(
        self, base: Callable[..., Any], module: nn.Module, where: str, *args: Any, **kwargs: Any
    ) -> Any:
        """The forward of an attention: inside its model's forward, or in a
        checkpoint's recompute."""
        if not self.wanted(module):
            return base(module, *args, **kwargs)
        self._check(module, where, (*args, *kwargs.values()))
        return self.run(base, module, *args, **kwargs)

    def _check(self, module: nn.Module, where: str, arguments: Sequence[Any]) -> None:
        """Raise where an attention got masks that another back end prepared, which
        would be read wrongly."""
        foreign = next((type(a).__name__ for a in arguments if type(a).__name__ == "BlockMask"), "")
        alone = not self.under_way and not in_backward()
        if foreign or alone:
            happened = f"got a {foreign}" if foreign else "was called without the model around it"
            raise RuntimeError(
                f"{type(module).__name__} at '{where}' {happened}, so its masks "
                f"are those of '{self.before[0]}', a back "
                "end that regularizers cannot look into. Call the model "
                "itself, which prepares the masks of SDPA in "
                "training, or load it with attn_implementation='sdpa'."
            )

    def describe(self) -> str:
        """What is switched, in words."""
        pairs = dict.fromkeys(zip(self.before, self.instead, strict=True))
        if self.stays([layer.clones for layer in self.layers]):
            return "; ".join(
                f"'{a}' stays in training forwards: no method needs a "
                "mask by query or the matrix. In a graph of "
                f"torch.compile it runs as '{b}'"
                for a, b in pairs
            )
        return "; ".join(
            f"'{a}' runs as '{b}' in training forwards, where attention can be entered"
            for a, b in pairs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "under_way": 0}


def find_backend(
    model: nn.Module, attentions: Mapping[str, nn.Module], layers: Sequence[Layer]
) -> LibraryBackend | None:
    """The hidden back ends of a model's attentions."""
    hidden = [config for config in configs_of(model) if is_hidden(getattr(config, WANTED))]
    if not any(is_hidden(asked(m)) for m in attentions.values()):
        return None
    instead = [_instead(model, config, attentions.values()) for config in hidden]
    backend = LibraryBackend(hidden, instead, layers)
    entries = {name: _entry(m) for name, m in attentions.items() if is_hidden(asked(m))}
    backend.wrapped = all(e is not None for e in entries.values())
    backend.widens = all(b == "sdpa" for b in instead) and all(
        fits_widened(getattr(m, "head_dim", 0), getattr(m, "num_key_value_groups", 1))
        for m in attentions.values()
    )
    for name, entry in entries.items():
        site = vars(attentions[name]).get("_dampen_attention")
        if site is not None and entry is not None and backend.wrapped:
            site.entries.append(entry)
    return backend


def _entry(attention: nn.Module) -> RegistryEntry | None:
    """The entry of the registry that an attention looks up, where it is there."""
    for cls in type(attention).__mro__:
        forward = vars(cls).get("forward")
        if not isinstance(forward, FunctionType):
            continue
        space = inspect.unwrap(forward).__globals__
        registry = space.get("ALL_ATTENTION_FUNCTIONS")
        if registry is not None and hasattr(registry, "_global_mapping"):
            name = str(asked(attention))
            return RegistryEntry(space["__name__"], name) if name in registry else None
    return None


def models_of(model: nn.Module) -> list[nn.Module]:
    """The library's models inside a model, which prepare masks for their attentions."""
    return [m for m in model.modules() if hasattr(type(m), "set_attn_implementation")]


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of transformers that a model holds, those below them too."""
    known: dict[int, Any] = {}
    for module in model.modules():
        _collect(vars(module).get("config"), known)
    return list(known.values())


def asked(attention: nn.Module) -> object:
    """The entry of the registry that an attention looks up."""
    return getattr(vars(attention).get("config"), WANTED, None)


def _collect(config: Any, known: dict[int, Any]) -> None:
    """A config of transformers and those below it."""
    if not hasattr(config, WANTED) or id(config) in known:
        return
    known[id(config)] = config
    for name in getattr(config, "sub_configs", {}):
        _collect(getattr(config, name, None), known)


def _instead(model: nn.Module, config: Any, attentions: Any) -> str:
    """The entry of the registry that takes everything these attentions hand
    over and has a socket."""
    classes = {type(m) for m in attentions if vars(m).get("config") is config}
    owners = [
        m
        for m in model.modules()
        if vars(m).get("config") is config and hasattr(type(m), "_supports_sdpa")
    ]
    fits = all(getattr(type(m), "_supports_sdpa", False) for m in owners)
    return (
        "sdpa" if fits and not any(_hands_over(cls) & _ONLY_EAGER for cls in classes) else "eager"
    )


def _hands_over(cls: type) -> set[str]:
    """The keywords that the code of a class's forward calls others with."""
    forward = inspect.getattr_static(cls, "forward", None)
    code = inspect.unwrap(forward).__code__ if isinstance(forward, FunctionType) else None
    constants = () if code is None else code.co_consts
    return {name for c in constants if isinstance(c, tuple) for name in c if isinstance(name, str)}


def backend_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model of the library whose back end is switched."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dampen_backend.run_model(base, self, *args, **kwargs)

    return forward


def hidden_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention in such a model."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, where = self._dampen_hidden
        return backend.run_attention(base, self, where, *args, **kwargs)

    return forward


# --- models loaded with attn_implementation="eager"
#
# Models of Hugging Face that were loaded with `attn_implementation="eager"`: their training
# forward runs the library's `sdpa` while a method looks into attention, where both compute the
# same; eval and the config never see it.
#
# Whether both compute the same is read off the code of the eager function that the model's file
# brings: softmax(q k^T * scale + bias + mask), dropout, the product with values, and nothing
# else. Capped scores, attention sinks, or an attention whose own code does something of its own
# in `eager` (GPT-2 may reorder and upcast) are left alone, and so is a model of which one part
# has no SDPA. The eager socket follows those as it follows any code.
#
# A forward that needs the matrix of weights keeps `eager`: requested weights, a
# mask of heads, a user's hook on an attention module. So does an attention that is called
# without its model, whose masks are those of `eager`.

# what the code of an eager function may name: anything else might be more than SDPA computes
_PLAIN = set(
    "repeat_kv num_key_value_groups head_dim torch nn functional F matmul "
    "transpose softmax float32 to type dtype "
    "dropout training contiguous size shape hasattr getattr".split()
)
_ARGUMENTS = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
_NEEDS_MATRIX = ("output_attentions", "head_mask", "decoder_head_mask", "cross_attn_head_mask")


class EagerBackend(LibraryBackend):
    """The configs of one model that name `eager`, and `sdpa` during the training
    forwards that can take it."""

    def __init__(self, model: nn.Module, configs: Sequence[Any], layers: Sequence[Layer]) -> None:
        super().__init__(configs, ["sdpa"] * len(configs), layers)
        self.staying = 0  # forwards under way that keep eager
        # whether the last forward of the model did: a checkpoint's recompute must do the same
        self.took_sdpa = False
        self.watched = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
        self.places = {_name(m): _places(m) for m in models_of(model)}

    def run_model(
        self, base: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """The outermost forward decides for those inside it."""
        if not self.wanted(module):
            return base(module, *args, **kwargs)
        if self.under_way or not (self.staying or self._leave_alone(module, args, kwargs)):
            self.took_sdpa = True
            return self.run(base, module, *args, **kwargs)
        self.staying += 1
        self.took_sdpa = False
        try:
            return base(module, *args, **kwargs)
        finally:
            self.staying -= 1

    def run_attention(
        self, base: Callable[..., Any], module: nn.Module, where: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Inside its model the configs have been switched, or not; alone its
        masks are eager ones."""
        alone = not torch.compiler.is_compiling() and not self.under_way and not self.staying
        if alone and self.took_sdpa and in_backward() and self.wanted(module):
            return self.run(base, module, *args, **kwargs)
        return base(module, *args, **kwargs)

    def _leave_alone(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether this forward must be left alone: somebody wants more of its
        attention than the result."""
        given = [kwargs.get(name) for name in _NEEDS_MATRIX]
        given += [args[i] for i in self.places.get(_name(module), ()) if i < len(args)]
        if any(x is not None and x is not False for x in given):
            return True
        if any(c.output_attentions or getattr(c, WANTED) != "eager" for c in self.configs):
            return (
                True  # requested by the config, or no longer eager: the user has changed it since
            )
        return any(forward_hooks(m, not_of="transformers.") for m in self.watched)

    def describe(self) -> str:
        return (
            "'eager' runs as 'sdpa' in training forwards; it stays "
            "where attention weights are requested, by "
            "output_attentions=True or a forward hook"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "staying": 0}


def find_eager(
    model: nn.Module, attentions: Mapping[str, nn.Module], layers: Sequence[Layer]
) -> EagerBackend | None:
    """The switch of a model that was loaded with `eager`, where every attention of it computes what
    `sdpa` computes."""
    configs = [config for config in configs_of(model) if getattr(config, WANTED) == "eager"]
    if not any(asked(m) == "eager" for m in attentions.values()):
        return None
    looking_up = [
        m
        for m in model.modules()
        if any(vars(m).get("config") is c for c in configs)
        and not hasattr(type(m), "set_attn_implementation")
        and names_any(type(m), {"ALL_ATTENTION_FUNCTIONS", "_attn_implementation"})
    ]
    known = {id(m) for m in looking_up}
    supported = all(getattr(type(m), "_supports_sdpa", False) for m in models_of(model))
    every = all(id(m) in known for m in attentions.values() if asked(m) == "eager")
    if (
        not supported
        or not every
        or not all(_same_in_sdpa(cls) for cls in {type(m) for m in looking_up})
    ):
        return None
    return EagerBackend(model, configs, layers)


def _same_in_sdpa(cls: type) -> bool:
    """Whether an attention looks its back end up, and the library's `eager` and
    `sdpa` do the same for it."""
    forward = inspect.getattr_static(cls, "forward", None)
    if not isinstance(forward, FunctionType):
        return False
    forward = inspect.unwrap(forward)
    registry, eager = (
        forward.__globals__.get(n) for n in ("ALL_ATTENTION_FUNCTIONS", "eager_attention_forward")
    )
    named = set(forward.__code__.co_names)
    if registry is None or not isinstance(eager, FunctionType):
        return False
    sdpa = registry["sdpa"]
    if not named >= {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"} or "eager" in _texts(
        forward.__code__
    ):
        return False
    if not getattr(sdpa, "__module__", "").startswith("transformers."):
        return False  # a user's own
    allowed = _ARGUMENTS | ({"position_bias"} & set(inspect.signature(sdpa).parameters))
    return (
        set(inspect.signature(eager).parameters) <= allowed
        and set(eager.__code__.co_names) <= _PLAIN
    )


def _texts(code: CodeType) -> set[str]:
    """The strings among the constants of a code, also inside tuples."""
    flat = [x for c in code.co_consts for x in (c if isinstance(c, tuple) else (c,))]
    return {x for x in flat if isinstance(x, str)}


def _name(module: nn.Module) -> str:
    """A class by name: the swapped one has the name of the one below it."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _places(module: nn.Module) -> list[int]:
    """Where the arguments that need the matrix stand among positional ones."""
    names = list(inspect.signature(module.forward).parameters)
    return [names.index(name) for name in _NEEDS_MATRIX if name in names]
