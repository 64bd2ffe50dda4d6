"""The way of a tensor through the functions of a module, so that it can be gone again with another at its start."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dampen.hooks.equations import Equation
from dampen.hooks.layout import Layout


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
        """Go the way from `since` to here with another tensor at its start, and with the model's dropout or not."""
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
        """Whether one number per row is added to the scores on the way here, such as its largest, subtracted."""
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
        self.used: Tensor | None = None  # those that the model goes on with
        self.keys_first = (
            False  # whether the scores are k q^T, with a softmax over their first axis
        )
        # the steps of a softmax that the code writes out, with what each read and gave
        self.steps: dict[str, tuple[Way, Tensor]] = {}
        self.layout: Layout | None = None  # of its operands, once the stages have met the scores
        self.early = False  # whether that was at the softmax: the model's code goes on with what they made of it
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
