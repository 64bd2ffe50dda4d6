"""Configurations x settings x seeds as independent runs, and the manifest of which run belongs
where (plan.json)."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dampen.names import nearest
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.files import read_json, write_json
from dampen.studies.methods_text import check_plain
from dampen.studies.recipe import ROW_SECTIONS, SECTIONS, Recipe, merge
from dampen.studies.run import Run, TrainOptions
from dampen.studies.search_space import (
    COUNTS,
    SETTINGS,
    STRENGTH_SETTINGS,
    Axis,
    AxisValues,
    axes_of_row,
    design,
    first_stage,
    mentions,
)
from dampen.studies.store import LoggedRun, RunStore

MOST = 100_000
"""Trials of one row: more is a slip of the keyboard."""
TABLES = {"data": "name", "model": "name", "train": "lr", "pretrain": "train.epochs"}
"""Sections that are tables, each with an example of a value in it."""
HEADER = ("title", "paper", "table", "metric", "report", "command")


@dataclass
class Setting:
    """One choice of grid values of a configuration, with the id of the run of each seed."""

    grid: dict[str, Any]
    ids: dict[str, str]  # by seed
    published: dict[str, Any] = field(default_factory=dict)
    logged: dict[str, LoggedRun] = field(default_factory=dict)  # by seed, where results were read
    model: dict[str, Any] = field(default_factory=dict)  # the section of its runs, likewise

    @property
    def planned(self) -> int:
        return len(self.ids)

    def finished(self) -> dict[str, LoggedRun]:
        """The runs with a result, by seed."""
        return {seed: run for seed, run in self.logged.items() if run.status == "finished"}

    def to_dict(self) -> dict[str, Any]:
        """As plan.json has it, in the words of 0.2, so that every version reads it."""
        return {"grid": self.grid, "trials": self.ids, "published": self.published}


@dataclass
class Config:
    """A method with its settings, as one line of the table."""

    name: str
    methods: list[dict[str, Any]]
    settings: list[Setting]
    published: dict[str, Any] = field(default_factory=dict)
    baseline: bool = False
    note: str = ""

    def ids(self) -> list[str]:
        """The ids of its runs, over all settings and seeds."""
        return [id for setting in self.settings for id in setting.ids.values()]

    def to_dict(self) -> dict[str, Any]:
        """As plan.json has it, in the words of 0.2, so that every version reads it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return plain | {"points": [setting.to_dict() for setting in self.settings]}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Config:
        """Read what `to_dict` wrote."""
        settings = [
            Setting(s["grid"], s["trials"], s.get("published", {})) for s in plain["points"]
        ]
        return cls(**{k: v for k, v in plain.items() if k != "points"}, settings=settings)


@dataclass
class Comparison:
    """What a run consists of: the rows with their trials, and the header of the recipe."""

    name: str
    scale: str
    header: dict[str, Any]
    departures: list[str]
    seeds: list[int]
    configs: list[Config]
    runs: dict[str, Run]

    def save(self, folder: Path) -> None:
        """Write plan.json; a comparison that grew since says so in its title."""
        if self.name.startswith("compare-"):
            count = len({seed // self.folds for seed in self.seeds})
            words = f", {count} seed{'s' * (count != 1)}"
            self.header["title"] = re.sub(r", \d+ seeds?\b", words, self.header["title"])
        plain = {k: v for k, v in vars(self).items() if k not in ("configs", "runs")}
        plain["rows"] = [config.to_dict() for config in self.configs]
        plain["trials"] = {id: run.to_dict() for id, run in self.runs.items()}
        write_json(folder / "plan.json", plain)

    @classmethod
    def load(cls, folder: Path) -> Comparison:
        """Read plan.json."""
        content = read_json(
            folder / "plan.json",
            "Run the command that wrote it again: it is made anew, trials stay.",
        )
        configs = [Config.from_dict(row) for row in content.pop("rows")]
        stored = content.pop("trials").items()
        runs = {
            id: Run.from_stored(run, f"trial {id} in {folder / 'plan.json'}") for id, run in stored
        }
        return cls(**content, configs=configs, runs=runs)

    def config_of_run(self) -> dict[str, str]:
        """The name of the configuration of each run, by the run's id."""
        return {id: config.name for config in self.configs for id in config.ids()}

    def first_run(self, config: Config) -> Run:
        """The run of the first setting and seed of a configuration."""
        return self.runs[next(iter(config.settings[0].ids.values()))]

    def run_of(self, setting: Setting, seed: int) -> Run:
        """The run of a setting with a seed; made after its others and added to the comparison where
        it is not there.

        Args:
            setting: one of this comparison's.
            seed: of the run.
        """
        if str(seed) not in setting.ids:
            run = replace(self.runs[next(iter(setting.ids.values()))], seed=seed)
            self.runs[run.id] = run
            setting.ids[str(seed)] = run.id
            self.seeds = sorted({*self.seeds, seed})
        return self.runs[setting.ids[str(seed)]]

    def joined(self, earlier: Comparison, recorded: Container[str]) -> Comparison:
        """This plan, with the rows and seeds that an earlier one under the same conditions has
        recorded: they stay.

        Args:
            earlier: a comparison under the same conditions.
            recorded: the ids of runs that have a result.
        """
        own = {row.name: copy.deepcopy(row) for row in self.configs}
        trials = dict(self.runs)
        for row in earlier.configs:
            kept = [
                replace(p, ids={s: i for s, i in p.ids.items() if i in recorded})
                for p in row.settings
            ]
            if not any(point.ids for point in kept):
                continue
            trials |= {i: earlier.runs[i] for point in kept for i in point.ids.values()}
            here = own.setdefault(row.name, replace(row, settings=[]))
            for point in kept:
                same = next((p for p in here.settings if p.grid == point.grid), None)
                if same is None:
                    here.settings.append(point)
                else:
                    same.ids = point.ids | same.ids
        seeds = sorted(
            {*self.seeds, *(int(s) for row in own.values() for p in row.settings for s in p.ids)}
        )
        commands = dict.fromkeys(
            filter(None, [*earlier.header["command"].split(" && "), self.header["command"]])
        )
        header = {**self.header, "command": " && ".join(commands)}
        whole = all(i in recorded for i in earlier.runs)
        extended = whole and bool({*self.seeds} - {*earlier.seeds})
        if (
            extended or earlier.header.get("test") == "sequential"
        ):  # looked at, then extended: see `stats.py`
            header["test"] = "sequential"
        if added := earlier.header.get("added"):
            header["added"] = dict(added)
        joined = replace(self, configs=list(own.values()), runs=trials, seeds=seeds, header=header)
        if whole:
            before = {row.name for row in earlier.configs}
            joined.note_addition(row.name for row in self.configs if row.name not in before)
        return joined

    def note_addition(self, names: Iterable[str]) -> None:
        """Note in the header that these configurations were added after a look at the others.

        Args:
            names: of the configurations.
        """
        added, new = self.header.get("added") or {}, list(names)
        if new:
            number = 1 + max(added.values(), default=0)
            self.header["added"] = added | dict.fromkeys(new, number)

    @property
    def folds(self) -> int:
        """Trials that make one value: the folds of a round of cross-validation, or 1."""
        return self.header.get("folds") or 1

    def labels(self, trials: Iterable[Run]) -> dict[str, str]:
        """Row, grid point and seed of each trial, for people.

        Args:
            trials: the runs to name.
        """
        wanted, named = {t.id for t in trials}, dict[str, str]()
        for row in self.configs:
            for point in row.settings:
                grid = "".join(f" {k.split('.')[-1]}={_short(v)}" for k, v in point.grid.items())
                for seed, trial in point.ids.items():
                    whole, fold = divmod(int(seed), self.folds)
                    place = f"seed {whole} fold {fold}" if self.folds > 1 else f"seed {seed}"
                    if trial in wanted:
                        named.setdefault(trial, f"{row.name}{grid} {place}")
        return named

    def chosen(self, rows: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Run]:
        """The trials to run: of the named rows and seeds, or of all. Seeds come first, so that rows
        fill up evenly.

        Args:
            rows: names of configurations; default: all.
            seeds: default: all.
        """
        names = {r.name for r in self.configs}
        problems = [
            f"--row: there is no row {r!r}{nearest(r, names)}" for r in rows if r not in names
        ]
        if problems:
            raise ConfigError(self.name, problems)
        wanted: dict[str, Run] = {}
        for seed in self.seeds:
            for row in self.configs:
                if (not rows or row.name in rows) and (not seeds or seed in seeds):
                    for point in row.settings:
                        if str(seed) in point.ids:  # after a race rows differ in their seeds
                            wanted[point.ids[str(seed)]] = self.runs[point.ids[str(seed)]]
        return list(wanted.values())


def make_comparison(
    recipe: Recipe,
    scale: str | None = None,
    settings: Iterable[str] = (),
    seeds: Sequence[int] | None = None,
    check_names: bool = True,
    points: Mapping[str, Sequence[AxisValues]] | None = None,
) -> Comparison:
    """The plan of a recipe; raises ConfigError with every problem of every row.

    `settings` are strings such as `train.lr=0.01`, as on the command line. Without `check_names`
    the names of data sets, models and methods are taken on trust (torch is then not imported).
    `points` are the settings of each row, in place of the grid; a recipe with a search has one for
    each row until it has chosen, the first that it tries.

    Args:
        recipe: what to compare.
        scale: one of the recipe's; default: the one it names.
        settings: changes such as `train.lr=0.01`, as on the command line.
        seeds: in place of the recipe's.
        check_names: look up data sets, models and methods; without it torch is not imported.
        points: the settings of each configuration in place of the grid, for a search.
    """
    at = recipe.at(scale)
    over, problems = read_settings(settings)
    if at["search"] and at["grid"]:
        problems.append("search, grid: a row's settings come from one of them; leave out the other")
    if at["search"] and points is None and not problems:
        points = {row: tried[:1] for row, tried in design_of(recipe, scale, settings)[1].items()}
    seeds = list(seeds) if seeds is not None else at.get("seeds", [0])
    header = {k: getattr(recipe, k) for k in HEADER}
    plan = Comparison(recipe.name, at["scale"], header, at["departures"], seeds, [], {})
    plan.header["cost"] = at["cost"]
    if recipe.plugins:
        plan.header["plugins"] = recipe.plugins
    for i, row in enumerate(at["rows"]):
        config, path = _config(at, row, over), f"rows[{i}] {row['name']}: "
        choices, found = (
            _choices(config, at["grid"], len(seeds), path)
            if points is None
            else (points[row["name"]], [])
        )
        made, wrong = _points(config, choices, seeds, row, plan, path, check_names)
        problems += found + wrong
        methods = config.get("methods", [])
        plan.configs.append(
            Config(
                row["name"],
                methods,
                made,
                row.get("published", {}),
                row.get("baseline", False),
                row.get("note", ""),
            )
        )
    problems = list(dict.fromkeys(problems))
    if problems:
        raise ConfigError(f"Recipe {recipe.name!r} at scale {plan.scale!r}", problems)
    return plan


def read_settings(settings: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """What --set changes, as sections, and what is wrong with it."""
    over: dict[str, Any] = {}
    problems = [problem for setting in settings for problem in _apply_setting(setting, over)]
    return over, problems


def _config(
    at: Mapping[str, Any], row: Mapping[str, Any], over: Mapping[str, Any]
) -> dict[str, Any]:
    """What a row is trained with, but for its settings and seeds."""
    config = merge(
        merge({k: at[k] for k in SECTIONS if k in at}, {k: row[k] for k in SECTIONS if k in row}),
        over,
    )
    return {k: v for k, v in config.items() if k not in ("seeds", "tuning_seeds")}


def design_of(
    recipe: Recipe, scale: str | None, settings: Iterable[str] = ()
) -> tuple[dict[str, list[Axis]], dict[str, list[AxisValues]]]:
    """The axes that the search of a recipe has in each row, and the settings that it tries; every
    row as many."""
    at = recipe.at(scale)
    over, _ = read_settings(settings)
    axes = {
        row["name"]: axes_of_row(at["search"], row, _config(at, row, over)) for row in at["rows"]
    }
    axes = {row: [a for a in own if not _is_set(over, a.key)] for row, own in axes.items()}
    staged = STRENGTH_SETTINGS in at["search"]
    tried = (first_stage if staged else design)(axes, at["search"][SETTINGS])
    problems = [f"search.{k}: no row says '${k}'" for k in _unused(at["search"], axes.values())]
    for row in at["rows"]:
        own = axes[row["name"]]
        unused = _unused(row.get("search", {}), [own])
        problems += [
            f"row {row['name']!r}: search.{k}: the row does not say '${k}'" for k in unused
        ]
        different = [s for i, s in enumerate(tried[row["name"]]) if s not in tried[row["name"]][:i]]
        if own and len(different) < at["search"][SETTINGS]:
            problem = f"its axes make only {len(different)} different settings of {at['search'][SETTINGS]}"
            problems.append(
                f"row {row['name']!r}: search: {problem}; give a "
                "range, or longer lists, or fewer settings"
            )
    if problems:
        raise ConfigError(f"Recipe {recipe.name!r} at scale {at['scale']!r}", problems)
    return axes, tried


def is_refused(
    recipe: Recipe, scale: str | None, settings: Iterable[str], name: str, values: AxisValues
) -> bool:
    """Whether a configuration cannot be trained at these values of its axes,
    as far as its methods say.

    A comparison of two passes in which nothing is drawn counts as refused: it would always be zero,
    but for dropout that the model has built in.

    Args:
        recipe: with this configuration.
        scale: of the recipe.
        settings: changes as on the command line.
        name: of the configuration.
        values: one for each axis.
    """
    from dampen.studies.checks import check_trial
    from dampen.studies.methods_text import compares_nothing

    at, over = recipe.at(scale), read_settings(settings)[0]
    row = next(row for row in at["rows"] if row["name"] == name)
    filled = copy.deepcopy(_fill(_config(at, row, over), values))
    wrong = [p for key, v in values.items() if "." in key for p in _put(filled, key, v)]
    run, problems = Run.parse({**filled, "seed": 0}, "")
    if run is None or problems or wrong or check_trial(run):
        return True
    return compares_nothing(run.methods)


def _unused(search: Mapping[str, Any], axes: Iterable[Sequence[Axis]]) -> list[str]:
    known = {axis.key for own in axes for axis in own}
    return [
        k
        for k, v in search.items()
        if k not in COUNTS and "." not in k and v is not False and k not in known
    ]


def _is_set(over: Mapping[str, Any], key: str) -> bool:
    """Whether --set has said a value for a dotted key, which is then not searched."""
    value: Any = over
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _choices(
    config: Mapping[str, Any], grid: Mapping[str, list[Any]], seeds: int, path: str
) -> tuple[list[AxisValues], list[str]]:
    """The grid points of one row, made of the axes that it uses."""
    used = {k: v for k, v in grid.items() if "." in k or mentions(config, f"${k}")}
    count = math.prod(map(len, used.values())) * seeds
    if count > MOST:
        return [], [
            f"{path}grid: it makes {count} trials with {seeds} seeds; at most {MOST} can be planned"
        ]
    return [
        dict(zip(used, values, strict=True)) for values in itertools.product(*used.values())
    ], []


def _points(
    config: dict[str, Any],
    choices: Sequence[AxisValues],
    seeds: Sequence[int],
    row: Mapping[str, Any],
    plan: Comparison,
    path: str,
    names: bool,
) -> tuple[list[Setting], list[str]]:
    """The points of one row with their trials. Two settings that make the same
    trials are one point."""
    from dampen.studies.checks import check_trial

    points: dict[tuple[str, ...], Setting] = {}
    problems: list[str] = []
    for chosen in choices:
        filled = copy.deepcopy(_fill(config, chosen))
        for key, value in chosen.items():
            if "." in key:
                problems += [f"{path}grid.{problem}" for problem in _put(filled, key, value)]
        first, found = Run.parse({**filled, "seed": seeds[0]}, path)
        if first is not None and names:
            found = check_trial(first, path)
        problems += found
        # The seeds of a setting differ in nothing else, so one of them is read and checked.
        runs = [replace(first, seed=seed) for seed in seeds] if first is not None else []
        plan.runs |= {run.id: run for run in runs}
        ids = {str(run.seed): run.id for run in runs}
        published: dict[str, Any] = next(
            (p["published"] for p in row.get("published_grid", []) if _matches(p["grid"], chosen)),
            {},
        )
        points.setdefault(tuple(ids.values()), Setting(chosen, ids, published))
    return list(points.values()), problems


def _short(value: Any) -> Any:
    """A value of a grid for a label: what a search found has sixteen digits."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _matches(wanted: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    return all(chosen.get(k) == v for k, v in wanted.items())


def _fill(value: Any, chosen: Mapping[str, Any]) -> Any:
    """Replace "$name" by the grid's value."""
    if isinstance(value, Mapping):
        return {k: _fill(v, chosen) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_fill(v, chosen) for v in value]
    return (
        chosen.get(value[1:], value) if isinstance(value, str) and value.startswith("$") else value
    )


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
        return [
            f"--set {setting}: {key} is a table; say which "
            f"of its values, such as {key}.{TABLES[key]}"
        ]
    return [f"--set {problem}" for problem in _put(over, key, value)]


# --------------------
# A plan made again from the trials in its folder, where plan.json is damaged: no trial is ever
# lost with it.


def load_comparison(folder: Path) -> Comparison:
    """The plan of a folder; where plan.json is damaged, what its trials say of it.

    Args:
        folder: that holds plan.json.
    """
    try:
        return Comparison.load(folder)
    except (LabError, KeyError, TypeError, AttributeError) as error:
        plan = rebuild_plan(folder)
        if not plan.runs:
            raise LabError(
                f"{folder / 'plan.json'} is damaged ({error}), and no trial lies beside it."
            ) from error
        return plan


def rebuild_plan(folder: Path) -> Comparison:
    """One row for each list of methods, one point for each other difference; the row without
    methods is the baseline.

    Names of rows, published numbers and the command stood in plan.json alone; the command that made
    it brings them back, and finds every trial where it was.

    Args:
        folder: that holds the folders of runs.
    """
    found = [_stored_run(path.parent) for path in sorted(folder.glob("*/config.json"))]
    trials = {run.id: run for run in found if run is not None}
    rows: dict[str, Config] = {}
    points: dict[tuple[str, str], Setting] = {}
    for id, trial in trials.items():
        name = " + ".join(_method_name(m) for m in trial.methods) or "plain"
        other = json.dumps(
            {k: v for k, v in trial.canonical().items() if k not in ("seed", "methods")},
            sort_keys=True,
        )
        row = rows.setdefault(
            name, Config(name, list(trial.methods), [], baseline=not trial.methods)
        )
        if (name, other) not in points:
            points[name, other] = Setting({}, {})
            row.settings.append(points[name, other])
        points[name, other].ids[str(trial.seed)] = id
    for row in rows.values():
        for i, point in enumerate(row.settings if len(row.settings) > 1 else []):
            point.grid["point"] = i
    finals = (_primary(folder / id) for id in trials)
    header: dict[str, Any] = dict.fromkeys(HEADER, "")
    header |= {
        "title": folder.name,
        "metric": next(filter(None, finals), ""),
        "report": "best",
        "cost": "",
    }
    departures = ["plan.json was damaged: rows and their names were made again from the trials"]
    seeds = sorted({t.seed for t in trials.values()})
    ordered = sorted(rows.values(), key=lambda row: not row.baseline)
    return Comparison(folder.name, "rebuilt", header, departures, seeds, ordered, trials)


def _stored_run(folder: Path) -> Run | None:
    try:
        return RunStore(folder).trial()
    except LabError:
        return None


def _primary(folder: Path) -> str:
    try:
        final = RunStore(folder).final() or {}
    except LabError:
        return ""
    return str((final.get("primary") or [""])[0])


def _method_name(method: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v)}" for k, v in method.items() if k != "name")
    return f"{method['name']}({arguments})" if arguments else str(method["name"])
