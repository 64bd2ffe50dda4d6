"""What a search may vary: the axes of a recipe's grid, or the learning rate and the strengths of the methods."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dampen.studies.config.design import SETTINGS, STRENGTH_SETTINGS, Axis
from dampen.studies.config.plan import Comparison, design_of, make_comparison, read_settings
from dampen.studies.config.recipe import Recipe, merge
from dampen.studies.config.trial import TrainOptions
from dampen.studies.errors import ConfigError

DECAY = (0.01, 3.0)
"""Where AdamW's weight decay is searched: on little data the best is often far above the usual 0.01 to 0.05."""
STRENGTHS = ("rate", "weight", "query", "key", "value", "attended_value", "query_key", "ffn", "ffn1", "ffn2")
"""Arguments that say how strong a method is."""


def axis_of(key: str, values: Sequence[Any]) -> Axis:
    """The range that a grid's values span; what are no numbers, or all the same, stays a list.

    >>> axis_of("train.lr", [0.001, 0.0001, 0.005])
    Axis(key='train.lr', low=0.0001, high=0.005, log=True, choices=(), least=None, most=None, first=None)
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

    With a search of its own the recipe says the axes, with a grid they span it. Without one they are the learning rate,
    from a fifth to five times what the recipe says, the weight decay, and each method's strength around its value (a
    rate up to 0.8). What a row says itself of the first two is left as it says. Every row gets the same number of
    trials, so that no method is tuned harder than another.
    """
    at = recipe.at(scale)
    if at["search"]:
        return recipe, design_of(recipe, scale)[0]
    if at["grid"]:
        axes = {
            row["name"]: [axis_of(k, v) for k, v in at["grid"].items() if "." in k or f"${k}" in repr(row)]
            for row in at["rows"]
        }
        return recipe, axes
    common = _of_the_optimizer(at)
    rows, axes = [], {}
    for row in at["rows"]:
        methods, found = _open_methods(row.get("methods", []))
        rows.append({**row, "methods": methods})
        axes[row["name"]] = [*(axis for axis in common if not _says(row, axis.key)), *found]
    own = {k: v for k, v in recipe.scales[at["scale"]].items() if k != "rows"}
    return replace(recipe, rows=rows, scales={at["scale"]: own}, scale=at["scale"]), axes


def _of_the_optimizer(at: Mapping[str, Any]) -> list[Axis]:
    """Learning rate and weight decay; of one's own training only where they are among its parameters."""
    if "function" in at:
        said, where, usual = at["function"]["params"], "function.params", False
    else:
        train = {"lr": TrainOptions.lr, "weight_decay": TrainOptions.weight_decay, **at.get("train", {})}
        said, where, usual = train, "train", train.get("optimizer", TrainOptions.optimizer) == "adamw"
    lr, decay = (said.get(name) if _is_number(said.get(name)) else None for name in ("lr", "weight_decay"))
    axes = [Axis(f"{where}.lr", lr / 5, lr * 5, log=True)] if lr else []
    if decay is not None:
        low, high = (DECAY[0], DECAY[1]) if usual or not decay else (decay / 10, decay * 10)
        axes.append(Axis(f"{where}.weight_decay", min(low, decay or low), max(high, decay), log=True))
    return axes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _says(tree: Any, key: str) -> bool:
    """Whether plain data has a value under a dotted name."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return False
        tree = tree[part]
    return True


def tuned_recipe(recipe: Recipe, count: int, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a comparison with a search over `count` settings of every row, around what it says (with the
    `settings` of the command line), the learning rate and the weight decay with the same values in all rows.

    Where these two vary beside strengths, a third of the settings belongs to the strengths alone: drawn together, the
    learning rate and the weight decay decide which setting is best, and the strength beside them is left to chance.
    """
    over, problems = read_settings(settings)
    if problems:
        raise ConfigError("The comparison", problems)
    opened, axes = make_searchable(replace(recipe, base=merge(recipe.base, over)))
    common = {a.key: a.table() for own in axes.values() for a in own if "." in a.key}
    rows = []
    for row in opened.rows:
        left = {key: False for key in common if key not in [a.key for a in axes[row["name"]]]}
        rows.append({**row, "search": left | {a.key: a.table() for a in axes[row["name"]] if "." not in a.key}})
    mixed = any(len({"." in a.key for a in own}) == 2 for own in axes.values())
    second = {STRENGTH_SETTINGS: count // 3} if mixed and count >= 3 else {}
    return replace(opened, rows=rows, search={SETTINGS: count - sum(second.values()), **second, **common})


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
    """The range around a value, with that value in the first stage."""
    if name == "rate":
        low, high = max(0.01, value / 5), min(0.8, value * 3)
        return Axis(variable, low, high, first=min(max(value, low), high))
    return Axis(variable, value / 10, value * 10, log=True, first=value)


def plan_at(
    recipe: Recipe,
    scale: str | None,
    settings: Sequence[str],
    row: str,
    chosen: Mapping[str, Any],
    seeds: Sequence[int],
) -> Comparison:
    """The plan of one row with the chosen values in place of the grid."""
    name = recipe.at(scale)["scale"]
    own = {k: v for k, v in recipe.scales[name].items() if k not in ("grid", "search")}
    point = replace(recipe, grid={k: [v] for k, v in chosen.items()}, search={}, scales={name: own}, scale=name)
    plan = make_comparison(point, name, settings, seeds, check_names=False)
    plan.rows = [r for r in plan.rows if r.name == row]
    wanted = {trial for p in plan.rows[0].points for trial in p.trials.values()}
    plan.trials = {i: t for i, t in plan.trials.items() if i in wanted}
    return plan
