"""Methods written as plain data, `{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}`, become regularizers.

On the command line they are written as calls: `drop_key(rate=linear(0.3, 0.0))`; `a + b` puts both into one model.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dampen.extensions import is_in_file
from dampen.names import nearest
from dampen.studies.errors import ConfigError
from dampen.studies.schema import check_plain, unknown_keys

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer

OBJECT = "object"
"""The key, in the plain form of a method, that says: an object of the user's, known by this hash of class and state."""
CODE = "code"
"""The key that holds the hash of a method's own file (`my.py:HeadDropout`): other code is another trial."""
SCHEDULES = ("constant", "linear", "cosine", "early", "late", "curriculum", "warmup", "vshape")
WRITTEN = (*SCHEDULES, "last")
"""What may be written; an object of Python's with `last` in it stays an object, because its trials have that name."""
COMPOSED = ("hidden_key",)
"""Names of rows that stand for several methods together: what `dampen.hidden_key` returns, as plain data."""


def compose(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The methods behind a spec: itself, or the parts of a composition by its paper's name.

    They are written out, so that a trial is the same whichever way it was said.

    >>> [part["name"] for part in compose({"name": "hidden_key", "hidden": 0.2})]
    ['drop_key', 'hidden_dropout', 'r_drop']
    """
    if spec["name"] not in COMPOSED:
        return [dict(spec)]
    rates = {"key": 0.1, "hidden": 0.1, "weight": 1.0}
    unknown = unknown_keys(_arguments(spec), rates, f"{spec['name']}.")
    if unknown:
        raise ConfigError("A row", unknown)
    rates |= _arguments(spec)
    parts: list[dict[str, Any]] = [
        {"name": "drop_key", "rate": rates["key"], "unit": "column"},
        {"name": "hidden_dropout", "rate": rates["hidden"]},
    ]
    return (
        parts if rates["weight"] == 0 else [*parts, {"name": "r_drop", "weight": rates["weight"]}]
    )


def build_methods(specs: Sequence[Mapping[str, Any]]) -> list[Regularizer]:
    """One regularizer per spec.

    Args:
        specs: methods as plain data.

    >>> build_methods([{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}])[0].name
    'drop_key'
    """
    problems = check_methods(specs, "methods")
    if problems:
        raise ConfigError("The list of methods", problems)
    return [_build(spec) for spec in specs]


def check_methods(specs: Sequence[Mapping[str, Any]], path: str) -> list[str]:
    """Every problem of the specs: unknown methods, unknown arguments, values that the method refuses."""
    from dampen.registry import methods

    known, problems = methods(), []
    for i, spec in enumerate(specs):
        where, name = f"{path}[{i}]", spec["name"]
        if name not in known and not is_in_file(name):
            problems.append(f"{where}: unknown method {name!r}{nearest(name, known)}")
            continue
        try:
            cls = _class(spec)
        except ValueError as error:
            problems.append(f"{where}: {error}")
            continue
        unknown = unknown_keys(
            _arguments(spec), inspect.signature(cls).parameters, f"{where} {name}."
        )
        problems += unknown
        if not unknown:
            try:
                built = _build(spec)
            except (
                Exception
            ) as error:  # whatever a method, or one of the user's, says of its arguments
                problems.append(f"{where} {name}: {error or type(error).__name__}")
            else:
                if built.does_nothing:
                    example = ", ".join(f"{k}={v}" for k, v in built.example.items())
                    problems.append(
                        f"{where} {name}: as written it does nothing; write for example {name}({example})"
                    )
    return problems


def _build(spec: Mapping[str, Any]) -> Regularizer:
    return _class(spec)(**{k: _value(v) for k, v in _arguments(spec).items()})


def _arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k not in ("name", CODE)}


def _class(spec: Mapping[str, Any]) -> type[Regularizer]:
    """The class of a method; one in a file must be the code that the trial was made for."""
    from dampen.registry import find_method

    cls, wanted = find_method(spec["name"]), spec.get(CODE)
    if wanted is not None and code_of_method(spec["name"]) != wanted:
        raise ValueError(
            f"{spec['name']} has changed since this trial was made. Run the comparison again: new trials."
        )
    return cls


def code_of_method(name: str) -> str:
    """The hash of the file behind `my.py:HeadDropout` and of what that imports: it is part of a trial's identity."""
    from dampen.studies.user_code import digest_of_file

    return digest_of_file(Path(name.rpartition(":")[0]).expanduser())


def _value(value: Any) -> Any:
    """A one-key table is a schedule, {"linear": [0.3, 0]} or {"linear": {"start": 0.3, "end": 0}}; the rest stays."""
    if not isinstance(value, Mapping):
        return value
    from dampen import schedules

    if len(value) != 1:
        raise ValueError(
            f"a schedule is a table with one key, such as {{ linear = [0.3, 0.0] }}, got {dict(value)!r}"
        )
    ((name, arguments),) = value.items()
    if name not in WRITTEN:
        raise ValueError(f"unknown schedule {name!r}{nearest(name, WRITTEN)}")
    make = getattr(schedules, name)
    if isinstance(arguments, Mapping):
        return make(**{k: _value(v) for k, v in arguments.items()})
    return make(
        *(_value(v) for v in (arguments if isinstance(arguments, list | tuple) else [arguments]))
    )


def parse_rows(text: str, what: str = "--methods") -> dict[str, list[dict[str, Any]]]:
    """The rows written on a command line: comma between rows, plus between the methods of one row.

    Args:
        text: comma between configurations, plus between the methods of one.
        what: names the text in error messages.

    >>> for row, methods in parse_rows("drop_key, drop_path(rate=0.1) + drop_head(rate=linear(0.2, 0))").items():
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
                raise ConfigError(
                    what, [f"the row {name!r} is written more than once" for name in twice]
                )
            rows = {name: _row(row, what) for name, row in zip(names, tree.elts, strict=True)}
            return {
                _shown(n, files): [{**s, "name": files.get(s["name"], s["name"])} for s in r]
                for n, r in rows.items()
            }
        reason = "brackets that do not belong there" if text.strip() else "nothing is there"
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = _reason(hidden, getattr(error, "msg", "") or str(error) or "nested too deeply")
    shown = text if len(text) < 200 else f"{text[:200]}..."
    raise ConfigError(
        what, [f"cannot read {shown!r}: {reason}; write drop_key(rate=0.1), drop_path + drop_head"]
    )


def _reason(text: str, told: str) -> str:
    """Why text cannot be read; Python would speak of the square brackets that were put around it."""
    if "parenthesis" not in told and "never closed" not in told and "unmatched" not in told:
        return told
    opened, closed = (sum(text.count(mark) for mark in marks) for marks in ("([{", ")]}"))
    if opened == closed:
        return "its brackets do not belong together"
    return (
        "a bracket is not closed" if opened > closed else "a bracket is closed that was not opened"
    )


def _hide_files(text: str) -> tuple[str, dict[str, str]]:
    """`my.py:HeadDropout` is no Python expression: a word stands for each until the text is parsed."""
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


def _row(node: ast.expr, what: str) -> list[dict[str, Any]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _row(node.left, what) + _row(node.right, what)
    if isinstance(node, ast.Name):
        return [] if node.id == "plain" else compose({"name": node.id})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return compose({"name": node.func.id, **_named(node, what)})
    raise ConfigError(
        what, [f"cannot read {ast.unparse(node)!r}: write name or name(argument=value)"]
    )


def _named(node: ast.Call, what: str) -> dict[str, Any]:
    """The arguments of a call by name, each once, none of them called name: that is what the call says."""
    names = [k.arg for k in node.keywords]
    for name in names:
        if name is None or name == "name" or names.count(name) > 1:
            raise ConfigError(
                what,
                [f"cannot read {ast.unparse(node)!r}: write each argument once, as name=value"],
            )
    return {str(k.arg): _literal(k.value, what) for k in node.keywords}


def _literal(node: ast.expr, what: str) -> Any:
    """A number, string, list, or a schedule written as a call."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.args and node.keywords:
            raise ConfigError(
                what, [f"{ast.unparse(node)!r}: give either positions or names, not both"]
            )
        return {node.func.id: _named(node, what) or [_literal(a, what) for a in node.args]}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e, what) for e in node.elts]
    problem = "it is neither a number, a string, a list nor a schedule"
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        raise ConfigError(what, [f"{ast.unparse(node)!r}: {problem}"]) from None
    if found := check_plain(value, ast.unparse(node)):
        raise ConfigError(what, found)
    return value


# --------------------
# Methods in plain data, written as one would type them.


def methods_as_text(methods: Iterable[Mapping[str, Any]]) -> str:
    """Methods as one would write them on the command line.

    >>> methods_as_text([{"name": "drop_key", "rate": {"linear": [0.3, 0]}}, {"name": "drop_path"}])
    'drop_key(rate=linear(0.3, 0)) + drop_path'
    >>> methods_as_text([])
    'plain'
    """
    parts = []
    for method in methods:
        if OBJECT in method:  # one of the user's own, which knows how it wants to be shown
            parts.append(str(method.get("shown", method["name"])))
            continue
        arguments = ", ".join(
            f"{k}={_argument_as_text(v)}" for k, v in method.items() if k != "name"
        )
        parts.append(f"{method['name']}({arguments})" if arguments else str(method["name"]))
    return " + ".join(parts) or "plain"


def _argument_as_text(value: Any) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, Mapping):
            return (
                f"{name}({', '.join(f'{k}={_argument_as_text(v)}' for k, v in arguments.items())})"
            )
        items = arguments if isinstance(arguments, list | tuple) else [arguments]
        return f"{name}({', '.join(map(_argument_as_text, items))})"
    return json.dumps(value) if isinstance(value, str) else str(value)


def python_call(method: Mapping[str, Any]) -> str:
    """The Python that makes a method, to copy after `import dampen`.

    Args:
        method: the method as plain data.

    >>> python_call({"name": "drop_key", "rate": {"linear": [0.3, 0]}, "unit": "column"})
    "dampen.DropKey(rate=dampen.linear(0.3, 0), unit='column')"
    """
    if OBJECT in method:
        return str(method.get("shown", method["name"]))
    name = str(method["name"])
    if is_in_file(name):
        cls = name.rpartition(":")[2]
    else:
        found = _class({"name": name})
        ours = found.__module__.startswith("dampen.")
        cls = f"dampen.{found.__name__}" if ours else found.__name__
    return f"{cls}({', '.join(f'{k}={_as_python(v)}' for k, v in _arguments(method).items())})"


def _as_python(value: Any) -> str:
    if not isinstance(value, Mapping) or len(value) != 1:
        return repr(value)
    ((name, arguments),) = value.items()
    if isinstance(arguments, Mapping):
        inside = ", ".join(f"{k}={_as_python(v)}" for k, v in arguments.items())
    else:
        items = arguments if isinstance(arguments, list | tuple) else [arguments]
        inside = ", ".join(map(_as_python, items))
    return f"dampen.{name}({inside})"
