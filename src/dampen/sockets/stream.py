"""The quickest way to a residual branch: the stream itself tells when something is added to it.

`residual.py` follows every tensor of a block through a function mode, and each torch function of the block pays for it.
Where it has seen that all a block does with its stream is `stream + branch`, out of place and by the operator, the
stream is given a class of its own for the length of one forward: `x + b` then comes here, and nothing else is touched.
The number of additions and the block's output are compared with what was followed; a block that adds otherwise this
time raises, because its branches would have gone past the regularizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import in_functorch
from dampen.calls import BranchCall

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer
    from dampen.sockets.residual import Memory
    from dampen.sockets.state import Layer


class Stream(Tensor):
    """A block's residual stream while the block runs: a plain tensor, but for additions."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _dampen_stream: StreamSocket

    def __add__(self, other: Any) -> Tensor:
        return self._dampen_stream.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self._dampen_stream.add(self, other)

    def add(self, other: Any, **kwargs: Any) -> Tensor:
        return self._dampen_stream.add(self, other, **kwargs)


class StreamSocket:
    """One forward of a block whose way of adding is known."""

    def __init__(self, regularizers: Sequence[Regularizer], x: Tensor, layer: Layer, memory: Memory) -> None:
        self.regularizers, self.layer, self.memory, self.root = regularizers, layer, memory, x
        self.sums: list[Tensor] = []
        self._open(x)

    def _open(self, t: Tensor) -> None:
        t._dampen_stream = self  # type: ignore[attr-defined]
        t.__class__ = Stream  # no view, no node in the graph; `close` takes it back

    def add(self, residual: Tensor, branch: Any, **kwargs: Any) -> Tensor:
        """stream + branch, with the regularizers on the branch."""
        number = len(self.sums)
        expected = self.sums[-1] if number else self.root
        if number == len(self.memory.roles) or residual is not expected or kwargs or not _is_branch(branch, residual):
            self._raise()
        call = BranchCall(self.memory.roles[number], residual, self.layer.site)
        for r in self.regularizers:
            branch = r.branch(branch, call)
        if call.skip:
            out = torch.add(residual, branch)
        else:  # in the dtype and shape that the sum would have had
            out = branch.to(torch.promote_types(residual.dtype, branch.dtype)).expand_as(residual)
        out = out if type(out) is Tensor else out.as_subclass(Tensor)
        self.sums.append(out)
        self._open(out)
        return out

    def close(self) -> None:
        """Make plain tensors of the stream again, whatever ended the forward."""
        for t in (self.root, *self.sums):
            t.__class__ = Tensor
            del t._dampen_stream  # type: ignore[attr-defined]

    def check(self, block: nn.Module, out: Any) -> None:
        """Raise unless every branch was seen and the last sum is what the block gives out."""
        first = out if isinstance(out, Tensor) else next((v for v in out if isinstance(v, Tensor)), None)
        if len(self.sums) != len(self.memory.roles) or first is not self.sums[-1]:
            self._raise(type(block).__name__)

    def _raise(self, name: str = "The block") -> None:
        self.layer.residual_memory = None  # the next forward is followed from its start
        names = ", ".join(sorted({r.name for r in self.regularizers}))
        raise RuntimeError(
            f"{name} at '{self.layer.site.name}' adds to its residual stream in another way than in the forward before "
            f"({len(self.memory.roles)} branches: {', '.join(self.memory.roles)}), so {names} would miss some. Run the "
            "step again, which looks anew; a block that changes from step to step must be left out with sites=."
        )


def may_stream(memory: Memory | None, x: Tensor, roots: int) -> bool:
    """Whether a block's stream can be given a class of its own in this forward."""
    return (
        memory is not None
        and memory.by_operator
        and roots == 1
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and not in_functorch()
    )


def _is_branch(branch: Any, residual: Tensor) -> bool:
    return type(branch) is Tensor and branch.shape == residual.shape
