"""From what was asked to a plan: rows x seeds of a user's own function, or of the lab's trainer on their parts."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison, make_comparison
from dampen.studies.config.recipe import Recipe
from dampen.studies.config.trial import Run
from dampen.studies.errors import ConfigError
from dampen.studies.plugins import active
from dampen.studies.records.rebuild import load_comparison
from dampen.studies.records.record import RunStore
from dampen.studies.report.summary import plural
from dampen.studies.study.rows import PLAIN, Rows, check_params, read_rows
from dampen.studies.trainer.function import Function
from dampen.studies.trainer.own_result import direction
from dampen.studies.trainer.parts import Parts


@dataclass
class ComparisonRequest:
    """A comparison that can start: the recipe, its plan, where it goes, and the function where there is one."""

    recipe: Recipe
    plan: Comparison
    folder: Path
    wanted: list[Run]  # the trials that were asked for; the plan also has what was recorded before
    function: Function | None = None
    remark: str = ""  # what the user should know before it starts
    parts: Parts | None = None  # the user's own model and data, where the lab trains them
    settings: tuple[str, ...] = ()  # changes as on the command line, which a search applies again


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """`8` means seeds 0 to 7; a list is taken as it is."""
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError("The comparison", [f"seeds: must be 1 or more, got {seeds}"])
        return list(range(seeds))
    listed = list(seeds) if isinstance(seeds, Sequence) and not isinstance(seeds, str) else []
    if not listed or len(set(listed)) < len(listed) or not all(type(s) is int and s >= 0 for s in listed):
        raise ConfigError("The comparison", [f"seeds: a number, or different whole numbers from 0, got {seeds!r}"])
    return listed


def metric_of(metric: str | Sequence[str] | None) -> tuple[str, str] | None:
    """`"accuracy"`, `"rmse:min"` or `("rmse", "min")`; the direction follows from the name where it is not said.

    >>> metric_of("f1"), metric_of("score:min")
    (('f1', 'max'), ('score', 'min'))
    """
    if metric is None:
        return None
    parts = metric.split(":") if isinstance(metric, str) else list(metric)
    if len(parts) == 1:
        parts.append(direction(parts[0]))
    if len(parts) != 2 or parts[1] not in ("max", "min") or not parts[0]:
        raise ConfigError("The comparison", [f"metric: expected a name, 'name:max' or 'name:min', got {metric!r}"])
    return parts[0], parts[1]


def request_own(
    function: Function,
    methods: Any,
    seeds: int | Sequence[int] = 8,
    *,
    reference: str = PLAIN,
    metric: str | Sequence[str] | None = None,
    params: Mapping[str, Any] | None = None,
    grid: Mapping[str, list[Any]] | None = None,
    folder: Path | str | None = None,
    out: Path | str = "runs",
    same_code: bool = False,
    resume: bool = True,
    command: Sequence[str] = (),
) -> ComparisonRequest:
    """The comparison of a user's own training."""
    rows = read_rows(methods, reference)
    judged = metric_of(metric)
    problems = check_params(params, rows.rows)
    if problems:
        raise ConfigError("The comparison", problems)
    section = {"name": function.code.name, "code": function.code.digest, "params": dict(params or {})}
    name = "compare-" + re.sub(r"[^\w.-]+", "-", function.code.name.replace(".py:", "-").replace("notebook:", ""))
    place = _folder(folder, out, name, {"name": section["name"], "params": section["params"]}, resume)
    section["code"], remark = _code(section, place, same_code)
    base = {"function": section, "seeds": seeds_of(seeds)}
    title = f"{function.code.name}, {plural(len(base['seeds']), 'seed')}"
    recipe = recipe_of(name, title, rows, reference, base, judged[0] if judged else "", shlex.join(command))
    recipe = replace(recipe, grid={f"function.params.{k}": v for k, v in (grid or {}).items()})
    asked = planned(recipe)
    plan = with_recorded(asked, place)
    return ComparisonRequest(recipe, plan, place, asked.chosen(), sent(function, plan, rows, judged), remark)


def recipe_of(
    name: str, title: str, rows: Rows, reference: str, base: dict[str, Any], metric: str, command: str
) -> Recipe:
    """The recipe of a comparison: it has no paper, and every row says only what differs."""
    listed = []
    for row in rows.rows:
        own: dict[str, Any] = {"name": row.name, "methods": row.methods, "baseline": row.name == reference}
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
    """The plan of a comparison. Problems are told in words of the comparison: nobody wrote a recipe, and what is wrong
    in every row is said once."""
    try:
        return make_comparison(recipe, settings=settings)
    except ConfigError as error:
        marks = [f"rows[{i}] {row['name']}: " for i, row in enumerate(recipe.rows)]
        by_row = {mark: [p.removeprefix(mark) for p in error.problems if p.startswith(mark)] for mark in marks}
        common = [p for p in by_row[marks[0]] if all(p in found for found in by_row.values())]
        rest = [p for p in error.problems if not p.startswith(tuple(marks))]
        own = [f"row {row['name']!r}: {p}" for row, mark in zip(recipe.rows, marks, strict=True) for p in by_row[mark]]
        raise ConfigError("The comparison", rest + common + [p for p in own if not p.endswith(tuple(common))]) from None


def sent(function: Function, plan: Comparison, rows: Rows, metric: tuple[str, str] | None) -> Function:
    """The function with what its trials need: names of rows, regularizers without a plain form, the metric."""
    names = {i: row.name for row in plan.rows for point in row.points for i in point.trials.values()}
    return replace(function, rows=names, objects={**function.objects, **rows.objects}, metric=metric)


def _folder(folder: Path | str | None, out: Path | str, name: str, kind: dict[str, Any], resume: bool) -> Path:
    """Same function and parameters, same folder; the code is not part of it, so that its changes can be told."""
    mark = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:8]
    place = Path(folder) if folder is not None else Path(out) / f"{name}-{mark}"
    if resume or not (place / "plan.json").exists():
        return place
    if folder is not None:
        raise ConfigError("folder", [f"{place} holds a study already, and resume=False; give another folder"])
    return next(p for i in range(2, 10_000) if not (p := place.with_name(f"{place.name}-{i}")).exists())


def _code(section: dict[str, Any], folder: Path, same_code: bool) -> tuple[str, str]:
    """The hash that trials are known by, and what to say where the code is another than that of earlier records."""
    if not (folder / "plan.json").exists():
        return section["code"], ""
    earlier = load_comparison(folder)
    done = {
        t.function["code"] for i, t in earlier.trials.items() if t.function and (folder / i / "final.json").exists()
    }
    if not done or section["code"] in done:
        return section["code"], ""
    if same_code:
        told = f"The code of {section['name']} differs from that of the recorded trials; they count all the same."
        return min(done), told
    return section["code"], (
        f"The code of {section['name']} has changed since {_count(earlier, folder)} were recorded: new trials are run. "
        f"Those of the older code stay in {folder} and are listed as such. "
        "same_code=True (--same-code) would count them."
    )


def _count(plan: Comparison, folder: Path) -> str:
    n = sum((folder / i / "final.json").exists() for i in plan.trials)
    return f"{n} trial{'s' * (n != 1)}"


def with_recorded(plan: Comparison, folder: Path) -> Comparison:
    """The plan, with the rows and seeds that were recorded here before under the same conditions."""
    if not (folder / "plan.json").exists():
        return plan
    earlier = load_comparison(folder)
    code = {t.function["code"] for t in plan.trials.values() if t.function}
    formats = {t.format for t in plan.trials.values()}
    recorded = {
        i
        for i, t in earlier.trials.items()
        if RunStore(folder / i).done and (t.format in formats if t.function is None else t.function["code"] in code)
    }
    return plan.joined(earlier, recorded) if recorded else plan
