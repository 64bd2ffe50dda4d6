"""`regularize(..., example=...)`: one forward on an input of the user's, so that what cannot work is reported at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def run_example(model: nn.Module, example: Any) -> None:
    """One training forward without gradient. The model, its buffers and the random numbers are left as they were.

    Args:
        model: a regularized model.
        example: what the model is called with: a tensor, a tuple of arguments or a mapping of keywords.
    """
    args, kwargs = _arguments(example)
    with _as_it_was(model), torch.random.fork_rng(), torch.no_grad():
        model.train()
        model(*args, **kwargs)


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, tuple | list):
        return tuple(example), {}
    raise TypeError(
        f"regularize(example=...) is what the model is called with: a tensor, a tuple of arguments or a dict of "
        f"keywords, got {type(example).__name__}."
    )


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers()
    ]  # batch norm counts every forward
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
