"""Which axis is which in the operands of an attention: anything with leading axes as (B, H, tokens, channels).

Four axes are (B, H, N, D) by convention, unless the way of the channels says (B * H, blocks, N, D) (HaloNet). Of three
or five the module's own number of heads tells which axis is the heads (Nest: (B, H, blocks, N, D); Twins: (B, blocks,
H, N, D); BLOOM: (B * H, N, D)); where it does not tell, a guess would drop blocks of an image for heads, so it is an
error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dampen.names import leave_out

_HEADS = "num_heads heads n_heads num_attention_heads n_head nhead num_head nb_head num_attn_heads".split()


def heads_of(module: nn.Module | None) -> int | None:
    """The number of heads that an attention module says it has."""
    for name in _HEADS:
        value: Any = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


class Layout:
    """How to fold tensors with the leading axes `leading` into (B, H, ., .), and back."""

    def __init__(self, leading: Sequence[int], axis: int | None, heads: int) -> None:
        self.leading, self.axis, self.heads = tuple(leading), axis, heads
        self.plain = len(self.leading) == 2 and axis == 1
        if (
            axis is not None and self.leading[axis] != heads
        ):  # merged with the batch: (B * H, ...) becomes (B, H, ...)
            n = self.leading[axis] // heads
            self.split = (*self.leading[:axis], n, heads, *self.leading[axis + 1 :])
            self.axis = axis + 1
        else:
            self.split = self.leading

    def fold(self, t: Tensor) -> Tensor:
        """(*leading, R, C) as (B, H, R, C); leading axes of size 1 or missing ones are repeated."""
        if self.plain and t.ndim == 4 and t.shape[:2] == self.leading:
            return t
        t = t.expand(*self.leading, *t.shape[-2:]).reshape(*self.split, *t.shape[-2:])
        if self.axis is None:  # heads are merged into the batch, or there is one
            return t.reshape(-1, self.heads, *t.shape[-2:])
        return t.movedim(self.axis, -3).reshape(-1, self.heads, *t.shape[-2:])

    def unfold(self, t: Tensor) -> Tensor:
        """(B, H, R, C) with the leading axes again."""
        if self.plain:
            return t
        if self.axis is None:
            return t.reshape(*self.leading, *t.shape[-2:])
        others = [n for i, n in enumerate(self.split) if i != self.axis]
        t = t.reshape(*others, self.heads, *t.shape[-2:]).movedim(-3, self.axis)
        return t if self.split == self.leading else t.reshape(*self.leading, *t.shape[-2:])


def layout_of(
    leading: Sequence[int],
    module: nn.Module | None,
    where: str,
    tokens: int,
    given: Sequence[int] | None,
    told: tuple[int | None, int] | None = None,
) -> Layout:
    """The layout of operands with these leading axes and so many queries in an attention of `module`, which was given
    something of the shape `given`; an error where it cannot be told. `told` is what the way of the channels says: the
    axis of the heads and their number."""
    leading = tuple(leading)
    heads, size = heads_of(module), len(leading)
    if size == 0 and given is not None and len(given) > 2:
        raise RuntimeError(
            f"{type(module).__name__} at '{where}' got {tuple(given)} and attends with two axes, so its queries and "
            f"keys are not the tokens of one sample (of a batch, its samples?). To go on, {leave_out(where)}."
        )
    if told is not None:
        return Layout(leading, *told)
    if heads is None and size == 1 and given is not None and len(given) == 3 and given[1] == tokens:
        heads = (
            leading[0] // given[0] if leading[0] % given[0] == 0 else None
        )  # (B, N, C) became (B * H, N, D)
    found = [i for i, n in enumerate(leading) if n == heads]
    if size > 1 and given is not None and given[0] == leading[0]:
        found = [
            i for i in found if i > 0
        ]  # the first axis is the batch, even where it is as long as the heads
    merged = (
        heads is not None and given is not None and leading[:1] == (given[0] * heads,) and heads > 1
    )
    if size == 2 and merged and 1 not in found:
        return Layout(leading, 0, heads or 1)
    if size == 2 and (heads is None or 1 in found or not found):
        return Layout(leading, 1, leading[1])
    alone = (
        size == 1
        and given is not None
        and len(given) == 3
        and (leading[0], tokens) == tuple(given[:2])
    )
    if (
        size == 0 or (size == 1 and heads == 1) or alone
    ):  # one head, or one of several that run one after the other
        return Layout(leading, None, 1)
    if size == 1 and heads is not None and leading[0] % heads == 0:
        return Layout(leading, None, heads)
    if len(found) == 1:
        return Layout(leading, found[0], leading[found[0]])
    raise RuntimeError(
        f"{type(module).__name__} at '{where}' attends with {size + 2} axes, (batch..., tokens, channels) = "
        f"{tuple(leading)} + two, and its number of heads ({'unknown' if heads is None else heads}) does not tell "
        f"which of them are the heads. Give the module an attribute num_heads, or {leave_out(where)}."
    )
