"""A linear map of a layer while regularizers are at work in it: seen with its own input, weight and bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import refuse_nested
from dampen.hooks.adapters import read_adapter
from dampen.hooks.context import AtRole, Frame, Layer, LinearSite, frame_of
from dampen.hooks.roles import kind_of, weight_of
from dampen.regularizer import LinearCall, Regularizer, check_only_reads


def linear_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear map with the stages operands and product open."""

    plain = base is nn.Linear.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        site: LinearSite = self._dampen_linear
        layer = site.layer
        frame = frame_of(layer) if layer.frames else None
        work = frame.work if frame is not None else None
        if work is None or work.training is not self.training:  # no block has asked for this module
            work = layer.at_work(self)
        if work is None:
            return base(self, input)  # type: ignore[no-any-return]
        # inside an attention, whose own input was looked at, each look is a call of its function mode
        inside = frame is not None and frame.call is not None and type(input) is Tensor
        if not inside and input.is_nested:
            refuse_nested(input, f"the linear layer '{site.role}' at '{layer.site.name}'")
        if not torch.compiler.is_compiling() and not input.numel():  # an expert or a batch without tokens
            if frame is not None:
                frame.hits += 1
            return base(self, input)  # type: ignore[no-any-return]
        kind = site.kind or kind_of(self)
        if kind == "convolution":
            return _convolve(base, self, site, work.methods, input)
        weight = self.weight if kind == "linear" else weight_of(self, kind)
        routing = frame.routing if frame is not None and site.expert else None
        if routing is not None:
            valid = routing.rows(input)
        elif frame is not None and (work.valid or frame.valid is not None):
            valid = layer_valid(layer, frame, input, site.role, work.valid)
        else:
            valid = None
        call = LinearCall(site.role, input, weight, self.bias, self, layer.site, valid)
        call.tokens = None if routing is None else routing.tokens
        if site.adapter is not None:
            call.adapter = read_adapter(site.adapter, layer.site.name)

        def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
            if x is input and w is weight:
                return base(self, input)  # type: ignore[no-any-return]
            if kind == "conv1d":  # the same kernel as GPT-2's own, so that a rate of 0 is the identity to the bit
                y = torch.addmm(self.bias, x.flatten(0, -2), w.t())
                return cast(Tensor, y.unflatten(0, x.shape[:-1]))
            return F.linear(x, w, bias)

        y = run_linear(frame, work.at_role(site.role), call, multiply, plain)
        return y if routing is None else routing.put(y, valid)

    return forward


def _convolve(
    base: Callable[..., Any], module: Any, site: LinearSite, active: Sequence[Regularizer], input: Tensor
) -> Tensor:
    """A convolution that is one position wide: its positions are tokens, (B, C, ...) as (B, positions, C)."""
    frame, places = frame_of(site.layer), input.shape[2:]
    if input.ndim != module.weight.ndim:
        raise RuntimeError(
            f"the convolution '{site.role}' at '{site.layer.site.name}' got {tuple(input.shape)}, without samples. "
            "Give batches, or leave the layer out with sites=."
        )
    tokens, weight = input.flatten(2).transpose(1, 2), weight_of(module, "convolution")

    def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if x is tokens and w is weight:
            y: Tensor = base(module, input)
            return y.flatten(2).transpose(1, 2)
        return F.linear(x, w, bias)

    call = LinearCall(site.role, tokens, weight, module.bias, module, site.layer.site)
    return cast(Tensor, apply_linear(frame, active, call, multiply).transpose(1, 2).unflatten(2, places))


def layer_valid(layer: Layer, frame: Frame, input: Tensor, role: str, needed: bool) -> Tensor | None:
    """Which tokens of a linear map's input are no padding, as far as the layer knows by now; None: all.

    Args:
        layer: whose map it is.
        frame: the forward under way.
        input: of the map.
        role: of the map.
        needed: whether a method at work counts valid tokens.
    """
    valid = frame.valid
    if needed and not layer.tells_padding and layer.padding is not None:
        valid = layer.padding.of(layer)
    if valid is not None:
        return fit_valid(valid.t() if frame.sequence_first and frame.call is None else valid, input)
    # a map of the feed-forward in a block whose attention has not reported padding yet
    if needed and not frame.early and layer.tells_padding and frame.in_block and role.startswith("ffn"):
        frame.early = role
    return None


def fit_valid(valid: Tensor, input: Tensor) -> Tensor | None:
    """The validity (B, N) of a layer's tokens, as a linear map sees them: (B, N, D), or (B * N, D) where flattened."""
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
    plain: bool = True,
) -> Tensor:
    """As `run_linear`, for a place whose methods nobody has sorted by roles."""
    return run_linear(frame, AtRole(regularizers, call.role), call, multiply, plain)


def run_linear(
    frame: Frame | None,
    work: AtRole,
    call: LinearCall,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    plain: bool = True,
) -> Tensor:
    """operands -> x W^T + b -> product, and the call kept for the attention under way.

    Methods that only read come first and are shown what no method has changed.

    Args:
        frame: the forward under way; None outside a block.
        work: what the methods do at maps of this role.
        call: the map and its input.
        multiply: makes the product of an input, a weight and a bias.
        plain: whether `multiply` is `F.linear` and no more, for which a method may have a function of its own.
    """
    if frame is not None:
        frame.multiplying = True  # what happens here is no other map of the attention, whatever weight it reads
    try:
        x, weight = call.input, call.weight
        for r in work.operands:
            x, weight = r.operands(x, weight, call)
        changed = x is not call.input or weight is not call.weight
        y = done = None  # who has multiplied
        if plain and not changed:
            for r in work.multiplying:
                if (y := r.multiply(call)) is not None:
                    done = r
                    break
        if y is None:
            y = multiply(x, weight, call.bias)
        call.output = None if changed else y
        for r in work.product:
            if r is done:
                continue
            if changed and r.only_reads:
                if r.reads_product and call.output is None:
                    call.output = multiply(call.input, call.weight, call.bias)
                seen = y if call.output is None else call.output
                check_only_reads(r, "product", seen, r.product(seen, call))
                continue
            new = r.product(y, call)
            y = new if new is y else check_only_reads(r, "product", y, new)
    finally:
        if frame is not None:
            frame.multiplying = False
    if frame is not None:
        frame.hits += 1
        if frame.call is not None:
            frame.call.maps[call.role] = call
            if frame.call.followed is not None:
                frame.call.followed.start(y, -1, call)
    return y
