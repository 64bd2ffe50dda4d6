"""The opening of a block: what its norms and linear maps make of its input, before anything is perturbed.

In the first pass of a two-pass step these calls are kept; in the second, a call with the very same tensors gives the
very same result. Nothing else is assumed about the block: what a perturbation changed is another tensor, and is
computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import saved_tensors_are_hooked, version_of

SHARED = frozenset({F.linear, F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm})


class RememberedCall:
    """A call that was made: function, arguments, result, the versions that all of them had, and the modes it was made
    in."""

    def __init__(self, function: Any, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        self.function, self.args, self.kwargs, self.output = function, args, kwargs, output
        self.versions, self.modes = self._versions(), _modes(output)

    def is_again(self, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether this is the same question, of tensors that nobody has changed since."""
        return (
            function is self.function
            and len(args) == len(self.args)
            and kwargs.keys() == self.kwargs.keys()
            and all(_is(a, b) for a, b in zip(args, self.args, strict=True))
            and all(_is(v, self.kwargs[k]) for k, v in kwargs.items())
            and self._versions() == self.versions
            and _modes(self.output) == self.modes
        )

    def _versions(self) -> list[int]:
        return [version_of(v) for v in (*self.args, *self.kwargs.values(), self.output) if isinstance(v, Tensor)]


class FirstBlock(TorchFunctionMode):
    """Around a block's forward: keeps its opening calls in `calls` (given the block's inputs), or takes them from
    there."""

    def __init__(self, calls: list[RememberedCall], inputs: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.calls, self.recording, self.taken = calls, inputs is not None, 0
        self.clean = [t for t in inputs or () if isinstance(t, Tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in SHARED or saved_tensors_are_hooked():
            return func(*args, **kwargs)
        if not self.recording:
            for call in self.calls:
                if call.is_again(func, args, kwargs):
                    self.taken += 1
                    return call.output
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if args and any(args[0] is t for t in self.clean):
            self.calls.append(RememberedCall(func, args, kwargs, output))
            self.clean.append(output)
        return output


def _modes(like: Tensor) -> tuple[Any, ...]:
    """What else decides about the result of a call: whether gradients are recorded, and autocast."""
    device = like.device.type
    autocast = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), autocast, torch.get_autocast_dtype(device) if autocast else None


def _is(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    return bool(first == second)
