"""Other weights in a model for a while: an average, the start of a fine-tuning, a point between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dampen._torch import placed_like


def floating(model: nn.Module) -> dict[str, Tensor]:
    """The floating-point parameters and buffers that belong to a model, by name; not those of its
    regularizers.

    Args:
        model: regularized or not.
    """
    state = model.state_dict(keep_vars=True)
    return {n: t for n, t in state.items() if isinstance(t, Tensor) and t.is_floating_point()}


@contextlib.contextmanager
def carrying(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these weights; afterwards its own, to the bit.

    Args:
        model: whose weights are exchanged.
        values: by the names of `floating`; what is not named stays.
    """
    live = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    # what runs inside may write to buffers, as batch norm does
    written = values.keys() | {n for n, _ in model.named_buffers(remove_duplicate=False)}
    own = {n: t.detach().clone() for n, t in live.items() if n in written}
    _write(live, values)
    try:
        yield
    finally:
        _write(live, own)


@torch.no_grad()
def _write(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        # past autograd, which would count a graph that was made before as changed
        sharded = getattr(value, "device_mesh", None) is not None
        into[name].data.copy_(value if sharded else placed_like(value, into[name]))
    # autocast keeps copies of the weights in low precision, which are those of before
    torch.clear_autocast_cache()
