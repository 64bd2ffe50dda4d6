"""Residual branches, found in any block by following the data.

While a block runs, every addition is looked at. One operand that *is* the residual stream (the block's input, the
result of the last residual addition, or a norm or reshape of it), after a sublayer has run since the last one, makes
it a residual addition; the other operand is the branch, with whatever the block has put in it (LayerScale, DropPath,
dropout, a post-norm). So pre-norm, post-norm, sandwich and decoder blocks of any library are read without an adapter
of their own. The number of branches found is checked against the sublayers that the block has, so a block that adds
in some other way raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen.regularizer import BranchCall, Regularizer

if TYPE_CHECKING:
    from dampen.state import Layer

_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_LOOKS = {"__get__", "size", "dim", "stride", "numel"}  # ask a tensor for its form, not for its values
_SAME_STREAM = set(
    "layer_norm rms_norm group_norm reshape view flatten unflatten permute transpose movedim contiguous to type float "
    "half bfloat16 squeeze unsqueeze clone type_as".split()
)


def call_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as a mode received it."""
    if getattr(func, "__name__", "") == "unflatten":  # its super() cannot be traced below a mode by torch.compile
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


class ResidualSocket(TorchFunctionMode):
    """Shows each residual branch of one block's forward to the regularizers, just before it is added."""

    def __init__(self, regularizers: Sequence[Regularizer], stream: Tensor, layer: Layer) -> None:
        super().__init__()
        self.regularizers, self.layer = regularizers, layer
        self.stream = [stream]  # tensors that are the residual stream, possibly normed or reshaped
        layer.sublayer, layer.entered = "", "ffn"
        self.found: list[str] = []
        self.read = False  # whether anything was computed from the sum since the last addition
        self.removed = False  # whether a skip was left out

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
            self.layer.sublayer = "attention"
        elif (func is F.linear or name == "addmm") and not self.layer.sublayer:
            self.layer.sublayer = self.layer.entered
        elif name in _ADDITIONS and self.layer.sublayer and len(args) == 2:
            left, right = (self._is_stream(arg) for arg in args)
            if left != right:
                return self._add(*args) if left else self._add(args[1], args[0])
        self.read = self.read or (name not in _LOOKS and any(map(self._is_stream, (*args, *kwargs.values()))))
        out = call_torch(func, args, kwargs)
        if name in _SAME_STREAM and args and self._is_stream(args[0]):
            self.stream.append(out)
        return out

    def _is_stream(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(value is s for s in self.stream)

    def _add(self, residual: Tensor, branch: Tensor) -> Tensor:
        call = BranchCall(self.layer.sublayer, residual, self.layer.site)
        for r in self.regularizers:
            branch = r.branch(branch, call)
        self.removed = self.removed or not call.skip
        if self.removed and self.found and not self.read:
            raise RuntimeError(
                f"The block at '{self.layer.site.name}' adds {self.found[-1]} and {self.layer.sublayer} to the same "
                "input, side by side: one skip goes around both, and to take it from one would lose the other. "
                "Leave the block out with sites=."
            )
        if call.skip:
            out = torch.add(residual, branch)
        else:  # in the dtype and shape that the sum would have had
            out = branch.to(torch.promote_types(residual.dtype, branch.dtype)).expand_as(residual)
        self.found.append(self.layer.sublayer)
        self.stream, self.read = [out], False
        self.layer.sublayer, self.layer.entered = "", "ffn"
        return out

    def check(self, block: nn.Module, expected: int) -> None:
        """Raise where the block did not add as many branches as it has sublayers."""
        if len(self.found) != expected:
            names = ", ".join(sorted({r.name for r in self.regularizers}))
            raise RuntimeError(
                f"{type(block).__name__} at '{self.layer.site.name}': found {len(self.found)} residual additions "
                f"({', '.join(self.found) or 'none'}) where its sublayers make {expected}, so {names} cannot act on "
                "its branches. "
                "Write the block as x = x + branch(x) (or norm(x + branch(x))) per sublayer, or leave it out with "
                "sites=."
            )
