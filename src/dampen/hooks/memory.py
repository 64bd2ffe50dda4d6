"""What one forward of a block did, so that the next one need only be compared with it; see `residual.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class Found(NamedTuple):
    """A residual addition, by whatever rule it was found."""

    labels: frozenset[str]  # the sublayers of the branch
    branch_first: bool  # whether the left operand is the branch
    read: bool  # whether anything was computed from the sum before it
    around: frozenset[str] = (
        frozenset()
    )  # sublayers that remade the stream: no residual goes around them
    projected: bool = False  # whether the other operand is a projected shortcut
    resized: bool | None = (
        None  # whether it is of another size than the stream, where the rule asked for that
    )


class Addition(NamedTuple):
    """A residual addition that is remembered, and which calls made its operands."""

    left: int
    right: int
    found: Found


class Memory(NamedTuple):
    """What one forward of a block did, call by call; an attention module that ends is a call of None."""

    functions: tuple[Any, ...]
    additions: dict[
        int, Addition | None
    ]  # by the number of the call; None: an attention, which tells its layout
    result: int  # the call that gave the block's output
    by_operator: (
        bool  # whether all that is done with the stream is `stream + branch`: then see `stream.py`
    )
    roles: tuple[str, ...]  # of the branches, in their order
    attended: tuple[int, ...]  # how many attention modules had run before each
    apart: (
        bool  # whether every sum was read before the next one: no two branches stand side by side
    )


Entry = tuple[Any, tuple[Any, ...], dict[str, Any], Any, int, Found | None]
"""A call: function, arguments, what came out, attentions it ran in, and what is known of it where it is a residual
addition."""


def remember(
    roots: Sequence[Tensor], log: Sequence[Entry], out: Tensor, may_stream: bool
) -> Memory | None:
    """A forward, for the next; None where an operand of an addition was made by no call of its own."""
    made = {id(root): -1 - i for i, root in enumerate(roots)}
    additions: dict[int, Addition | None] = {}
    roles: list[str] = []
    attended: list[int] = []
    ended = 0
    for number, (func, args, _, result, _, found) in enumerate(log):
        if found is not None:
            left, right = made.get(id(args[0])), made.get(id(args[1]))
            if left is None or right is None:
                return None
            additions[number] = Addition(left, right, found)
            roles.append(role_of(found.labels))
            attended.append(ended)
        elif func is None:
            ended += 1
        elif attends(func):
            additions[number] = None
        made[id(result)] = number
    if id(out) not in made:
        return None
    by_operator = may_stream and len(roots) == 1 and _by_operator(roots[0], log, additions)
    functions = tuple(entry[0] for entry in log)
    apart = all([plan.found.read for plan in additions.values() if plan is not None][1:])
    return Memory(
        functions, additions, made[id(out)], by_operator, tuple(roles), tuple(attended), apart
    )


def _by_operator(x: Tensor, log: Sequence[Entry], additions: dict[int, Addition | None]) -> bool:
    """Whether every sum is `stream + branch` by the operator, on the block's input or the sum before, and nothing else
    is ever added to the stream."""
    if x.ndim != 3 or x.shape[0] == x.shape[1]:
        return False
    stream, number_of_last = x, -1
    for number, (func, args, _, out, _, found) in enumerate(log):
        adds = getattr(func, "__name__", "") in ADDITIONS
        plan = additions.get(number)
        if adds and plan is not None:
            residual, place = (
                (args[1], plan.right) if plan.found.branch_first else (args[0], plan.left)
            )
            same = residual.shape == args[0].shape == args[1].shape
            if (
                func is not Tensor.add
                or residual is not stream
                or place != number_of_last
                or not same
            ):
                return False
            stream, number_of_last = out, number
        elif (adds or func is torch.add or found is not None) and any(
            value is stream for value in args
        ):
            return False
    return True


def attends(func: Any) -> bool:
    """Whether a torch function is attention as a whole."""
    return func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward


def role_of(labels: frozenset[str]) -> str:
    """attention, ffn, or parallel for both."""
    kinds = sorted({label.split()[0] for label in labels})
    return kinds[0] if len(kinds) == 1 else "parallel"
