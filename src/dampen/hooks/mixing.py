"""Scores whose axes change places on their way, and heads that are mixed there (talking heads).

A linear map over the last axis, a convolution one position wide over the second, or an einsum with a matrix that is a
parameter mixes heads where that axis is one of the leading ones of the scores; so does a norm over such an axis
(DeepViT). Anything that would mix queries or keys is not followed."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

_MIXES = {"linear", "conv2d", "layer_norm"}
_ALONE = set(
    "to float half double bfloat16 type type_as contiguous clone dropout nan_to_num tanh clamp mul __mul__ __rmul__ "
    "div __truediv__ add __add__".split()
)
MOVES_AXES = {"permute", "transpose", "swapaxes", "swapdims", "movedim", "einsum", *_MIXES}


def moved_axes(
    name: str, axes: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Which axis of the scores each axis of a function's result is, from those of its input; () where it does not
    keep them apart.

    >>> moved_axes("permute", (0, 1, 2, 3), (None, 0, 2, 3, 1), {})
    (0, 2, 3, 1)
    """
    numbers = _numbers(args[1:], kwargs)
    size = len(axes)
    if name == "permute" and len(numbers) == size:
        return tuple(axes[n] for n in numbers)
    if name in ("transpose", "swapaxes", "swapdims") and len(numbers) == 2:
        order = list(axes)
        a, b = numbers
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if name == "movedim" and len(numbers) == 2:
        order = list(axes)
        order.insert(numbers[1] % size, order.pop(numbers[0]))
        return tuple(order)
    leading = size - 2
    if name == "linear":
        return axes if 0 < axes[-1] < leading else ()
    if name == "layer_norm":
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return axes if len(shape) == 1 and axes[-1] < leading else ()
    if name == "einsum":
        return _mixed_by_matrix(axes, args)
    if name == "conv2d":
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        alone = isinstance(weight, Tensor) and tuple(weight.shape[2:]) == (1, 1)
        return axes if alone and size == 4 and axes[1] == 1 else ()
    return axes if name in _ALONE else ()


def mixes_by_matrix(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function is an einsum of a tensor and one matrix that is a parameter."""
    if name != "einsum" or len(args) != 3 or not isinstance(args[0], str):
        return False
    return sum(isinstance(x, nn.Parameter) and x.ndim == 2 for x in args[1:]) == 1


def _mixed_by_matrix(axes: tuple[int, ...], args: tuple[Any, ...]) -> tuple[int, ...]:
    """`moved_axes` of such an einsum, which replaces one letter of the tensor by another ("bhij,hg->bgij")."""
    parts = re.fullmatch(r"(\w+),(\w+)->(\w+)", args[0].replace(" ", ""))
    if parts is None:
        return ()
    left, right, out = parts.groups()
    tensor, matrix = (right, left) if isinstance(args[1], nn.Parameter) else (left, right)
    old = [x for x in matrix if x in tensor and x not in out]
    new = [x for x in matrix if x in out and x not in tensor]
    if len(tensor) != len(axes) or len(old) != 1 or len(new) != 1 or len(matrix) != 2:
        return ()
    places = dict(zip(tensor.replace(old[0], new[0]), axes, strict=True))
    if places[new[0]] >= len(axes) - 2 or set(out) != set(places):
        return ()
    return tuple(places[x] for x in out)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for value in (*args, *kwargs.values()):
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool)]
