"""A block and its linear layers while regularizers are at work in them.

The block has the stages tokens, branch and block. A linear layer is seen with its own input, weight
and bias: the stages operands and product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import (
    in_functorch,
    no_torch_function,
    pytree,
    refuse_nested,
    saved_tensors_are_hooked,
    version_of,
)
from dampen.calls import BranchCall, waiting_of
from dampen.containers import first_of, with_first
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
from dampen.hooks.discover.roles import kind_of, read_adapter, weight_of
from dampen.hooks.residual import ResidualSocket
from dampen.hooks.tracing.products import heads_of
from dampen.names import leave_out
from dampen.regularizer import (
    ADAPTERS,
    BLOCK_STAGES,
    STEP_STAGES,
    LinearCall,
    Regularizer,
    check_only_reads,
)

if TYPE_CHECKING:
    from dampen.hooks.discover.sites import LayerPlan


# --- additions to the stream
#
# The quickest way to a residual branch: the stream itself reports when something is added to it.
#
# The tracer in `residual.py` follows every tensor of a block through a function
# mode, and each torch function of the block pays for it. Where several forwards have done nothing
# with the stream but `stream + branch`, out of place and by the operator, the stream is given a
# class of its own for the length of one forward: `x + b` then comes here, and nothing else is
# touched. The additions, the attentions that ran before each, and the block's output
# are compared with what was followed. Where they differ, branches may have gone past the
# regularizers: what the forward did is undone (draws, penalties), the block is run again from its
# input and followed, and its stream is never trusted again. A block that alternates from the start
# is never streamed, and nothing of it runs twice.

STEADY = 3
"""So many forwards must have been like the first before a stream is trusted."""
LEARNING = 2
"""So many forwards may depart from the one before: an attention learns its layout in the first."""


class Stream(Tensor):
    """A block's residual stream while the block runs: a plain tensor, but for additions."""

    __torch_function__ = no_torch_function
    _dampen_stream: StreamSocket

    def __add__(self, other: Any) -> Tensor:
        return self._dampen_stream.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self._dampen_stream.add(self, other)

    def add(self, other: Any, **kwargs: Any) -> Tensor:
        return self._dampen_stream.add(self, other, **kwargs)

    def reshape(self, *shape: Any) -> Tensor:
        return self._dampen_stream.reshaped(self, super().reshape(*shape))

    def view(self, *shape: Any) -> Tensor:
        return self._dampen_stream.reshaped(self, super().view(*shape))

    def flatten(self, *axes: Any) -> Tensor:
        return self._dampen_stream.reshaped(self, super().flatten(*axes))

    def unflatten(self, *sizes: Any) -> Tensor:
        return self._dampen_stream.reshaped(self, super().unflatten(*sizes))  # type: ignore[no-untyped-call]

    def __iadd__(self, other: Any) -> Tensor:
        return self._dampen_stream.add_otherwise(self, other)

    def add_(self, other: Any, **kwargs: Any) -> Tensor:
        return self._dampen_stream.add_otherwise(self, other, **kwargs)


class StreamSocket:
    """One forward of a block whose way of adding is known."""

    def __init__(
        self,
        regularizers: Sequence[Regularizer],
        active: Sequence[Regularizer],
        x: Tensor,
        layer: Layer,
        frame: Frame,
    ) -> None:
        assert layer.residual_memory is not None  # `may_stream` has looked
        self.regularizers, self.active, self.layer, self.frame = regularizers, active, layer, frame
        self.memory, self.root = layer.residual_memory, x
        self.sums: list[Tensor] = []
        self.stream = [x]  # the block's input or its last sum, and the same in other shapes
        self.opened: list[Tensor] = []
        self.departed = False  # whether the block adds otherwise this time
        self.thread = threading.get_ident()
        self.version, self.random = version_of(x), torch.get_rng_state()
        self.penalties = [waiting_of(r) for r in active]
        frame.residual = self
        self._open(x)

    def _open(self, t: Tensor) -> None:
        t._dampen_stream = self  # type: ignore[attr-defined]
        t.__class__ = Stream  # no view, no node in the graph; `close` takes it back
        self.opened.append(t)

    def reshaped(self, stream: Tensor, out: Tensor) -> Tensor:
        """The stream in another shape, which a branch may be added to."""
        if threading.get_ident() != self.thread or not any(stream is t for t in self.stream):
            return out
        if out is not stream:
            out = out if type(out) is Tensor else out.as_subclass(Tensor)
            self.stream.append(out)
            self._open(out)
        return out

    def add(self, residual: Tensor, branch: Any, **kwargs: Any) -> Tensor:
        """stream + branch, with the regularizers on the branch."""
        if threading.get_ident() != self.thread:  # the same tensor in a forward of another thread
            return torch.add(residual, branch, **kwargs)
        number, memory = len(self.sums), self.memory
        if (
            self.departed
            or number == len(memory.roles)
            or not any(residual is t for t in self.stream)
            or kwargs
            or type(branch) is not Tensor
            or branch.shape != residual.shape
            or self.frame.attended != memory.attended[number]
        ):
            return self.add_otherwise(residual, branch, **kwargs)
        call = BranchCall(memory.roles[number], residual, self.layer.site, memory=self.frame.memory)
        residual.__class__ = (
            Tensor  # a method may add to what it reads, and that is no addition of the block's
        )
        try:
            for r in self.regularizers:
                branch = r.branch(branch, call)
        finally:
            residual.__class__ = Stream
        if not call.skip and not memory.apart:  # refused where it is followed
            return self.add_otherwise(residual, branch)
        if call.skip:
            out = torch.add(residual, branch)
        else:  # in the dtype and shape that the sum would have had
            out = branch.to(torch.promote_types(residual.dtype, branch.dtype)).expand_as(residual)
        out = out if type(out) is Tensor else out.as_subclass(Tensor)
        self.sums.append(out)
        self.stream = [out]
        self._open(out)
        return out

    def add_otherwise(self, residual: Tensor, other: Any, **kwargs: Any) -> Tensor:
        """A sum that was not there before: this forward will be undone, so nothing
        may be changed in place."""
        self.departed = True
        return torch.add(residual, other, **kwargs).as_subclass(Tensor)

    def see_queries(self, q: Tensor) -> None:
        """The layout of an attention is that of the forwards before."""

    def leave(self, out: Any) -> None:
        """An attention module has run."""
        self.frame.attended += 1

    def close(self) -> None:
        """Make plain tensors of the stream again, whatever ended the forward."""
        for t in self.opened:
            t.__class__ = Tensor
            del t._dampen_stream  # type: ignore[attr-defined]

    def is_as_before(self, out: Any) -> bool:
        """Whether every branch was seen and the last sum is the output of the block."""
        return (
            not self.departed
            and len(self.sums) == len(self.memory.roles)
            and any(first_of(out) is t for t in self.stream)
        )

    def undo(self, block: nn.Module) -> None:
        """Take back what the forward has drawn and noted, so that the block can run
        again and be followed."""
        self.layer.residual_memory, self.layer.residual_departures = None, LEARNING + 1
        if version_of(self.root) != self.version:
            names = ", ".join(sorted({r.name for r in self.regularizers}))
            raise RuntimeError(
                f"{type(block).__name__} at '{self.layer.site.name}' adds to "
                "its residual stream in another way than "
                "in the forwards before, and has changed its input in "
                "place, so that it cannot be run again for "
                f"{names}. Run the step again, which looks anew."
            )
        torch.set_rng_state(self.random)
        for r, penalties in zip(self.active, self.penalties, strict=True):
            for key in waiting_of(r):
                del r._penalties[key]
            r._penalties.update(penalties)
        self.frame.restart()


def may_stream(layer: Layer, x: Tensor, roots: int) -> bool:
    """Whether a block's stream can be given a class of its own in this forward. Not while tensors
    that autograd saves are replaced (checkpoints), because a forward that is undone would have
    saved some; and on the CPU alone, where the state of the random numbers costs two
    microseconds to keep."""
    if torch.compiler.is_compiling() or layer.residual_departures > LEARNING:
        return False
    if layer.residual_same < STEADY:
        return False
    memory = layer.residual_memory
    return (
        memory is not None
        and memory.by_operator
        and roots == memory.roots
        and type(x) is Tensor
        and x.device.type == "cpu"
        and not x.is_inference()
        and not in_functorch()
        and not saved_tensors_are_hooked()
    )


# --- blocks and their linear layers


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
            f"{type(self).__name__} at '{layer.site.name}' got no "
            "tensor that could be found in its arguments "
            f"({', '.join(type(a).__name__ for a in (*args, *kwargs.values())) or 'none'}). "
            "Give it tensors, or tuples, dicts or dataclasses of them, or "
            "leave the block out with target_modules=."
        )
    stages = set() if x is given else {s for r in active for s in r.stages} & set(BLOCK_STAGES)
    if stages:
        raise RuntimeError(
            f"{type(self).__name__} at '{layer.site.name}' takes a "
            f"{type(given).__name__} of tensors, not one, so "
            f"methods of whole blocks ({', '.join(sorted(stages))}) cannot act on it. "
            f"To continue, {leave_out(layer.site.name)}."
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
        # to set an attribute of a module takes microseconds; to read it in a graph
        # would guard the graph by it
        if compiling or r.input_has_gradient is not has_gradient:
            r.input_has_gradient = has_gradient
    branching = work.branch
    # a mode that is open also keeps torch.nn's encoder layer from its fused
    # eval path around our sites
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
    """What is left to do when a block's own forward has run: the stage block, and a look whether
    its maps were seen."""
    if site.wants_linear and frame.hits == 0 and work.linear:
        raise RuntimeError(
            f"{type(self).__name__} at '{site.layer.site.name}' ran without "
            "calling any of its linear modules, so the "
            "regularizers on its linear maps did nothing. Call the "
            "modules (self.fc1(x)) instead of using their "
            "weights."
        )
    acting = work.block
    if not acting:
        return out
    y = first_of(out)
    if y is None:
        raise RuntimeError(
            f"{type(self).__name__} at '{site.layer.site.name}' returned a "
            f"{type(out).__name__} in which no tensor was "
            f"found, so {type(acting[0]).__name__} cannot act on it. "
            "Return a tensor, or a tuple, a dict or a "
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
    """Whether a tensor may hold other tokens of the same samples: those of LTX2's audio have
    another width."""
    return value.ndim == 3 and value.dtype == x.dtype and value.shape[0] == x.shape[0]


def check_tokens(
    block: nn.Module, method: Regularizer, before: Tensor, after: Tensor, others: Sequence[Any]
) -> None:
    """Raise where a method took tokens away although the block gets something else that has one
    entry per token."""
    if after.shape == before.shape:
        return
    batch, length = before.shape[:2]
    for other in pytree.tree_leaves(others):
        if isinstance(other, Tensor) and other is not before:
            sizes = other.shape[1:] if other.shape[:1] == (batch,) else other.shape
            if length in sizes:
                raise RuntimeError(
                    f"{type(method).__name__} left {after.shape[1]} of {length} tokens, but "
                    f"{type(block).__name__} also gets a tensor of shape "
                    f"{tuple(other.shape)} (a mask or positions), "
                    f"which fits the {length}. {type(method).__name__} "
                    "works where positions are in the tokens."
                )


# --- its linear layers


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
        if work is None or work.training is not self.training:  # no block uses this module
            work = layer.at_work(self)
        if work is None:
            return base(self, input)  # type: ignore[no-any-return]
        # inside an attention, whose own input was looked at, each look is a
        # call of its function mode
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
        here = work.roles.get(site.role) or work.at_role(site.role)
        if routing is not None:
            valid = routing.rows(input)
        elif frame is not None and (here.valid or frame.valid is not None):
            valid = layer_valid(layer, frame, input, site.role, here.valid)
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
    """A convolution that is one position wide: its positions are tokens, (B, C, ...) as (B,
    positions, C)."""
    frame, places = frame_of(site.layer), input.shape[2:]
    if input.ndim != module.weight.ndim:
        raise RuntimeError(
            f"the convolution '{site.role}' at '{site.layer.site.name}' "
            f"got {tuple(input.shape)}, without samples. "
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
    """Which tokens of a linear map's input are no padding, as far as the layer
    knows by now; None: all.

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
    """The validity (B, N) of a layer's tokens, as a linear map sees them: (B, N, D), or (B * N, D)
    where flattened."""
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
        plain: whether `multiply` is `F.linear` and no more, for which a method may
            have a function of its own.
    """
    if frame is None:
        return _run_linear(work, call, multiply, plain)
    residual, aside = frame.residual, False
    if (
        plain
        and not frame.inside
        and type(residual) is ResidualSocket
        and not torch.compiler.is_compiling()
    ):
        aside = residual.step_aside()  # what methods compute here is nothing that the block did
    frame.multiplying = (
        True  # what happens here is no other map of the attention, whatever weight it reads
    )
    try:
        y = _run_linear(work, call, multiply, plain)
    finally:
        frame.multiplying = False
        if aside:
            cast(ResidualSocket, residual).come_back()
    if aside:
        cast(ResidualSocket, residual).saw(F.linear, (call.input, call.weight, call.bias), y)
    frame.hits += 1
    # the attention's own maps; an adapter's are parts of one
    if frame.call is not None and call.role not in ADAPTERS:
        frame.call.maps[call.role] = call
        if frame.call.followed is not None:
            frame.call.followed.start(y, -1, call)
    return y


def _run_linear(
    work: AtRole,
    call: LinearCall,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    plain: bool,
) -> Tensor:
    """The three stages alone."""
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
    return y


# --- only the samples that keep a branch
#
# Run a sublayer on the samples that keep its branch: the others' branch is multiplied by 0
# anyway.
#
# The method draws which samples stay when the sublayer starts, and multiplies the branch where
# it is added. So whatever comes between the two (an output projection with a bias, LayerScale)
# changes nothing: what a dropped sample gets there is not used.

SIMPLE = (bool, int, float, str, type(None))


class SubsetSite:
    """What is kept on a sublayer that may run on some samples of a batch."""

    def __init__(self, layer: Layer, skipper: Regularizer, part: str, heads: int | None) -> None:
        self.layer, self.skipper, self.part, self.heads = layer, skipper, part, heads

    def tell(self, reason: str) -> None:
        """Let `print(reg)` say that a forward ran the sublayer on all samples."""
        said = f"the {self.part} ran on all samples, {reason}"
        if said not in self.skipper.not_skipped:
            self.skipper.not_skipped = " and ".join(filter(None, (self.skipper.not_skipped, said)))


def subset_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a sublayer on the kept samples, with zeros for the others."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: SubsetSite = self._dampen_subset
        frame = frame_of(site.layer)
        if frame is None or frame.work is None or site.skipper not in frame.work.methods:
            return base(self, *args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        x = next((v for v in leaves if isinstance(v, Tensor)), None)
        if x is None:
            return base(self, *args, **kwargs)
        reason = why_not(x, leaves, frame.samples, site.heads)
        if reason:
            site.tell(reason)
            return base(self, *args, **kwargs)
        kept = site.skipper.keep_samples(x, frame.memory)
        if kept is None:
            return base(self, *args, **kwargs)
        some_x = x[kept]  # once: attention knows by identity that queries, keys and values are one
        some = list(leaves)
        for i, v in enumerate(leaves):
            if v is x:
                some[i] = some_x
            elif isinstance(v, Tensor) and is_by_sample(v, x, site.heads):
                some[i] = v[kept]
        args, kwargs = pytree.tree_unflatten(some, form)
        found, form = pytree.tree_flatten(base(self, *args, **kwargs))
        whole = [spread(v, kept, x, site.heads) if isinstance(v, Tensor) else v for v in found]
        return pytree.tree_unflatten(whole, form)

    return forward


def is_by_sample(v: Tensor, x: Tensor, heads: int | None) -> bool | None:
    """Whether an argument's first axis is the samples of x (B, N, D); None where that is unknown.

    A tensor (H, N, M), one bias for each head, looks like one for each sample where H equals B.
    """
    batch, tokens, width = x.shape
    if v is x:
        return True
    if v.ndim == 0 or v.shape[0] == 1 or (v.ndim <= 2 and v.shape[0] == tokens):
        return False
    if v.shape[0] != batch:
        return None
    if v.ndim == 2:
        return True if v.shape[1] == tokens else None
    if v.ndim == 4 and v.shape[1] in (1, heads) and v.shape[2] in (1, tokens):
        return True
    distinct = heads not in (None, batch) or (v.shape == x.shape and width != tokens)
    return True if v.shape[1] == tokens and distinct else None


def why_not(x: Tensor, leaves: list[Any], samples: int | None, heads: int | None) -> str:
    """Why a sublayer with these arguments runs on all samples; empty where it need not."""
    if any(not isinstance(v, (Tensor, *SIMPLE)) for v in leaves):
        return "an argument may carry states (a cache)"
    if x.ndim != 3 or x.shape[0] == x.shape[1]:
        return "the batch axis and the token axis have the same size"
    if x.shape[0] != samples:
        return "its first axis is not the samples of the block (windows?)"
    if any(isinstance(v, Tensor) and is_by_sample(v, x, heads) is None for v in leaves):
        return "an argument's batch axis is unknown"
    return ""


def spread(some: Tensor, kept: Tensor, x: Tensor, heads: int | None) -> Tensor:
    """A result of the kept samples in their places, 0 elsewhere; what is not by sample as it is."""
    batch, tokens = x.shape[:2]
    states = some.ndim > 1 and some.shape[1] == tokens
    weights = some.ndim == 4 and some.shape[1] == heads and len(kept) > 1
    if some.ndim == 0 or some.shape[0] != len(kept) or not (states or weights):
        return some
    return some.new_zeros((batch, *some.shape[1:])).index_copy(0, kept, some)


def open_subsets(plan: LayerPlan, layer: Layer) -> list[tuple[nn.Module, SubsetSite]]:
    """The sublayers of a layer that a method may run on some samples; the method gets the reason
    why none, or only some."""
    skipper = next((c for c in layer.clones if c.skips_samples), None)
    if skipper is None:
        return []
    others = [c for c in layer.clones if c is not skipper and c.stages - set(STEP_STAGES)]
    if others or plan.block is None:
        by = type(others[0]).__name__ if others else "the model, which has no module for the layer"
        skipper.not_skipped = f"nothing is skipped beside {by}"
        return []
    if any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in skipper.neighbors):
        skipper.not_skipped = "nothing is skipped, the samples are on the second axis"
        return []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in plan.block.modules()):
        skipper.not_skipped = "nothing is skipped, batch norm mixes the samples"
        return []
    feed_forward = [m.module for m in plan.linears.values() if m.role in ("ffn_in", "ffn_out")]
    holder = smallest_around(plan.block, feed_forward)
    sublayers = [(m, "attention") for m in plan.attentions.values()]
    heads = next(filter(None, map(heads_of, plan.attentions.values())), None)
    if holder is plan.block or holder is None or any(a in holder.modules() for a, _ in sublayers):
        skipper.not_skipped = "no module holds the feed-forward alone, so it runs on all samples"
    else:
        sublayers.append((holder, "feed-forward"))
    return [(m, SubsetSite(layer, skipper, part, heads)) for m, part in sublayers]


def smallest_around(block: nn.Module, parts: list[nn.Module]) -> nn.Module | None:
    """The smallest module of a block that holds all of some modules, more than one of them.

    Args:
        block: where to look.
        parts: modules in it.
    """
    if len(parts) < 2:
        return None
    holding = [m for m in block.modules() if all(p in set(m.modules()) for p in parts)]
    return min(holding, key=lambda m: len(list(m.modules())), default=None)
