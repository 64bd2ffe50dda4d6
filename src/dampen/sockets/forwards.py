"""The sockets: what a class-swapped module does in its forward while regularizers are at work in it.

Inside an attention module `F.scaled_dot_product_attention` means `dampen.attention`; inside a layer every linear map
is seen with its own input, weight and bias. Sockets are opened per module and not around the whole step, because
activation checkpointing runs a module's forward again during the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dampen.kernels.attend import attend
from dampen.regularizer import ATTENTION_STAGES, BLOCK_STAGES, LINEAR_STAGES, Call, LinearCall, Regularizer
from dampen.sockets.adapters import read_adapter
from dampen.sockets.blame import add_blame
from dampen.sockets.eager import EagerAttention
from dampen.sockets.embeddings import embedding_forward, mask_forward
from dampen.sockets.equations import PRODUCTS
from dampen.sockets.frame import Frame, close_frame, frame_of, open_frame
from dampen.sockets.layout import layout_of
from dampen.sockets.residual import ResidualSocket, call_torch
from dampen.sockets.roles import is_conv1d, weight_of
from dampen.sockets.state import AttentionSite, BlockSite, LinearSite, ModelSite
from dampen.sockets.stream import StreamSocket, may_stream
from dampen.sockets.torch_mha import mha_forward
from dampen.two_pass.reuse import prefix_forward


class Socket(TorchFunctionMode):
    """Inside one attention module, F.scaled_dot_product_attention means `attention`, and softmax(q k^T) v too."""

    def __init__(self, site: AttentionSite, frame: Frame, regularizers: Sequence[Regularizer], call: Call) -> None:
        super().__init__()
        self.site, self.frame, self.regularizers, self.call, self.seen = site, frame, regularizers, call, False
        self.eager = EagerAttention(cast(nn.Module, call.module), site.name, self._watch)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen = True
            return socket_attention(self.site, self.frame, self.regularizers, self.call, *args, **kwargs)
        if func is F.linear and not self.frame.multiplying:
            return self._linear(*args, **kwargs)
        if not self.eager.ways and getattr(func, "__name__", "") not in PRODUCTS:  # nearly all: nothing to follow
            return call_torch(func, args, kwargs)
        return self.eager.call(func, args, kwargs, self.regularizers, self.call, call_torch)

    def _watch(self, call: Call, before: bool) -> None:
        """Before and after an attention that the module computes itself."""
        needs_valid = any(r.needs_valid for r in self.regularizers)
        if before:
            if needs_valid:
                call.seen = None
                call.seen = call.valid_keys
            call.valid = self.frame.valid if call.cross else call.seen if needs_valid else None
            made = call.maps.get("v")
            strange = made is not None and made.input.ndim == 3 and made.input.shape[1] != call.shape[3]  # ProphetNet
            if not call.cross and call.valid is not None and (call.shape[2] != call.shape[3] or strange):
                raise RuntimeError(
                    f"{type(call.module).__name__} at '{self.site.name}' attends from {call.shape[2]} queries to "
                    f"{call.shape[3]} keys, so its mask of keys does not tell which of its tokens are padding. "
                    "Leave the layer out with sites=, or take a method that has no penalties."
                )
            return
        self.seen = True
        attention_done(self.site, self.frame, call, needs_valid, "eager (the model computes its scores itself)")

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear called by the module itself with the weight of one of its maps (timm's EVA with a qkv bias)."""
        for module in self.site.linears:
            if module.weight is weight:
                linear: Any = module._dampen_linear
                call = LinearCall(linear.role, input, weight, bias, module, self.site.layer.site)
                return apply_linear(self.frame, self.regularizers, call, F.linear)
        return F.linear(input, weight, bias)


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
    """`attention` as an attention site runs it: what it learns about padding is for the rest of the block."""
    if call.cross:
        call.valid = frame.valid  # the queries are the tokens that this layer's self-attention has seen
    layout = None
    if query.ndim != 4 and any(sees_attention(r) for r in regularizers):
        leading = query.shape[:-2]
        layout = layout_of(leading, call.module, site.name, query.shape[-2], call.given)
        query, key, value = (layout.fold(t) for t in (query, key, value))
        attn_mask = attn_mask if attn_mask is None or attn_mask.ndim < 3 else layout.fold(attn_mask)
    o, weights, kernel = attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, regularizers, call, need_weights
    )
    o = o if layout is None else layout.unfold(o)
    attention_done(site, frame, call, any(r.needs_valid for r in regularizers), str(kernel))
    return (o, weights) if need_weights else o


def attention_done(site: AttentionSite, frame: Frame, call: Call, needs_valid: bool, kernel: str) -> None:
    """What an attention has told: padding, for the rest of its block, and the kernel that ran."""
    if not call.cross and needs_valid:
        frame.valid = call.valid
        if frame.early and frame.valid is not None:
            raise RuntimeError(
                f"The feed-forward of '{site.layer.site.name}' ({frame.early}) runs before its attention, whose mask "
                "says which tokens are padding: its penalty would count padded tokens. Leave the feed-forward terms "
                "out, or give batches without padding."
            )
    site.layer.kernels[site.name] = kernel


def attention_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module with its socket open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: AttentionSite = self._dampen_attention
        layer = site.layer
        frame = frame_of(layer)
        active = [r for r in layer.active(self) if sees_attention(r)]
        if frame is not None:
            if not active:
                return in_attention(self, frame, base, self, *args, **kwargs)
            return in_attention(self, frame, run_attention, self, base, site, frame, active, args, kwargs)
        if not active:
            return base(self, *args, **kwargs)
        frame = open_frame(layer, in_block=False)  # the block is not known, or the attention was called without it
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
    first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
    before, call = frame.call, Call(self, site.layer.site, site.cross, given=None if first is None else first.shape)
    frame.call = call
    try:
        if isinstance(self, nn.MultiheadAttention):
            return mha_forward(self, site, frame, active, call, socket_attention, *args, **kwargs)
        socket = Socket(site, frame, active, call)
        switched = switch_on(self, site)
        try:
            with socket:
                out = base(self, *args, **kwargs)
        finally:
            if switched:
                switch_off(self, site)
        if not socket.seen:
            raise_without_socket(self, site, socket.eager.why)
        return socket.eager.put_weights(out)
    finally:
        frame.call = before


def switch_on(module: Any, site: AttentionSite) -> bool:
    """timm's Swin and others are unfused by default: they call SDPA in this forward only, so eval stays bit-exact.

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


def in_attention(module: nn.Module, frame: Frame, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an attention module of a block, which learns that it ran and what it gave."""
    if frame.residual is None or module is frame.block:
        return run(*args, **kwargs)
    frame.inside += 1
    try:
        out = run(*args, **kwargs)
        frame.residual.leave(out)
        return out
    finally:
        frame.inside -= 1


def sees_attention(r: Regularizer) -> bool:
    """Whether anything of a regularizer happens inside attention; one of the branches alone leaves the kernel be."""
    return bool(r.roles) or r.needs_valid or not r.stages.isdisjoint(ATTENTION_STAGES)


def mark_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module that only tells its block what it is, for branches without SDPA (Swin)."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = frame_of(self._dampen_mark)
        if frame is None:
            return base(self, *args, **kwargs)
        return in_attention(self, frame, base, self, *args, **kwargs)

    return forward


def raise_without_socket(module: nn.Module, site: AttentionSite, why: str) -> None:
    """Nothing may be silent: a regularizer that was never asked for has done nothing."""
    stages = sorted({s for r in site.layer.clones for s in r.stages if s in ATTENTION_STAGES})
    raise RuntimeError(
        f"{type(module).__name__} at '{site.name}' ran without calling F.scaled_dot_product_attention, and {why}, so "
        f"its regularizers (stages {', '.join(stages) or 'watching for padding'}) did nothing. "
        "Where the library can, give the model an SDPA back end (transformers: model.set_attn_implementation('sdpa')); "
        "in your own code call F.scaled_dot_product_attention or dampen.attention. "
        "A layer that cannot (talking heads, linear attention) must be left out with sites=."
    )


def linear_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear map with the stages operands and product open."""

    def forward(self: Any, input: Tensor) -> Tensor:
        site: LinearSite = self._dampen_linear
        layer = site.layer
        active = layer.active(self)
        if not active:
            return base(self, input)
        if not torch.compiler.is_compiling() and input.numel() == 0:  # an expert, or a modality, without tokens
            return base(self, input)
        weight, frame = weight_of(self), frame_of(layer)
        valid = None if frame is None else frame.valid
        if frame is not None and valid is not None and frame.sequence_first and frame.call is None:
            valid = valid.t()
        elif frame is not None and valid is None and not frame.early and is_early(frame, site.role, active):
            frame.early = site.role
        call = LinearCall(site.role, input, weight, self.bias, self, layer.site, fit_valid(valid, input))
        if site.adapter is not None:
            call.adapter = read_adapter(site.adapter, layer.site.name)

        def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            if x is input and w is weight:
                return base(self, input)
            if is_conv1d(self):  # the same kernel as GPT-2's own, so that a rate of 0 is the identity to the bit
                return torch.addmm(self.bias, x.flatten(0, -2), w.t()).unflatten(0, x.shape[:-1])
            return F.linear(x, w, bias)

        return apply_linear(frame, active, call, multiply)

    return forward


def is_early(frame: Frame, role: str, active: Sequence[Regularizer]) -> bool:
    """Whether a map of the feed-forward runs in a block whose attention has not told yet what is padding."""
    return frame.in_block and role.startswith("ffn") and any(r.needs_valid for r in active)


def fit_valid(valid: Tensor | None, input: Tensor) -> Tensor | None:
    """The validity (B, N) of a layer's tokens, as a linear map sees them: (B, N, D), or (B * N, D) where flattened."""
    if valid is None:
        return None
    if input.ndim == 2 and input.shape[0] % valid.shape[1] == 0:
        samples = input.shape[0] // valid.shape[1]
        return valid.expand(samples, -1).flatten() if valid.shape[0] in (1, samples) else None
    if input.ndim == 3 and valid.shape[1] == input.shape[1]:
        return valid
    return None  # windows: the attention's rows are not this map's tokens, and none of them is padding


def apply_linear(
    frame: Frame | None,
    regularizers: Sequence[Regularizer],
    call: LinearCall,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """operands -> x W^T + b -> product, and the call kept for the attention under way."""
    x, weight = call.input, call.weight
    for r in regularizers:
        if "operands" in r.stages and call.role in r.roles:
            x, weight = r.operands(x, weight, call)
    if frame is None:
        y = multiply(x, weight, call.bias)
    else:
        frame.multiplying = True
        try:
            y = multiply(x, weight, call.bias)
        finally:
            frame.multiplying = False
    call.output = y
    for r in regularizers:
        if "product" in r.stages and call.role in r.roles:
            y = r.product(y, call)
    if frame is not None:
        frame.hits += 1
        if frame.call is not None:
            frame.call.maps[call.role] = call
    return y


def block_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block with the stages tokens, branch and block open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: BlockSite = self._dampen_block
        layer = site.layer
        active = layer.active(self)
        if not active:
            return base(self, *args, **kwargs)
        frame = open_frame(layer)
        try:
            return run_block(self, base, site, frame, active, args, kwargs)
        finally:
            close_frame(layer, frame)

    return forward


def run_block(
    self: Any,
    base: Callable[..., Any],
    site: BlockSite,
    frame: Frame,
    active: Sequence[Regularizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The forward of a block in which regularizers are at work."""
    layer = site.layer
    frame.block = self
    given = args[0] if args else kwargs.get(site.input_name)
    x = given if isinstance(given, Tensor) else first_tensor([*args, *kwargs.values()])
    stages = {s for r in active for s in r.stages} & set(BLOCK_STAGES) if x is not given else set()
    if stages:
        raise RuntimeError(
            f"{type(self).__name__} at '{layer.site.name}' takes a {type(given).__name__} of tensors, not one, so "
            f"methods of whole blocks ({', '.join(sorted(stages))}) cannot act on it. "
            "Leave the block out with sites=."
        )
    if x.is_nested:
        raise RuntimeError(
            f"{type(self).__name__} at '{layer.site.name}' got a nested tensor, which torch.nn.TransformerEncoder "
            "makes of padded batches in eval, and which regularizers cannot take. Set encoder.use_nested_tensor = "
            "False, or build it with enable_nested_tensor=False."
        )
    for r in active if site.first else ():
        if "tokens" in r.stages:
            before, x = x, r.tokens(x)
            check_tokens(self, r, before, x, [*args[1:], *kwargs.values()])
            args, kwargs = (x, *args[1:]) if args else (), kwargs if args else {**kwargs, site.input_name: x}
    for r in active:
        if r.input_has_gradient is not x.requires_grad:  # to set an attribute of a module takes microseconds
            r.input_has_gradient = x.requires_grad
    branching = [r for r in active if "branch" in r.stages]
    # a mode that is open also keeps torch.nn's encoder layer from its fused eval path around our sites
    if branching or (isinstance(self, nn.TransformerEncoderLayer) and not self.training):
        others = [t for t in (*args, *kwargs.values()) if is_stream(t, x)]
        memory = layer.residual_memory
        if branching and memory is not None and may_stream(memory, x, 1 + len(others)):
            stream = StreamSocket(branching, x, layer, memory)
            try:
                out = base(self, *args, **kwargs)
                stream.check(self, out)
            finally:
                stream.close()
            return finish_block(self, site, frame, active, x, out)
        socket = ResidualSocket(branching, [x, *others], layer, frame)
        with socket:
            out = base(self, *args, **kwargs)
        if branching:
            socket.check(self, site.branches, out)
    else:
        out = base(self, *args, **kwargs)
    return finish_block(self, site, frame, active, x, out)


def finish_block(self: Any, site: BlockSite, frame: Frame, active: Sequence[Regularizer], x: Tensor, out: Any) -> Any:
    """What is left to do when a block's own forward has run: the stage block, and a look whether its maps were seen."""
    if site.wants_linear and frame.hits == 0 and any(not r.stages.isdisjoint(LINEAR_STAGES) for r in active):
        raise RuntimeError(
            f"{type(self).__name__} at '{site.layer.site.name}' ran without calling any of its linear modules, so the "
            "regularizers on its linear maps did nothing. Call the modules (self.fc1(x)) instead of using their "
            "weights."
        )
    y = out[0] if isinstance(out, tuple) else out
    for r in active:
        if "block" in r.stages:
            y = r.block(x, y)
    return (y, *out[1:]) if isinstance(out, tuple) else y


def first_tensor(values: Sequence[Any]) -> Tensor:
    """The first tensor among a block's arguments, lists of them included (CrossViT)."""
    return next(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def is_stream(value: Any, x: Tensor) -> bool:
    """Whether another argument of a block may be a stream of tokens too (CaiT's class token)."""
    return isinstance(value, Tensor) and value is not x and value.ndim == x.ndim and value.shape[-1] == x.shape[-1]


def check_tokens(block: nn.Module, method: Regularizer, before: Tensor, after: Tensor, others: Sequence[Any]) -> None:
    """Raise where a method took tokens away although the block gets something else that has one entry per token."""
    if after.shape == before.shape:
        return
    batch, length = before.shape[:2]
    for other in pytree.tree_leaves(others):
        if isinstance(other, Tensor) and other is not before:
            sizes = other.shape[1:] if other.shape[:1] == (batch,) else other.shape
            if length in sizes:
                raise RuntimeError(
                    f"{type(method).__name__} left {after.shape[1]} of {length} tokens, but "
                    f"{type(block).__name__} also gets a tensor of shape {tuple(other.shape)} (a mask or positions), "
                    f"which fits the {length}. {type(method).__name__} works where positions are in the tokens."
                )


def model_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the whole model, with the stage inputs open. Penalties wait until they are taken; an error ends
    the step that they belong to."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: ModelSite = self._dampen_model
        for r in site.own:
            if "inputs" in r.stages and site.acts(r, self.training):
                args, kwargs = apply_inputs(self, site, r, args, kwargs)
        site.ledger.enter(self.training and site.enabled)
        frames = [(layer, open_frame(layer, in_block=False)) for layer in site.blockless if layer.enabled]
        try:
            return base(self, *args, **kwargs)
        except BaseException as error:  # an aborted forward leaves no penalty for the next one
            site.ledger.forget()
            add_blame(error)
            raise
        finally:
            site.ledger.leave()
            for layer, frame in frames:
                close_frame(layer, frame)

    return forward


def apply_inputs(
    self: Any, site: ModelSite, r: Regularizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model with the stage `inputs` of a regularizer applied to its data."""
    name, i = site.input_name, site.input_position
    if len(args) > i and args[i] is not None:
        return (*args[:i], r.inputs(args[i]), *args[i + 1 :]), kwargs
    if kwargs.get(name) is not None:
        return args, {**kwargs, name: r.inputs(kwargs[name])}
    raise RuntimeError(
        f"{type(r).__name__} acts on the input '{name}' of {type(self).__name__}, but the model was "
        f"called without it (got {len(args)} positional arguments, keywords {sorted(kwargs)}), so it "
        f"would do nothing. Call the model with '{name}', or remove {type(r).__name__}."
    )


FORWARDS = {
    "attention": attention_forward,
    "mark": mark_forward,
    "linear": linear_forward,
    "block": block_forward,
    "prefix": prefix_forward,
    "embedding": embedding_forward,
    "mask": mask_forward,
    "model": model_forward,
}


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


def model_input(module: nn.Module) -> tuple[str, int]:
    """Which argument of a model's forward is the data, by the usual names, else the first: its name and position."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    name = next((n for n in _DATA if n in names), first_argument(module))
    return name, names.index(name) if name in names else 0


def first_argument(module: nn.Module) -> str:
    """The name of the first argument of a module's forward."""
    names = [n for n, p in inspect.signature(type(module).forward).parameters.items() if p.kind is not p.VAR_KEYWORD]
    return names[1] if len(names) > 1 else ""
