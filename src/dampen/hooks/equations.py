"""Products of two tensors, however they are written, with their axes named: `@`, matmul, bmm, baddbmm, einsum.

For scores the left operand holds the queries and the right one the keys; for outputs the weights and the values."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dampen.hooks.ways import Way


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
        """Whether scores that came from `made` still have queries and keys, in this order, as their last axes."""
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
        """Whether the last axis of the left operand, the keys of the weights, is what is summed over."""
        return self.letters is None or self._letters[0][-1] == self.summed

    @property
    def contracts_rows(self) -> bool:
        """Whether the last axis but one of the left operand is what is summed over, of an einsum."""
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
    """The product that a torch function computes, or None where it is none, or one of another kind."""
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
    if "Z" in a + b + out:  # an ellipsis stands for any number of leading axes
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
    """The inverse of `_permute(., want, have)`: axes that `want` has not were of size 1 and are summed away."""
    for x in [x for x in have if x not in want]:
        t, have = torch.select(t, have.index(x), 0), have.replace(x, "")
    return t.permute([have.index(x) for x in want])
