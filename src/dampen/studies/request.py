"""Turn a comparison request into a run plan: configurations x seeds of a user's function, or of the
built-in trainer."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dampen.extensions import hint
from dampen.names import nearest
from dampen.studies.checks import preset, task_of
from dampen.studies.comparison import (
    Comparison,
    load_comparison,
    make_comparison,
    read_setting,
)
from dampen.studies.configs import PLAIN, Rows, check_params, read_rows
from dampen.studies.data import DATASETS
from dampen.studies.data.arrays import content_hash, read_function
from dampen.studies.data.sets import locate, recognize
from dampen.studies.environment import git_state
from dampen.studies.errors import ConfigError
from dampen.studies.files import fingerprint
from dampen.studies.methods_text import parse_rows
from dampen.studies.metric import direction
from dampen.studies.metrics import not_measured, primary
from dampen.studies.plugins import active
from dampen.studies.recipe import Recipe, merge
from dampen.studies.report.summary import plural
from dampen.studies.run import Run, TrainOptions
from dampen.studies.store import RunStore, read_run
from dampen.studies.trainer.data import MODEL
from dampen.studies.trainer.user_function import (
    Function,
    Parts,
    as_function,
    check_signature,
    function_in_file,
)
from dampen.studies.trainer.user_result import guess_direction
from dampen.studies.trust import code_of_plan, require_approval, require_no_remote_code
from dampen.studies.user_code import Code


@dataclass
class ComparisonRequest:
    """A comparison that can start: the recipe, its plan, where it goes, and the function where
    there is one."""

    recipe: Recipe
    plan: Comparison
    folder: Path
    wanted: list[Run]  # the requested runs; the plan also has what was recorded before
    function: Function | None = None
    remark: str = ""  # what the user should know before it starts
    parts: Parts | None = None  # the user's model and data, for the built-in trainer
    settings: tuple[str, ...] = ()  # changes as on the command line, which a search applies again


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """`8` means seeds 0 to 7; a list is taken as it is.

    Args:
        seeds: how many, or which.
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError("The comparison", [f"seeds: must be 1 or more, got {seeds}"])
        return list(range(seeds))
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if (
        not listed
        or len(set(listed)) < len(listed)
        or not all(type(s) is int and s >= 0 for s in listed)
    ):
        raise ConfigError(
            "The comparison", [f"seeds: a number, or different whole numbers from 0, got {seeds!r}"]
        )
    return listed


def metric_of(metric: str | Sequence[str] | None) -> tuple[str, str] | None:
    """`"accuracy"`, `"rmse:min"` or `("rmse", "min")`; the direction follows from the
    name where it is not said.

    Args:
        metric: as the user gave it, or None.

    >>> metric_of("f1"), metric_of("score:min")
    (('f1', 'max'), ('score', 'min'))
    """
    if metric is None:
        return None
    parts = metric.split(":") if isinstance(metric, str) else list(metric)
    if len(parts) == 1:
        parts.append(guess_direction(parts[0]))
    if len(parts) != 2 or parts[1] not in ("max", "min") or not parts[0]:
        raise ConfigError(
            "The comparison", [f"metric: expected a name, 'name:max' or 'name:min', got {metric!r}"]
        )
    return parts[0], parts[1]


def request_own(
    function: Function,
    methods: Any,
    seeds: int | Sequence[int] = 8,
    *,
    reference: str = PLAIN,
    metric: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    grid: Mapping[str, list[Any]] | None = None,
    folder: Path | str | None = None,
    out: Path | str = "runs",
    same_code: bool = False,
    resume: bool = True,
    command: Sequence[str] = (),
) -> ComparisonRequest:
    """The comparison of a user's own training; `settings` are parameters as on the
    command line, `lr=0.1`."""
    rows = read_rows(methods, reference)
    judged = metric_of(metric)
    params = {**(params or {}), **_parameters(settings)}
    _refuse_both(settings, {row.name: row.params for row in rows.rows})
    check_signature(function.load(), function.code.name)
    problems = check_params(params, rows.rows)
    if problems:
        raise ConfigError("The comparison", problems)
    section = {
        "name": function.code.name,
        "code": function.code.digest,
        "params": dict(params or {}),
    }
    name = "compare-" + re.sub(
        r"[^\w.-]+", "-", function.code.name.replace(".py:", "-").replace("notebook:", "")
    )
    place = _folder(
        folder, out, name, {"name": section["name"], "params": section["params"]}, resume
    )
    section["code"], remark = _code(section, place, same_code, function.code)
    if function.code.untracked:
        named = "; ".join(function.code.untracked)
        remark = "\n".join(filter(None, [remark, f"Changes in these are not tracked: {named}."]))
    base = {"function": section, "seeds": seeds_of(seeds)}
    title = f"{function.code.name}, {plural(len(base['seeds']), 'seed')}"
    recipe = recipe_of(
        name, title, rows, reference, base, judged[0] if judged else "", shlex.join(command)
    )
    recipe = replace(recipe, grid={f"function.params.{k}": v for k, v in (grid or {}).items()})
    asked = planned(recipe)
    asked.header["code"] = {
        "files": sorted(function.code.files),
        "outside": sorted(path.name for path in function.code.outside),
        "untracked": list(function.code.untracked),
        **git_state(function.code.root),
    }
    if judged:
        asked.header["mode"] = judged[1]
    plan = with_recorded(asked, place)
    if judged:
        _check_metric(judged[0], plan, place)
    return ComparisonRequest(
        recipe, plan, place, asked.chosen(), sent(function, plan, rows, judged), remark
    )


def _check_metric(metric: str, plan: Comparison, folder: Path) -> None:
    """Refuse a metric that no recorded run has: it was not returned, and further runs would not
    return it either."""
    logged = (read_run(folder / id, run) for id, run in plan.runs.items())
    known = [run.final.test for run in logged if run and run.final and run.final.test]
    if known and not any(metric in test for test in known):
        names = ", ".join(dict.fromkeys(name for test in known for name in test))
        raise ConfigError(
            "The comparison", [f"metric: the recorded runs have no {metric!r}, only {names}"]
        )


def _parameters(settings: Sequence[str]) -> dict[str, Any]:
    """What --set says, by name."""
    read = [read_setting(setting) for setting in settings]
    if problems := [problem for _, _, problem in read if problem]:
        raise ConfigError("The comparison", problems)
    return {key: value for key, value, _ in read}


def _refuse_both(settings: Sequence[str], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a value that --set and the params(...) of a row both say: nobody could
    know which one is meant.

    Args:
        settings: as on the command line.
        rows: what the params(...) of each row set, in the names of --set.
    """
    said = {setting.partition("=")[0]: setting for setting in settings}
    problems = [
        f"--set {said[key]} and "
        f"params({key.rpartition('.')[2]}={value!r}) of row {name!r}: say one of them"
        for name, values in rows.items()
        for key, value in values.items()
        if key in said
    ]
    if problems:
        raise ConfigError("The comparison", problems)


def recipe_of(
    name: str,
    title: str,
    rows: Rows,
    reference: str,
    base: dict[str, Any],
    metric: str,
    command: str,
) -> Recipe:
    """The recipe of a comparison: it has no paper, and every row says only what differs."""
    listed = []
    for row in rows.rows:
        own: dict[str, Any] = {
            "name": row.name,
            "methods": row.methods,
            "baseline": row.name == reference,
        }
        listed.append(own | ({"function": {"params": row.params}} if row.params else {}))
    return Recipe(
        name=name,
        title=title,
        paper="",
        table="",
        cost="",
        command=command,
        departures=[],
        metric=metric,
        base=base,
        rows=listed,
        scales={"laptop": {}},
        plugins=[name for name, _ in active()],
    )


def planned(recipe: Recipe, settings: Sequence[str] = ()) -> Comparison:
    """The plan of a comparison. Problems are reported in words of the comparison, since nobody
    wrote a recipe. What is wrong in every configuration is reported once."""
    try:
        return make_comparison(recipe, settings=settings)
    except ConfigError as error:
        marks = [f"rows[{i}] {row['name']}: " for i, row in enumerate(recipe.rows)]
        by_row = {
            mark: [p.removeprefix(mark) for p in error.problems if p.startswith(mark)]
            for mark in marks
        }
        common = [p for p in by_row[marks[0]] if all(p in found for found in by_row.values())]
        rest = [p for p in error.problems if not p.startswith(tuple(marks))]
        own = [
            f"row {row['name']!r}: {p}"
            for row, mark in zip(recipe.rows, marks, strict=True)
            for p in by_row[mark]
        ]
        raise ConfigError(
            "The comparison", rest + common + [p for p in own if not p.endswith(tuple(common))]
        ) from None


def sent(
    function: Function, plan: Comparison, rows: Rows, metric: tuple[str, str] | None
) -> Function:
    """The function with what its trials need: names of rows, regularizers without a
    plain form, the metric."""
    names = plan.config_of_run()
    return replace(
        function, rows=names, objects={**function.objects, **rows.objects}, metric=metric
    )


def _folder(
    folder: Path | str | None, out: Path | str, name: str, kind: dict[str, Any], resume: bool
) -> Path:
    """Same function and parameters, same folder; the code is not part of it, so that its changes
    can be reported."""
    mark = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]
    place = Path(folder) if folder is not None else Path(out) / f"{name}-{mark}"
    if resume or not (place / "plan.json").exists():
        return place
    if folder is not None:
        raise ConfigError(
            "folder", [f"{place} holds a study already, and resume=False; give another folder"]
        )
    return next(
        p for i in range(2, 10_000) if not (p := place.with_name(f"{place.name}-{i}")).exists()
    )


def _code(section: dict[str, Any], folder: Path, same_code: bool, code: Code) -> tuple[str, str]:
    """The hash that trials are known by, and what to say where the code is another than that of
    earlier records."""
    if not (folder / "plan.json").exists():
        return section["code"], ""
    earlier = load_comparison(folder)
    done = {
        t.function["code"]
        for i, t in earlier.runs.items()
        if t.function and (folder / i / "final.json").exists()
    }
    if not done or section["code"] in done:
        return section["code"], ""
    if code.earlier in done and _older(code.outside, folder):
        return code.earlier, ""
    if same_code:
        told = f"The code of {section['name']} differs from that of the recorded trials; they count all the same."
        return min(done), told
    return section["code"], (
        f"The code of {section['name']} has changed since "
        f"{_count(earlier, folder)} were recorded: new trials are run. "
        f"Those of the older code stay in {folder} and are listed as such. "
        "same_code=True (--ignore-code-change) would count them."
    )


def _older(files: Sequence[Path], folder: Path) -> bool:
    """Whether no file was changed after the first result was recorded, by an older rule that did
    not track them."""
    recorded = min(p.stat().st_mtime for p in folder.glob("*/final.json"))
    return all(file.stat().st_mtime <= recorded for file in files)


def _count(plan: Comparison, folder: Path) -> str:
    n = sum((folder / i / "final.json").exists() for i in plan.runs)
    return f"{n} trial{'s' * (n != 1)}"


def with_recorded(plan: Comparison, folder: Path) -> Comparison:
    """The plan, with the rows and seeds that were recorded here before
    under the same conditions."""
    if not (folder / "plan.json").exists():
        return plan
    earlier = load_comparison(folder)
    code = {t.function["code"] for t in plan.runs.values() if t.function}
    formats = {t.format for t in plan.runs.values()}
    recorded = {
        i
        for i, t in earlier.runs.items()
        if RunStore(folder / i).done
        and (t.format in formats if t.function is None else t.function["code"] in code)
    }
    if not recorded:
        return plan
    # What is requested now may run. What an earlier plan in this folder names may not,
    # it can come from others.
    wanted = {kept.what for kept in code_of_plan(plan, folder)}
    strange = [kept for kept in code_of_plan(earlier, folder) if kept.what not in wanted]
    require_approval(folder, strange)
    return plan.joined(earlier, recorded)


# --------------------
# The comparison by the built-in trainer, on built-in or on the user's model and data.


TRAIN = tuple(f.name for f in fields(TrainOptions))
"""Parameters of a row that the built-in trainer knows; `mixup` and `augment` go to the data."""


def request_parts(
    model: Any,
    data: Any,
    methods: Any,
    seeds: int | Sequence[int] = 8,
    *,
    reference: str = PLAIN,
    metric: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    folds: int | None = None,
    data_dir: str | None = None,
    folder: Path | str | None = None,
    out: Path | str = "runs",
    resume: bool = True,
) -> ComparisonRequest:
    """The comparison of methods on a model and data, trained by the built-in trainer."""
    section, parts = data_section(data if data is not None else "digits", data_dir)
    chosen, parts = model_section(model, parts)
    if (
        chosen is not None
        and chosen["name"].startswith("hf/")
        and DATASETS[section["name"]].spec.task == "text"
    ):
        section["tokenizer"] = MODEL
    base: dict[str, Any] = merge({"data": section}, preset(section["name"]))
    base = merge(base, {"model": chosen}) if chosen is not None else base
    if chosen is None and section["name"] == "function":
        raise ConfigError(
            "--model", ["data from a function needs a model: say --model file.py:build or another"]
        )
    base = merge(base, sections(params or {}, base, "params"))
    rows = read_rows(methods, reference)
    said = metric_of(metric)
    name = base["model"]["name"]
    judged = _judged(said, task_of(section["name"], name))
    command = _command(data, model, methods, seeds, settings)
    shown = section.get("source", section["name"])
    base["seeds"] = seeds_of(seeds)
    title = f"{shown}: {name}, {plural(len(base['seeds']), 'seed')}"
    if folds is not None:
        base = merge(base, {"data": {"folds": folds}})
        base["seeds"] = [folds * seed + fold for seed in seeds_of(seeds) for fold in range(folds)]
        title += f" of {folds} folds each, averaged"
    short = "".join(c if c.isalnum() or c in "-_." else "-" for c in f"compare-{shown}-{name}")
    recipe = recipe_of(short, title, plain_rows(rows), reference, base, judged, shlex.join(command))
    recipe = replace(recipe, rows=[_with_params(r, rows, base) for r in recipe.rows])
    _refuse_both(settings, {r["name"]: _leaves(r) for r in recipe.rows})
    asked = planned(recipe, settings)
    asked.header |= {"folds": folds} if folds is not None else {}
    place = _place(asked.name, asked.runs, folder, out, resume)
    plan = with_recorded(asked, place)
    remark = builtin_dropout_warning(
        builtin_dropout(parts.model if parts else None, asked.chosen()[0].model), name
    )
    plan.departures = list(dict.fromkeys([*plan.departures, *([remark] if remark else [])]))
    return ComparisonRequest(
        recipe, plan, place, asked.chosen(), remark=remark, parts=parts, settings=tuple(settings)
    )


def _judged(said: tuple[str, str] | None, task: str) -> str:
    """The metric that judges: the one that was said, if the task's trainer measures
    it, else the task's own."""
    if said is None:
        return primary(task)[0]
    name, way = said
    problem = not_measured(name, task)
    if not problem and way != direction(name):
        problem = f"of {name!r} {'less' if direction(name) == 'min' else 'more'} is better; leave out ':{way}'"
    if problem:
        raise ConfigError("The comparison", [f"metric: {problem}"])
    return name


def comparison(
    data: Any, model: Any, methods: Any, seeds: int, settings: Sequence[str] = ()
) -> Recipe:
    """The recipe of a comparison, written as on the command line.

    >>> recipe = comparison("digits", "vit(depth=2)", "drop_key(rate=0.3), drop_attention + drop_key", 5)
    >>> [row["name"] for row in recipe.rows]
    ['plain', 'drop_key(rate=0.3)', 'drop_attention + drop_key']
    >>> recipe.base["model"]["depth"], recipe.base["model"]["width"]
    (2, 48)
    """
    return request_parts(model, data, methods, seeds, settings=settings).recipe


def data_section(data: Any, data_dir: str | None) -> tuple[dict[str, Any], Parts]:
    """The data of the trials as plain data, and where it is. A user's own has a
    fingerprint of its content."""
    if callable(data) or (isinstance(data, str) and ".py:" in data):
        function = as_function(data) if callable(data) else function_in_file(data, "--data")
        content = content_hash(read_function(function.load(), function.code.name))
        section = {"name": "function", "source": function.code.name, "code": function.code.digest}
        return section | {"fingerprint": content}, Parts(read=function)
    if isinstance(data, str) and data in DATASETS and data not in ("table", "function"):
        found = fingerprint_of_set(data, data_dir)
        return {"name": data, **({"fingerprint": found} if found else {})}, Parts()
    path = Path(data).expanduser()
    if not path.exists():
        named = [name for name, source in DATASETS.items() if not source.general]
        near = hint("dampen.data", str(data), named)
        problem = f"--data: unknown dataset or path {str(data)!r} (no such file: {path.absolute()})"
        raise ConfigError("The comparison", [problem + near])
    section = {
        "name": recognize(path),
        "source": path.resolve().name,
        "fingerprint": fingerprint(path),
    }
    return section, Parts(data=str(path.resolve()))


def fingerprint_of_set(name: str, data_dir: str | None) -> str | None:
    """The fingerprint of the data that a general reader finds: its files are the user's own, and no
    official set."""
    place = locate(name, data_dir) if name in DATASETS and DATASETS[name].general else None
    return fingerprint(place) if place is not None else None


def model_section(model: Any, parts: Parts) -> tuple[dict[str, Any] | None, Parts]:
    """The model of the trials as plain data, and where it is."""
    if model is None:
        return None, parts
    if callable(model):
        function = as_function(model)
        return {"name": function.code.name, "code": function.code.digest}, replace(
            parts, build=function
        )
    text = str(model)
    if text.startswith("hf/"):
        name, arguments = _arguments(text)
        folder = Path(name.removeprefix("hf/")).expanduser()
        if not (folder / "config.json").is_file():
            problem = f"{folder} holds no saved Hugging Face model: there is no config.json. Say --model hf/FOLDER"
            raise ConfigError("--model", [problem])
        require_no_remote_code(folder)
        section = {
            "name": f"hf/{folder.resolve().name}",
            "fingerprint": fingerprint(folder),
            **arguments,
        }
        return section, replace(parts, model=str(folder.resolve()))
    if ".py:" in text:
        name, arguments = _arguments(text)
        found: Function = function_in_file(name, "--model")
        return {"name": found.code.name, "code": found.code.digest, **arguments}, replace(
            parts, build=found
        )
    name, arguments = _arguments(text)
    return {"name": name, **arguments}, parts


def _arguments(text: str) -> tuple[str, dict[str, Any]]:
    """`vit(width=64)`, `timm/vit_tiny_patch16_224(drop_rate=0.1)`, `file.py:build(depth=3)`: name
    and arguments."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return text.strip(), {}
    try:
        ((parsed,),) = parse_rows(f"x({rest}").values()
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            "--model", [f"cannot read {text!r}: write name or name(argument=value)"]
        ) from error
    return name.strip(), {k: v for k, v in parsed.items() if k != "name"}


def plain_rows(rows: Rows) -> Rows:
    """The rows without their parameters; the built-in trainer cannot take regularizers
    that have no plain form."""
    if rows.objects:
        named = [r.name for r in rows.rows if any("object" in m for m in r.methods)]
        problem = (
            f"{named}: regularizers of your own classes need your own training function (train=)"
        )
        raise ConfigError("The list of rows", [problem])
    return Rows([replace(row, params={}) for row in rows.rows])


def _with_params(row: dict[str, Any], rows: Rows, base: Mapping[str, Any]) -> dict[str, Any]:
    (own,) = (r for r in rows.rows if r.name == row["name"])
    return {**row, **sections(own.params, base, f"params of row {own.name!r}")}


def _leaves(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a row says of its own in a section, by their dotted names."""
    own = {k: v for k, v in row.items() if isinstance(v, Mapping)}
    return {
        f"{section}.{key}": value
        for section, values in own.items()
        for key, value in values.items()
    }


def sections(params: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters such as weight_decay, label_smoothing, patience or mixup, in the sections that
    they belong to."""
    found: dict[str, Any] = {}
    problems = []
    for key, value in params.items():
        if key in TRAIN:
            found.setdefault("train", {})[key] = value
        elif key == "mixup":
            before = base["data"].get("augment") or []
            before = [before] if isinstance(before, str | dict) else list(before)
            found["data"] = {"augment": [*before, {"name": "mixup", "alpha": value}]}
        elif key == "augment":
            found["data"] = {"augment": value}
        else:
            problems.append(
                f"{where}: unknown parameter {key!r}{nearest(key, [*TRAIN, 'mixup', 'augment'])}"
            )
    if problems:
        raise ConfigError("The comparison", problems)
    return found


def _place(
    name: str, trials: Mapping[str, Any], folder: Any, out: Path | str, resume: bool
) -> Path:
    """Same conditions, same folder."""
    kind = {
        k: v
        for k, v in next(iter(trials.values())).canonical().items()
        if k not in ("seed", "methods")
    }
    mark = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]
    place = Path(folder) if folder is not None else Path(out) / f"{name}-{mark}"
    if not resume and (place / "plan.json").exists():
        raise ConfigError(
            "folder", [f"{place} holds a study already, and resume=False; give another folder"]
        )
    return place


def _command(data: Any, model: Any, methods: Any, seeds: Any, settings: Sequence[str]) -> list[str]:
    """The command that repeats it, as far as it can be written on one."""
    if not all(x is None or isinstance(x, str | Path) for x in (data, model)) or not isinstance(
        methods, str
    ):
        return ["dampen.compare(...)"]
    command = [
        "dampen",
        "compare",
        "--data",
        str(data),
        *(["--model", str(model)] if model is not None else []),
    ]
    command += ["--methods", methods, "--seeds", str(len(seeds_of(seeds)))]
    return command + [part for s in settings for part in ("--set", s)]


# --------------------
# What a saved model drops by itself: every row of a comparison has it, the one called plain too.


def builtin_dropout(folder: str | None, model: Mapping[str, Any]) -> dict[str, float]:
    """The rates above 0 of the model's configuration, as the trial changes them; none for a model
    that is no folder."""
    path = Path(folder or "") / "config.json"
    if folder is None or not path.is_file():
        return {}
    try:
        config = {**json.loads(path.read_text(encoding="utf-8")), **model}
    except (
        ValueError,
        TypeError,
    ):  # no JSON, or no table: the library that loads it says so better
        return {}
    found = {k: v for k, v in config.items() if "drop" in k and isinstance(v, float)}
    return {key: value for key, value in found.items() if value > 0}


def builtin_dropout_warning(rates: Mapping[str, float], name: str) -> str:
    """In a sentence, with what to write instead; empty where nothing is dropped.

    >>> options = {"hidden_dropout_prob": 0.1}
    >>> print(builtin_dropout_warning(options, "hf/bert"))  # doctest: +NORMALIZE_WHITESPACE
    hf/bert drops by itself (hidden_dropout_prob=0.1), in every row, plain too; to compare with a
    model that does not, \
write --set model.hidden_dropout_prob=0.0
    """
    if not rates:
        return ""
    said = ", ".join(f"{key}={value:g}" for key, value in rates.items())
    off = " ".join(f"--set model.{key}=0.0" for key in rates)
    return f"{name} drops by itself ({said}), in every row, plain too; to compare with a model that does not, write {off}"
