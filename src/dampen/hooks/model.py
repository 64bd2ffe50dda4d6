"""Hooks on the whole model: its forward, its input embedding, its padding, and a loss
that cannot be touched."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import is_empty, refuse_nested
from dampen.containers import first_of, tensors_in, with_first, with_tensors
from dampen.hooks.builtin_dropout import deterministic
from dampen.hooks.context import ModelSite, close_frame, open_frame
from dampen.hooks.weights import check_attached
from dampen.masks import memories
from dampen.names import leave_out
from dampen.regularizer import STAGES, Regularizer, UnsupportedModel, in_order

if TYPE_CHECKING:
    from dampen.hooks.context import Layer


# --- errors
#
# Which method, stage and layer an error came from, read from its traceback: no step pays for
# it.


def blame(error: BaseException) -> str:
    """`DropKey.mask at 'blocks.0'` for an error raised inside a stage of a
    regularizer; empty for any other.

    The innermost stage counts: one regularizer may call another.
    """
    found, trace = "", error.__traceback__
    while trace is not None:
        owner, name = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_code.co_name
        if isinstance(owner, Regularizer) and name in STAGES:
            found = f"{type(owner).__name__}.{name}" + (
                f" at '{owner.site.name}'" if owner.site else ""
            )
        trace = trace.tb_next
    return found


def add_blame(error: BaseException) -> None:
    """Note on an error where it came from, once."""
    note = f"dampen: raised in {where}" if (where := blame(error)) else ""
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


# --- the model's forward
#
# The forward of the whole model: the stage `inputs`, and the penalties that wait until they are
# taken.

_DATA = (
    "pixel_values",
    "images",
    "image",
    "x",
    "input",
    "inputs",
    "input_values",
    "input_features",
    "input_ids",
    "src",
)


TRACED = (
    "torch.jit.trace cannot record a model in training mode whose "
    "regularizers are on: it would keep the choices of "
    "one step for all others. Call model.eval() first, trace inside "
    "`with reg.disable():`, or use torch.compile."
)


def model_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the whole model, with the stage inputs open. Penalties wait until they are
    taken; an error ends the step that they belong to."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = self._dampen_model.doubled
        if doubled is None or torch.compiler.is_compiling() or not doubled.turn:
            return once(self, *args, **kwargs)
        return doubled.run(self, partial(once, self), partial(base, self), silent, args, kwargs)

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: ModelSite = self._dampen_model
        for r in site.own:
            if "inputs" in r.stages and site.acts(r, self.training):
                args, kwargs = apply_inputs(self, site, r, args, kwargs)
        # whether a graph is made is read first: it would depend on what is read before that
        if not torch.compiler.is_compiling():
            if self.training and site.enabled and torch.jit.is_tracing():
                raise RuntimeError(TRACED)
            if site.stepping and self.training and site.enabled and torch.is_grad_enabled():
                check_attached(self, site)
            if site.order is not None and not site.order.known:
                site.order.start()
        trained = not torch.is_grad_enabled() and any(
            t.requires_grad for t in tensors_in((args, kwargs))
        )
        site.ledger.enter(self.training and site.enabled, trained)
        if site.padding is not None:
            site.padding.start()
        frames = [(layer, open_frame(layer)) for layer in site.blockless if layer.enabled]
        if not torch.compiler.is_compiling():
            memories.setdefault(threading.get_ident(), []).append(None)
        try:
            out = base(self, *args, **kwargs)
            if not torch.compiler.is_compiling():
                site.check_reached()
            return out
        except BaseException as error:  # an aborted forward leaves no penalty for the next one
            site.ledger.forget()
            add_blame(error)
            raise
        finally:
            site.ledger.leave()
            if not torch.compiler.is_compiling():
                opened = memories[threading.get_ident()]
                opened.pop()
                if not opened:
                    del memories[threading.get_ident()]
            for layer, frame in frames:
                close_frame(layer, frame)

    return forward


@contextlib.contextmanager
def silent(model: nn.Module) -> Iterator[None]:
    """Inside, nothing in the model is random; what draws in its own code is found by its draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deterministic(model):
            yield


def apply_inputs(
    self: Any, site: ModelSite, r: Regularizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model with the stage `inputs` of a regularizer applied to its data."""
    name, i = site.input_name, site.input_position
    given = args[i] if len(args) > i else kwargs.get(name)
    if isinstance(given, torch.Tensor):
        refuse_nested(given, f"{type(r).__name__} at the input '{name}'")
        if is_empty(given):
            return args, kwargs
    if given is not None and len(args) > i:
        return (*args[:i], r.inputs(given), *args[i + 1 :]), kwargs
    if given is not None:
        return args, {**kwargs, name: r.inputs(given)}
    raise RuntimeError(
        f"{type(r).__name__} acts on the input '{name}' of "
        f"{type(self).__name__}, but the model was "
        f"called without it (got {len(args)} positional "
        f"arguments, keywords {sorted(kwargs)}), so it "
        f"would do nothing. Call the model with '{name}', or remove {type(r).__name__}."
    )


def model_input(module: nn.Module) -> tuple[str, int]:
    """Which argument of a model's forward is the data, by the usual names, else the first: its name
    and position."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    name = next((n for n in _DATA if n in names), first_argument(module))
    return name, names.index(name) if name in names else 0


def first_argument(module: nn.Module) -> str:
    """The name of the first argument of a module's forward."""
    names = [
        n
        for n, p in inspect.signature(type(module).forward).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    ]
    return names[1] if len(names) > 1 else ""


# --- the input embedding
#
# The stage `embeddings`: the output of a model's input or patch embedding, before positions
# are added.
#
# The embedding is found once, when a method uses the hook point: by the model's own word
# (`get_input_embeddings` of transformers, `patch_embed` of timm), then by the usual names.
# Padding is read from the `attention_mask` argument of the innermost module around the
# embedding that takes one (a backbone, or one side of an encoder-decoder), because outside
# attention nothing else shows it.

_NOT_TOKENS = re.compile(r"pos|type|segment|relative|time|norm|rotary", re.IGNORECASE)
_PATCHES = re.compile(r"(^|\.)(patch_?embed\w*|conv_proj|feature_projection|embed)$", re.IGNORECASE)


class MaskSite:
    """What is kept on a module that is called with `attention_mask`: the position of the argument,
    and the present one."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.mask: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask": None}


class EmbeddingSite:
    """What is kept on an embedding: the clones that act on its output, the model's site, and who
    knows the mask."""

    def __init__(self, clones: list[Regularizer], model: ModelSite, masks: MaskSite | None) -> None:
        self.clones, self.model, self.masks = in_order(clones), model, masks


def mask_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that is called with `attention_mask`: kept while it runs."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: MaskSite = self._dampen_mask
        mask = args[site.position] if site.position < len(args) else kwargs.get("attention_mask")
        site.mask = mask if isinstance(mask, Tensor) else None
        out = base(self, *args, **kwargs)
        site.mask = None
        return out

    return forward


def embedding_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an embedding with the stage embeddings open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: EmbeddingSite = self._dampen_embedding
        out = base(self, *args, **kwargs)
        active = [r for r in site.clones if site.model.acts(r, self.training)]
        if not active:
            return out
        x = first_of(out)
        if x is None:
            raise RuntimeError(
                f"{type(self).__name__} returned a "
                f"{type(out).__name__} in which no embeddings were found, so "
                f"{type(active[0]).__name__} cannot act on them. Return a "
                "tensor, or a tuple, a dict or a dataclass."
            )
        refuse_nested(x, f"{type(active[0]).__name__} at the input embedding")
        if is_empty(x):
            return out
        valid = fit_mask(None if site.masks is None else site.masks.mask, x)
        ids = next((a for a in args if isinstance(a, Tensor) and not a.is_floating_point()), None)
        for r in active:
            if r.reads_ids:
                r.input_ids = ids
            x = r.embeddings(x, valid)
            r.input_ids = None
        return with_first(out, x)

    return forward


def fit_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A model's 2-d mask as bool (B, N) for embeddings (B, N, D); None where it is of another
    shape, or none came."""
    if mask is None or mask.ndim != 2 or x.ndim != 3 or mask.shape != x.shape[:2]:
        return None
    return mask != 0


def mask_owner(model: nn.Module, name: str) -> tuple[nn.Module, int] | None:
    """The innermost module around the embedding `name` whose forward takes `attention_mask`, and at
    which position."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:end]))
        names = list(inspect.signature(type(owner).forward).parameters)[1:]
        if "attention_mask" in names:
            return owner, names.index("attention_mask")
    return None


def open_embeddings(
    model: nn.Module, embeddings: dict[str, nn.Module], clones: list[Regularizer], site: ModelSite
) -> list[tuple[nn.Module, str, object]]:
    """What to swap: each embedding. Each module that knows the mask is watched from here on."""
    swaps: list[tuple[nn.Module, str, object]] = []
    known: dict[int, MaskSite] = {}
    for name, module in embeddings.items():
        found = mask_owner(model, name)
        if found is not None and id(found[0]) not in known:
            known[id(found[0])] = _mask_site(*found)
        swaps.append(
            (
                module,
                "embedding",
                EmbeddingSite(clones, site, known[id(found[0])] if found else None),
            )
        )
    return swaps


def mask_sites(model: nn.Module, name: str) -> list[MaskSite]:
    """The modules around `name` whose forward takes `attention_mask`,
    watched, the innermost first."""
    sites = []
    while (found := mask_owner(model, name)) is not None:
        sites.append(_mask_site(*found))
        if found[0] is model:
            break
        name = next(n for n, m in model.named_modules() if m is found[0])
    return sites


def _mask_site(owner: nn.Module, position: int) -> MaskSite:
    """What watches a module for its mask: one for all that use it."""
    from dampen.hooks.patch import swap  # which knows this module

    site: MaskSite | None = vars(owner).get("_dampen_mask")
    if site is None:
        site = MaskSite(position)
        swap(owner, "mask", site)
    return site


def find_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """The input embeddings of a model by dotted name: one, or one per side of an
    encoder-decoder."""
    named = dict(model.named_modules())
    tokens: dict[str, nn.Module] = {
        n: m
        for n, m in named.items()
        if isinstance(m, nn.Embedding) and not _NOT_TOKENS.search(last(n))
    }
    if len(tokens) > 1 and any("decoder" in n or "target" in n for n in tokens):
        return tokens
    for owner in named.values():  # the model itself first, then what it wraps (SentenceTransformer)
        told = _told(owner)
        name = next((n for n, m in named.items() if m is told), None)
        if name is not None and told is not None:
            return {name: told}
    patches = {n: m for n, m in named.items() if _PATCHES.search(n)}
    if patches and not tokens:
        first = next(iter(patches))
        return {first: patches[first]}
    if tokens:
        first = next(iter(tokens))
        return {first: tokens[first]}
    raise UnsupportedModel(
        f"{type(model).__name__} has no input embedding that could "
        "be found: no get_input_embeddings(), no "
        "nn.Embedding of tokens, no module named patch_embed. "
        "Name the module that makes tokens of the input "
        "'patch_embed' or 'embed', or leave the method out."
    )


def last(name: str) -> str:
    """The last part of a dotted name."""
    return name.rsplit(".", 1)[-1]


def _told(model: nn.Module) -> nn.Module | None:
    """What the model itself calls its input embedding."""
    ask = getattr(model, "get_input_embeddings", None)
    if callable(ask):
        try:
            told = ask()
        except NotImplementedError:  # transformers: this architecture does not say
            return None
        return told if isinstance(told, nn.Module) else None
    return None


# --- padding
#
# Padding in layers whose attention cannot report it: those without a softmax over tokens
# (Mamba, linear attention).
#
# It is read from the `attention_mask` that the model was called with, else from an attention of
# the same forward. Where a layer runs before the first attention that reports padding, its
# penalty would count padded tokens, which is an error.


class Padding:
    """What the layers of one model know about the padding of a forward."""

    def __init__(self) -> None:
        self.masks: list[
            MaskSite
        ] = []  # the modules that are called with `attention_mask`, the innermost first
        self.reported: dict[
            int, Tensor
        ] = {}  # by thread: the valid tokens (B, N) that an attention has reported
        self.unknown: dict[int, str] = {}  # by thread: a layer that needed them before

    def start(self) -> None:
        """A forward of the model starts."""
        self.reported.pop(_thread(), None)
        self.unknown.pop(_thread(), None)

    def report(self, valid: Tensor) -> None:
        """An attention has met a mask: its valid tokens (B, N)."""
        before = self.unknown.get(_thread())
        if before is not None and not torch.compiler.is_compiling() and not bool(valid.all()):
            raise RuntimeError(
                f"The layer '{before}' has no attention that reports padding "
                "and ran before the first one that does, "
                "so its penalty counted padded tokens. Call the model with "
                "attention_mask=, a 2-d mask, give batches "
                f"without padding, or {leave_out(before)}."
            )
        self.reported[_thread()] = valid

    def of(self, layer: Layer) -> Tensor | None:
        """The valid tokens (B, N) of a layer that cannot report them itself; None
        where nothing is padded."""
        given = [site for site in self.masks if site.mask is not None]
        for site in given:
            if site.mask is not None and site.mask.ndim == 2:
                return site.mask != 0
        if self.masks and not given:
            return None  # called without a mask: nothing is padded
        valid = self.reported.get(_thread())
        if valid is None:
            self.unknown[_thread()] = layer.site.name
        return valid

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "reported": {}, "unknown": {}}


def open_padding(model: nn.Module, layers: Sequence[Layer]) -> Padding | None:
    """Watch the masks of a model in which a layer needs padding and cannot report it."""
    needing = [
        layer
        for layer in layers
        if not layer.tells_padding and any(c.needs_valid for c in layer.clones)
    ]
    if not needing:
        return None
    padding = Padding()
    padding.masks = mask_sites(model, needing[0].site.name)
    for layer in layers:
        layer.padding = padding
    return padding


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


# --- penalties on the model's own output
#
# A carrier for trainers whose loss cannot be touched: the gradient of the penalties rides on
# the model's own output.
#
# L -> L forward, to the bit dL -> dL, dL backward: what flows into the loss flows into the
# penalties as well
#
# So whatever the trainer does to the loss (a gradient scaler, division by accumulation steps)
# happens to the penalties. Where the model gives no loss, a number says what flows into them
# instead, and its first output carries them.


class CarrierSite:
    """What is kept on a model that carries its penalties: the handle, and the
    number that was given."""

    def __init__(self, reg: Any, scale: float | None) -> None:
        self.reg, self.scale = reg, scale


def carrier_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model whose output carries the penalties; inside `reg.loss`
    they are added as usual."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: CarrierSite = self._dampen_carrier
        output = base(self, *args, **kwargs)
        if not (self.training and torch.is_grad_enabled()) or site.reg.in_loss:
            return output
        terms = site.reg.penalties()
        site.reg.attached = {name: value.detach() for name, value in terms.items()}
        if not terms:
            return output
        shifts = str(getattr(self, "loss_type", "")).startswith("ForCausalLM")
        return carry(output, sum(terms.values()), site.scale, share_of_step(kwargs, shifts))

    return forward


class _Ride(torch.autograd.Function):
    """The first argument, unchanged; whatever its gradient is, a number goes to the second."""

    @staticmethod
    def forward(ctx: Any, carried_by: Tensor, penalty: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, penalty.dtype
        return carried_by.clone()  # a trainer may scale it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.new_full((), ctx.scale, dtype=ctx.like), None


def carry(output: Any, penalty: Tensor, scale: float | None, share: Tensor | float = 1.0) -> Any:
    """`output` with the penalty's gradient on its loss, or with a `scale` on its first tensor.

    `share` is what part of the step's items this forward holds, where the model divides
    its loss by those of all.
    """
    if scale is not None:
        return _replace_first(output, lambda t: _Ride.apply(t, penalty, scale))  # type: ignore[no-untyped-call]
    loss = _loss(output)
    if loss is None:
        raise RuntimeError(
            "regularize(..., attach_to_loss=True) lets the penalties ride on "
            "the model's own loss, but it returned a "
            f"{type(output).__name__} without one. Call it with labels; or "
            "say how much of the penalties' gradient "
            "each backward should add, attach_to_loss=1.0 (or 1 / "
            "accumulation steps); or add reg.penalty() to "
            "the loss."
        )
    riding = penalty * share
    return _replace_loss(
        output, loss, loss + (riding - riding.detach()).to(loss.dtype)
    )  # adds 0, and its gradient


def share_of_step(kwargs: Mapping[str, Any], shifts: bool = False) -> Tensor | float:
    """The part of a step's labels that this forward holds: transformers' models divide by
    `num_items_in_batch`, the labels of all micro-batches, and their trainer
    then divides no more."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
    if labels is None:
        labels = kwargs.get("labels")
        labels = labels[..., 1:] if shifts and isinstance(labels, Tensor) else labels
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    out: Tensor | float = (labels != -100).sum() / items
    return out


def _loss(output: Any) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    else:
        found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, Tensor) and found.ndim == 0 and found.requires_grad else None


def _replace_loss(output: Any, before: Tensor, loss: Tensor) -> Any:
    new = with_tensors(output, lambda t: loss if t is before else t)
    if new is output:  # an object of the user's own
        output.loss = loss
    return new


def _replace_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    first = next((t for t in tensors_in(output) if t.requires_grad), None)
    if first is None:
        raise RuntimeError(
            "regularize(..., attach_to_loss=NUMBER) needs a tensor "
            "with gradient in the model's output, got "
            f"{type(output).__name__}."
        )
    new = change(first)
    return with_tensors(output, lambda t: new if t is first else t)


# --- regularize(..., example=...)
#
# `regularize(..., example=...)`: one forward on an input of the user's, so that what cannot
# work is reported at once.


def run_example(model: nn.Module, example: Any) -> None:
    """One training forward without gradient. The model, its buffers and the random
    numbers are left as they were.

    Args:
        model: a regularized model.
        example: what the model is called with: a tensor, a tuple of arguments
            or a mapping of keywords.
    """
    args, kwargs = _arguments(example)
    with _as_it_was(model), torch.random.fork_rng(), torch.no_grad():
        model.train()
        model(*args, **kwargs)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise TypeError(
        "regularize(example=...) is what the model is called with: a "
        "tensor, a tuple of arguments or a dict of "
        f"keywords, got {type(example).__name__}."
    )


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers()
    ]  # batch norm counts every forward
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
