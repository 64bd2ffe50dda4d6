"""Methods written as plain data, `{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}`, become
regularizers.

On the command line they are written as calls: `drop_key(rate=linear(0.3, 0.0))`; `a + b` puts both
into one model.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

# not `from dampen`: that looks the name up among the classes, with torch
import dampen.texts as texts
from dampen.extensions import is_in_file
from dampen.names import nearest
from dampen.studies.errors import ConfigError
from dampen.texts import SCHEDULES as SCHEDULES
from dampen.texts import TextError
from dampen.texts import check_plain as check_plain

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer


# --- plain data
#
# Plain data, as JSON has it: what a trial, a recipe and the values on a command line are made
# of.

# --------------------
# Checking plain data against dataclasses: every problem is collected, each with the nearest known
# key.


def unknown_keys(mapping: Mapping[str, Any], known: Iterable[str], path: str) -> list[str]:
    """One problem for each key that is not known."""
    known = list(known)
    return [f"{path}{key}: unknown key{nearest(key, known)}" for key in mapping if key not in known]


def check_fields(
    cls: Any, mapping: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str]]:
    """The values for the dataclass `cls`, with numbers in the declared type, and all
    that is wrong with them.

    Args:
        cls: a dataclass.
        mapping: values by field.
        path: prefix of each problem.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Options:
    ...     lr: float = 0.1
    ...     epochs: int = 1
    >>> given = {"lr": 1, "epoch": 3, "epochs": "x"}
    >>> check_fields(Options, given, "train.")  # doctest: +NORMALIZE_WHITESPACE
    ({'lr': 1.0}, ["train.epoch: unknown key; did you mean 'epochs'?", "train.epochs:
    expected int, got 'x'"])
    """
    hints = _hints(cls)
    known = [f.name for f in fields(cls)]
    problems = unknown_keys(mapping, known, path)
    values: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in mapping:
            try:
                values[f.name] = coerce(mapping[f.name], hints[f.name])
            except TypeError as error:
                problems.append(f"{path}{f.name}: {error}")
        elif f.default is MISSING and f.default_factory is MISSING:
            problems.append(f"{path}{f.name}: missing")
    return values, problems


@cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; reading thousands of trials reads them again and again."""
    return typing.get_type_hints(cls)


def coerce(value: Any, hint: Any) -> Any:
    """`value` in the type `hint`, or TypeError in words. Only an int given
    for a float is converted.

    Args:
        value: what was given.
        hint: the declared type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return coerce(value, option)
            except TypeError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
        raise TypeError(f"got {value!r}{nearest(value, map(str, arguments))}")
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            return origin(coerce(v, arguments[0]) for v in value)
    elif origin is dict:
        if isinstance(value, dict):
            return value
    elif hint is Any:
        return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) < 2**1023:  # NaN and infinity too
                raise TypeError(f"expected a finite number, got {str(value)[:40]}")
            return float(value)
    elif (
        isinstance(hint, type)
        and isinstance(value, hint)
        and (hint is bool or not isinstance(value, bool))
    ):
        return value
    name = hint.__name__ if isinstance(hint, type) and origin is None else str(hint)
    raise TypeError(f"expected {name}, got {value!r}")


# --- methods as plain data

OBJECT = "object"
"""The key, in the plain form of a method, that says: an object of the user's, known by this hash of
class and state."""
CODE = "code"
"""The key that holds the hash of a method's own file (`my.py:HeadDropout`): other
code is another trial."""


def compose(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The methods behind a spec: see `dampen.texts.compose`.

    Args:
        spec: the name of a method and its arguments.
    """
    try:
        return texts.compose(spec)
    except TextError as error:
        raise ConfigError("A configuration", error.problems) from None


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


def compares_nothing(specs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two passes are compared while no method draws anything: only a model's built-in
    dropout is left then.

    Args:
        specs: methods as plain data.

    >>> compares_nothing([{"name": "r_drop", "weight": 1.0}, {"name": "drop_key", "rate": 0.0}])
    True
    """
    from dampen.schedules import always_zero

    if any(OBJECT in spec for spec in specs):  # an object of the user's: its run shows it
        return False
    made = build_methods(specs)
    drawing = [m for m in made if m.stochastic and m.passes == 1]
    return any(m.passes > 1 and not m.stochastic for m in made) and all(
        m.schedules
        and not any(p.requires_grad for p in m.parameters())
        and all(always_zero(s, depth) for s in m.schedules.values() for depth in (0.0, 0.5, 1.0))
        for m in drawing
    )


def check_methods(specs: Sequence[Mapping[str, Any]], path: str) -> list[str]:
    """Every problem of the specs: unknown methods, unknown arguments, values
    that the method refuses."""
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
                        f"{where} {name}: as written it does "
                        f"nothing; write for example {name}({example})"
                    )
    return problems


def _build(spec: Mapping[str, Any]) -> Regularizer:
    return _class(spec)(**{k: texts.value_of(v) for k, v in _arguments(spec).items()})


def _arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k not in ("name", CODE)}


def _class(spec: Mapping[str, Any]) -> type[Regularizer]:
    """The class of a method; one in a file must be the code that the trial was made for."""
    from dampen.registry import find_method

    cls, wanted = find_method(spec["name"]), spec.get(CODE)
    if wanted is not None and code_of_method(spec["name"]) != wanted:
        raise ValueError(
            f"{spec['name']} has changed since this trial was "
            "made. Run the comparison again: new trials."
        )
    return cls


def code_of_method(name: str) -> str:
    """The hash of the file behind `my.py:HeadDropout` and of what that imports: it is part of a
    trial's identity."""
    from dampen.studies.user_code import digest_of_file

    return digest_of_file(Path(name.rpartition(":")[0]).expanduser())


def parse_rows(text: str, what: str = "--methods") -> dict[str, list[dict[str, Any]]]:
    """The configurations written on a command line: comma between them, plus
    between the methods of one.

    Args:
        text: comma between configurations, plus between the methods of one.
        what: names the text in error messages.

    >>> parse_rows("drop_key, drop_path(rate=0.1) + drop_head")["drop_key"]
    [{'name': 'drop_key'}]
    """
    try:
        return texts.parse(text)
    except TextError as error:
        raise ConfigError(what, error.problems) from None


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
