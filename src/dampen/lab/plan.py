"""Rows x grid x seeds of a recipe as independent trials, and the manifest of which trial belongs to which row."""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dampen.lab.check import nearest
from dampen.lab.errors import ConfigError
from dampen.lab.recipe import SECTIONS, Recipe, merge
from dampen.lab.record import read_json, write_json
from dampen.lab.trial import Trial

HEADER = ("title", "paper", "table", "metric", "report", "command")


@dataclass
class Point:
    """One choice of grid values; `trials` maps each seed to the trial's id."""

    grid: dict[str, Any]
    trials: dict[str, str]
    published: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One row of the table."""

    name: str
    methods: list[dict[str, Any]]
    points: list[Point]
    published: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    note: str = ""


@dataclass
class Plan:
    """What a run consists of: the rows with their trials, and the header of the recipe."""

    name: str
    scale: str
    header: dict[str, Any]
    departures: list[str]
    seeds: list[int]
    rows: list[Row]
    trials: dict[str, Trial]

    def save(self, folder: Path) -> None:
        """Write plan.json."""
        plain = asdict(self) | {"trials": {i: t.to_dict() for i, t in self.trials.items()}}
        write_json(folder / "plan.json", plain)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read plan.json."""
        content = read_json(folder / "plan.json")
        rows = [Row(**{**r, "points": [Point(**p) for p in r["points"]]}) for r in content["rows"]]
        trials = {i: Trial.from_dict(t, f"trial {i} in {folder / 'plan.json'}") for i, t in content["trials"].items()}
        return cls(**{**content, "rows": rows, "trials": trials})

    def joined(self, earlier: Plan, recorded: Container[str]) -> Plan:
        """This plan, with the rows and seeds that an earlier one under the same conditions has recorded: they stay."""
        own = {row.name: copy.deepcopy(row) for row in self.rows}
        trials = dict(self.trials)
        for row in earlier.rows:
            kept = [replace(p, trials={s: i for s, i in p.trials.items() if i in recorded}) for p in row.points]
            if not any(point.trials for point in kept):
                continue
            trials |= {i: earlier.trials[i] for point in kept for i in point.trials.values()}
            here = own.setdefault(row.name, replace(row, points=[]))
            for point in kept:
                same = next((p for p in here.points if p.grid == point.grid), None)
                if same is None:
                    here.points.append(point)
                else:
                    same.trials = point.trials | same.trials
        seeds = sorted({*self.seeds, *(int(s) for row in own.values() for p in row.points for s in p.trials)})
        commands = dict.fromkeys([*earlier.header["command"].split(" && "), self.header["command"]])
        header = {**self.header, "command": " && ".join(commands)}
        return replace(self, rows=list(own.values()), trials=trials, seeds=seeds, header=header)

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Trial]:
        """The trials to run: of the named rows and seeds, or of all. Seeds come first, so that rows fill up evenly."""
        names = {r.name for r in self.rows}
        problems = [f"--row: there is no row {r!r}{nearest(r, names)}" for r in rows if r not in names]
        if problems:
            raise ConfigError(self.name, problems)
        wanted: dict[str, Trial] = {}
        for seed in self.seeds:
            for row in self.rows:
                if (not rows or row.name in rows) and (not seeds or seed in seeds):
                    for point in row.points:
                        wanted[point.trials[str(seed)]] = self.trials[point.trials[str(seed)]]
        return list(wanted.values())


def make_plan(
    recipe: Recipe,
    scale: str | None = None,
    settings: Iterable[str] = (),
    seeds: Sequence[int] | None = None,
    check_names: bool = True,
) -> Plan:
    """The plan of a recipe; raises ConfigError with every problem of every row.

    `settings` are strings such as `train.lr=0.01`, as on the command line. Without `check_names` the names of data
    sets, models and methods are taken on trust (torch is then not imported).
    """
    at = recipe.at(scale)
    problems: list[str] = []
    over: dict[str, Any] = {}
    for setting in settings:
        problems += _apply_setting(setting, over)
    seeds = list(seeds) if seeds is not None else at.get("seeds", [0])
    plan = Plan(recipe.name, at["scale"], {k: getattr(recipe, k) for k in HEADER}, at["departures"], seeds, [], {})
    plan.header["cost"] = at["cost"]
    for i, row in enumerate(at["rows"]):
        config = merge(merge({k: at[k] for k in SECTIONS if k in at}, {k: row[k] for k in SECTIONS if k in row}), over)
        config.pop("seeds", None)
        points, found = _points(config, at["grid"], seeds, row, plan, f"rows[{i}] {row['name']}: ", check_names)
        problems += found
        methods = config.get("methods", [])
        plan.rows.append(
            Row(row["name"], methods, points, row.get("published", {}), row.get("baseline", False), row.get("note", ""))
        )
    problems = list(dict.fromkeys(problems))
    if problems:
        raise ConfigError(f"Recipe {recipe.name!r} at scale {plan.scale!r}", problems)
    return plan


def _points(
    config: dict[str, Any],
    grid: Mapping[str, list[Any]],
    seeds: Sequence[int],
    row: Mapping[str, Any],
    plan: Plan,
    path: str,
    names: bool,
) -> tuple[list[Point], list[str]]:
    """The grid points of one row. A value that the row does not use makes no second point."""
    from dampen.lab.validate import check_trial

    points: dict[tuple[str, ...], Point] = {}
    problems: list[str] = []
    used = {k: v for k, v in grid.items() if "." in k or _mentions(config, f"${k}")}
    for values in itertools.product(*used.values()):
        chosen = dict(zip(used, values, strict=True))
        filled = copy.deepcopy(_fill(config, chosen))
        for key, value in chosen.items():
            if "." in key:
                _put(filled, key, value)
        ids = {}
        for seed in seeds:
            trial, found = Trial.parse({**filled, "seed": seed}, path)
            if trial is not None and names and seed == seeds[0]:
                found = check_trial(trial, path)
            problems += found
            if trial is not None:
                plan.trials[trial.id] = trial
                ids[str(seed)] = trial.id
        published: dict[str, Any] = next(
            (p["published"] for p in row.get("published_grid", []) if _matches(p["grid"], chosen)), {}
        )
        points.setdefault(tuple(ids.values()), Point(chosen, ids, published))
    return list(points.values()), problems


def _matches(wanted: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return all(chosen.get(k) == v for k, v in wanted.items())


def _mentions(value: Any, variable: str) -> bool:
    if isinstance(value, Mapping):
        return any(_mentions(v, variable) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_mentions(v, variable) for v in value)
    return value == variable


def _fill(value: Any, chosen: Mapping[str, Any]) -> Any:
    """Replace "$name" by the grid's value."""
    if isinstance(value, Mapping):
        return {k: _fill(v, chosen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(v, chosen) for v in value]
    return chosen.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _apply_setting(setting: str, over: dict[str, Any]) -> list[str]:
    """`a.b=c` with a TOML value, or a bare word as a string."""
    key, equals, text = setting.partition("=")
    section = key.split(".")[0]
    if not equals:
        return [f"--set {setting}: expected key=value, such as train.lr=0.001"]
    if section not in SECTIONS or section == "seeds":
        return [f"--set {setting}: unknown section {section!r}{nearest(section, SECTIONS)}"]
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    _put(over, key, value)
    return []
