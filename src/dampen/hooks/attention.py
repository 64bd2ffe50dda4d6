"""An attention module while regularizers are at work in it: `F.scaled_dot_product_attention` means
`dampen.attention` there, and softmax(q k^T) v too. Sockets are opened per module and not around the
whole step, because activation checkpointing runs a module's forward again
during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import refuse_nested
from dampen.containers import first_of, with_tensors
from dampen.hooks.block import apply_linear
from dampen.hooks.context import (
    AttentionSite,
    Frame,
    close_frame,
    frame_of,
    open_frame,
    sees_attention,
)
from dampen.hooks.discover.source import scripted_function
from dampen.hooks.library_backends import hooked, run_flash, run_registered
from dampen.hooks.residual import ResidualSocket, call_torch
from dampen.hooks.torch_mha import functional_mha, mha_forward
from dampen.hooks.tracing.channels import (
    attends_over_channels,
    start_following,
    tell_heads,
    tell_rows,
)
from dampen.hooks.tracing.eager import NO_SOFTMAX, EagerAttention
from dampen.hooks.tracing.products import PRODUCTS, layout_of
from dampen.hooks.tracing.scores import Plain
from dampen.kernels.attend import Needs, attend
from dampen.names import leave_out
from dampen.regularizer import ATTENTION_STAGES, Call, LinearCall, Regularizer


class Socket(TorchFunctionMode):
    """Inside one attention module, F.scaled_dot_product_attention means `attention`, and
    softmax(q k^T) v too."""

    def __init__(
        self, site: AttentionSite, frame: Frame, regularizers: Sequence[Regularizer], call: Call
    ) -> None:
        super().__init__()
        self.site, self.frame, self.regularizers, self.call, self.seen = (
            site,
            frame,
            regularizers,
            call,
            False,
        )
        self.eager: EagerAttention | None = None  # from the first product of two tensors on
        if torch.compiler.is_compiling() or site.follow is not False:
            start_following(site, call)
        else:
            call.unknown = site.unknown

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen = True
            # mostly it is known to be over tokens; a graph may not depend on that
            over_tokens = not torch.compiler.is_compiling() and self.site.over_tokens
            if (self.site.over_channels or not over_tokens) and self._is_over_channels(
                *args, **kwargs
            ):
                self._leave_out()
                return func(*args, **kwargs)
            return socket_attention(
                self.site, self.frame, self.regularizers, self.call, *args, **kwargs
            )
        if func is F.multi_head_attention_forward:
            self.seen = True
            within = partial(socket_attention, self.site, self.frame, self.regularizers, self.call)
            return functional_mha(self._linear, within, self.frame, self.call, *args, **kwargs)
        eager = self.eager
        of_scores = eager is not None and args and eager.knows(args[0])  # heads that are mixed
        if func is F.linear and not self.frame.multiplying and not of_scores:
            return self._linear(*args, **kwargs)
        name = getattr(func, "__name__", "")
        # nearly every function has nothing to do with an attention that the module computes itself
        if name not in PRODUCTS and (
            eager is None or not eager.ways or eager.passes_by(name, args, kwargs)
        ):
            if self.call.followed is not None:
                return self._followed(func, args, kwargs)
            if name == "unflatten":  # its super() cannot be traced below a mode by torch.compile
                return torch.unflatten(*args, **kwargs)
            return func(*args, **kwargs)
        if eager is None:
            eager = self.eager = EagerAttention(
                cast(nn.Module, self.call.module),
                self.site,
                self._watch,
                self._leave_out,
                self._attend,
            )
            eager.start(self.regularizers, self.call)
        return eager.meet(func, args, kwargs, self._run)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function of an attention that the module computes itself."""
        return (call_torch if self.call.followed is None else self._followed)(func, args, kwargs)

    def _followed(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a torch function, and go with the channels that it moves."""
        out = call_torch(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("conv1d", "conv2d", "conv3d"):
            weight: Tensor = args[1] if len(args) > 1 else kwargs["weight"]
            self.call.followed.start(out, 1 - weight.ndim)  # also without samples: (C, ...)
        else:
            self.call.followed.follow(func, name, args, kwargs, out)
        return out

    def flash(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of a function of flash_attn and the like, or of a back end in
        Hugging Face's registry."""
        self.seen = True
        if self.call.cross:
            self.call.valid = self.frame.valid
        if isinstance(args[0], nn.Module):
            out, told = self._registered(function, *args, **kwargs)
        else:
            out, told = run_flash(
                function, self.regularizers, self.call, self.site.name, *args, **kwargs
            )
        if self.call.valid is not None and not self.call.cross:
            padding_reported(self.site, self.frame, self.call)
        self.site.kernel = self.site.layer.kernels[self.site.name] = told
        return out

    def _registered(
        self,
        function: Callable[..., Any],
        _: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, str]:
        operands = (query, key, value)
        self.call.shape = (*query.shape[:3], key.shape[2])
        self.call.head_size, self.call.value_size = query.shape[3], value.shape[3]
        if self.call.followed is not None:
            companions = [self.call.followed.of(t) for t in operands]
            tell_rows(self.site, self.call, companions, operands)
        if self.frame.residual is not None:
            self.frame.residual.see_queries(query)
        return run_registered(
            function, self.regularizers, self.call, self.site.name, *operands, mask, kwargs
        )

    def close(self) -> None:
        """No circle of references is left; see `close_frame`."""
        if self.eager is not None:
            self.eager.watch, self.eager.leave_out = nobody, nothing
            self.eager.attend = not_any_more

    def _attend(self, plain: Plain) -> Tensor:
        """dampen's attention in the place of one that the module computes itself."""
        self.seen = True
        out = socket_attention(
            self.site,
            self.frame,
            self.regularizers,
            self.call,
            plain.q,
            plain.k,
            plain.v,
            plain.mask,
            scale=plain.scale,
        )
        assert isinstance(out, Tensor)  # no weights were requested
        return out

    def _watch(self, call: Call, before: bool) -> None:
        """Before and after an attention that the module computes itself."""
        needs_valid = any(r.needs_valid for r in self.regularizers)
        if before:
            if needs_valid:
                call.seen = None
                call.seen = call.valid_keys
            call.valid = self.frame.valid if call.cross else call.seen if needs_valid else None
            made = call.maps.get("v")
            strange = (
                made is not None and made.input.ndim == 3 and made.input.shape[1] != call.shape[3]
            )  # ProphetNet
            odd = call.shape[2] != call.shape[3] or strange
            if odd and not call.cross and call.valid is not None and self._hides_no_key(call):
                call.valid = None
            elif odd and not call.cross and call.valid is not None:
                raise RuntimeError(
                    f"{type(call.module).__name__} at '{self.site.name}' "
                    f"attends from {call.shape[2]} queries to "
                    f"{call.shape[3]} keys, so its mask of keys does "
                    "not show which of its tokens are padding. "
                    f"Use a method without penalties, or {leave_out(self.site.name)}."
                )
            return
        self.seen = True
        if needs_valid and not call.cross:
            padding_reported(self.site, self.frame, call)
        self.site.layer.kernels[self.site.name] = EAGER
        if not torch.compiler.is_compiling():
            self.site.kernel = EAGER

    @staticmethod
    def _hides_no_key(call: Call) -> bool:
        """Whether every key is seen by some query, so that no token is padding,
        whichever keys are its tokens."""
        return call.valid is not None and _is_whole(call.valid)

    def _is_over_channels(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> bool:
        """Whether the scores are those of channels with channels, as the first attention of the
        module has shown."""
        if self.site.over_channels or self.site.knows_tokens():
            return self.site.over_channels
        followed = self.call.followed
        companions = [None if followed is None else followed.of(t) for t in (query, key)]
        found = query.ndim > 2 and attends_over_channels(companions, query, self.call.given)
        return self.site.note_channels(found)

    def _leave_out(self) -> None:
        """An attention over channels: it runs as the model has it, now and in later forwards."""
        self.seen = True
        pass_by(self.site)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear called by the module itself with the weight of one of its maps (timm's EVA with
        a qkv bias)."""
        for module in self.site.linears:
            if module.weight is weight:
                linear: Any = module._dampen_linear
                call = LinearCall(linear.role, input, weight, bias, module, self.site.layer.site)
                return apply_linear(self.frame, self.regularizers, call, F.linear)
        out = F.linear(input, weight, bias)
        # what an adapter adds to a map's output leaves the channels those of the map
        adapts = any(m.weight is weight for m in self.site.adapters)
        if self.call.followed is not None and not adapts:
            self.call.followed.start(out, -1)
        return out


EAGER = "eager (the model computes its scores itself)"


def nobody(call: Call, before: bool) -> None:
    """Who watches an attention after its forward."""


def not_any_more(plain: Plain) -> Tensor:
    """Who runs an attention after its forward."""
    raise RuntimeError("an attention ran after its module's forward")


def nothing() -> None:
    """Who leaves an attention out after its forward."""


def socket_attention(
    site: AttentionSite,
    frame: Frame,
    regularizers: Sequence[Regularizer],
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None] | Tensor:
    """`attention` as an attention site runs it: what it learns about padding is for
    the rest of the block."""
    if call.cross:
        call.valid = (
            frame.valid
        )  # the queries are the tokens that this layer's self-attention has seen
    layout, followed = None, call.followed
    companions: list[Tensor | None] = [None, None, None]
    if followed is not None:
        companions = [followed.of(t) for t in (query, key, value)]
    if query.ndim != 4 and any(sees_attention(r) for r in regularizers):
        leading = query.shape[:-2]
        told = tell_heads(site, call, companions, leading)
        layout = layout_of(leading, call.module, site.name, query.shape[-2], call.given, told)
        query, key, value = (layout.fold(t) for t in (query, key, value))
        companions = [None if c is None else layout.fold(c) for c in companions]
        attn_mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else layout.fold(attn_mask)
    if query.ndim == 4:  # else unused
        call.shape, call.head_size, call.value_size = (
            (*query.shape[:3], key.shape[2]),
            query.shape[3],
            value.shape[3],
        )
        if followed is not None:
            tell_rows(site, call, companions, (query, key, value))
    if frame.residual is not None:
        frame.residual.see_queries(query)
    drops = bool(dropout_p)
    needs = None if torch.compiler.is_compiling() else site.needs
    if needs is None or needs.regularizers is not regularizers or needs.drops != drops:
        needs = Needs(regularizers, drops)
        if (
            not torch.compiler.is_compiling()
        ):  # what is kept would be something that a graph depends on
            site.needs = needs
    o, weights, kernel = attend(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        needs,
        call,
        need_weights,
    )
    o = o if layout is None else layout.unfold(o)
    if needs.valid and not call.cross:
        padding_reported(site, frame, call)
    if torch.compiler.is_compiling():
        site.layer.kernels[site.name] = str(kernel)
    elif kernel is not site.kernel:  # mostly it is the one of the last forward
        site.kernel, site.layer.kernels[site.name] = kernel, str(kernel)
    return (o, weights) if need_weights else o


def padding_reported(site: AttentionSite, frame: Frame, call: Call) -> None:
    """Keep what a self-attention has reported about padding, for the rest of its block."""
    frame.valid = call.valid
    batch, _, tokens, _ = call.shape
    given = () if call.given is None else tuple(call.given)
    if len(given) == 3 and given[:2] == (tokens, batch) != (batch, tokens):
        frame.sequence_first = (
            True  # the module was given (N, B, D), and so is the feed-forward beside it (FSMT)
        )
    if site.layer.padding is not None and call.valid is not None:
        site.layer.padding.report(call.valid)
    if frame.early and frame.valid is not None and not _is_whole(frame.valid):
        raise RuntimeError(
            f"The feed-forward of '{site.layer.site.name}' "
            f"({frame.early}) runs before its attention, whose mask "
            "says which tokens are padding: its penalty would count "
            "padded tokens. Leave the feed-forward terms "
            "out, or give batches without padding."
        )


def _is_whole(valid: Tensor) -> bool:
    """Whether no token is padding; a graph cannot ask for what is in a tensor."""
    return not torch.compiler.is_compiling() and bool(valid.all())


def pass_by(
    site: AttentionSite, why: str = "left out (attends over channels, not over tokens)"
) -> None:
    """Methods inside attention do not act in a layer whose attentions are all over channels, or
    over their queries."""
    layer = site.layer
    if not torch.compiler.is_compiling():
        site.kernel = None
    layer.kernels[site.name] = why
    if all(layer.kernels.get(name, "").startswith("left out") for name in layer.attentions):
        layer.tells_padding, layer.passed_by = False, True
        layer.reached = {name: parts - {"attention"} for name, parts in layer.reached.items()}


def attention_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module with its socket open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: AttentionSite = self._dampen_attention
        layer = site.layer
        frame = None
        if layer.frames:
            # the innermost is mostly this thread's; a graph knows no thread
            last = layer.frames[-1]
            mine = not torch.compiler.is_compiling() and last.thread == threading.get_ident()
            frame = last if mine else frame_of(layer)
        work = frame.work if frame is not None else None
        if work is None or work.training is not self.training:  # no block uses this module
            work = layer.at_work(self)
        active = [] if work is None or site.over_channels else work.attention
        if active:
            first = args[0] if args else None
            if not isinstance(first, Tensor) or not first.is_floating_point():
                first = first_of((args, kwargs))
            if first is not None and first.is_nested:
                refuse_nested(first, f"{type(self).__name__} at '{site.name}'")
            if first is not None and not torch.compiler.is_compiling() and not first.numel():
                active = []  # a batch without samples or tokens
        if frame is not None:
            if not active:
                return in_attention(self, frame, base, self, *args, **kwargs)
            return in_attention(
                self, frame, run_attention, self, base, site, frame, active, args, kwargs
            )
        if not active:
            return base(self, *args, **kwargs)
        frame = open_frame(layer)  # the block is not known, or the attention was called without it
        try:
            return run_attention(self, base, site, frame, active, args, kwargs)
        finally:
            close_frame(layer, frame)

    return forward


def run_attention(
    self: Any,
    base: Callable[..., Any],
    site: AttentionSite,
    frame: Frame,
    active: Sequence[Regularizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The forward of an attention module in which regularizers are at work."""
    if not torch.is_grad_enabled() and any(
        r.takes_jacobian and r.ledger is not None and r.ledger.asked() for r in active
    ):  # a penalty that is a derivative of the attention, in a `reg.loss` without gradients
        return with_jacobian(active, run_attention, self, base, site, frame, active, args, kwargs)
    given = None
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            given = a.shape
            break
    before, call = frame.call, Call(self, site.layer.site, site.cross, given=given)
    frame.call = call
    try:
        if isinstance(self, nn.MultiheadAttention):
            return mha_forward(self, site, frame, active, call, socket_attention, *args, **kwargs)
        socket = Socket(site, frame, active, call)
        # timm's Swin and others are unfused by default
        switched = (site.switched > 0 or getattr(self, "fused_attn", None) is False) and switch_on(
            self, site
        )
        try:
            functions = site.flash
            if site.entries and not torch.compiler.is_compiling():
                functions = [*functions, *site.entries]
            with hooked(functions, socket.flash) if functions else nullcontext(), socket:
                out = base(self, *args, **kwargs)
        finally:
            socket.close()
            if switched:
                switch_off(self, site)
        eager = socket.eager
        if not socket.seen and eager is not None and eager.over_queries:
            site.over_channels = True  # never entered again
            pass_by(site, "left out (its softmax is over its queries, not over its keys)")
            return out
        if not socket.seen:
            raise_without_socket(self, site, NO_SOFTMAX if eager is None else eager.why)
        if eager is None:
            if not torch.compiler.is_compiling():
                site.path = None
            return out
        eager.remember()
        return eager.put_weights(out)
    finally:
        frame.call = before


def with_jacobian(measuring: Sequence[Regularizer], run: Callable[..., Any], *args: Any) -> Any:
    """An attention whose derivative is a penalty, in a `reg.loss` without gradients: nothing of its
    graph gets out."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "joint is a derivative of the attention, and under "
            "torch.inference_mode() there is none. Measure this loss "
            "under torch.no_grad() instead."
        )
    for r in measuring:
        r.measuring = True
    try:
        with torch.enable_grad():
            return with_tensors(run(*args), Tensor.detach)
    finally:
        for r in measuring:
            r.measuring = False


def switch_on(module: Any, site: AttentionSite) -> bool:
    """timm's Swin and others are unfused by default: they call SDPA in this forward only, so eval
    stays bit-exact.

    Forwards are counted, because another thread may be in the same module."""
    if site.switched == 0 and getattr(module, "fused_attn", None) is not False:
        return False
    site.switched += 1
    module.fused_attn = True
    return True


def switch_off(module: Any, site: AttentionSite) -> None:
    """The last forward that needed the switch sets it back."""
    site.switched -= 1
    if site.switched == 0:
        module.fused_attn = False


def in_attention(
    module: nn.Module, frame: Frame, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run an attention module of a block, which learns that it ran and what it gave."""
    residual = frame.residual
    if residual is None or module is frame.block:
        return run(*args, **kwargs)
    followed = type(residual) is ResidualSocket and not torch.compiler.is_compiling()
    aside = followed and not frame.inside and cast(ResidualSocket, residual).leave_attention_out()
    frame.inside += 1
    try:
        out = run(*args, **kwargs)
        residual.leave(out)
        return out
    finally:
        frame.inside -= 1
        if aside:
            cast(ResidualSocket, residual).come_back()


def mark_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module that only reports its kind to its block, for branches
    without SDPA (Swin)."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = frame_of(self._dampen_mark)
        if frame is None:
            return base(self, *args, **kwargs)
        return in_attention(self, frame, base, self, *args, **kwargs)

    return forward


def raise_without_socket(module: nn.Module, site: AttentionSite, why: str) -> None:
    """Nothing may be silent: a regularizer that was never called has done nothing."""
    stages = sorted({s for r in site.layer.clones for s in r.stages if s in ATTENTION_STAGES})
    scripted = scripted_function(module)
    if scripted:
        why = f"it calls '{scripted}', which torch.jit.script has compiled, so that what it does cannot be followed"
    raise RuntimeError(
        f"{type(module).__name__} at '{site.name}' ran without calling "
        f"F.scaled_dot_product_attention, and {why}, so "
        f"its regularizers (stages {', '.join(stages) or 'watching for padding'}) did nothing. "
        "Where the library can, give the model an SDPA back end (transformers: "
        "model.set_attn_implementation('sdpa')); "
        "in your own code call F.scaled_dot_product_attention or dampen.attention. "
        f"If that cannot be (talking heads, linear attention), {leave_out(site.name)}."
    )
