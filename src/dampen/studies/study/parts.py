"""The comparison by the lab's own trainer, on built-in or on the user's own model and data."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dampen.extensions import hint
from dampen.names import nearest
from dampen.studies.config.methods_text import parse_rows
from dampen.studies.config.names import preset, task_of
from dampen.studies.config.recipe import Recipe, merge
from dampen.studies.config.trial import TrainOptions
from dampen.studies.data import DATASETS
from dampen.studies.data.own_function import content_hash, read_parts
from dampen.studies.data.recognize import recognize
from dampen.studies.data.sets import locate
from dampen.studies.errors import ConfigError
from dampen.studies.metrics import not_measured, primary
from dampen.studies.records.fingerprint import fingerprint
from dampen.studies.records.metric import direction
from dampen.studies.report.summary import plural
from dampen.studies.study.own_dropout import own_dropout, told
from dampen.studies.study.request import ComparisonRequest, metric_of, planned, recipe_of, seeds_of, with_recorded
from dampen.studies.study.rows import PLAIN, Rows, read_rows
from dampen.studies.trainer.build import MODEL
from dampen.studies.trainer.function import Function, as_function, function_in_file
from dampen.studies.trainer.parts import Parts

TRAIN = tuple(f.name for f in fields(TrainOptions))
"""Parameters of a row that the lab's trainer knows; `mixup` and `augment` go to the data."""


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
    """The comparison of methods on a model and data, trained by the lab."""
    section, parts = data_section(data if data is not None else "digits", data_dir)
    chosen, parts = model_section(model, parts)
    if chosen is not None and chosen["name"].startswith("hf/") and DATASETS[section["name"]].spec.task == "text":
        section["tokenizer"] = MODEL
    base: dict[str, Any] = merge({"data": section}, preset(section["name"]))
    base = merge(base, {"model": chosen}) if chosen is not None else base
    if chosen is None and section["name"] == "function":
        raise ConfigError("--model", ["data from a function needs a model: say --model file.py:build or another"])
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
    asked = planned(recipe, settings)
    asked.header |= {"folds": folds} if folds is not None else {}
    place = _place(asked.name, asked.trials, folder, out, resume)
    plan = with_recorded(asked, place)
    remark = told(own_dropout(parts.model if parts else None, asked.chosen()[0].model), name)
    plan.departures = list(dict.fromkeys([*plan.departures, *([remark] if remark else [])]))
    return ComparisonRequest(recipe, plan, place, asked.chosen(), remark=remark, parts=parts, settings=tuple(settings))


def _judged(said: tuple[str, str] | None, task: str) -> str:
    """The metric that judges: the one that was said, if the task's trainer measures it, else the task's own."""
    if said is None:
        return primary(task)[0]
    name, way = said
    problem = not_measured(name, task)
    if not problem and way != direction(name):
        problem = f"of {name!r} {'less' if direction(name) == 'min' else 'more'} is better; leave out ':{way}'"
    if problem:
        raise ConfigError("The comparison", [f"metric: {problem}"])
    return name


def comparison(data: Any, model: Any, methods: Any, seeds: int, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a comparison, written as on the command line.

    >>> recipe = comparison("digits", "vit(depth=2)", "drop_key(rate=0.3), drop_attention + drop_key", 5)
    >>> [row["name"] for row in recipe.rows]
    ['plain', 'drop_key(rate=0.3)', 'drop_attention + drop_key']
    >>> recipe.base["model"]["depth"], recipe.base["model"]["width"]
    (2, 48)
    """
    return request_parts(model, data, methods, seeds, settings=settings).recipe


def data_section(data: Any, data_dir: str | None) -> tuple[dict[str, Any], Parts]:
    """The data of the trials as plain data, and where it is. A user's own has a fingerprint of its content."""
    if callable(data) or (isinstance(data, str) and ".py:" in data):
        function = as_function(data) if callable(data) else function_in_file(data, "--data")
        content = content_hash(read_parts(function.load(), function.code.name))
        section = {"name": "function", "source": function.code.name, "code": function.code.digest}
        return section | {"fingerprint": content}, Parts(read=function)
    if isinstance(data, str) and data in DATASETS and data not in ("table", "function"):
        found = fingerprint_of_set(data, data_dir)
        return {"name": data, **({"fingerprint": found} if found else {})}, Parts()
    path = Path(data).expanduser()
    if not path.exists():
        known = f"--data: there is no data set and no path {str(data)!r}{hint('dampen.data', str(data), DATASETS)}"
        raise ConfigError("The comparison", [known])
    section = {"name": recognize(path), "source": path.resolve().name, "fingerprint": fingerprint(path)}
    return section, Parts(data=str(path.resolve()))


def fingerprint_of_set(name: str, data_dir: str | None) -> str | None:
    """The fingerprint of the data that a general reader finds: its files are the user's own, and no official set."""
    place = locate(name, data_dir) if name in DATASETS and DATASETS[name].general else None
    return fingerprint(place) if place is not None else None


def model_section(model: Any, parts: Parts) -> tuple[dict[str, Any] | None, Parts]:
    """The model of the trials as plain data, and where it is."""
    if model is None:
        return None, parts
    if callable(model):
        function = as_function(model)
        return {"name": function.code.name, "code": function.code.digest}, replace(parts, build=function)
    text = str(model)
    if text.startswith("hf/"):
        name, arguments = _arguments(text)
        folder = Path(name.removeprefix("hf/")).expanduser()
        if not (folder / "config.json").is_file():
            problem = f"{folder} holds no saved Hugging Face model: there is no config.json. Say --model hf/FOLDER"
            raise ConfigError("--model", [problem])
        section = {"name": f"hf/{folder.resolve().name}", "fingerprint": fingerprint(folder), **arguments}
        return section, replace(parts, model=str(folder.resolve()))
    if ".py:" in text:
        name, arguments = _arguments(text)
        found: Function = function_in_file(name, "--model")
        return {"name": found.code.name, "code": found.code.digest, **arguments}, replace(parts, build=found)
    name, arguments = _arguments(text)
    return {"name": name, **arguments}, parts


def _arguments(text: str) -> tuple[str, dict[str, Any]]:
    """`vit(width=64)`, `timm/vit_tiny_patch16_224(drop_rate=0.1)`, `file.py:build(depth=3)`: name and arguments."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return text.strip(), {}
    try:
        ((parsed,),) = parse_rows(f"x({rest}").values()
    except (ConfigError, ValueError) as error:
        raise ConfigError("--model", [f"cannot read {text!r}: write name or name(argument=value)"]) from error
    return name.strip(), {k: v for k, v in parsed.items() if k != "name"}


def plain_rows(rows: Rows) -> Rows:
    """The rows without their parameters; the lab's trainer cannot take regularizers that have no plain form."""
    if rows.objects:
        named = [r.name for r in rows.rows if any("object" in m for m in r.methods)]
        problem = f"rows {named}: a regularizer of your own class runs in your own training (train=), not in the lab's"
        raise ConfigError("The list of rows", [problem])
    return Rows([replace(row, params={}) for row in rows.rows])


def _with_params(row: dict[str, Any], rows: Rows, base: Mapping[str, Any]) -> dict[str, Any]:
    (own,) = (r for r in rows.rows if r.name == row["name"])
    return {**row, **sections(own.params, base, f"params of row {own.name!r}")}


def sections(params: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters such as weight_decay, label_smoothing, patience or mixup, in the sections that they belong to."""
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
            problems.append(f"{where}: unknown parameter {key!r}{nearest(key, [*TRAIN, 'mixup', 'augment'])}")
    if problems:
        raise ConfigError("The comparison", problems)
    return found


def _place(name: str, trials: Mapping[str, Any], folder: Any, out: Path | str, resume: bool) -> Path:
    """Same conditions, same folder."""
    kind = {k: v for k, v in next(iter(trials.values())).canonical().items() if k not in ("seed", "methods")}
    mark = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]
    place = Path(folder) if folder is not None else Path(out) / f"{name}-{mark}"
    if not resume and (place / "plan.json").exists():
        raise ConfigError("folder", [f"{place} holds a study already, and resume=False; give another folder"])
    return place


def _command(data: Any, model: Any, methods: Any, seeds: Any, settings: Sequence[str]) -> list[str]:
    """The command that repeats it, as far as it can be written on one."""
    if not all(x is None or isinstance(x, str | Path) for x in (data, model)) or not isinstance(methods, str):
        return ["dampen.compare(...)"]
    command = ["dampen", "compare", "--data", str(data), *(["--model", str(model)] if model is not None else [])]
    command += ["--methods", methods, "--seeds", str(len(seeds_of(seeds)))]
    return command + [part for s in settings for part in ("--set", s)]
