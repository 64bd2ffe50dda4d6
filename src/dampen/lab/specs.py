"""Methods written as plain data, `{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}`, become regularizers.

On the command line they are written as calls: `drop_key(rate=linear(0.3, 0.0))`; `a + b` puts both into one model.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dampen.lab.check import nearest, unknown_keys
from dampen.lab.errors import ConfigError

if TYPE_CHECKING:
    from dampen.regularizer import Regularizer

SCHEDULES = ("constant", "linear", "cosine", "early", "late", "curriculum", "warmup", "vshape")


def build_methods(specs: Sequence[Mapping[str, Any]]) -> list[Regularizer]:
    """One regularizer per spec.

    >>> build_methods([{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}])[0].name
    'drop_key'
    """
    problems = check_methods(specs, "methods")
    if problems:
        raise ConfigError("The list of methods", problems)
    return [_build(spec) for spec in specs]


EXAMPLES = {
    "arora_dropout": "arora_dropout(value=0.05, ffn=0.05)",
    "explicit_dropout": "explicit_dropout(value=0.05, ffn=0.05)",
    "skip_ablation": "skip_ablation(attention=True)",
}
"""How the methods are written that must be told what to act on."""


def check_methods(specs: Sequence[Mapping[str, Any]], path: str) -> list[str]:
    """Every problem of the specs: unknown methods, unknown arguments, values that the method refuses."""
    from dampen.registry import methods

    known, problems = methods(), []
    for i, spec in enumerate(specs):
        where, name = f"{path}[{i}]", spec["name"]
        if name not in known:
            problems.append(f"{where}: unknown method {name!r}{nearest(name, known)}")
            continue
        arguments = {k: v for k, v in spec.items() if k != "name"}
        unknown = unknown_keys(arguments, inspect.signature(known[name]).parameters, f"{where} {name}.")
        problems += unknown
        if not unknown:
            try:
                built = _build(spec)
            except (TypeError, ValueError) as error:
                problems.append(f"{where} {name}: {error}")
            else:
                if built.does_nothing:
                    problems.append(f"{where} {name}: as written it does nothing; write for example {EXAMPLES[name]}")
    return problems


def _build(spec: Mapping[str, Any]) -> Regularizer:
    from dampen.registry import methods

    return methods()[spec["name"]](**{k: _value(v) for k, v in spec.items() if k != "name"})


def _value(value: Any) -> Any:
    """A one-key table is a schedule, {"linear": [0.3, 0]} or {"linear": {"start": 0.3, "end": 0}}; the rest stays."""
    if not isinstance(value, Mapping):
        return value
    from dampen import schedules

    if len(value) != 1:
        raise ValueError(f"a schedule is a table with one key, such as {{ linear = [0.3, 0.0] }}, got {dict(value)!r}")
    ((name, arguments),) = value.items()
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}{nearest(name, SCHEDULES)}")
    make = getattr(schedules, name)
    if isinstance(arguments, Mapping):
        return make(**{k: _value(v) for k, v in arguments.items()})
    return make(*(_value(v) for v in (arguments if isinstance(arguments, list | tuple) else [arguments])))


def parse_rows(text: str) -> dict[str, list[dict[str, Any]]]:
    """The rows written on a command line: comma between rows, plus between the methods of one row.

    >>> for row, methods in parse_rows("drop_key, drop_path(rate=0.1) + drop_head(rate=linear(0.2, 0))").items():
    ...     print(row, methods, sep=": ")
    drop_key: [{'name': 'drop_key'}]
    drop_path(rate=0.1) + drop_head(rate=linear(0.2, 0)): [{'name': 'drop_path', 'rate': 0.1}, \
{'name': 'drop_head', 'rate': {'linear': [0.2, 0]}}]
    """
    try:
        tree = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError as error:
        raise ConfigError(
            "--methods", [f"cannot read {text!r}: {error.msg}; write drop_key(rate=0.1), drop_path + drop_head"]
        ) from error
    assert isinstance(tree, ast.Tuple)  # the parentheses and the comma above make it one
    return {ast.unparse(row): _row(row) for row in tree.elts}


def _row(node: ast.expr) -> list[dict[str, Any]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _row(node.left) + _row(node.right)
    if isinstance(node, ast.Name):
        return [] if node.id == "plain" else [{"name": node.id}]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return [{"name": node.func.id, **{str(k.arg): _literal(k.value) for k in node.keywords}}]
    raise ConfigError("--methods", [f"cannot read {ast.unparse(node)!r}: write name or name(argument=value)"])


def _literal(node: ast.expr) -> Any:
    """A number, string, list, or a schedule written as a call."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.args and node.keywords:
            raise ConfigError("--methods", [f"{ast.unparse(node)!r}: give either positions or names, not both"])
        named = {str(k.arg): _literal(k.value) for k in node.keywords}
        return {node.func.id: named or [_literal(a) for a in node.args]}
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(e) for e in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ConfigError(
            "--methods", [f"{ast.unparse(node)!r} is neither a number, a string, a list nor a schedule"]
        ) from error
