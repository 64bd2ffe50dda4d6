"""What a search may vary: the axes of a recipe's grid, or the learning rate and the strengths of the methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dampen.lab.config.design import Axis
from dampen.lab.config.plan import Plan, make_plan
from dampen.lab.config.recipe import Recipe

STRENGTHS = ("rate", "weight", "query", "key", "value", "attended_value", "query_key", "ffn", "ffn1", "ffn2")
"""Arguments that say how strong a method is."""


def axis_of(key: str, values: Sequence[Any]) -> Axis:
    """The range that a grid's values span; what are no numbers, or all the same, stays a list.

    >>> axis_of("train.lr", [0.001, 0.0001, 0.005])
    Axis(key='train.lr', low=0.0001, high=0.005, log=True, choices=(), least=None, most=None)
    >>> axis_of("unit", ["element", "column"]).choices
    ('element', 'column')
    """
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or min(numbers) == max(numbers):
        return Axis(key, choices=tuple(values))
    low, high = float(min(numbers)), float(max(numbers))
    return Axis(key, low, high, log=low > 0 and high / low >= 10)


def make_searchable(recipe: Recipe, scale: str | None = None) -> tuple[Recipe, dict[str, list[Axis]]]:
    """A recipe whose rows have something to search for, and the axes of each row.

    With a grid the axes span it. Without one they are the learning rate, from a tenth to ten times what the recipe
    says, and each method's strength around its value (a rate up to 0.8); every row gets the same number of trials, so
    that no method is tuned harder than another.
    """
    at = recipe.at(scale)
    if at["grid"]:
        axes = {
            row["name"]: [axis_of(k, v) for k, v in at["grid"].items() if "." in k or f"${k}" in repr(row)]
            for row in at["rows"]
        }
        return recipe, axes
    rate = _learning_rate(at)
    rows, axes = [], {}
    for row in at["rows"]:
        methods, found = _open_methods(row.get("methods", []))
        rows.append({**row, "methods": methods})
        axes[row["name"]] = [*rate, *found]
    own = {k: v for k, v in recipe.scales[at["scale"]].items() if k != "rows"}
    return replace(recipe, rows=rows, scales={at["scale"]: own}, scale=at["scale"]), axes


def _learning_rate(at: Mapping[str, Any]) -> list[Axis]:
    """From a tenth to ten times what is said; of one's own training only where `lr` is one of its parameters."""
    if "function" not in at:
        key, lr = "train.lr", at.get("train", {}).get("lr", 1e-3)
    else:
        key, lr = "function.params.lr", at["function"]["params"].get("lr")
    return [Axis(key, float(lr) / 10, float(lr) * 10, log=True)] if isinstance(lr, int | float) and lr > 0 else []


def _open_methods(methods: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Axis]]:
    """The methods with variables for their strengths, and an axis for each."""
    from dampen.registry import methods as known

    opened, axes = [], []
    for i, given in enumerate(methods):
        method = {"name": given} if isinstance(given, str) else dict(given)
        parameters = inspect.signature(known()[method["name"]]).parameters
        for name in STRENGTHS:
            default = parameters[name].default if name in parameters else None
            value = method.get(name, default)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                variable = f"{method['name']}_{name}" + (f"_{i + 1}" if i else "")
                method[name] = f"${variable}"
                axes.append(_strength(variable, name, float(value)))
        opened.append(method)
    return opened, axes


def _strength(variable: str, name: str, value: float) -> Axis:
    if name == "rate":
        return Axis(variable, max(0.01, value / 5), min(0.8, value * 3))
    return Axis(variable, value / 10, value * 10, log=True)


def plan_at(
    recipe: Recipe,
    scale: str | None,
    settings: Sequence[str],
    row: str,
    chosen: Mapping[str, Any],
    seeds: Sequence[int],
) -> Plan:
    """The plan of one row with the chosen values in place of the grid."""
    name = recipe.at(scale)["scale"]
    own = {k: v for k, v in recipe.scales[name].items() if k != "grid"}
    point = replace(recipe, grid={k: [v] for k, v in chosen.items()}, scales={name: own}, scale=name)
    plan = make_plan(point, name, settings, seeds, check_names=False)
    plan.rows = [r for r in plan.rows if r.name == row]
    wanted = {trial for p in plan.rows[0].points for trial in p.trials.values()}
    plan.trials = {i: t for i, t in plan.trials.items() if i in wanted}
    return plan
