"""Read the CIFAR authors' Python pickles without pickle's machine: nothing is called, whatever a
file asks for.

A pickle is a program for a small stack machine. The files that exist use a handful of its
instructions to lay down one flat table: names to numbers, texts, lists of those, and arrays of
whole numbers. Those instructions are read here as data; every other instruction, name or shape is
refused. An array is only ever a view of bytes that lie in the file."""

from __future__ import annotations

import io
import math
import pickletools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from dampen.studies.plugins import DamagedData

Table = dict[bytes | str, Any]
"""Names to whole numbers, bytes, texts, lists of those, and arrays of whole numbers."""

NAMES = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    (
        "numpy.core.multiarray",
        "_reconstruct",
    ): "_reconstruct",  # where numpy keeps the two differs with its version
    ("numpy._core.multiarray", "_reconstruct"): "_reconstruct",
    ("numpy.core.numeric", "_frombuffer"): "_frombuffer",
    ("numpy._core.numeric", "_frombuffer"): "_frombuffer",
    ("_codecs", "encode"): "encode",
}
CODES = tuple(f"{sign}{width}" for sign in "ui" for width in (1, 2, 4, 8))
SCALARS = (int, bytes, str)


class _Refused(ValueError):
    """The file is not one of the tables that are read."""


@dataclass(frozen=True)
class _Name:
    """A name that the file mentions; it stands for nothing that could be called."""

    what: str


@dataclass
class _Kind:
    """An array's type, whole numbers alone."""

    code: str
    order: str = "="

    def build(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) == 8 else None
        order = order.decode("latin1") if isinstance(order, bytes) else order
        if order not in ("|", "<", ">", "=") or state[2:] != (None, None, None, -1, -1, 0):
            raise _Refused(f"an array's type with state {_short(state)}")
        self.order = order

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.code).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]


@dataclass
class _Array:
    """An array, empty until its state comes."""

    value: np.ndarray | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or self.value is not None:
            raise _Refused(f"an array with state {_short(state)}")
        _, shape, kind, fortran, content = state
        self.value = _view(content, kind, shape, "F" if fortran is True else "C")


def _view(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(kind, _Kind) or not isinstance(content, bytes) or order not in ("C", "F"):
        raise _Refused("an array that is not made of bytes and a type of whole numbers")
    if (
        not isinstance(shape, tuple)
        or not all(type(n) is int and n >= 0 for n in shape)
        or len(shape) > 4
    ):
        raise _Refused(f"an array of shape {_short(shape)}")
    dtype = kind.numpy()
    if math.prod(shape) * dtype.itemsize != len(content):
        raise _Refused(f"an array of shape {_short(shape)} over {len(content)} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order=order)


class _Reader:
    """The stack on which the table is put together."""

    def __init__(self, size: int):
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under the open marks
        self.memo: dict[int, Any] = {}
        self.encoded, self.size = 0, size

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def read(self, content: bytes) -> Any:
        for code, argument, _ in pickletools.genops(io.BytesIO(content)):
            if code.name == "STOP":
                return self.stack.pop()
            self.step(code.name, argument)
        raise _Refused("it ends too early")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case (
                "INT"
                | "BININT"
                | "BININT1"
                | "BININT2"
                | "LONG"
                | "LONG1"
                | "BINUNICODE"
                | "SHORT_BINUNICODE"
            ):
                stack.append(argument)
            case "UNICODE" | "BINUNICODE8" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "BYTEARRAY8":
                stack.append(bytes(argument))
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # Python 2's texts are bytes
                stack.append(argument.encode("latin1"))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "MARK":
                self.below.append(stack)
                self.stack = []
            case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}[name]
                items = [stack.pop() for _ in range(count)]
                stack.append(_tuple(items[::-1]))
            case "TUPLE":
                items = self.since_mark()
                self.stack.append(_tuple(items))
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([] if name == "EMPTY_LIST" else {})
            case "LIST" | "DICT":
                items = self.since_mark()
                self.stack.append([] if name == "LIST" else {})
                self.add(items)
            case "APPEND" | "SETITEM":
                items = [stack.pop() for _ in range(1 if name == "APPEND" else 2)]
                self.add(items[::-1])
            case "APPENDS" | "SETITEMS":
                self.add(self.since_mark())
            case "GLOBAL":
                stack.append(_named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                last, first = stack.pop(), stack.pop()
                stack.append(_named(first, last))
            case "REDUCE":
                arguments, name_ = stack.pop(), stack.pop()
                stack.append(self.called(name_, arguments))
            case "BUILD":
                state = stack.pop()
                if not isinstance(stack[-1], _Kind | _Array):
                    raise _Refused(f"it gives a state to {_short(stack[-1])}")
                stack[-1].build(state)
            case _:
                raise _Refused(f"it has the instruction {name}")

    def add(self, items: list[Any]) -> None:
        """Into the list or the table on top of the stack. Lists hold scalars and only the table
        holds lists: no file can make a small tangle that is huge once it is followed."""
        top = self.stack[-1]
        if isinstance(top, list) and all(type(item) in SCALARS for item in items):
            top.extend(items)
        elif isinstance(top, dict) and len(items) % 2 == 0:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) not in (bytes, str) or not (
                    type(value) in SCALARS or isinstance(value, list | _Array)
                ):
                    raise _Refused(f"its table has {_short(value)} under {_short(key)}")
                top[key] = value
        else:
            raise _Refused(f"it puts {_short(items)} into {_short(top)}")

    def called(self, name: Any, arguments: Any) -> Any:
        """What the named function of numpy makes of these arguments; others raise."""
        what = name.what if isinstance(name, _Name) else None
        match what, arguments:
            case "encode", (str(text), "latin1"):
                self.encoded += len(text)
                if self.encoded > self.size:  # each text once is as much as the file can hold
                    raise _Refused("it encodes more text than it has")
                return text.encode("latin1")
            case "dtype", (str() | bytes() as code, *_):
                code = code.decode("latin1") if isinstance(code, bytes) else code
                if code not in CODES:
                    raise _Refused(f"it has arrays of {code[:20]!r}; whole numbers are read")
                return _Kind(code)
            case "_reconstruct", (_Name(what="ndarray"), (0,), b"b" | "b"):
                return _Array()
            case "_frombuffer", (content, kind, shape, order):
                return _Array(_view(content, kind, shape, order))
        raise _Refused(f"it calls {what or _short(name)}")


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    """Tuples are arguments and states: short, and nested once at most."""
    deep = any(
        isinstance(part, tuple) for item in items if isinstance(item, tuple) for part in item
    )
    if len(items) > 8 or deep:
        raise _Refused(f"it has a tuple of {len(items)}")
    return tuple(items)


def _named(module: Any, name: Any) -> _Name:
    if (module, name) not in NAMES:
        raise _Refused(f"it asks for {_short(module, quoted=False)}.{_short(name, quoted=False)}")
    return _Name(NAMES[module, name])


def _short(value: Any, quoted: bool = True) -> str:
    """A value for a message: its kind where it could be long."""
    if isinstance(value, str | bytes | bool) or value is None:
        return (
            repr(value[:40])
            if isinstance(value, bytes) or (quoted and isinstance(value, str))
            else str(value)[:40]
        )
    return f"a {type(value).__name__.strip('_').lower()}"


def safe_unpickle(content: bytes, where: str) -> Table:
    """The table that a pickle holds; anything but names, whole numbers, texts, lists and arrays of
    them is refused.

    >>> import pickle
    >>> safe_unpickle(pickle.dumps({"labels": [1, 2]}), "batch")
    {'labels': [1, 2]}
    >>> safe_unpickle(pickle.dumps(len), "batch")
    Traceback (most recent call last):
    ...
    dampen.studies.data.dataset.DamagedData: batch was not read: ...
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # texts with odd escapes; they are read all the same
            table = _Reader(len(content)).read(content)
        if not isinstance(table, dict):
            raise _Refused(f"it holds {_short(table)} and no table")
        return {key: _whole(value) for key, value in table.items()}
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        OverflowError,
    ) as error:  # genops' own are among them
        raise DamagedData(
            f"{where} was not read: as a pickle of arrays and lists it is damaged or unsafe "
            f"({error}). "
            "Fetch the official file again."
        ) from error


def _whole(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.value is None:
            raise _Refused("an array has no content")
        return value.value
    return value
