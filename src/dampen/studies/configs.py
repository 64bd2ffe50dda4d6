"""The rows of a comparison, in any of the ways people write them, as plain data.

    "drop_key(rate=0.2), r_drop + drop_head"        text, as on the command line
    DropKey(0.2)                                    a regularizer
    [DropKey(0.1), RDrop(1.0)]                      several in one model
    {"mine": MyMethod(), "both": [...]}             rows with names
    {"decay 0.1": {"params": {"weight_decay": 0.1}, "methods": ...}}    a row
    with parameters of its own

In text, `params(weight_decay=0.1)` holds parameters. A regularizer becomes the plain data that
would build it again; one that cannot be written so is sent to the workers as it is and known by a
hash of its class and its state.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dampen.registry import methods as registered
from dampen.regularizer import Regularizer, snake_case
from dampen.studies.errors import ConfigError
from dampen.studies.methods_text import (
    OBJECT,
    SCHEDULES,
    build_methods,
    methods_as_text,
    parse_rows,
)
from dampen.studies.user_code import code_of, code_of_class

PLAIN = "plain"
PARAMS = "params"


@dataclass(frozen=True)
class Row:
    """One row: its methods as plain data, and the parameters that are its own."""

    name: str
    methods: list[dict[str, Any]] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Rows:
    """All rows, and the regularizers that have no plain form, pickled, by their hash."""

    rows: list[Row] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        if any(r.name == row.name for r in self.rows):
            raise ConfigError(
                "The list of rows",
                [f"two rows are called {row.name!r}; give one of them another name"],
            )
        self.rows.append(row)


def read_rows(given: Any, reference: str = PLAIN) -> Rows:
    """Every row that was written, the plain one first where it is the reference.

    >>> rows = read_rows(["drop_key(rate=0.2)", {"decay": {"params": {"weight_decay": 0.1}}}])
    >>> [(row.name, row.methods, row.params) for row in rows.rows]
    [('plain', [], {}), ('drop_key(rate=0.2)', [{'name': 'drop_key', 'rate': 0.2}], {}), \
('decay', [], {'weight_decay': 0.1})]
    """
    found = Rows()
    if reference == PLAIN:
        found.add(Row(PLAIN))
    items = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for item in items:
        _read(item, found)
    if reference not in (r.name for r in found.rows):
        names = ", ".join(repr(r.name) for r in found.rows)
        raise ConfigError(
            "The list of rows", [f"reference: there is no row {reference!r}; there are {names}"]
        )
    if len(found.rows) < 2 and given is not None:  # None: the baseline alone
        raise ConfigError(
            "The list of rows",
            ["methods: nothing to compare with the reference; name at least one method"],
        )
    return found


def _read(item: Any, found: Rows) -> None:
    if isinstance(item, str):
        for name, specs in parse_rows(item).items():
            if specs:  # a row that says `plain` is there already
                found.add(_row(name, specs, {}))
    elif isinstance(item, Mapping) and isinstance(item.get("name"), str):
        found.add(_named(None, [item], found))
    elif isinstance(item, Mapping):
        for name, content in item.items():
            found.add(_named(str(name), content, found))
    else:
        found.add(_named(None, item, found))


def _row(name: str, specs: list[dict[str, Any]], params: dict[str, Any]) -> Row:
    """Takes `params(...)` out of the methods."""
    own = dict(params)
    for spec in specs:
        if spec["name"] == PARAMS:
            own |= {k: v for k, v in spec.items() if k != "name"}
    return Row(name, [s for s in specs if s["name"] != PARAMS], own)


def _named(name: str | None, content: Any, found: Rows) -> Row:
    params: dict[str, Any] = {}
    if isinstance(content, Mapping) and not isinstance(content.get("name"), str):
        unknown = set(content) - {"methods", "params"}
        if unknown:
            problem = f"a row is a method, a list of methods, or {{'methods': ..., 'params': {{...}}}}, got {content!r}"
            raise ConfigError("The list of rows", [f"{name}: {problem}"])
        params, content = dict(content.get("params", {})), content.get("methods", [])
    shown, specs = [], []
    for method in content if isinstance(content, list | tuple) else [content]:
        told, plain = _method(method, found)
        shown.append(told)
        specs += plain
    return _row(name or " + ".join(shown), specs, params)


def _method(method: Any, found: Rows) -> tuple[str, list[dict[str, Any]]]:
    """A method as people would write it, and as plain data."""
    if isinstance(method, Regularizer):
        spec = plain_form(method)
        if spec is None:
            spec = _as_object(method, found)
        return _shown(method, spec), [spec]
    if isinstance(method, str):
        parsed = parse_rows(method)
        if len(parsed) != 1:
            raise ConfigError(
                "The list of rows",
                [f"{method!r}: one row is meant here; join methods with + or give a list"],
            )
        ((name, specs),) = parsed.items()
        return name, specs
    if isinstance(method, Mapping) and isinstance(method.get("name"), str):
        return methods_as_text([method]), [dict(method)]
    problem = f"expected a regularizer such as DropKey(0.1), or text such as 'drop_key(rate=0.1)', got {method!r}"
    raise ConfigError("The list of rows", [problem])


def _shown(method: Regularizer, spec: Mapping[str, Any]) -> str:
    return repr(method).splitlines()[0] if OBJECT in spec else methods_as_text([spec])


def plain_form(method: Regularizer) -> dict[str, Any] | None:
    """The plain data that builds an equal regularizer, or None where there is no such.

    >>> from dampen import DropKey, linear
    >>> method = DropKey(linear(0.3, 0.0), unit="column")
    >>> plain_form(method)  # doctest: +NORMALIZE_WHITESPACE
    {'name': 'drop_key', 'rate': {'linear': {'start': 0.3, 'end': 0.0, 'along':
    'depth'}}, 'unit': 'column'}
    """
    name = snake_case(type(method).__name__)
    if registered().get(name) is not type(method):
        return None
    spec: dict[str, Any] = {"name": name}
    for key, parameter in inspect.signature(type(method)).parameters.items():
        value = (
            method._schedules[key][0]
            if key in method._schedules
            else getattr(method, key, parameter.default)
        )
        value = _plain(value)
        if value != _plain(parameter.default) and _is_json(value):
            spec[key] = value
    for key in [k for k in spec if k != "name"]:  # what a default would have given need not be said
        shorter = {k: v for k, v in spec.items() if k != key}
        spec = shorter if _builds(shorter, method) else spec
    return spec if _builds(spec, method) else None


def _builds(spec: dict[str, Any], method: Regularizer) -> bool:
    """Whether plain data makes an equal regularizer."""
    try:
        return _state(build_methods([spec])[0]) == _state(method)
    except (TypeError, ValueError):  # ConfigError is one
        return False


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """A schedule as its table, a constant one as its number."""
    kind = type(value).__name__
    if kind == "constant":
        return value.value
    if kind == "per_layer":
        return list(value.values)
    if is_dataclass(value) and kind in SCHEDULES:
        return {kind: {f.name: _plain(getattr(value, f.name)) for f in fields(value)}}
    return list(value) if isinstance(value, tuple) else value


def _as_object(method: Regularizer, found: Rows) -> dict[str, Any]:
    import cloudpickle

    text = f"{code_of_class(type(method))} {_state(method)}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found.objects[digest] = cloudpickle.dumps(method)
    return {"name": method.name, OBJECT: digest, "shown": repr(method).splitlines()[0]}


def _state(method: Regularizer) -> str:
    """Everything about a regularizer that was said when it was made, as text."""
    hidden = {"serial", "_penalties", "_buffers", "_modules", "_parameters", "neighbors"}
    own = {k: v for k, v in vars(method).items() if k not in hidden}
    values = {**dict(method.named_buffers()), **dict(method.named_parameters())}
    return repr(sorted((k, _told(v)) for k, v in [*own.items(), *values.items()]))


def _told(value: Any) -> str:
    """As text, without the places of things in memory and in the order of no set."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, value)))
    if inspect.isfunction(value):
        return code_of(value).digest
    return repr(value)


def check_params(base: Mapping[str, Any] | None, rows: Iterable[Row]) -> list[str]:
    """Problems of parameters that are not plain data."""
    problems = []
    for where, params in [
        ("params", base or {}),
        *((f"params of row {r.name!r}", r.params) for r in rows),
    ]:
        try:
            json.dumps(params, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(
                f"{where}: only numbers, strings, lists and tables can be recorded: {error}"
            )
    return problems
