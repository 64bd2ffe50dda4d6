"""Products of two tensors with their axes named, and the operations between them, so that they can
be run again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.hooks.tracing.channels import Heads
from dampen.names import leave_out

# --- which axis is which
#
# Which axis is which in the operands of an attention: anything with leading axes as (B, H,
# tokens, channels).
#
# Four axes are (B, H, N, D) by convention, unless the way of the channels says (B * H, blocks,
# N, D) (HaloNet). Of three or five the module's own number of heads shows which axis is the
# heads (Nest: (B, H, blocks, N, D); Twins: (B, blocks, H, N, D); BLOOM: (B * H, N, D)); where
# it does not show it, a guess would drop blocks of an image for heads, so it is an error.

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

    def __init__(
        self, leading: Sequence[int], axis: int | None, heads: int, first: bool = False
    ) -> None:
        self.leading, self.axis, self.heads = tuple(leading), axis, heads
        self.plain = len(self.leading) == 2 and axis == 1
        if (
            axis is not None and self.leading[axis] != heads
        ):  # merged with the batch: (B * H, ...) becomes (B, H, ...)
            n = self.leading[axis] // heads
            parts = (heads, n) if first else (n, heads)
            self.split = (*self.leading[:axis], *parts, *self.leading[axis + 1 :])
            self.axis = axis if first else axis + 1
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
    traced: Heads | None = None,
) -> Layout:
    """The layout of operands with these leading axes and so many queries in an attention of
    `module`, which was given something of the shape `given`; an error where it is unknown. `traced`
    is where the heads are, where tracing found them."""
    leading = tuple(leading)
    heads, size = heads_of(module), len(leading)
    if size == 0 and given is not None and len(given) > 2:
        raise RuntimeError(
            f"{type(module).__name__} at '{where}' got {tuple(given)} and "
            "attends with two axes, so its queries and "
            "keys are not the tokens of one sample (of a batch, its "
            f"samples?). To continue, {leave_out(where)}."
        )
    if traced is not None:
        return Layout(leading, *traced)
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
        f"{type(module).__name__} at '{where}' attends with "
        f"{size + 2} axes, (batch..., tokens, channels) = "
        f"{tuple(leading)} + two, and its number of heads "
        f"({'unknown' if heads is None else heads}) does not show "
        "which of them are the heads. Give the module an "
        f"attribute num_heads, or {leave_out(where)}."
    )


# --- products
#
# Products of two tensors, however they are written, with their axes named: `@`, matmul, bmm,
# baddbmm, einsum.
#
# For scores the left operand holds the queries and the right one the keys; for outputs the
# weights and the values.


class Equation:
    """left, right -> out with a letter per axis; one letter is summed over."""

    def __init__(self, left: Tensor, right: Tensor, letters: tuple[str, str, str] | None) -> None:
        self.left, self.right = left, right
        self.letters = letters  # None: a matmul, whose leading axes broadcast

    def like(self, left: Tensor | None, right: Tensor | None) -> Equation:
        """The same equation of other tensors."""
        return Equation(
            self.left if left is None else left,
            self.right if right is None else right,
            self.letters,
        )

    @property
    def summed(self) -> str:
        """The letter summed over, of an einsum."""
        a, b, out = self._letters
        return next(x for x in a if x in b and x not in out)

    @property
    def _letters(self) -> tuple[str, str, str]:
        if self.letters is None:
            raise RuntimeError("a matmul has no letters")  # cannot happen: callers look first
        return self.letters

    # --- as scores

    def scores_last(self, made: Tensor, scores: Tensor) -> bool:
        """Whether scores that came from `made` still have queries and keys, in this
        order, as their last axes."""
        if scores.ndim < 2 or made.ndim < 2 or scores.shape[-2:] != made.shape[-2:]:
            return False
        if self.letters is None:
            return True
        a, b, out = self.letters
        return out[-2] not in b and out[-1] not in a and out[-2] in a and out[-1] in b

    def tokens_last(self) -> tuple[Tensor, Tensor]:
        """Queries (..., N, D) and keys (..., M, D), with the leading axes of the scores."""
        if self.letters is None:
            return self.left, self.right.transpose(-2, -1)
        a, b, out = self.letters
        d = self.summed
        return _permute(self.left, a, out[:-1] + d), _permute(self.right, b, out[:-2] + out[-1] + d)

    def remake(self, q: Tensor, k: Tensor, start: Way) -> Tensor:
        """The product again with other queries and keys, given as `tokens_last` gives them."""
        if self.letters is None:
            left, right = (
                q.reshape(self.left.shape),
                k.reshape(*self.right.shape[:-2], *k.shape[-2:]).transpose(-2, -1),
            )
        else:
            a, b, out = self.letters
            d = self.summed
            left, right = _back(q, a, out[:-1] + d), _back(k, b, out[:-2] + out[-1] + d)
        args = tuple(
            left if x is self.left else right if x is self.right else x for x in start.args
        )
        pairs = start.kwargs.items()
        kwargs = {
            key: left if x is self.left else right if x is self.right else x for key, x in pairs
        }
        made: Tensor = start.func(*args, **kwargs)
        return made

    # --- as outputs

    @property
    def values(self) -> Tensor:
        """The operand that holds the values."""
        return self.right

    @property
    def contracts_last(self) -> bool:
        """Whether the last axis of the left operand, the keys of the weights,
        is what is summed over."""
        return self.letters is None or self._letters[0][-1] == self.summed

    @property
    def contracts_rows(self) -> bool:
        """Whether the last axis but one of the left operand is what is
        summed over, of an einsum."""
        return self.letters is not None and self._letters[0][-2] == self.summed

    def with_rows_last(self) -> Equation:
        """The same einsum with the last two axes of the left operand in the other order."""
        a, b, out = self._letters
        return Equation(self.left, self.right, (a[:-2] + a[-1] + a[-2], b, out))

    @property
    def key_axis(self) -> int:
        """The axis of the values that counts keys."""
        return -2 if self.letters is None else self._letters[1].index(self.summed)

    def values_last(self) -> Tensor:
        """Values (..., M, D)."""
        if self.letters is None:
            return self.right
        a, b, _ = self.letters
        return _permute(self.right, b, a[:-2] + self.summed + self._channel)

    def values_back(self, v: Tensor) -> Tensor:
        """Values (..., M, D) as the product takes them."""
        if self.letters is None:
            return v.reshape(self.right.shape)
        a, b, _ = self.letters
        return _back(v, b, a[:-2] + self.summed + self._channel)

    def outputs_last(self, o: Tensor) -> Tensor:
        """The output as (..., N, D)."""
        if self.letters is None:
            return o
        a, _, out = self.letters
        return _permute(o, out, a[:-1] + self._channel)

    def outputs_back(self, o: Tensor) -> Tensor:
        """(..., N, D) as the product gave it."""
        if self.letters is None:
            return o
        a, _, out = self.letters
        return _back(o, out, a[:-1] + self._channel)

    @property
    def _channel(self) -> str:
        a, b, _ = self._letters
        return next(x for x in b if x not in a)


class Turned(Equation):
    """Scores written as k q^T: the keys are on the left."""

    @classmethod
    def of(cls, scores: Equation) -> Turned:
        return cls(scores.left, scores.right, scores.letters)

    def like(self, left: Tensor | None, right: Tensor | None) -> Equation:
        return Turned.of(super().like(left, right))

    def tokens_last(self) -> tuple[Tensor, Tensor]:
        k, q = super().tokens_last()
        return q, k

    def remake(self, q: Tensor, k: Tensor, start: Way) -> Tensor:
        return super().remake(k, q, start)


class Flipped(Equation):
    """values^T @ weights^T, as convolutional models write it: the output is (..., D, N)."""

    def like(self, left: Tensor | None, right: Tensor | None) -> Equation:
        return Flipped(
            self.left if right is None else right, self.right, None
        )  # its values stand on the left

    @property
    def values(self) -> Tensor:
        return self.left

    @property
    def key_axis(self) -> int:
        return -1

    def values_last(self) -> Tensor:
        return self.left.transpose(-2, -1)

    def values_back(self, v: Tensor) -> Tensor:
        return v.transpose(-2, -1).reshape(self.left.shape)

    def outputs_last(self, o: Tensor) -> Tensor:
        return o.transpose(-2, -1)

    def outputs_back(self, o: Tensor) -> Tensor:
        return o.transpose(-2, -1)


PRODUCTS = frozenset("einsum baddbmm matmul __matmul__ bmm __rmatmul__".split())
"""The functions that `product_equation` reads."""


def product_equation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Equation | None:
    """The product that a torch function computes, or None where it is none,
    or one of another kind."""
    if name == "einsum":
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return (
            _einsum(args[0], operands) if len(operands) == 2 and isinstance(args[0], str) else None
        )
    if name == "baddbmm":
        left = kwargs.get("batch1", args[1] if len(args) > 1 else None)
        right = kwargs.get("batch2", args[2] if len(args) > 2 else None)
    elif name in ("matmul", "__matmul__", "bmm", "__rmatmul__"):
        left, right = (*args, kwargs.get("mat2", kwargs.get("other")))[:2] if args else (None, None)
        if name == "__rmatmul__":
            left, right = right, left
    else:
        return None
    if (
        not isinstance(left, Tensor)
        or not isinstance(right, Tensor)
        or min(left.ndim, right.ndim) < 2
    ):
        return None
    return Equation(left, right, None)


def _einsum(equation: str, operands: Any) -> Equation | None:
    parts = re.fullmatch(
        r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation.replace(" ", "").replace("...", "Z")
    )
    if parts is None or not all(isinstance(x, Tensor) for x in operands):
        return None
    a, b, out = parts.groups()
    if "Z" in a + b + out:  # an ellipsis matches any number of leading axes
        return None
    summed = [x for x in a if x in b and x not in out]
    lost = [x for x in a + b if x not in out and x not in summed]
    own = [x for x in b if x not in a]
    if len(summed) != 1 or lost or len(own) != 1 or len(set(a)) != len(a) or len(set(b)) != len(b):
        return None
    return Equation(operands[0], operands[1], (a, b, out))


def _permute(t: Tensor, have: str, want: str) -> Tensor:
    """The axes in another order; an axis that the operand does not have becomes one of size 1."""
    missing = [x for x in want if x not in have]
    for x in missing:
        t, have = t.unsqueeze(0), x + have
    return t.permute([have.index(x) for x in want])


def _back(t: Tensor, want: str, have: str) -> Tensor:
    """The inverse of `_permute(., want, have)`: axes that `want` has not were of size 1 and are
    summed away."""
    for x in [x for x in have if x not in want]:
        t, have = torch.select(t, have.index(x), 0), have.replace(x, "")
    return t.permute([have.index(x) for x in want])


# --- the operations on the way to a product
#
# The way of a tensor through the functions of a module, so that it can be gone again with
# another at its start.


class Way:
    """A tensor on its way, the function that made it and where it came from."""

    def __init__(
        self, tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Any
    ) -> None:
        self.tensor, self.func, self.args, self.kwargs = tensor, func, args, kwargs
        self.source: Way | None = source
        self.axes: tuple[int, ...] = tuple(
            range(tensor.ndim)
        )  # which axis of the scores each of its axes is

    @property
    def in_order(self) -> bool:
        """Whether its axes are those of the scores, in their order."""
        return self.axes == tuple(range(len(self.axes)))

    def again(self, new: Tensor, since: Way, dropout: bool = True) -> Tensor:
        """Go the way from `since` to here with another tensor at its start, and with the model's
        dropout or not."""
        if self is since:
            return new
        source = self.source
        if source is None:
            raise RuntimeError(
                "a way of scores has no beginning"
            )  # cannot happen: `since` lies on it
        before = source.again(new, since, dropout)
        if name_of(self.func) == "dropout" and not dropout:
            return before
        old = source.tensor
        args = tuple(put_in(a, old, before) for a in self.args)
        kwargs = {k: put_in(a, old, before) for k, a in self.kwargs.items()}
        out: Tensor = self.func(*args, **kwargs)
        return out

    def parts(self) -> list[Any]:
        """What the way is made of, all but the tensors on it."""
        if self.source is None:
            return [self.func]
        return [
            *self.source.parts(),
            self.func,
            *(None if x is self.source.tensor else x for x in self._given()),
        ]

    def shifts_rows(self) -> bool:
        """Whether one number per row is added to the scores on the way here, such as
        its largest, subtracted."""
        if self.source is None:
            return False
        narrow = any(
            isinstance(x, Tensor) and x.ndim > 0 and x.shape[-1] == 1 for x in self._given()
        )
        return (narrow and self.tensor.shape[-1] > 1) or self.source.shifts_rows()

    def _given(self) -> list[Any]:
        given = [*self.args, *self.kwargs.values()]
        return [x for a in given for x in (a if isinstance(a, list | tuple) else [a])]

    def drops(self, since: Way) -> bool:
        """Whether the model's own dropout is at work between `since` and here."""
        if self is since or self.source is None:
            return False
        rate = self.args[1] if len(self.args) > 1 else self.kwargs.get("p", 0.5)
        training = (
            self.args[2]
            if len(self.args) > 2
            else self.kwargs.get("training", self.kwargs.get("train", True))
        )
        return bool(name_of(self.func) == "dropout" and rate and training) or self.source.drops(
            since
        )

    def names(self, since: Way | None = None) -> list[str]:
        """The functions on the way here, the last first."""
        if self is since:
            return []
        before = [] if self.source is None else self.source.names(since)
        return [name_of(self.func), *before]


class Product:
    """A product of two tensors that may be scores."""

    def __init__(self, equation: Equation, number: int, start: Way) -> None:
        self.equation, self.number, self.start = (
            equation,
            number,
            start,
        )  # the number counts a forward's products
        self.softmax: Way | None = None  # the weights, once its scores have met one
        self.scores: Way | None = None  # what entered it
        self.keys: Way | None = None  # the scores of keys alone, where sinks were laid beside them
        self.clean: Tensor | None = None  # the weights at the softmax that no method has changed
        self.used: Tensor | None = None  # those that the model continues with
        self.keys_first = (
            False  # whether the scores are k q^T, with a softmax over their first axis
        )
        # the steps of a softmax that the code writes out, with what each read and gave
        self.steps: dict[str, tuple[Way, Tensor]] = {}
        self.layout: Layout | None = None  # of its operands, once the stages have met the scores
        # whether that was at the softmax: the model's code continues with what they made of it
        self.early = False
        self.touched = False  # whether more is done with the weights than dropout and the product
        self.turned: Way | None = (
            None  # the weights with their last two axes swapped, for values^T weights^T
        )


def put_in(value: Any, old: Tensor, new: Tensor) -> Any:
    """An argument with one tensor in the place of another, also within a list."""
    if isinstance(value, list | tuple):
        return [put_in(v, old, new) for v in value] if any(v is old for v in value) else value
    return new if value is old else value


def name_of(func: Any) -> str:
    """The name of a torch function."""
    return getattr(func, "__name__", "")
