"""Rows x grid x seeds of a recipe as independent trials, and the manifest of which trial belongs to which row."""

from __future__ import annotations

import copy
import itertools
import math
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dampen.lab.config.plain import check_plain
from dampen.lab.config.recipe import ROW_SECTIONS, SECTIONS, Recipe, merge
from dampen.lab.config.trial import TrainOptions, TrialSpec
from dampen.lab.errors import ConfigError
from dampen.lab.files import read_json, write_json
from dampen.names import nearest

MOST = 100_000
"""Trials of one row: more is a slip of the keyboard."""
TABLES = {"data": "name", "model": "name", "train": "lr", "pretrain": "train.epochs"}
"""Sections that are tables, each with an example of a value in it."""
HEADER = ("title", "paper", "table", "metric", "report", "command")


@dataclass
class Point:
    """One choice of grid values; `trials` maps each seed to the trial's id."""

    grid: dict[str, Any]
    trials: dict[str, str]
    published: dict[str, Any] = field(default_factory=dict)


@dataclass
class PlannedRow:
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
    rows: list[PlannedRow]
    trials: dict[str, TrialSpec]

    def save(self, folder: Path) -> None:
        """Write plan.json; a comparison that grew since says so in its title."""
        if self.name.startswith("compare-"):
            count = len({seed // self.folds for seed in self.seeds})
            told = f", {count} seed{'s' * (count != 1)}"
            self.header["title"] = re.sub(r", \d+ seeds?\b", told, self.header["title"])
        plain = asdict(self) | {"trials": {i: t.to_dict() for i, t in self.trials.items()}}
        write_json(folder / "plan.json", plain)

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read plan.json."""
        content = read_json(folder / "plan.json", "Run the command that wrote it again: it is made anew, trials stay.")
        rows = [PlannedRow(**{**r, "points": [Point(**p) for p in r["points"]]}) for r in content["rows"]]
        trials = {
            i: TrialSpec.from_dict(t, f"trial {i} in {folder / 'plan.json'}") for i, t in content["trials"].items()
        }
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
        commands = dict.fromkeys(filter(None, [*earlier.header["command"].split(" && "), self.header["command"]]))
        header = {**self.header, "command": " && ".join(commands)}
        looked = all(i in recorded for i in earlier.trials) and bool({*self.seeds} - {*earlier.seeds})
        if looked or earlier.header.get("test") == "sequential":  # looked at, then extended: see records/sequential.py
            header["test"] = "sequential"
        return replace(self, rows=list(own.values()), trials=trials, seeds=seeds, header=header)

    @property
    def folds(self) -> int:
        """Trials that make one value: the folds of a round of cross-validation, or 1."""
        return self.header.get("folds") or 1

    def labels(self, trials: Iterable[TrialSpec]) -> dict[str, str]:
        """Row, grid point and seed of each trial, for people."""
        wanted, named = {t.id for t in trials}, dict[str, str]()
        for row in self.rows:
            for point in row.points:
                grid = "".join(f" {k.split('.')[-1]}={_short(v)}" for k, v in point.grid.items())
                for seed, trial in point.trials.items():
                    whole, fold = divmod(int(seed), self.folds)
                    told = f"seed {whole} fold {fold}" if self.folds > 1 else f"seed {seed}"
                    if trial in wanted:
                        named.setdefault(trial, f"{row.name}{grid} {told}")
        return named

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[TrialSpec]:
        """The trials to run: of the named rows and seeds, or of all. Seeds come first, so that rows fill up evenly."""
        names = {r.name for r in self.rows}
        problems = [f"--row: there is no row {r!r}{nearest(r, names)}" for r in rows if r not in names]
        if problems:
            raise ConfigError(self.name, problems)
        wanted: dict[str, TrialSpec] = {}
        for seed in self.seeds:
            for row in self.rows:
                if (not rows or row.name in rows) and (not seeds or seed in seeds):
                    for point in row.points:
                        if str(seed) in point.trials:  # after a race rows differ in their seeds
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
        config = {k: v for k, v in config.items() if k not in ("seeds", "tuning_seeds")}
        points, found = _points(config, at["grid"], seeds, row, plan, f"rows[{i}] {row['name']}: ", check_names)
        problems += found
        methods = config.get("methods", [])
        plan.rows.append(
            PlannedRow(
                row["name"], methods, points, row.get("published", {}), row.get("baseline", False), row.get("note", "")
            )
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
    from dampen.lab.config.names import check_trial

    points: dict[tuple[str, ...], Point] = {}
    problems: list[str] = []
    used = {k: v for k, v in grid.items() if "." in k or _mentions(config, f"${k}")}
    count = math.prod(map(len, used.values())) * len(seeds)
    if count > MOST:
        return [], [f"{path}grid: it makes {count} trials with {len(seeds)} seeds; at most {MOST} can be planned"]
    for values in itertools.product(*used.values()):
        chosen = dict(zip(used, values, strict=True))
        filled = copy.deepcopy(_fill(config, chosen))
        for key, value in chosen.items():
            if "." in key:
                problems += [f"{path}grid.{problem}" for problem in _put(filled, key, value)]
        ids = {}
        for seed in seeds:
            trial, found = TrialSpec.parse({**filled, "seed": seed}, path)
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


def _short(value: Any) -> Any:
    """A value of a grid for a label: what a search found has sixteen digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _matches(wanted: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return all(chosen.get(k) == v for k, v in wanted.items())


def _mentions(value: Any, variable: str) -> bool:
    if isinstance(value, Mapping):
        return any(_mentions(v, variable) for v in value.values())
    if isinstance(value, list | tuple):
        return any(_mentions(v, variable) for v in value)
    out: bool = value == variable
    return out


def _fill(value: Any, chosen: Mapping[str, Any]) -> Any:
    """Replace "$name" by the grid's value."""
    if isinstance(value, Mapping):
        return {k: _fill(v, chosen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(v, chosen) for v in value]
    return chosen.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value


def _put(tree: dict[str, Any], key: str, value: Any) -> list[str]:
    """Set a value by its dotted name; what is wrong with the name, if anything."""
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            return [f"{key}: {parent} is a value, so there is nothing below it"]
    if not all([*parents, last]):
        return [f"{key}: expected names between dots, such as train.lr"]
    tree[last] = value
    return []


def read_setting(setting: str) -> tuple[str, Any, str]:
    """`a.b=c` with a TOML value, or a bare word as a string: key, value, and what is wrong with it.

    >>> read_setting("lr=0.01"), read_setting("name=wide")
    (('lr', 0.01, ''), ('name', 'wide', ''))
    """
    key, equals, text = setting.partition("=")
    if not equals:
        return key, None, f"--set {setting}: expected key=value, such as train.lr=0.001"
    try:
        found = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return key, text, ""
    except RecursionError:
        return key, None, f"--set {key}: nested too deeply"
    if set(found) != {"x"}:
        return key, None, f"--set {key}: expected one value, got {text!r}"
    return key, found["x"], "; ".join(check_plain(found["x"], f"--set {key}"))


def _apply_setting(setting: str, over: dict[str, Any]) -> list[str]:
    key, value, problem = read_setting(setting)
    section = key.split(".")[0]
    if problem:
        return [problem]
    if section not in ROW_SECTIONS:
        known = {f.name: f"train.{f.name}" for f in fields(TrainOptions)}
        near = f"; did you mean {known[key]!r}?" if key in known else nearest(section, ROW_SECTIONS)
        return [f"--set {setting}: unknown section {section!r}{near}"]
    if key in TABLES and not isinstance(value, Mapping) and value is not False:
        return [f"--set {setting}: {key} is a table; say which of its values, such as {key}.{TABLES[key]}"]
    return [f"--set {problem}" for problem in _put(over, key, value)]
