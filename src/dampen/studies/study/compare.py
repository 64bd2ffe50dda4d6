"""`dampen.compare`: which method is worth it in your own training, in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dampen.studies.config.plan import Comparison
from dampen.studies.config.search_space import tuned_recipe
from dampen.studies.config.trial import Run
from dampen.studies.engines.grid_tuning import chosen_in_words, own_metric, tune
from dampen.studies.engines.racing import race_plan, seconds
from dampen.studies.engines.runner import ComparisonResult, run_comparison
from dampen.studies.errors import ConfigError, Interrupted, LabError
from dampen.studies.study.kept import save_function, save_parts
from dampen.studies.study.preflight import check_rows
from dampen.studies.study.progress import view_of
from dampen.studies.study.request import ComparisonRequest, planned, request_own
from dampen.studies.study.rows import PLAIN
from dampen.studies.study.study import Study
from dampen.studies.trainer.function import as_function, being_read, function_in_file
from dampen.studies.trainer.parts import Parts
from dampen.studies.trainer.state import Execution


def compare(
    train: Callable[[Any], Mapping[str, Any]] | str | None = None,
    *,
    model: Any = None,
    data: Any = None,
    methods: Any,
    seeds: int | Sequence[int] = 8,
    reference: str = PLAIN,
    metric: str | Sequence[str] | None = None,
    margin: float | None = None,
    params: Mapping[str, Any] | None = None,
    tune: int = 0,
    until_decided: bool = False,
    budget: str | float | None = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    folder: Path | str | None = None,
    resume: bool = True,
    progress: bool = True,
    same_code: bool = False,
    loggers: Sequence[str] = (),
) -> Study:
    """Compare methods in one's own training, or in the lab's with one's own model and data.

    Args:
        train: a function of a `dampen.Trial` that trains and returns test metrics, or `"train.py:train"`.
        model: for the lab's own trainer instead: a name, a path, or a function.
        data: likewise.
        methods: the rows: text, a regularizer, a list of them, or names for these; see `dampen.studies.study.rows`.
        seeds: how many, or which. The same seed gives every row the same initial weights and order of batches.
        reference: the row that the others are compared with; `"plain"` is added where it is not there.
        metric: the test metric to judge by, as in `"f1"` or `"rmse:min"`; default: the first that comes back.
        margin: the smallest difference that matters, in the unit of the table.
        params: what the function reads from `trial.params`.
        tune: how many settings of every row, the baseline too, are tried on three tuning seeds first: learning rate,
            weight decay and the methods' strengths, chosen by the mean of validation.
        until_decided: add seeds until every row is decided; `budget` (such as "30m") ends it earlier.
        engine: where trials run, "local" or "ray"; see `dampen compare --help`.
        address: of a Ray cluster.
        workers: trials at a time.
        threads: of each trial.
        folder: where records go; default: a folder below `runs` that follows from function and parameters.
        resume: keep what is recorded there and go on with what was cut off.
        progress: show it.
        same_code: count records of an older version of the code.
        loggers: "tensorboard", "wandb", or what other packages bring, told beside the record.
    """
    if being_read() is not None:
        raise LabError(
            f"dampen.compare was called while {being_read()} was being imported for its training function. Put the "
            'call under `if __name__ == "__main__":`.'
        )
    if (train is None) == (model is None and data is None):
        raise ConfigError("The comparison", ["say either train=, your own function, or data= (and model=)"])
    if train is None:
        from dampen.studies.study.parts import request_parts

        asked = request_parts(
            model, data, methods, seeds, reference=reference, metric=metric, params=params, folder=folder, resume=resume
        )
    else:
        function = function_in_file(train) if isinstance(train, str) else as_function(train)
        asked = request_own(
            function,
            methods,
            seeds,
            reference=reference,
            metric=metric,
            params=params,
            folder=folder,
            resume=resume,
            same_code=same_code,
        )
    if asked.remark and progress:
        print(asked.remark, file=sys.stderr)
    settings: dict[str, Any] = {"engine": engine, "address": address, "workers": workers, "threads": threads}
    settings |= {"progress": progress, "loggers": tuple(loggers)}
    study = Study(asked.folder, asked.plan, asked.function, asked.parts, settings)
    _start(study, asked, tune, until_decided, budget, margin)
    return study


def _start(
    study: Study,
    asked: ComparisonRequest,
    tune: int,
    until_decided: bool,
    budget: str | float | None,
    margin: float | None,
) -> None:
    until_decided = until_decided or budget is not None  # a budget is for as many seeds as it takes
    if tune:
        _tune(study, asked, tune)
    if margin is not None:
        study.plan.header["margin"] = margin
    check_rows(study.plan, study.folder, Execution(function=study.function, parts=study.parts))
    if not until_decided:
        run(study, {}, **study.settings)
        return

    def train(trials: list[Run]) -> bool:
        return run(study, {}, trials, **study.settings).exit_code != 130

    study.race = race_plan(study.plan, study.folder, train, margin=margin, budget=seconds(budget) if budget else None)
    if study.settings["progress"]:
        print(study.race.told(), file=sys.stderr)


def _tune(study: Study, asked: ComparisonRequest, trials: int) -> None:
    """Choose learning rate, weight decay and strengths of every row on validation first, the baseline's too; the study
    goes on with the best."""
    if study.function is not None:
        own_metric(study.function)
    study.folder = study.folder.with_name(f"{study.folder.name}-tuned")
    recipe = tuned_recipe(asked.recipe, trials, asked.settings)

    def train(tuning: Comparison, place: Path) -> int:
        own = Study(place, tuning, study.function, study.parts, study.settings)
        return run(own, {}, **study.settings).exit_code

    first = planned(recipe)
    first.header |= asked.plan.header
    study.plan, code = tune(recipe, first, study.folder, None, (), (), train)
    if code:
        raise LabError(f"The tuning in {study.folder} stopped (code {code}); the same call goes on.")
    if study.settings["progress"]:
        print("\n".join(chosen_in_words(study.folder)), file=sys.stderr)


def run(
    study: Study,
    objects: Mapping[str, bytes],
    chosen: list[Run] | None = None,
    *,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    loggers: tuple[str, ...] = (),
    data_dir: str | None = None,
) -> ComparisonResult:
    """Run what is missing of a study's plan; raise where nothing came out of it."""
    plan, folder = study.plan, study.folder
    if study.function is not None:
        names = {i: row.name for row in plan.rows for point in row.points for i in point.trials.values()}
        study.function = replace(study.function, rows=names, objects={**study.function.objects, **objects})
        save_function(study.function, folder)
    else:
        save_parts(study.parts or Parts(), folder, data_dir)
    own: dict[str, Any] = {"function": study.function, "parts": study.parts, "data_dir": data_dir}
    execution = Execution(threads=threads, keep_weights=False, loggers=loggers, **own)
    options: dict[str, Any] = {"engine": engine, "workers": workers}
    options |= {"address": address} if engine == "ray" else {}
    trials = plan.chosen() if chosen is None else chosen
    with view_of(study, trials, progress) as view:
        result = run_comparison(plan, folder, trials, execution, view, retry=False, **options)
    if result.exit_code == 130:
        raise Interrupted(f"Stopped; what was recorded is in {folder}. The same call goes on from there.")
    if not any(o.status == "finished" for o in result.outcomes.values()):
        told = "\n".join(result.messages()) or "no trial finished"
        raise LabError(f"No trial of {folder} came to an end:\n{told}")
    return result
