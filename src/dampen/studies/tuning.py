"""Choosing each row's setting on validation, with seeds that the table does not use, before the
table is trained.

The settings come from the recipe's `[search]` (the same number for every row, the baseline too) or
from its `[grid]`. Each is trained on every tuning seed, and the best mean is chosen
(`search_space.select`). With `strength_settings` a second stage follows (`search_space.py`). A
choice at the end of a range that was searched extends it once: a quarter as many settings again
beyond that end, then a new choice among all. The test is read once per configuration, when the
chosen setting is trained on `seeds`. What was tried is kept in `search.json`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dampen.studies.comparison import (
    Comparison,
    Config,
    Setting,
    design_of,
    is_refused,
    make_comparison,
    read_settings,
)
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.files import read_json, write_json
from dampen.studies.metric import describe
from dampen.studies.recipe import Recipe, merge
from dampen.studies.run import TrainOptions
from dampen.studies.search_space import (
    SETTINGS,
    STRENGTH_SETTINGS,
    Axis,
    AxisValues,
    Selection,
    Tried,
    remarks,
    second_stage,
    select,
)
from dampen.studies.table import grid_text, read_results
from dampen.studies.trainer.user_function import Function

DECAY = (0.01, 3.0)
"""Where AdamW's weight decay is searched: on little data the best is often far above
the usual 0.01 to 0.05."""
STRENGTHS = (
    "rate",
    "weight",
    "query",
    "key",
    "value",
    "attended_value",
    "query_key",
    "ffn",
    "ffn1",
    "ffn2",
)
"""Arguments that say how strong a method is."""


def axis_of(key: str, values: Sequence[Any]) -> Axis:
    """The range that a grid's values span; what are no numbers, or all the same, stays a list.

    >>> axis_of("train.lr", [0.001, 0.0001, 0.005])  # doctest: +NORMALIZE_WHITESPACE
    Axis(key='train.lr', low=0.0001, high=0.005, log=True, choices=(),
    least=None, most=None, first=None)
    >>> axis_of("unit", ["element", "column"]).choices
    ('element', 'column')
    """
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or min(numbers) == max(numbers):
        return Axis(key, choices=tuple(values))
    low, high = float(min(numbers)), float(max(numbers))
    return Axis(key, low, high, log=low > 0 and high / low >= 10)


def make_searchable(
    recipe: Recipe, scale: str | None = None
) -> tuple[Recipe, dict[str, list[Axis]]]:
    """A recipe whose rows have something to search for, and the axes of each row.

    With a search of its own the recipe says the axes, with a grid they span it. Without one they
    are the learning rate, from a fifth to five times what the recipe says, the weight decay, and
    each method's strength around its value (a rate up to 0.8). What a row says itself of the first
    two is left as it says. Every row gets the same number of trials, so that no method is tuned
    harder than another.
    """
    at = recipe.at(scale)
    if at["search"]:
        return recipe, design_of(recipe, scale)[0]
    if at["grid"]:
        axes = {
            row["name"]: [
                axis_of(k, v) for k, v in at["grid"].items() if "." in k or f"${k}" in repr(row)
            ]
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
    """Learning rate and weight decay; of one's own training only where they are
    among its parameters."""
    if "function" in at:
        said, where, usual = at["function"]["params"], "function.params", False
    else:
        train = {
            "lr": TrainOptions.lr,
            "weight_decay": TrainOptions.weight_decay,
            **at.get("train", {}),
        }
        said, where, usual = (
            train,
            "train",
            train.get("optimizer", TrainOptions.optimizer) == "adamw",
        )
    lr, decay = (
        said.get(name) if _is_number(said.get(name)) else None for name in ("lr", "weight_decay")
    )
    axes = [Axis(f"{where}.lr", lr / 5, lr * 5, log=True)] if lr else []
    if decay is not None:
        low, high = (DECAY[0], DECAY[1]) if usual or not decay else (decay / 10, decay * 10)
        axes.append(
            Axis(f"{where}.weight_decay", min(low, decay or low), max(high, decay), log=True)
        )
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
    """The recipe of a comparison with a search over `count` settings of every row, around what it
    says (with the `settings` of the command line), the learning rate and the weight decay with the
    same values in all rows.

    Where these two vary beside strengths, a third of the settings belongs to the strengths alone:
    drawn together, the learning rate and the weight decay decide which setting is best, and the
    strength beside them is left to chance.

    Args:
        recipe: of a comparison.
        count: settings to try for each configuration.
        settings: changes as on the command line.
    """
    over, problems = read_settings(settings)
    if problems:
        raise ConfigError("The comparison", problems)
    opened, axes = make_searchable(replace(recipe, base=merge(recipe.base, over)))
    common = {a.key: a.table() for own in axes.values() for a in own if "." in a.key}
    rows = []
    for row in opened.rows:
        left = {key: False for key in common if key not in [a.key for a in axes[row["name"]]]}
        rows.append(
            {
                **row,
                "search": left | {a.key: a.table() for a in axes[row["name"]] if "." not in a.key},
            }
        )
    mixed = any(len({"." in a.key for a in own}) == 2 for own in axes.values())
    second = {STRENGTH_SETTINGS: count // 3} if mixed and count >= 3 else {}
    return replace(
        opened, rows=rows, search={SETTINGS: count - sum(second.values()), **second, **common}
    )


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


FOLDER = "search"
"""Trials of the tuning lie here, apart from those of the table."""
STAGE = "stage"
"""Key in the header of a plan of tuning trials: which part of the tuning they are."""
LATER = "later"
"""Key in that header: how many trials a second stage will have."""
SECOND, BEYOND = "second stage", "beyond the ranges"
GOING = (0, 1, 5)
"""Exit codes after which a choice is possible: settings whose runs failed or diverged lose, and
nothing else does."""


@dataclass
class Tuning:
    """The settings that are tried: the plan of their trials, the axes of each row, and what
    extended them."""

    plan: Comparison
    axes: dict[str, list[Axis]]
    settings: int  # of each row, in both stages; 0 for a grid, whose rows may differ
    strength_settings: int = 0  # how many of them belong to the second stage
    inside: dict[str, int] = field(
        default_factory=dict
    )  # by row, settings within its ranges; the others extend them
    extended: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by row

    def of(
        self, rows: Sequence[str], after: Mapping[str, int] | None = None, stage: str = ""
    ) -> Comparison:
        """The plan of these rows alone, or of all; of the settings after the first so many of each
        row, where given."""
        kept = [row for row in self.plan.configs if not rows or row.name in rows]
        if after is not None:
            kept = [replace(row, settings=row.settings[after[row.name] :]) for row in kept]
            kept = [row for row in kept if row.settings]
        used = {i for row in kept for point in row.settings for i in point.ids.values()}
        header = self.plan.header | ({STAGE: stage} if stage else {})
        plan = Comparison(**{**self.plan.__dict__, "configs": kept, "header": header})
        plan.runs = {i: t for i, t in self.plan.runs.items() if i in used}
        return plan

    def counts(self) -> dict[str, int]:
        """How many settings each row has so far."""
        return {row.name: len(row.settings) for row in self.plan.configs}

    def add(
        self,
        recipe: Recipe,
        scale: str | None,
        settings: Sequence[str],
        more: Mapping[str, list[AxisValues]],
    ) -> None:
        """Append settings to rows."""
        at = recipe.at(scale)
        points: dict[str, list[AxisValues]] = {row["name"]: [] for row in at["rows"]}
        points |= {
            row.name: [p.grid for p in row.settings] + more.get(row.name, [])
            for row in self.plan.configs
        }
        self.plan = make_comparison(recipe, scale, settings, at["tuning_seeds"], points=points)
        self.plan = self.of(list(self.axes))


def make_tuning(
    recipe: Recipe, scale: str | None, settings: Sequence[str], check_names: bool = True
) -> Tuning | None:
    """What there is to choose, on the tuning seeds; None where nothing is.

    Args:
        recipe: with a search, or with a grid and tuning seeds.
        scale: of the recipe.
        settings: changes as on the command line.
        check_names: look up data sets, models and methods.
    """
    at = recipe.at(scale)
    seeds = at.get("tuning_seeds")
    if at["search"]:
        axes, tried = design_of(recipe, scale, settings)
        plan = make_comparison(recipe, scale, settings, seeds, check_names, tried)
        more = at["search"].get(STRENGTH_SETTINGS, 0)
        count = at["search"][SETTINGS] + more
    elif seeds:
        plan, count = make_comparison(recipe, scale, settings, seeds, check_names), 0
        more = 0
        axes = {row.name: _grid_axes(row) for row in plan.configs if len(row.settings) > 1}
    else:
        return None
    tuning = Tuning(plan, {row: own for row, own in axes.items() if own}, count, more)
    tuning.plan = tuning.of(list(tuning.axes) or [""])
    return tuning if tuning.plan.configs else None


def tuning_plan(
    recipe: Recipe,
    scale: str | None,
    settings: Sequence[str],
    rows: Sequence[str],
    check_names: bool = True,
) -> Comparison | None:
    """The trials that choose, as far as they are known before any has run; None where nothing is
    chosen. Its header says how many follow in a second stage; extended
    ranges come on top of that."""
    tuning = make_tuning(recipe, scale, settings, check_names)
    plan = tuning.of(rows) if tuning is not None else None
    if tuning is None or plan is None or not plan.configs:
        return None
    plan.header[LATER] = len(plan.configs) * tuning.strength_settings * len(plan.seeds)
    return plan


def count_runs(plan: Comparison | None) -> int:
    """How many trials choose, those of a second stage included."""
    return len(plan.runs) + plan.header[LATER] if plan is not None else 0


def _grid_axes(row: Config) -> list[Axis]:
    return [axis_of(key, [p.grid[key] for p in row.settings]) for key in row.settings[0].grid]


def as_large(plan: Comparison, tuning: Comparison) -> Comparison:
    """The plan with as many trials as it will have once its points are
    chosen, whichever they are."""
    return _at(plan, {row.name: row.settings[0].grid for row in tuning.configs})


def _at(plan: Comparison, chosen: Mapping[str, AxisValues]) -> Comparison:
    """The plan with these rows at these grid points; a table that reports all keeps them all."""
    if plan.header["report"] == "all":
        return plan
    for row in plan.configs:
        if row.name in chosen:
            row.settings = [p for p in row.settings if p.grid == chosen[row.name]]
    used = {i for r in plan.configs for p in r.settings for i in p.ids.values()}
    plan.runs = {i: t for i, t in plan.runs.items() if i in used}
    return plan


def tune(
    recipe: Recipe,
    plan: Comparison,
    folder: Path,
    scale: str | None,
    settings: Sequence[str],
    rows: Sequence[str],
    run: Callable[[Comparison, Path], int],
) -> tuple[Comparison, int]:
    """Run the tuning trials with `run` (a plan and a folder to an exit code) and choose. A code
    that is not 0 says why nothing could be chosen.

    With `rows` only these are run; the others keep what is recorded of them.

    Args:
        recipe: with a search, or with a grid and tuning seeds.
        plan: the comparison to train once settings are chosen.
        folder: of its runs; tuning runs go to a folder inside.
        scale: of the recipe.
        settings: changes as on the command line.
        rows: tune these configurations alone; default: all.
        run: trains the runs of a comparison in a folder and returns an exit code.
    """
    tuning = make_tuning(recipe, scale, settings)
    if tuning is None:
        return plan, 0
    if both := sorted({*plan.seeds} & {*tuning.plan.seeds}):
        raise ConfigError(
            recipe.name,
            [f"--seed: {both} are tuning seeds; settings chosen on them would gain there"],
        )
    place = folder / FOLDER
    code = run(tuning.of(rows), place)
    if code not in GOING:
        return plan, code

    def refused(row: str, values: AxisValues) -> bool:
        return is_refused(recipe, scale, settings, row, values)

    for stage in (SECOND, BEYOND):
        tuning.inside = tuning.counts()
        best = _selections(tuning, read_results(tuning.plan, place))
        more = _strengths(tuning, best) if stage == SECOND else _extensions(tuning, best, refused)
        if not more:
            continue
        tuning.add(recipe, scale, settings, more)
        added = tuning.of(rows, tuning.inside, stage)
        code = run(added, place) if added.configs else 0
        if code not in GOING:
            return plan, code
    tuning.plan.save(place)
    results = read_results(tuning.plan, place)
    found = _selections(tuning, results)
    chosen = {name: selection for name, selection in found.items() if selection is not None}
    record = _record_of(tuning, chosen, results)
    write_json(folder / "search.json", record)
    _check_chosen(tuning.of(rows), chosen, results, place)
    points = {name: found.chosen.values for name, found in chosen.items()}
    brief = {
        name: {k: v for k, v in row.items() if k != "trials"}
        for name, row in record["rows"].items()
    }
    plan.header["search"] = record | {"rows": brief}
    if not tuning.settings:
        return _at(plan, points), 0
    waiting = {row.name: [p.grid for p in row.settings] for row in plan.configs}
    made = make_comparison(
        recipe, scale, settings, plan.seeds, points=waiting | {k: [v] for k, v in points.items()}
    )
    made.header |= plan.header
    return made, 0


def _check_chosen(
    tuning: Comparison, chosen: Mapping[str, Any], results: Mapping[str, Any], place: Path
) -> None:
    """A row of which nothing can be chosen stops the run, unless all its runs diverged: then that
    is its result."""
    for row in tuning.configs:
        ended = [id in results for point in row.settings for id in point.ids.values()]
        if row.name not in chosen and not all(ended):
            raise LabError(
                f"No setting of {row.name!r} can be selected: none of its "
                "tuning runs finished. The errors are in "
                f"{place}. Correct the method or remove it, then rerun the same command to resume."
            )


def own_metric(function: Function | None) -> tuple[str, str]:
    """The metric by which settings of a training of the user's own are chosen;
    refuses where none was said."""
    if function is None or function.metric is None:
        problem = "say which validation metric of your function it goes by, such as --metric accuracy or --metric nll:min"
        raise ConfigError("The search", [f"metric: {problem}"])
    return function.metric


def chosen_in_words(folder: Path) -> list[str]:
    """What was chosen for each row, a line each, from the record of a folder; nothing
    where nothing was tuned.

    Args:
        folder: of the comparison.
    """
    if not (folder / "search.json").exists():
        return []
    record = read_json(folder / "search.json")
    metric = describe(record["metric"])
    lines = []
    for name, row in record["rows"].items():
        what = "nothing chosen"
        if row.get("chosen") is not None:
            value = f"{metric.scale * row['valid']:.{metric.digits}f}"
            what = f"{grid_text(row['chosen'])} (validation {metric.title} {value}, {len(record['seeds'])} tuning seeds)"
        lines.append("; ".join([f"{name}: {what}", *remarks(row)]))
    return lines


def _strengths(
    tuning: Tuning, found: Mapping[str, Selection | None]
) -> dict[str, list[AxisValues]]:
    """The settings of the second stage, around the best of the first."""
    best = {
        row: selection.chosen.values for row, selection in found.items() if selection is not None
    }
    return (
        second_stage(tuning.axes, best, tuning.strength_settings)
        if tuning.strength_settings
        else {}
    )


def _extensions(
    tuning: Tuning,
    found: Mapping[str, Selection | None],
    refused: Callable[[str, AxisValues], bool],
) -> dict[str, list[AxisValues]]:
    """Settings beyond the ends at which rows chose, short of what a method refuses."""
    points: dict[str, list[AxisValues]] = {}
    for row, selection in found.items() if tuning.settings else ():
        if selection is None:
            continue
        for key, upwards, extra in _beyond(
            selection, tuning.axes[row], tuning.settings, partial(refused, row)
        ):
            points.setdefault(row, []).extend(extra)
            last = [s[key] for s in extra][-1]
            tuning.extended.setdefault(row, []).append(
                {"axis": key, "end": _end(upwards), "to": last}
            )
    return points


def _beyond(
    selection: Selection,
    axes: Sequence[Axis],
    settings: int,
    refused: Callable[[AxisValues], bool],
) -> list[tuple[str, bool, list[AxisValues]]]:
    """A quarter of the settings again, shared by the ends at which the choice lies; the other
    values stay chosen.

    Where a method refuses the end, such as R-Drop on dropout at rate 0, the same number of steps
    stops before it.
    """
    by_key, chosen = {axis.key: axis for axis in axes}, selection.chosen.values
    ends = [(key, upwards) for key, upwards in selection.edges if by_key[key].beyond(upwards, 1)]
    count = max(math.ceil(settings / 4), len(ends))
    found = []
    for i, (key, upwards) in enumerate(ends):
        share = count // len(ends) + (i < count % len(ends))
        extra = [{**chosen, key: value} for value in by_key[key].beyond(upwards, share)]
        if any(refused(values) for values in extra):
            shorter = by_key[key].beyond(upwards, share + 1)[:-1]
            extra = [{**chosen, key: value} for value in shorter]
            extra = [values for values in extra if not refused(values)]
        if extra:
            found.append((key, upwards, extra))
    return found


def _end(upwards: bool) -> str:
    return "upper" if upwards else "lower"


def _selections(tuning: Tuning, results: Mapping[str, Any]) -> dict[str, Selection | None]:
    mode = _metric(results)[1]
    return {
        row.name: select(_tried(row, results, len(row.settings)), tuning.axes[row.name], mode)
        for row in tuning.plan.configs
    }


def _metric(results: Mapping[str, Any]) -> tuple[str, str]:
    return next((tuple(r["selection"]) for r in results.values() if "selection" in r), ("", "max"))


def _tried(row: Config, results: Mapping[str, Any], inside: int) -> list[Tried]:
    """The settings of a row; those after the first `inside` came with an extension."""
    return [_one(p, results, i >= inside) for i, p in enumerate(row.settings)]


def _one(point: Setting, results: Mapping[str, Any], extension: bool) -> Tried:
    values: dict[str, float | None] = {}
    states = {}
    for seed, id in point.ids.items():
        found = results.get(id)
        done = found is not None and found["status"] == "finished"
        states[seed] = "complete" if done else found["status"] if found is not None else "failed"
        name = found["selection"][0] if found is not None and done else ""
        if found is not None and done and name not in found["valid"]:
            raise LabError(
                f"The training has no validation {name!r}, so no setting can be chosen by it. "
                "Give it to trial.log(valid={...}), or return it under 'valid'."
            )
        values[seed] = found["valid"][name] if found is not None and done else None
    return Tried(point.grid, values, point.ids, states, extension)


def _head(tuning: Tuning, results: Mapping[str, Any]) -> dict[str, Any]:
    metric, mode = _metric(results)
    count = tuning.settings or max(len(row.settings) for row in tuning.plan.configs)
    kind = {"storage": "tuning" if tuning.settings else "grid", "settings": count}
    kind |= {STRENGTH_SETTINGS: tuning.strength_settings} if tuning.strength_settings else {}
    seeds = tuning.plan.seeds
    return {**kind, "trials": count * len(seeds), "seeds": seeds, "metric": metric, "mode": mode}


def _record_of(
    tuning: Tuning, chosen: Mapping[str, Selection], results: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that was tried and what was chosen, for the record."""
    rows = {
        row.name: _row(row, tuning, chosen.get(row.name), results) for row in tuning.plan.configs
    }
    return _head(tuning, results) | {"rows": rows}


def _row(
    row: Config, tuning: Tuning, found: Selection | None, results: Mapping[str, Any]
) -> dict[str, Any]:
    tried, extended = (
        _tried(row, results, tuning.inside[row.name]),
        tuning.extended.get(row.name, []),
    )
    trials = [
        {
            "values": t.values,
            "valid": t.mean,
            "by_seed": t.by_seed,
            "ids": t.ids,
            "states": t.states,
        }
        | {"state": "complete" if t.complete else "failed", "extension": t.extension}
        for t in tried
    ]
    record: dict[str, Any] = {
        "axes": [a.__dict__ for a in tuning.axes[row.name]],
        "tried": len(tried),
        "trials": trials,
    }
    if found is None:
        return record | {"chosen": None}
    record |= {
        "chosen": found.chosen.values,
        "valid": found.chosen.mean,
        "tied": found.tied,
        "alike": found.alike,
    }
    further = {(e["axis"], e["end"]) for e in extended}
    record["edges"] = [
        {
            "axis": k,
            "end": _end(up),
            "value": found.chosen.values[k],
            "extended": (k, _end(up)) in further,
        }
        for k, up in found.edges
    ]
    return record | {"extended": extended}
