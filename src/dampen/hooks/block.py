"""A block while regularizers are at work in it: the stages tokens, branch and block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import pytree, refuse_nested
from dampen.containers import first_of, with_first
from dampen.hooks.context import AtWork, BlockSite, Frame, close_frame, open_frame
from dampen.hooks.residual import ResidualSocket
from dampen.hooks.stream import StreamSocket, may_stream
from dampen.names import leave_out
from dampen.regularizer import BLOCK_STAGES, Regularizer


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
            "Give it tensors, or tuples, dicts or dataclasses of them, or leave the block out with sites=."
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
            args, kwargs = (x, *args[1:]) if args else (), kwargs if args else {**kwargs, site.input_name: x}
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


def finish_block(self: Any, site: BlockSite, frame: Frame, work: AtWork, x: Tensor, out: Any) -> Any:
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
            "dataclass of them, or leave the block out with sites=."
        )
    new = y
    for r in acting:
        new = r.block(x, new)
    return with_first(out, new)


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
