"""The sockets: what a class-swapped module does in its forward while regularizers are at work in it.

Inside an attention module `F.scaled_dot_product_attention` means `dampen.attention`; inside a layer every linear map
is seen with its own input, weight and bias. Sockets are opened per module and not around the whole step, because
activation checkpointing runs a module's forward again during the backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dampen.adapters.residual import ResidualSocket, call_torch
from dampen.adapters.torch_mha import mha_forward
from dampen.attend import attend
from dampen.prefix import prefix_forward
from dampen.projections import is_conv1d, weight_of
from dampen.regularizer import ATTENTION_STAGES, LINEAR_STAGES, Call, LinearCall, Regularizer
from dampen.state import AttentionSite, BlockSite, Layer, LinearSite, ModelSite


class Socket(TorchFunctionMode):
    """Inside one attention module, F.scaled_dot_product_attention means `attention`."""

    def __init__(self, site: AttentionSite, regularizers: Sequence[Regularizer], call: Call) -> None:
        super().__init__()
        self.site, self.regularizers, self.call, self.seen = site, regularizers, call, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.seen = True
            return socket_attention(self.site, self.regularizers, self.call, *args, **kwargs)
        if func is F.linear and not self.site.layer.multiplying:
            return self._linear(*args, **kwargs)
        return call_torch(func, args, kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """F.linear called by the module itself with the weight of one of its maps (timm's EVA with a qkv bias)."""
        for module in self.site.linears:
            if module.weight is weight:
                linear: Any = module._dampen_linear
                call = LinearCall(linear.role, input, weight, bias, module, self.site.layer.site)
                return apply_linear(self.site.layer, self.regularizers, call, F.linear)
        return F.linear(input, weight, bias)


def socket_attention(
    site: AttentionSite,
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
    """`attention` as an attention site runs it: what it learns about padding and kernels stays with the layer."""
    layer = site.layer
    layer.sublayer = "attention"
    if call.cross:
        call.valid = layer.valid  # the queries are the tokens that this layer's self-attention has seen
    o, weights, kernel = attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, regularizers, call, need_weights
    )
    if not call.cross and any(r.needs_valid for r in regularizers):
        layer.valid = call.valid
        if layer.early and layer.valid is not None:
            raise RuntimeError(
                f"The feed-forward of '{layer.site.name}' ({layer.early}) runs before its attention, whose mask says "
                "which tokens are padding: its penalty would count padded tokens. Leave the feed-forward terms out, or "
                "give batches without padding."
            )
    layer.kernels[site.name] = str(kernel)
    return (o, weights) if need_weights else o


def attention_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module with its socket open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: AttentionSite = self._dampen_attention
        layer = site.layer
        active = [r for r in layer.active(self.training) if sees_attention(r)]
        if not active:
            layer.entered = "attention"
            return base(self, *args, **kwargs)
        call = Call(self, layer.site, site.cross)
        layer.call, layer.entered = call, "attention"
        if isinstance(self, nn.MultiheadAttention):
            out = mha_forward(self, site, active, call, socket_attention, *args, **kwargs)
        else:
            unfused = getattr(self, "fused_attn", None) is False  # timm's Swin: SDPA in this forward only
            if unfused:
                self.fused_attn = True
            socket = Socket(site, active, call)
            try:
                with socket:
                    out = base(self, *args, **kwargs)
            finally:
                if unfused:
                    self.fused_attn = False
            if not socket.seen:
                raise_without_socket(self, site)
        layer.call = None
        return out

    return forward


def sees_attention(r: Regularizer) -> bool:
    """Whether anything of a regularizer happens inside attention; one of the branches alone leaves the kernel be."""
    return bool(r.roles) or r.needs_valid or any(stage in r.stages for stage in ATTENTION_STAGES)


def mark_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module that only tells its block what it is, for branches without SDPA (Swin)."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._dampen_mark.entered = "attention"
        return base(self, *args, **kwargs)

    return forward


def raise_without_socket(module: nn.Module, site: AttentionSite) -> None:
    """Nothing may be silent: a regularizer that was never asked for has done nothing."""
    stages = sorted({s for r in site.layer.clones for s in r.stages if s in ATTENTION_STAGES})
    raise RuntimeError(
        f"{type(module).__name__} at '{site.name}' ran without calling F.scaled_dot_product_attention, so its "
        "regularizers "
        f"(stages {', '.join(stages) or 'watching for padding'}) did nothing. Give the model an SDPA back end: "
        "transformers: "
        "model.set_attn_implementation('sdpa') and no output_attentions; timm: "
        "timm.layers.set_fused_attn(True, experimental=True); "
        "your own code: call F.scaled_dot_product_attention or dampen.attention. A layer that cannot (talking heads) "
        "must be left "
        "out with sites=."
    )


def linear_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear map with the stages operands and product open."""

    def forward(self: Any, input: Tensor) -> Tensor:
        site: LinearSite = self._dampen_linear
        layer = site.layer
        active = layer.active(self.training)
        if not active:
            return base(self, input)
        weight = weight_of(self)
        valid = layer.valid
        if valid is None and layer.early == "" and site.role.startswith("ffn") and any(r.needs_valid for r in active):
            layer.early = site.role
        elif valid is not None and layer.sequence_first and layer.call is None:
            valid = valid.t()
        call = LinearCall(site.role, input, weight, self.bias, self, layer.site, fit_valid(valid, input))

        def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            if x is input and w is weight:
                return base(self, input)
            if is_conv1d(self):  # the same kernel as GPT-2's own, so that a rate of 0 is the identity to the bit
                return torch.addmm(self.bias, x.flatten(0, -2), w.t()).unflatten(0, x.shape[:-1])
            return F.linear(x, w, bias)

        return apply_linear(layer, active, call, multiply)

    return forward


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
    layer: Layer,
    regularizers: Sequence[Regularizer],
    call: LinearCall,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """operands -> x W^T + b -> product, and the call kept for the attention under way."""
    x, weight = call.input, call.weight
    for r in regularizers:
        if "operands" in r.stages and call.role in r.roles:
            x, weight = r.operands(x, weight, call)
    layer.multiplying = True
    y = multiply(x, weight, call.bias)
    layer.multiplying = False
    call.output = y
    for r in regularizers:
        if "product" in r.stages and call.role in r.roles:
            y = r.product(y, call)
    layer.hits += 1
    if layer.call is not None:
        layer.call.maps[call.role] = call
    return y


def block_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block with the stages tokens, branch and block open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: BlockSite = self._dampen_block
        layer = site.layer
        active = layer.active(self.training)
        layer.valid, layer.hits, layer.early = None, 0, ""
        if not active:
            layer.early = None
            return base(self, *args, **kwargs)
        x = args[0] if args else kwargs[site.input_name]
        if x.is_nested:
            raise RuntimeError(
                f"{type(self).__name__} at '{layer.site.name}' got a nested tensor, which "
                "torch.nn.TransformerEncoder makes of padded batches in eval, and which regularizers cannot take. Set "
                "encoder.use_nested_tensor = False, or build it with enable_nested_tensor=False."
            )
        for r in active if site.first else ():
            if "tokens" in r.stages:
                before, x = x, r.tokens(x)
                check_tokens(self, r, before, x, [*args[1:], *kwargs.values()])
                args, kwargs = (x, *args[1:]) if args else (), kwargs if args else {**kwargs, site.input_name: x}
        for r in active:
            r.input_has_gradient = x.requires_grad
        branching = [r for r in active if "branch" in r.stages]
        # a mode that is open also keeps torch.nn's encoder layer from its fused eval path around our sites
        if branching or (isinstance(self, nn.TransformerEncoderLayer) and not self.training):
            socket = ResidualSocket(branching, x, layer)
            with socket:
                out = base(self, *args, **kwargs)
            if branching:
                socket.check(self, site.branches)
        else:
            out = base(self, *args, **kwargs)
        layer.early = None
        if site.wants_linear and layer.hits == 0 and any(r.stages & set(LINEAR_STAGES) for r in active):
            raise RuntimeError(
                f"{type(self).__name__} at '{layer.site.name}' ran without calling any of its linear modules, so the "
                "regularizers "
                "on its linear maps did nothing. Call the modules (self.fc1(x)) instead of using their weights."
            )
        layer.valid = None
        y = out[0] if isinstance(out, tuple) else out
        for r in active:
            if "block" in r.stages:
                y = r.block(x, y)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    return forward


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
    """The forward of the whole model: empty the slots of the last step, then the stage inputs."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: ModelSite = self._dampen_model
        for r in site.clones:
            r.take_penalties()
        for r in site.own:
            if "inputs" in r.stages and site.enabled and (self.training or r.in_eval):
                name, i = site.input_name, site.input_position
                if len(args) > i and args[i] is not None:
                    args = (*args[:i], r.inputs(args[i]), *args[i + 1 :])
                elif kwargs.get(name) is not None:
                    kwargs = {**kwargs, name: r.inputs(kwargs[name])}
                else:
                    raise RuntimeError(
                        f"{type(r).__name__} acts on the input '{name}' of {type(self).__name__}, but the model was "
                        f"called without it (got {len(args)} positional arguments, keywords {sorted(kwargs)}), so it "
                        f"would do nothing. Call the model with '{name}', or remove {type(r).__name__}."
                    )
        return base(self, *args, **kwargs)

    return forward


FORWARDS = {
    "attention": attention_forward,
    "mark": mark_forward,
    "linear": linear_forward,
    "block": block_forward,
    "prefix": prefix_forward,
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
