"""The quickest way to a residual branch: the stream itself tells when something is added to it.

`residual.py` follows every tensor of a block through a function mode, and each torch function of the block pays for it.
Where several forwards have done nothing with the stream but `stream + branch`, out of place and by the operator, the
stream is given a class of its own for the length of one forward: `x + b` then comes here, and nothing else is touched.
The additions, the attentions that ran before each, and the block's output are compared with what was followed. Where
they differ, branches may have gone past the regularizers: what the forward did is undone (draws, penalties), the block
is run again from its input and followed, and its stream is never trusted again. A block that alternates from the
start is never streamed, and nothing of it runs twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import in_functorch, no_torch_function, saved_tensors_are_hooked, version_of
from dampen.calls import BranchCall, waiting_of
from dampen.containers import first_of

if TYPE_CHECKING:
    from dampen.hooks.context import Frame, Layer
    from dampen.regularizer import Regularizer

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
        self.departed = False  # whether the block adds otherwise this time
        self.thread = threading.get_ident()
        self.version, self.random = version_of(x), torch.get_rng_state()
        self.penalties = [waiting_of(r) for r in active]
        frame.residual = self
        self._open(x)

    def _open(self, t: Tensor) -> None:
        t._dampen_stream = self  # type: ignore[attr-defined]
        t.__class__ = Stream  # no view, no node in the graph; `close` takes it back

    def add(self, residual: Tensor, branch: Any, **kwargs: Any) -> Tensor:
        """stream + branch, with the regularizers on the branch."""
        if threading.get_ident() != self.thread:  # the same tensor in a forward of another thread
            return torch.add(residual, branch, **kwargs)
        number, memory = len(self.sums), self.memory
        if (
            self.departed
            or number == len(memory.roles)
            or residual is not (self.sums[-1] if number else self.root)
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
        self._open(out)
        return out

    def add_otherwise(self, residual: Tensor, other: Any, **kwargs: Any) -> Tensor:
        """A sum that was not there before: this forward will be undone, so nothing may be changed in place."""
        self.departed = True
        return torch.add(residual, other, **kwargs).as_subclass(Tensor)

    def see_queries(self, q: Tensor) -> None:
        """The layout of an attention is that of the forwards before."""

    def leave(self, out: Any) -> None:
        """An attention module has run."""
        self.frame.attended += 1

    def close(self) -> None:
        """Make plain tensors of the stream again, whatever ended the forward."""
        for t in (self.root, *self.sums):
            t.__class__ = Tensor
            del t._dampen_stream  # type: ignore[attr-defined]

    def is_as_before(self, out: Any) -> bool:
        """Whether every branch was seen and the last sum is what the block gives out."""
        return (
            not self.departed
            and len(self.sums) == len(self.memory.roles)
            and first_of(out) is self.sums[-1]
        )

    def undo(self, block: nn.Module) -> None:
        """Take back what the forward has drawn and noted, so that the block can run again and be followed."""
        self.layer.residual_memory, self.layer.residual_departures = None, LEARNING + 1
        if version_of(self.root) != self.version:
            names = ", ".join(sorted({r.name for r in self.regularizers}))
            raise RuntimeError(
                f"{type(block).__name__} at '{self.layer.site.name}' adds to its residual stream in another way than "
                f"in the forwards before, and has changed its input in place, so that it cannot be run again for "
                f"{names}. Run the step again, which looks anew."
            )
        torch.set_rng_state(self.random)
        for r, penalties in zip(self.active, self.penalties, strict=True):
            for key in waiting_of(r):
                del r._penalties[key]
            r._penalties.update(penalties)
        self.frame.restart()


def may_stream(layer: Layer, x: Tensor, roots: int) -> bool:
    """Whether a block's stream can be given a class of its own in this forward. Not while tensors that autograd saves
    are replaced (checkpoints), because a forward that is undone would have saved some; and on the CPU alone, where the
    state of the random numbers costs two microseconds to keep."""
    if torch.compiler.is_compiling() or layer.residual_departures > LEARNING:
        return False
    if layer.residual_same < STEADY:
        return False
    memory = layer.residual_memory
    return (
        memory is not None
        and memory.by_operator
        and roots == 1
        and type(x) is Tensor
        and x.device.type == "cpu"
        and not x.is_inference()
        and not in_functorch()
        and not saved_tensors_are_hooked()
    )
