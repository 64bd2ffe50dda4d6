"""A block and its linear layers while regularizers are at work in them.

The block has the stages tokens, branch and block. A linear layer is seen with its own input, weight and bias: the
stages operands and product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import pytree, refuse_nested
from dampen.containers import first_of, with_first
from dampen.hooks.adapters import read_adapter
from dampen.hooks.context import (
    AtRole,
    AtWork,
    BlockSite,
    Frame,
    Layer,
    LinearSite,
    close_frame,
    frame_of,
    open_frame,
)
from dampen.hooks.residual import ResidualSocket
from dampen.hooks.roles import kind_of, weight_of
from dampen.hooks.stream import StreamSocket, may_stream
from dampen.names import leave_out
from dampen.regularizer import BLOCK_STAGES, LinearCall, Regularizer, check_only_reads


def block_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block with the stages tokens, branch and block open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: BlockSite = self._dampen_block
        layer = site.layer
        work = layer.at_work(self)
        if work is None:
            return base(self, *args, **kwargs)
        frame = open_frame(layer, work, self)
        try:
            return run_block(self, base, site, frame, work, args, kwargs)
        finally:
            close_frame(layer, frame)

    return forward


def run_block(
    self: Any,
    base: Callable[..., Any],
    site: BlockSite,
    frame: Frame,
    work: AtWork,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The forward of a block in which regularizers are at work."""
    layer, active = site.layer, work.methods
    given = args[0] if args else kwargs.get(site.input_name)
    x = given if isinstance(given, Tensor) else first_of((args, kwargs))
    if x is None:
        raise RuntimeError(
            f"{type(self).__name__} at '{layer.site.name}' got no tensor that could be found in its arguments "
            f"({', '.join(type(a).__name__ for a in (*args, *kwargs.values())) or 'none'}). "
            "Give it tensors, or tuples, dicts or dataclasses of them, or leave the block out with target_modules=."
        )
    stages = set() if x is given else {s for r in active for s in r.stages} & set(BLOCK_STAGES)
    if stages:
        raise RuntimeError(
            f"{type(self).__name__} at '{layer.site.name}' takes a {type(given).__name__} of tensors, not one, so "
            f"methods of whole blocks ({', '.join(sorted(stages))}) cannot act on it. "
            f"To go on, {leave_out(layer.site.name)}."
        )
    if x.is_nested:
        refuse_nested(x, f"{type(self).__name__} at '{layer.site.name}'")
    compiling = torch.compiler.is_compiling()
    if not compiling and not x.numel():  # a batch without samples, or without tokens
        frame.work = None
        return base(self, *args, **kwargs)
    for r in active if site.first else ():
        if "tokens" in r.stages:
            before, x = x, r.tokens(x)
            check_tokens(self, r, before, x, [*args[1:], *kwargs.values()])
            args, kwargs = (
                (x, *args[1:]) if args else (),
                kwargs if args else {**kwargs, site.input_name: x},
            )
    frame.samples = len(x)
    has_gradient = x.requires_grad
    for r in active:
        # to set an attribute of a module takes microseconds; to read it in a graph would guard the graph by it
        if compiling or r.input_has_gradient is not has_gradient:
            r.input_has_gradient = has_gradient
    branching = work.branch
    # a mode that is open also keeps torch.nn's encoder layer from its fused eval path around our sites
    if branching or (isinstance(self, nn.TransformerEncoderLayer) and not self.training):
        others = [t for t in (*args, *kwargs.values()) if is_stream(t, x)]
        if branching and may_stream(layer, x, 1 + len(others)):
            stream = StreamSocket(branching, active, x, layer, frame)
            try:
                out = base(self, *args, **kwargs)
            finally:
                stream.close()
            if stream.is_as_before(out):
                return finish_block(self, site, frame, work, x, out)
            stream.undo(self)
        socket = ResidualSocket(branching, [x, *others], layer, frame)
        with socket:
            out = base(self, *args, **kwargs)
        if branching:
            socket.check(self, site.branches, out)
    else:
        out = base(self, *args, **kwargs)
    return finish_block(self, site, frame, work, x, out)


def finish_block(
    self: Any, site: BlockSite, frame: Frame, work: AtWork, x: Tensor, out: Any
) -> Any:
    """What is left to do when a block's own forward has run: the stage block, and a look whether its maps were seen."""
    if site.wants_linear and frame.hits == 0 and work.linear:
        raise RuntimeError(
            f"{type(self).__name__} at '{site.layer.site.name}' ran without calling any of its linear modules, so the "
            "regularizers on its linear maps did nothing. Call the modules (self.fc1(x)) instead of using their "
            "weights."
        )
    acting = work.block
    if not acting:
        return out
    y = first_of(out)
    if y is None:
        raise RuntimeError(
            f"{type(self).__name__} at '{site.layer.site.name}' returned a {type(out).__name__} in which no tensor was "
            f"found, so {type(acting[0]).__name__} cannot act on it. Return a tensor, or a tuple, a dict or a "
            "dataclass of them, or leave the block out with target_modules=."
        )
    new = y
    for r in acting:
        new = r.block(x, new)
    return with_first(out, new)


def is_stream(value: Any, x: Tensor) -> bool:
    """Whether another argument of a block may be a stream of tokens too (CaiT's class token)."""
    return (
        isinstance(value, Tensor)
        and value is not x
        and value.ndim == x.ndim
        and (value.shape[-1] == x.shape[-1] or _are_tokens(value, x))
    )


def _are_tokens(value: Tensor, x: Tensor) -> bool:
    """Whether a tensor may hold other tokens of the same samples: those of LTX2's audio have another width."""
    return value.ndim == 3 and value.dtype == x.dtype and value.shape[0] == x.shape[0]


def check_tokens(
    block: nn.Module, method: Regularizer, before: Tensor, after: Tensor, others: Sequence[Any]
) -> None:
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


# --- its linear layers ----------------------------------------------------------------------------


def linear_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a linear map with the stages operands and product open."""

    plain = base is nn.Linear.forward

    def forward(self: Any, input: Tensor) -> Tensor:
        site: LinearSite = self._dampen_linear
        layer = site.layer
        frame = None
        if layer.frames:
            # the innermost is mostly this thread's; a graph knows no thread
            last = layer.frames[-1]
            mine = not torch.compiler.is_compiling() and last.thread == threading.get_ident()
            frame = last if mine else frame_of(layer)
        work = frame.work if frame is not None else None
        if work is None or work.training is not self.training:  # no block has asked for this module
            work = layer.at_work(self)
        if work is None:
            return base(self, input)  # type: ignore[no-any-return]
        # inside an attention, whose own input was looked at, each look is a call of its function mode
        inside = frame is not None and frame.call is not None and type(input) is Tensor
        if not inside and input.is_nested:
            refuse_nested(input, f"the linear layer '{site.role}' at '{layer.site.name}'")
        if (
            not torch.compiler.is_compiling() and not input.numel()
        ):  # an expert or a batch without tokens
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
            if w is weight and kind == "low rank":  # with the dropout of the adapter
                return base(self, x)  # type: ignore[no-any-return]
            if (
                kind == "conv1d"
            ):  # the same kernel as GPT-2's own, so that a rate of 0 is the identity to the bit
                y = torch.addmm(self.bias, x.flatten(0, -2), w.t())
                return cast(Tensor, y.unflatten(0, x.shape[:-1]))
            return F.linear(x, w, bias)

        here = work.roles.get(site.role) or work.at_role(site.role)
        y = run_linear(frame, here, call, multiply, plain)
        return y if routing is None else routing.put(y, valid)

    return forward


def _convolve(
    base: Callable[..., Any],
    module: Any,
    site: LinearSite,
    active: Sequence[Regularizer],
    input: Tensor,
) -> Tensor:
    """A convolution that is one position wide: its positions are tokens, (B, C, ...) as (B, positions, C)."""
    frame, places = frame_of(site.layer), input.shape[2:]
    if input.ndim != module.weight.ndim:
        raise RuntimeError(
            f"the convolution '{site.role}' at '{site.layer.site.name}' got {tuple(input.shape)}, without samples. "
            "Give batches, or leave the layer out with target_modules=."
        )
    tokens, weight = input.flatten(2).transpose(1, 2), weight_of(module, "convolution")

    def multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if x is tokens and w is weight:
            y: Tensor = base(module, input)
            return y.flatten(2).transpose(1, 2)
        return F.linear(x, w, bias)

    call = LinearCall(site.role, tokens, weight, module.bias, module, site.layer.site)
    return cast(
        Tensor, apply_linear(frame, active, call, multiply).transpose(1, 2).unflatten(2, places)
    )


def layer_valid(
    layer: Layer, frame: Frame, input: Tensor, role: str, needed: bool
) -> Tensor | None:
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
    if (
        needed
        and not frame.early
        and layer.tells_padding
        and frame.in_block
        and role.startswith("ffn")
    ):
        frame.early = role
    return None


def fit_valid(valid: Tensor, input: Tensor) -> Tensor | None:
    """The validity (B, N) of a layer's tokens, as a linear map sees them: (B, N, D), or (B * N, D) where flattened."""
    if input.ndim == 2 and input.shape[0] % valid.shape[1] == 0:
        samples = input.shape[0] // valid.shape[1]
        return valid.expand(samples, -1).flatten() if valid.shape[0] in (1, samples) else None
    if input.ndim == 3 and valid.shape[1] == input.shape[1]:
        return valid
    return (
        None  # windows: the attention's rows are not this map's tokens, and none of them is padding
    )


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
        frame.multiplying = (
            True  # what happens here is no other map of the attention, whatever weight it reads
        )
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
