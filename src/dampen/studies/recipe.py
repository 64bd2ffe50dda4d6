"""Recipes: a comparison as TOML data. `plan.py` turns one into trials.

    title, paper, table, cost, command      what it reproduces, what it takes, what to type
    plugins = ["reproductions"]             modules with data sets, models and more: see
    `dampen.studies.plugins` departures = ["..."]                    every difference from the
    paper, in words metric = "accuracy"                     the test metric the table shows
    scale = "laptop"                        the default scale
    report = "best" | "all"                 choose the best grid point on
    validation, or show all of them
    [base]                                  data, model, train, methods, sites, seeds of every row;
    pretrain = { ... }:
                                            what differs in a masked autoencoder's
                                            training that goes before
    [grid]                                  "train.lr" = [...] sets a value; lambda = [...] replaces
    "$lambda" tuning_seeds = [1000, 1001, 1002]       in [base] or a scale: choose each row's
    setting by the mean of validation on
                                            these seeds first, then train it on
                                            `seeds`, which must be others
    [search]                                in place of [grid], also in a scale: every row is tuned,
    the baseline too settings = 12                           per row, each on all tuning seeds: at
    least 3 (default: 10000 to 10002),
                                            fewer only where a scale names its own
    "train.lr" = { low = 1e-3, high = 1e-2, log = true }    a range of every row, with the same
    values in all rows rate = { low = 0.05, high = 0.6 }       a range of the rows that say "$rate";
    weight = [0.3, 1, 3]: a list
                                            A choice at the end of a range extends it
                                            once; min, max bound that
    [scales.laptop]                         what differs at that scale (also cost, departures,
    rows = [...] to run) [[rows]]                                name, methods and what else
    differs; published = { accuracy = [86.4, 0.4] };
                                            search = { rate = { low = 0.1, high = 0.9 } } where its
                                            range is another, search = { "train.lr" = false } where
                                            it is not searched; scales.laptop = { ... } where the
                                            row differs at one scale

Percentages are published as percent, in recipes as in papers.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dampen.extensions import from_plugins, is_in_file
from dampen.names import nearest
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.methods_text import check_fields, check_plain, unknown_keys
from dampen.studies.plugins import load_plugins
from dampen.studies.search_space import COUNTS, SETTINGS, STRENGTH_SETTINGS, read_axis

TUNING_SEEDS = (10_000, 10_001, 10_002)
"""Settings are tried on these where a recipe or a comparison names none. No table uses them."""
FEWEST_TUNING = 3
SECTIONS = (
    "data",
    "model",
    "train",
    "methods",
    "sites",
    "pretrain",
    "function",
    "seeds",
    "tuning_seeds",
)
SCALE_KEYS = (*SECTIONS, "grid", "search", "rows", "cost", "departures", "unavailable")
ROW_SECTIONS = ("data", "model", "train", "methods", "sites", "pretrain", "function")
ROW_KEYS = (
    *ROW_SECTIONS,
    "search",
    "name",
    "scales",
    "published",
    "published_grid",
    "baseline",
    "note",
)


@dataclass(frozen=True)
class Recipe:
    """A recipe as it is in its file, checked for shape."""

    name: str
    base: dict[str, Any]
    rows: list[Any]
    title: str = ""
    paper: str = (
        ""  # a recipe of one's own has none, and need not say what it costs or departs from
    )
    table: str = ""
    cost: str = ""
    command: str = ""
    departures: list[str] = field(default_factory=list)
    metric: str = ""  # what the first result is judged by, where it is not said
    scale: str = "laptop"
    report: str = "best"
    grid: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)

    def at(self, scale: str | None) -> dict[str, Any]:
        """The base at a scale: data, model, train, methods, sites, seeds,
        grid, cost, departures."""
        scale = scale or self.scale
        if scale not in self.scales:
            raise ConfigError(
                self.name, [f"--scale: there is no scale {scale!r}{nearest(scale, self.scales)}"]
            )
        own = self.scales[scale]
        if "unavailable" in own:
            raise LabError(f"{self.name} cannot run at scale {scale!r}: {own['unavailable']}")
        merged = merge(self.base, {k: v for k, v in own.items() if k in SECTIONS})
        grid, search = own.get("grid", self.grid), merge(self.search, own.get("search") or {})
        if own.get("search") is False or ("grid" in own and "search" not in own):
            search = {}
        elif search:
            grid = own.get("grid", {}) if "search" in own else grid
            merged.setdefault("tuning_seeds", list(TUNING_SEEDS))
            self._check_tuning(scale, search, merged["tuning_seeds"], "tuning_seeds" in own)
        departures = [*self.departures, *own.get("departures", [])]
        rows = [row for row in self.rows if row["name"] in own.get("rows", [row["name"]])]
        rows = [merge(row, row.get("scales", {}).get(scale, {})) for row in rows]
        header = {"cost": own.get("cost", self.cost), "departures": departures, "scale": scale}
        if both := sorted({*merged.get("seeds", [0])} & {*merged.get("tuning_seeds", [])}):
            problem = f"tuning_seeds: {both} are seeds of the table too; what was chosen on them would gain there"
            raise ConfigError(f"Recipe {self.name!r} at scale {scale!r}", [problem])
        return {**merged, "grid": grid, "search": search, "rows": rows, **header}

    def code(self) -> list[str]:
        """The code that the recipe names and that this process has not imported:
        plug-ins, methods in files."""
        found = [f"the plug-in {name}" for name in self.plugins if name not in sys.modules]
        return found + [f"the method {name}" for name in sorted(_files_in(vars(self)))]

    def _check_tuning(
        self, scale: str, search: Mapping[str, Any], seeds: Sequence[int], own: bool
    ) -> None:
        """What a search needs: how many settings, and enough seeds to choose by."""
        problems = []
        if SETTINGS not in search:
            problems.append(
                "search.settings: missing; say how many "
                "settings each row gets, such as settings = 12"
            )
        if len(seeds) < FEWEST_TUNING and not own:
            problem = f"tuning_seeds: a search needs at least {FEWEST_TUNING}, got {seeds}: one seed chooses by luck"
            problems.append(
                f"{problem}. Only a scale may name fewer: [scales.{scale}] tuning_seeds = {seeds}"
            )
        if problems:
            raise ConfigError(f"Recipe {self.name!r} at scale {scale!r}", problems)


def _files_in(value: Any) -> set[str]:
    """All text of a recipe that names a method in a file, wherever it is."""
    if isinstance(value, str):
        return {value} if is_in_file(value) else set()
    inside = value.values() if isinstance(value, Mapping) else value
    return set().union(*map(_files_in, inside)) if isinstance(value, Mapping | list) else set()


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; a model or data set with another name
    replaces the old one wholly.

    Args:
        base: a table.
        over: what goes before it.

    >>> merge({"model": {"name": "vit", "depth": 7}, "train": {"lr": 1}}, {"model": {"depth": 2}, "train": {"lr": 3}})
    {'model': {'name': 'vit', 'depth': 2}, 'train': {'lr': 3}}
    >>> merge({"model": {"name": "vit", "depth": 7}}, {"model": {"name": "encoder"}})
    {'model': {'name': 'encoder'}}
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = value
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        ):
            merged[key] = merge(old, value)
    return merged


def list_recipes() -> dict[str, Path]:
    """The recipes that packages and plug-ins add, by name."""
    return {name: Path(path) for name, path in from_plugins("dampen.recipes").items()}


def load_recipe(name: str, import_plugins: bool = True) -> Recipe:
    """A recipe by the path of a TOML file, or by a name that a plug-in gave it; all problems are
    reported at once.

    Args:
        name: a path, or the name that a plug-in gave it.
        import_plugins: import the plug-ins that the recipe names, as running it needs.
    """
    known = list_recipes()
    path = known.get(name.removesuffix(".toml"), Path(name))
    if not path.is_file():
        raise ConfigError(
            f"Recipe {name!r}", [f"there is no such recipe and no such file{_where(name, known)}"]
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"not valid TOML: {error}"]) from error
    except RecursionError:
        raise ConfigError(str(path), ["not valid: nested too deeply"]) from None
    plugins = content.get("plugins", [])
    if problems := _check_strings(plugins, "plugins"):
        raise ConfigError(f"Recipe {name!r}", problems)
    if import_plugins:
        load_plugins(plugins, path)
    names = {place.resolve(): known_name for known_name, place in list_recipes().items()}
    label = names.get(path.resolve(), path.stem)
    recipe, problems = parse_recipe(label, content)
    if recipe is None or problems:
        raise ConfigError(f"Recipe {name!r}", problems)
    return recipe


def _where(name: str, known: Mapping[str, Path]) -> str:
    """Where a recipe of dampen's repository lies, as seen from the current
    folder, or the nearest name."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        path = folder / "reproductions" / f"{name.removesuffix('.toml')}.toml"
        if path.is_file():
            return f"; did you mean {path.relative_to(here) if folder == here else path}?"
    if known:
        return nearest(name, known)
    return "; the papers' recipes are in the folder reproductions of dampen's repository: run them from a clone"


def parse_recipe(name: str, content: Mapping[str, Any]) -> tuple[Recipe | None, list[str]]:
    """The recipe and everything that is wrong with its shape."""
    plain = check_plain(content, "")
    if plain:  # dates, infinite numbers, deep nesting: nothing below is made for them
        return None, plain
    content = {"title": name, "scales": {str(content.get("scale", "laptop")): {}}, **content}
    values, problems = check_fields(Recipe, {"name": name, **content}, "")
    if any(
        not isinstance(content.get(key, {}), Mapping)
        for key in ("base", "grid", "search", "scales")
    ):
        return None, problems
    problems += _check_base(content.get("base", {}))
    problems += _check_grid(content.get("grid", {}), "grid")
    problems += _check_search(content.get("search", {}), "search")
    scales, rows = content.get("scales", {}), content.get("rows", [])
    problems += _check_scales(scales, content.get("scale", "laptop"))
    problems += _check_rows(rows, list(scales))
    if not problems:
        names = [row["name"] for row in rows]
        for scale in scales:
            chosen = scales[scale].get("rows", [])
            problems += [
                f"scales.{scale}.rows: there is no row {r!r}{nearest(r, names)}"
                for r in chosen
                if r not in names
            ]
    if content.get("report", "best") not in ("best", "all"):
        problems.append(f"report: expected 'best' or 'all', got {content['report']!r}")
    return (None if problems else Recipe(**values)), problems


def _check_base(base: Any) -> list[str]:
    if not isinstance(base, Mapping):
        return [f"base: expected a table, got {base!r}"]
    problems = unknown_keys(base, SECTIONS, "base.") + _check_seeds(
        base.get("seeds", [0]), "base.seeds"
    )
    return problems + (
        _check_seeds(base["tuning_seeds"], "base.tuning_seeds") if "tuning_seeds" in base else []
    )


def _check_seeds(seeds: Any, path: str) -> list[str]:
    good = (
        isinstance(seeds, list)
        and seeds
        and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    )
    return (
        []
        if good and len(set(seeds)) == len(seeds)
        else [f"{path}: expected different whole numbers, got {seeds!r}"]
    )


def _check_grid(grid: Any, path: str) -> list[str]:
    if not isinstance(grid, Mapping):
        return [f"{path}: expected a table of lists, got {grid!r}"]
    return [
        f"{path}.{k}: expected a list with values, got {v!r}"
        for k, v in grid.items()
        if not isinstance(v, list) or not v
    ]


def _check_search(search: Any, path: str, settings: bool = True) -> list[str]:
    if not isinstance(search, Mapping):
        return [f"{path}: expected a table of ranges and lists, got {search!r}"]
    problems = []
    for key, least in ((SETTINGS, 2), (STRENGTH_SETTINGS, 1)):
        count = search.get(key, least)
        if key in search and not settings:
            problems.append(f"{path}.{key}: every row gets as many; say it in [search]")
        elif not isinstance(count, int) or isinstance(count, bool) or not least <= count <= 1000:
            problems.append(
                f"{path}.{key}: expected a whole number from {least} to 1000, got {count!r}"
            )
    for key, given in search.items():
        left_out = given is False and not settings
        problems += read_axis(key, given, path)[1] if key not in COUNTS and not left_out else []
    return problems


def _check_scales(scales: Any, default: Any) -> list[str]:
    if not isinstance(scales, Mapping) or not scales:
        return ["scales: missing; say [scales.laptop] and [scales.paper]"]
    problems = (
        []
        if default in list(scales)
        else [f"scale: there is no [scales.{default}]{nearest(default, scales)}"]
    )
    for name, scale in scales.items():
        if not isinstance(scale, Mapping):
            problems.append(f"scales.{name}: expected a table, got {scale!r}")
            continue
        problems += unknown_keys(scale, SCALE_KEYS, f"scales.{name}.")
        if not re.fullmatch(r"[\w.-]+", name):  # it names a folder
            problems.append(f"scales.{name!r}: expected letters, digits, '.', '-' and '_'")
        for key in ("rows", "departures"):
            problems += _check_strings(scale.get(key, []), f"scales.{name}.{key}")
        for key in ("cost", "unavailable"):
            if not isinstance(scale.get(key, ""), str):
                problems.append(f"scales.{name}.{key}: expected a string, got {scale[key]!r}")
        for key in ("seeds", "tuning_seeds"):
            problems += _check_seeds(scale[key], f"scales.{name}.{key}") if key in scale else []
        problems += _check_grid(scale.get("grid", {}), f"scales.{name}.grid")
        problems += _check_search(scale.get("search") or {}, f"scales.{name}.search")
    return problems


def _check_strings(value: Any, path: str) -> list[str]:
    good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    return [] if good else [f"{path}: expected a list of strings, got {value!r}"]


def _check_rows(rows: Any, scales: list[str]) -> list[str]:
    if not isinstance(rows, list) or not rows or not all(isinstance(r, Mapping) for r in rows):
        return ["rows: expected at least one [[rows]] table"]
    problems, names = [], [r.get("name") for r in rows]
    for i, row in enumerate(rows):
        where = f"rows[{i}]"
        if not isinstance(row.get("name"), str) or not row["name"]:
            problems.append(f"{where}.name: missing")
        elif names.index(row["name"]) != i:
            problems.append(f"{where}.name: {row['name']!r} is the name of an earlier row too")
        problems += unknown_keys(row, ROW_KEYS, f"{where}.")
        problems += _check_published(row.get("published", {}), f"{where}.published")
        problems += _check_search(row.get("search", {}), f"{where}.search", settings=False)
        at_scales = row.get("scales", {})
        if not isinstance(at_scales, Mapping) or not all(
            isinstance(own, Mapping) for own in at_scales.values()
        ):
            problems.append(f"{where}.scales: expected a table of tables, got {at_scales!r}")
            at_scales = {}
        problems += unknown_keys(at_scales, scales, f"{where}.scales.")
        for scale, own in at_scales.items():
            problems += unknown_keys(own, ROW_SECTIONS, f"{where}.scales.{scale}.")
        for key, kind in (("baseline", bool), ("note", str)):
            if not isinstance(row.get(key, kind()), kind):
                problems.append(f"{where}.{key}: expected {kind.__name__}, got {row[key]!r}")
        problems += _check_published_grid(row.get("published_grid", []), f"{where}.published_grid")
    if sum(r.get("baseline") is True for r in rows) > 1:
        problems.append("rows: more than one row says baseline = true")
    return problems


def _check_published_grid(points: Any, path: str) -> list[str]:
    good = isinstance(points, list) and all(
        isinstance(p, Mapping) and isinstance(p.get("grid"), Mapping) for p in points
    )
    if not good:
        return [
            f"{path}: expected a list of {{ grid = {{ ... }}, "
            f"published = {{ ... }} }}, got {points!r}"
        ]
    return [
        p
        for j, point in enumerate(points)
        for p in _check_published(point.get("published"), f"{path}[{j}].published")
    ]


def _check_published(published: Any, path: str) -> list[str]:
    if not isinstance(published, Mapping):
        return [
            f"{path}: expected {{ metric = mean }} or {{ metric = [mean, sd] }}, got {published!r}"
        ]
    problems = []
    for metric, value in published.items():
        numbers = value if isinstance(value, list) else [value]
        if not 1 <= len(numbers) <= 2 or not all(
            isinstance(n, int | float) and not isinstance(n, bool) for n in numbers
        ):
            problems.append(f"{path}.{metric}: expected a mean or [mean, sd], got {value!r}")
    return problems


# --------------------
# The demo: one method per idea against the plain model on few digits, where regularizers have
# something to do.
# 337 images to train on and 60 epochs: long enough that the plain model overfits. With 25 epochs
# the stochastic methods only slow training down and look harmful. Rates and length were chosen on
# validation, with other seeds than these.


DEMO_SEEDS = 8

FAMILIES: list[tuple[str, list[dict[str, Any]]]] = [
    ("tokens", [{"name": "patch_dropout", "rate": 0.3}]),
    ("two passes", [{"name": "drop_key", "rate": 0.2}, {"name": "consistency"}]),
    ("keys", [{"name": "drop_key", "rate": 0.3}]),
    ("attention weights", [{"name": "drop_attention", "rate": 0.2, "normalized": False}]),
    ("strongest scores", [{"name": "hard_masking", "rate": 0.3}]),
    ("heads", [{"name": "drop_head", "rate": 0.2}]),
    ("penalties", [{"name": "explicit_dropout", "value": 1.0, "ffn": 1.0}]),
    ("feed-forward", [{"name": "feed_forward_dropout", "rate": 0.2}]),
    (
        "input",
        [{"name": "token_graying"}],
    ),  # does nothing here: a table in which everything helps teaches little
]
"""One representative of each idea."""


def demo_recipe(known: list[str], seeds: int = DEMO_SEEDS) -> Recipe:
    """The demo as a recipe, with every family whose methods are `known`."""
    rows: list[dict[str, Any]] = [{"name": "plain", "methods": [], "baseline": True}]
    for family, methods in FAMILIES:
        if all(m["name"] in known for m in methods):
            names = " + ".join(m["name"] for m in methods)
            rows.append({"name": f"{names} ({family})", "methods": methods})
    return Recipe(
        name="demo",
        title=f"Which regularizer for a small ViT that has seen 337 digits? {seeds} seeds each",
        paper="",
        table="",
        cost="about 3 minutes on two quiet cores",
        command="dampen demo",
        departures=[
            "handwritten digits (8 x 8) and a 2-layer ViT: "
            "a demonstration, not a table of any paper",
            "rates, weights and the number of epochs were chosen before, "
            "on validation, with other seeds than these",
            "the baseline and every method have a weight decay of 1.0, near "
            "what validation selects for the baseline "
            "(1.47 in reproductions/small_data/digits); with the usual 0.05 "
            "most methods seem to gain 2 to 4 points more",
        ],
        metric="accuracy",
        base={
            "data": {"name": "digits", "train_fraction": 0.25},
            "model": {
                "name": "vit",
                "patch_size": 2,
                "width": 32,
                "depth": 2,
                "heads": 4,
                "mlp": 64,
            },
            "train": {
                "epochs": 60,
                "batch_size": 32,
                "lr": 3e-3,
                "weight_decay": 1.0,
                "warmup": 1.0,
                "validate_every": 6,
                "select": "last",
            },
            "seeds": list(range(seeds)),
        },
        rows=rows,
        scales={"laptop": {}},
    )
