"""Methods written as text, "drop_key(rate=linear(0.3, 0.0)) + drop_head", as plain
data and as regularizers.

`dampen.regularize` and every command read the same texts. A bare word is a string:
`drop_key(unit=column)`.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dampen.names import nearest

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer

SCHEDULES = ("constant", "linear", "cosine", "early", "late", "curriculum", "warmup", "vshape")
WRITTEN = (*SCHEDULES, "last")
"""What may be written; an object of Python's with `last` in it stays an object, because its trials
have that name."""
COMPOSED = ("hidden_key",)
"""Names that stand for several methods together: what `dampen.hidden_key`
returns, as plain data."""
EXAMPLE = "drop_key(rate=0.1), drop_path + drop_head"


class TextError(ValueError):
    """A text that cannot be read, with every problem that was found."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("; ".join(problems))


def read_methods(text: str) -> list[Regularizer]:
    """The regularizers of one model, written as text.

    Args:
        text: as in "drop_key(rate=0.2) + drop_head".

    >>> [m.name for m in read_methods("drop_key(unit=column) + drop_head")]
    ['drop_key', 'drop_head']
    """
    rows = parse(text)
    if len(rows) > 1:
        raise TextError(
            f"{text!r} has {len(rows)} configurations, and a model takes one. "
            f"To use them together write {' + '.join(rows)!r}."
        )
    (specs,) = rows.values()
    if not specs:
        raise TextError(f"{text!r} names no method. Write for example 'drop_key(rate=0.1)'.")
    return [make(spec) for spec in specs]


def make(spec: Mapping[str, Any]) -> Regularizer:
    """A regularizer from plain data; a wrong argument is named with the nearest right one.

    Args:
        spec: the name of a method and its arguments.
    """
    from dampen.registry import find_method  # with torch

    cls = find_method(spec["name"])
    given = {k: v for k, v in spec.items() if k != "name"}
    known = inspect.signature(cls).parameters
    wrong = [
        f"{spec['name']} has no argument {k!r}{nearest(k, known)}" for k in given if k not in known
    ]
    if wrong:
        raise TextError(*wrong)
    return cls(**{k: value_of(v) for k, v in given.items()})


def compose(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The methods behind a spec: itself, or the parts of a composition by its paper's name.

    They are written out, so that a run is the same whichever way it was written.

    Args:
        spec: the name of a method and its arguments.

    >>> [part["name"] for part in compose({"name": "hidden_key", "hidden": 0.2})]
    ['drop_key', 'hidden_dropout', 'r_drop']
    """
    if spec["name"] not in COMPOSED:
        return [dict(spec)]
    rates = {"key": 0.1, "hidden": 0.1, "weight": 1.0}
    given = {k: v for k, v in spec.items() if k != "name"}
    unknown = [
        f"{spec['name']}.{k}: unknown key{nearest(k, rates)}" for k in given if k not in rates
    ]
    if unknown:
        raise TextError(*unknown)
    rates |= given
    parts: list[dict[str, Any]] = [
        {"name": "drop_key", "rate": rates["key"], "unit": "column"},
        {"name": "hidden_dropout", "rate": rates["hidden"]},
    ]
    return (
        parts if rates["weight"] == 0 else [*parts, {"name": "r_drop", "weight": rates["weight"]}]
    )


def value_of(value: Any) -> Any:
    """A one-key table is a schedule, {"linear": [0.3, 0]} or {"linear": {"start": 0.3, "end": 0}};
    the rest stays.

    Args:
        value: an argument as plain data.
    """
    if not isinstance(value, Mapping):
        return value
    from dampen import schedules

    if len(value) != 1:
        raise ValueError(
            f"a schedule is a table with one key, such as {{ "
            f"linear = [0.3, 0.0] }}, got {dict(value)!r}"
        )
    ((name, arguments),) = value.items()
    if name not in WRITTEN:
        raise ValueError(f"unknown schedule {name!r}{nearest(name, WRITTEN)}")
    make = getattr(schedules, name)
    if isinstance(arguments, Mapping):
        return make(**{k: value_of(v) for k, v in arguments.items()})
    return make(
        *(value_of(v) for v in (arguments if isinstance(arguments, list | tuple) else [arguments]))
    )


def parse(text: str) -> dict[str, list[dict[str, Any]]]:
    """The configurations of a text, as plain data by name.

    Args:
        text: comma between configurations, plus between the methods of one.

    >>> for row, methods in parse("drop_key, drop_path(rate=0.1) + drop_head(rate=linear(0.2, 0))").items():
    ...     print(row, methods, sep=": ")
    drop_key: [{'name': 'drop_key'}]
    drop_path(rate=0.1) + drop_head(rate=linear(0.2, 0)): [{'name': 'drop_path', 'rate': 0.1}, \
{'name': 'drop_head', 'rate': {'linear': [0.2, 0]}}]
    """
    hidden, files = _hide_files(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # Python's opinion of odd escapes and the like is nothing for users
            tree = ast.parse(f"[{hidden}\n]", mode="eval").body
        if isinstance(tree, ast.List) and tree.elts:
            names = [ast.unparse(row) for row in tree.elts]
            twice = sorted({_shown(name, files) for name in names if names.count(name) > 1})
            if twice:
                raise TextError(*(f"{name!r} is written more than once" for name in twice))
            rows = {name: _row(row) for name, row in zip(names, tree.elts, strict=True)}
            return {
                _shown(n, files): [{**s, "name": files.get(s["name"], s["name"])} for s in r]
                for n, r in rows.items()
            }
        reason = "brackets that do not belong there" if text.strip() else "nothing is there"
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, TextError):
            raise
        reason = _reason(hidden, getattr(error, "msg", "") or str(error) or "nested too deeply")
    shown = text if len(text) < 200 else f"{text[:200]}..."
    raise TextError(f"cannot read {shown!r}: {reason}; write {EXAMPLE}")


def _reason(text: str, told: str) -> str:
    """Why text cannot be read; Python would speak of the square brackets
    that were put around it."""
    if "parenthesis" not in told and "never closed" not in told and "unmatched" not in told:
        return told
    opened, closed = (sum(text.count(mark) for mark in marks) for marks in ("([{", ")]}"))
    if opened == closed:
        return "its brackets do not belong together"
    return (
        "a bracket is not closed" if opened > closed else "a bracket is closed that was not opened"
    )


def _hide_files(text: str) -> tuple[str, dict[str, str]]:
    """`my.py:HeadDropout` is no Python expression: a word replaces each
    until the text is parsed."""
    files: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
        word = f"__file_{len(files)}__"
        files[word] = match[0]
        return word

    return re.sub(r"[^\s,+()='\"]+\.py:[A-Za-z_]\w*", hide, text), files


def _shown(name: str, files: Mapping[str, str]) -> str:
    for word, reference in files.items():
        name = name.replace(word, reference)
    return name


def _row(node: ast.expr) -> list[dict[str, Any]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _row(node.left) + _row(node.right)
    if isinstance(node, ast.Name):
        return [] if node.id == "plain" else compose({"name": node.id})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return compose({"name": node.func.id, **_named(node)})
    raise TextError(f"cannot read {ast.unparse(node)!r}: write name or name(argument=value)")


def _named(node: ast.Call) -> dict[str, Any]:
    """The arguments of a call by name, each once, none of them called name: that
    is what the call says."""
    names = [k.arg for k in node.keywords]
    for name in names:
        if name is None or name == "name" or names.count(name) > 1:
            raise TextError(
                f"cannot read {ast.unparse(node)!r}: write each argument once, as name=value"
            )
    return {str(k.arg): _literal(k.value) for k in node.keywords}


def _literal(node: ast.expr) -> Any:
    """A number, a string (a bare word is one), a list, or a schedule written as a call."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.args and node.keywords:
            raise TextError(f"{ast.unparse(node)!r}: give either positions or names, not both")
        return {node.func.id: _named(node) or [_literal(a) for a in node.args]}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e) for e in node.elts]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        problem = "it is neither a number, a string, a list nor a schedule"
        raise TextError(f"{ast.unparse(node)!r}: {problem}") from None
    if problems := check_plain(value, ast.unparse(node)):
        raise TextError(*problems)
    return value


DEEPEST = 16
"""Tables in tables beyond this are no setting of anybody's; every walk through plain
data may then recurse."""
LARGEST = 2**63
"""Whole numbers beyond this fit into no tensor."""


def check_plain(value: Any, path: str, depth: int = 0) -> list[str]:
    """Every place that is not plain data: dates, infinite numbers, huge ones,
    what is nested too deeply.

    Args:
        value: what should be plain data.
        path: its place, as a prefix of each problem.
        depth: of the tables around it.

    >>> check_plain({"lr": 0.1, "betas": [0.9, float("inf")]}, "train")
    ['train.betas[1]: expected a finite number, got inf']
    """
    if depth > DEEPEST:
        return [f"{path}: nested more than {DEEPEST} deep"]
    if isinstance(value, Mapping):
        named = [
            f"{path}: expected names as keys, got {key!r}"
            for key in value
            if not isinstance(key, str)
        ]
        inner = [
            p
            for k, v in value.items()
            for p in check_plain(v, f"{path}.{k}" if path else str(k), depth + 1)
        ]
        return named + inner
    if isinstance(value, list | tuple):
        return [p for i, v in enumerate(value) for p in check_plain(v, f"{path}[{i}]", depth + 1)]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{path}: expected a finite number, got {value}"]
    if isinstance(value, int) and abs(value) >= LARGEST:
        return [
            f"{path}: expected a number below 2**63, got one of {len(f'{abs(value):x}') * 4} bits"
        ]
    if value is None or isinstance(value, str | int | float):
        return []
    return [
        f"{path}: expected a number, a string, a list or a "
        f"table, got a {type(value).__name__}: {value}"
    ]
